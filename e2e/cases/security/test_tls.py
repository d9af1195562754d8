"""HTTPS at the URL of a fleet: a trainer pushes and generates, and a renewed certificate is served while it generates."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e import machine_token, stand_in
from e2e.cases.conftest import ready, remove
from e2e.chaos.trainer_process import MODULE, Trainer
from e2e.kube import Kubectl, condition, eventually
from sglang_rollout.controller.render import names

NAME, SECRET, POD = "encrypted", "encrypted-tls", "tls-trainer"
FOLDER = "/etc/rollout-ca"
CA = f"SGLANG_ROLLOUT_CA={FOLDER}/ca.crt"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

GENERATE = """
import json, ssl, sys
from urllib.parse import urlsplit
from sglang_rollout.trainer import connect
url, old = sys.argv[1], sys.argv[2]
address = (urlsplit(url).hostname, urlsplit(url).port)
count = 0
while True:
    with connect(url, timeout=10) as fleet:
        sample, = fleet.generate(input_ids=[[11, 22, 33]], sampling_params={"max_new_tokens": 4})
    count += bool(sample.output_ids)
    served = ssl.get_server_certificate(address)
    if served.split() != old.split():
        break
print(json.dumps({"requests": count, "served": served}))
"""
"""Generates until the URL serves another certificate than the one that is given. Each request has a new connection."""

CALL = """
import sys
from sglang_rollout.trainer import FleetError, connect
try:
    print(connect(sys.argv[1], timeout=1).document().name)
except FleetError as error:
    print(error)
"""


STALL = """
import socket, ssl, sys
from urllib.parse import urlsplit
host, port = urlsplit(sys.argv[1]).hostname, urlsplit(sys.argv[1]).port
sent = ssl.MemoryBIO()
handshake = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname=host)
try:
    handshake.do_handshake()
except ssl.SSLWantReadError:
    pass
with socket.create_connection((host, port), timeout=60) as connection:
    connection.sendall(sent.read())
    while connection.recv(65536):
        pass
print("closed")
"""
"""Begins a handshake, never ends it, and waits until the front closes the connection."""


@dataclass
class Authority:
    """An authority in a folder of this machine."""

    folder: Path

    def __post_init__(self) -> None:
        usage = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        self._openssl("req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", "1", "-subj", "/CN=authority", *usage)

    def issue(self, *hosts: str) -> dict[str, Any]:
        """Return a Secret with a new certificate, in the format of cert-manager."""
        names_of_hosts = ",".join(f"DNS:{host}" for host in hosts)
        (self.folder / "extensions").write_text(f"subjectAltName={names_of_hosts}\nauthorityKeyIdentifier=keyid\n")
        self._openssl("req", *_KEY, "-keyout", "tls.key", "-out", "tls.csr", "-subj", f"/CN={hosts[0]}")
        signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        self._openssl("x509", "-req", "-in", "tls.csr", *signer, "-days", "1", "-extfile", "extensions", "-out", "tls.crt")
        data = {key: base64.b64encode((self.folder / key).read_bytes()).decode() for key in ("tls.crt", "tls.key", "ca.crt")}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "type": "kubernetes.io/tls", "data": data}

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)


@dataclass
class Encrypted:
    """A fleet of one stand-in with a certificate, and a trainer's pod with the certificate of the authority."""

    kubectl: Kubectl
    authority: Authority
    url: str
    generate_url: str

    def renew(self) -> str:
        """Replace the certificate in the Secret, and return the new one."""
        hosts = (f"{NAME}-router.{self.kubectl.namespace}.svc", f"{NAME}-generate.{self.kubectl.namespace}.svc")
        self.kubectl.apply(self.authority.issue(*hosts))
        return (self.authority.folder / "tls.crt").read_text()

    def run(self, script: str, *words: str, ca: bool = True) -> str:
        """Run a script in the trainer's pod."""
        return self.kubectl.exec(POD, "env", *([CA] if ca else []), "python3", "-", *words, container="trainer", stdin=script, timeout=300)


