"""Kueue as a process on this machine, with webhooks that the lab's API server reaches over the bridge.

Build it with ``python -m e2e.neighbours.kueue`` (about five minutes on two cores, then cached).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import lab, network
from e2e.cluster.say import LabError, say
from e2e.kube import Kubectl, wait_for_crd
from e2e.neighbours import modules

MODULE = "sigs.k8s.io/kueue"
VERSION = "v0.19.2"
PORT = 9443
_WEBHOOKS = frozenset({"clusterqueue", "resourceflavor", "workload", "pod", "statefulset"})
# Kueue's metrics server reads its certificate from a fixed folder below /etc. A separate mount namespace provides the folder, so that
# nothing is written to the machine's /etc.
_START = """\
mount -t tmpfs tmpfs /srv && mkdir /srv/up /srv/work && mount -t overlay overlay -o lowerdir=/etc,upperdir=/srv/up,workdir=/srv/work /etc
mkdir -p /etc/kueue/metrics/certs && cp "$1"/tls.crt "$1"/tls.key /etc/kueue/metrics/certs/ || exit 1
shift; exec "$@"
"""
Document = dict[str, Any]


def folder() -> Path:
    """Return the cache folder of this version: the program and the manifests."""
    return modules.folder("kueue", VERSION)


def build() -> None:
    """Build Kueue, unless it is built already."""
    if (folder() / "kueue").exists():
        return
    source = modules.download(MODULE, VERSION, folder())
    shutil.copytree(source / "config" / "components", folder() / "config", dirs_exist_ok=True)
    modules.build(source, "./cmd/kueue", folder() / "kueue")


def definitions() -> list[Document]:
    """Return Kueue's CRDs. The cases use only the stored version, so no conversion webhook is needed."""
    return [yaml.safe_load(path.read_text()) for path in sorted((folder() / "config/crd/bases").glob("*.yaml"))]


def webhooks(namespace: str, ca: bytes) -> list[Document]:
    """Return the webhooks that the cases need, called by URL, for pods and StatefulSets of ``namespace``."""
    made = []
    for document in yaml.safe_load_all((folder() / "config/webhook/manifests.yaml").read_text()):
        kept = []
        for hook in document["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            if path.rsplit("-", 1)[-1] not in _WEBHOOKS:
                continue
            hook["clientConfig"] = {"url": f"https://{network.HOST}:{PORT}{path}", "caBundle": base64.b64encode(ca).decode()}
            if "kueue" not in path:
                hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
            kept.append(hook)
        made.append({**document, "metadata": {"name": f"kueue-{document['kind'].split('Webhook')[0].lower()}"}, "webhooks": kept})
    return made


@contextmanager
def running(kubectl: Kubectl, where: Path) -> Iterator[None]:
    """Run Kueue for the namespace of ``kubectl`` for the length of the block. Its log and certificate are in the folder ``where``."""
    program = modules.find_program("kueue", VERSION)
    pki = lab.pki()
    pki.certificate("kueue", "/CN=kueue", f"IP:{network.HOST}")
    for name in ("crt", "key"):
        shutil.copy(pki.root / f"kueue.{name}", where / f"tls.{name}")
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "metrics": {"bindAddress": "127.0.0.1:0"},
        "health": {"healthProbeBindAddress": "127.0.0.1:0"},
        "webhook": {"port": PORT, "host": network.HOST, "certDir": str(where)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["pod", "statefulset"]},
    }
    (where / "config.yaml").write_text(json.dumps(config))
    crds = definitions()
    _apply(kubectl, crds)
    for definition in crds:
        wait_for_crd(kubectl, definition["metadata"]["name"])
    # Its visibility server would need another certificate in another fixed folder.
    command = [str(program), f"--config={where / 'config.yaml'}", "--feature-gates=VisibilityOnDemand=false"]
    environment = os.environ | {"KUBECONFIG": str(lab.kubeconfig()), "NO_PROXY": "*", "no_proxy": "*"}
    with (where / "kueue.log").open("ab") as log:
        wrapped = ["unshare", "--mount", "sh", "-c", _START, "kueue", str(where), *command]
        child = subprocess.Popen(wrapped, env=environment, stdout=log, stderr=log)
    try:
        _apply(kubectl, webhooks(kubectl.namespace, pki.ca.read_bytes()))
        yield
    finally:
        # The webhooks first, because no pod can be created while their server does not answer.
        for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            kubectl("delete", kind, "kueue-mutating", "kueue-validating", "--ignore-not-found")
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10)


def _apply(kubectl: Kubectl, documents: list[Document]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


if __name__ == "__main__":
    try:
        build()
    except LabError as error:
        say(f"kueue: {error}")
        sys.exit(1)
