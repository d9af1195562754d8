"""Configurations of gate and front, checked against their golden texts and by haproxy itself."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_rollout.proxy.address import Address, UnixSocket
from sglang_rollout.proxy.cli import find_haproxy
from sglang_rollout.proxy.config import (
    Certificate,
    FrontParams,
    GateParams,
    fit_connections,
    front_config,
    gate_config,
    renewal_text,
)
from sglang_rollout.proxy.gate_map import UNSET
from tests.support.certificates import Authority

GOLDEN = Path(__file__).parent / "golden"
LOOPBACK = Address("127.0.0.1", 30001)
GATE = GateParams(
    Address("::", 30000),
    LOOPBACK,
    UnixSocket("/run/rollout-gate/agent.sock"),
    "/run/rollout-gate/gate.sock",
    metrics=Address("::", 30003),
    probes=Address("::", 30004),
)
FRONT = FrontParams(
    Address("::", 30000),
    Address("127.0.0.1", 30010),
    UnixSocket("/run/rollout-coordinator/coordinator.sock"),
    Address("127.0.0.1", 30021),
    generate=Address("::", 30005),
    metrics=Address("::", 30003),
    probes=Address("::", 30004),
)
CERTIFICATE = Certificate("/etc/sglang-rollout/tls/front.pem", "/run/rollout-front")
TEXTS = {
    "gate": gate_config(GATE),
    "front": front_config(FRONT),
    "front-tls": front_config(replace(FRONT, certificate=CERTIFICATE)),
    "front-store": front_config(replace(FRONT, store=Address("demo-store.default.svc.cluster.local", 30031))),
}


@pytest.mark.parametrize("name", TEXTS)
def test_golden(name: str) -> None:
    path = GOLDEN / f"{name}.cfg"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(TEXTS[name])
    assert TEXTS[name] == path.read_text(), "rendered text changed: if that is meant, run with UPDATE_GOLDEN=1"


@pytest.mark.router
@pytest.mark.parametrize("name", TEXTS)
def test_haproxy_accepts_the_configuration(name: str, tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    (tmp_path / "gate.sock.version").write_text(UNSET)
    (tmp_path / "renewal.lua").write_text(renewal_text(Certificate(str(tmp_path / "front.pem"), str(tmp_path))))
    Authority().issue("demo-router.default.svc").write(tmp_path / "front.pem")
    text = TEXTS[name]
    for folder in ("/run/rollout-gate", "/run/rollout-front", "/etc/sglang-rollout/tls"):
        text = text.replace(folder, str(tmp_path))
    path.write_text(text)
    done = subprocess.run([find_haproxy() or "haproxy", "-c", "-f", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize("name", TEXTS)
def test_bodies_are_json_with_a_sentence(name: str) -> None:
    bodies = [
        line.split(" string '")[1].split("'")[0] for line in TEXTS[name].splitlines() if " string '" in line and "status 200" not in line
    ]
    assert len(bodies) >= 5
    for body in bodies:
        assert json.loads(body)["error"]["message"].endswith(".")


def test_the_gate_starts_closed() -> None:
    server = next(line for line in TEXTS["gate"].splitlines() if line.strip().startswith("server e "))
    assert server.endswith(" disabled")


@pytest.mark.parametrize(("files", "connections"), [(20000, 4096), (1024, 384), (1_000_000, 4096), (256, 32), (10, 32)])
def test_connections_fit_the_limit_on_open_files(files: int, connections: int) -> None:
    assert fit_connections(4096, files, files=2) == connections


@pytest.mark.parametrize("socket", ["gate.sock", "/run/a b/gate.sock", "/run/'x'/gate.sock"])
def test_sockets_that_would_break_the_configuration_are_refused(socket: str) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        gate_config(GateParams(LOOPBACK, LOOPBACK, LOOPBACK, socket))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("[::1]:80", "::1", 80), ("demo-engine-0.demo:30000", "demo-engine-0.demo", 30000)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("ip", ["10.0.0.7", "fd00::7"])
def test_brackets_are_accepted_around_any_ip(ip: str) -> None:
    """Agents write the address of their pod's gate this way, because the family of its IP is not known in advance."""
    assert Address.parse(f"[{ip}]:30000") == Address(ip, 30000)
    assert Address.parse(str(Address(ip, 30000))) == Address(ip, 30000)
    assert Address("fd00::7", 30000).url == "http://[fd00::7]:30000"


@pytest.mark.parametrize("text", ["", "80", "host:", ":80", "host:0", "host:65536", "host:8o", "ho st:80", "::1:80x", "a\n:80", "-x:80"])
def test_invalid_address_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        Address.parse(text)


@pytest.mark.parametrize("status", [400, 403, 408, 413, 429, 500, 502, 503, 504])
def test_haproxy_has_no_pages_of_its_own(status: int) -> None:
    for text in TEXTS.values():
        defaults = text.split("\ndefaults\n")[1].split("\n\n")[0]
        start = f"    http-error status {status} content-type application/json string "
        (line,) = (line for line in defaults.splitlines() if line.startswith(start))
        assert set(json.loads(line.removeprefix(start).strip("'"))["error"]) == {"code", "message", "type"}