def trainer_pod() -> dict[str, Any]:
    """Return a trainer's pod that mounts the certificate of the authority, and not the private key."""
    pod = stand_in.trainer_pod(POD)
    pod["spec"]["volumes"].append({"name": "ca", "secret": {"secretName": SECRET, "items": [{"key": "ca.crt", "path": "ca.crt"}]}})
    container = next(container for container in pod["spec"]["containers"] if container["name"] == "trainer")
    container["volumeMounts"].append({"name": "ca", "mountPath": FOLDER, "readOnly": True})
    return pod


@pytest.fixture(scope="module")
def encrypted(kubectl: Kubectl, operator: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    """Create the fleet before its Secret, which the status then asks for."""
    document = stand_in.rollout(NAME, replicas=1)
    document["spec"]["security"] = machine_token.security(tls={"secretName": SECRET})
    urls = (names.public_url(NAME, kubectl.namespace, tls=True), names.generate_url(NAME, kubectl.namespace, tls=True))
    made = Encrypted(kubectl, Authority(tmp_path_factory.mktemp("authority")), *urls)
    kubectl("delete", "pod", POD, "--ignore-not-found", timeout=90)
    remove(kubectl, NAME)  # left by an interrupted run
    kubectl("delete", "secret", SECRET, "--ignore-not-found")
    kubectl.apply(stand_in.code())
    kubectl.apply(document)
    eventually("the status asks for the Secret", lambda: _reason(kubectl) == "InvalidCertificate", within=60)
    made.renew()
    kubectl.apply(trainer_pod())
    kubectl("wait", f"pod/{POD}", "--for=condition=Ready", "--timeout=90s", timeout=120)
    eventually("the rollout is Ready", lambda: ready(kubectl, NAME), within=240, every=1)
    yield made
    kubectl("delete", "pod", POD, "--ignore-not-found", "--wait=false")
    remove(kubectl, NAME)
    kubectl("delete", "secret", SECRET, "--ignore-not-found")


def _reason(kubectl: Kubectl) -> str:
    rollout = kubectl.get("sglr", NAME)
    return condition(rollout, "Ready")["reason"] if "status" in rollout else ""


def test_the_status_names_https(encrypted: Encrypted) -> None:
    endpoints = encrypted.kubectl.get("sglr", NAME)["status"]["endpoints"]
    assert (endpoints["url"], endpoints["generate"]) == (encrypted.url, encrypted.generate_url)


def test_a_trainer_pushes_by_https(encrypted: Encrypted, tmp_path: Path) -> None:
    command = ["kubectl", "-n", encrypted.kubectl.namespace, "exec", "-i", POD, "-c", "trainer", "--"]
    trainer = Trainer([*command, "env", CA, "python", "-m", MODULE, encrypted.url], tmp_path / "trainer.log")
    try:
        trainer.begin("encrypted")
        answer = trainer.outcome(120)
        assert answer["ok"], answer
    finally:
        trainer.end()


def test_a_caller_without_the_authority_or_https_learns_why(encrypted: Encrypted) -> None:
    assert encrypted.run(CALL, encrypted.url).strip() == NAME
    assert "SGLANG_ROLLOUT_CA" in encrypted.run(CALL, encrypted.url, ca=False)
    assert "serves HTTPS only" in encrypted.run(CALL, encrypted.url.replace("https://", "http://"))


def test_a_handshake_that_never_ends_is_closed(encrypted: Encrypted) -> None:
    assert encrypted.run(STALL, encrypted.url).strip() == "closed"


def test_a_renewed_certificate_is_served_while_requests_run(encrypted: Encrypted) -> None:
    old = (encrypted.authority.folder / "tls.crt").read_text()
    renewed = encrypted.renew()
    found = json.loads(encrypted.run(GENERATE, encrypted.generate_url, old).strip().splitlines()[-1])
    assert found["served"].split() == renewed.split()
    assert found["requests"] > 0
