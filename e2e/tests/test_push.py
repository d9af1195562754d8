"""Images and chart reach a registry, and the printed command uses them."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster import binaries
from e2e.cluster.say import LabError, wait_until
from e2e.images.archives import build
from e2e.images.catalog import Place
from e2e.images.push import check_registry, helm_command, push, use_images
from e2e.kube import ROOT


@pytest.mark.parametrize(
    "name",
    [
        "",
        "https://registry.example.org",
        "registry.example.org/Rollout",
        "registry.example.org/rollout/",
        "registry.example.org/x:dev",
        "a b",
    ],
)
def test_a_name_that_cannot_begin_an_image_is_refused(name: str) -> None:
    with pytest.raises(LabError, match=r"Write host, port and path"):
        check_registry(name)


def test_a_place_without_a_registry_is_refused_before_the_build() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LabError, match="does not answer"):
        check_registry(f"localhost:{port}/rollout")


def test_another_server_is_refused(other_server: int) -> None:
    with pytest.raises(LabError, match="answers HTTP 404, so it is no registry"):
        check_registry(f"localhost:{other_server}/rollout")


@pytest.fixture
def other_server(tmp_path: Path) -> Iterator[int]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_manifests_of_the_examples_use_the_pushed_images() -> None:
    place = Place("registry.example.org/rollout", "dev-0")
    fleet = yaml.safe_load(use_images((ROOT / "examples/rollout-cpu.yaml").read_text(), place))
    assert fleet["spec"]["engine"]["image"] == "registry.example.org/rollout/engine-cpu:dev-0"
    trainer = use_images((ROOT / "examples/trainer/job.yaml").read_text(), place)
    assert "localhost/" not in trainer
    assert "registry.example.org/rollout/coordinator:dev-0" in trainer


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A registry of its own. Debian has it as docker-registry."""
    if not shutil.which("docker-registry"):
        pytest.skip("docker-registry is not on PATH")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = tmp_path / "registry.json"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "data")}}
    config.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": f"127.0.0.1:{port}"}}))
    with subprocess.Popen(["docker-registry", "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            wait_until(lambda: _answers(f"http://127.0.0.1:{port}/v2/"), seconds=60, what="the registry does not answer")
            yield f"localhost:{port}/team/rollout"
        finally:
            child.terminate()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.long
def test_the_printed_command_installs_what_was_pushed(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{binaries.find()}:{os.environ['PATH']}")
    check_registry(registry)
    place = push(registry, build(["operator"]))
    host, _, path = registry.partition("/")
    accept = "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"
    manifest = urllib.request.Request(f"http://{host}/v2/{path}/operator/manifests/{place.tag}", headers={"Accept": accept})
    with urllib.request.urlopen(manifest, timeout=30) as answer:
        assert json.load(answer)["layers"]
    # The printed command, as far as it goes without a cluster.
    command = ["template" if word == "upgrade" else word for word in helm_command(place) if word not in ("--install", "--wait")]
    command += ["--kube-version", "1.34.0"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert rendered.returncode == 0, rendered.stderr
    images = {
        container["image"]
        for document in yaml.safe_load_all(rendered.stdout)
        if document and document["kind"] == "Deployment"
        for container in document["spec"]["template"]["spec"]["containers"]
    }
    assert images == {place.reference("operator")}
