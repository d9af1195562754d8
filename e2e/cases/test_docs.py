"""Commands of the pages that read a fleet on a cluster."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from e2e.cases.conftest import NAMESPACE, sample
from e2e.kube import Kubectl
from e2e.machine_token import TOKEN
from e2e.pages import SHELL_RULES, Block, Runner, blocks_for, is_like


def rewrite(text: str, url: str, port: int) -> str:
    """Return a block that runs as it is against the fleet ``demo``.

    Replaces the fleet's name, the URL that only pods reach, the port of a forward on this machine, and the names in capitals that a
    reader replaces. A watch prints the objects once.
    """
    text = re.sub(r"\bsglr [a-zA-Z][\w-]*", "sglr demo", text).replace("NAME-router", "demo-router").replace("status NAME", "status demo")
    text = text.replace("http://demo-router:30000", url)
    text = re.sub(r"(port-forward \S+) (\d+)", rf"\1 {port}:\2", text)
    text = re.sub(r"\blocalhost:3000\d", f"localhost:{port}", text)
    return re.sub(r" (?:-w|--watch)\b", "", text)


@pytest.fixture
def folder(kubectl: Kubectl, tmp_path: Path) -> Path:
    """Return a folder with the files that blocks name, a kubeconfig for the namespace of the cases, and this machine's token for curl."""
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    config["contexts"][0]["context"]["namespace"] = NAMESPACE
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    (tmp_path / "kubeconfig").chmod(0o600)
    (tmp_path / ".curlrc").write_text(f'header = "Authorization: Bearer {TOKEN}"\n')
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(sample(args=["--schedule-policy", "lof"])))
    return tmp_path


@pytest.mark.parametrize("block", blocks_for(Runner.CLUSTER), ids=str)
def test_cluster_block_runs(fleet: str, both_serve: None, url: str, folder: Path, block: Block) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = SHELL_RULES + rewrite(block.text, url, port)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "KUBECONFIG": str(folder / "kubeconfig"), "CURL_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert block.output is None or is_like(done.stdout, block.output), done.stdout
