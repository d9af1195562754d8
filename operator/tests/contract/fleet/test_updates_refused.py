"""Updates that SGLang will refuse: ``sglang-rollout local`` names the engine and the reason, and a push fails before its first byte."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from e2e.child import start_child

from sglang_rollout.plugin.install import LOADER
from tests.contract.support.engine_servers import stand_in
from tests.contract.support.local_fleet import wait_serving
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.timeout(180)]

WHY = "Online weight updates are not supported while weight splits are active. Restart with SPLITS=0 to use them."


@pytest.fixture(params=["Distributed", "Staged"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Run a fleet of two stand-ins, one of which refuses updates."""
    with ExitStack() as stack:
        engines = []
        for index, refused in enumerate(["", WHY]):
            engine = stand_in(free_port(), tmp_path / f"{index}.log", "--custom-weight-loader", LOADER, "--updates-refused", refused)
            engine.start()
            stack.callback(engine.kill)
            engine.wait()
            engines.append(engine.url)
        address = f"127.0.0.1:{free_port()}"
        line = [sys.executable, "-m", "sglang_rollout.cli", "local", "--listen", address, "--backend", "gloo"]
        line += ["--transport", request.param, "--state-dir", str(tmp_path / "state")]
        line += ["--staging-size-limit", "64Mi"] if request.param == "Staged" else []
        line += [part for engine in engines for part in ("--engine", engine)]
        log = tmp_path / "local.log"
        with log.open("wb") as out:
            local = start_child(line, stdout=out, stderr=out)
        stack.callback(local.wait, 30)
        stack.callback(local.terminate)
        wait_serving(f"http://{address}", 2, 60, local, log)
        yield f"http://{address}"


CALLS = {
    "/init_weights_update_group": {
        "master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3, "group_name": "g", "backend": "gloo"
    },
    "/update_weights_from_disk": {"model_path": "/checkpoints/1"},
    "/fleet/updates": {"shards": [{"tensors": [{"name": "w", "dtype": "F32", "shape": [2]}]}]},
}  # fmt: skip
"""First call of each kind of push. A transport refuses the kinds that it does not have."""


def test_a_push_is_refused_before_its_first_byte(url: str) -> None:
    document = requests.get(f"{url}/fleet", timeout=10).json()
    assert [member["updates_refused"] for member in document["members"]] == ["", WHY]
    other = "/fleet/updates" if document["transport"] == "Distributed" else "/update_weights_from_disk"
    for path in CALLS.keys() - {other}:
        reply = requests.post(f"{url}{path}", json=CALLS[path], timeout=30)
        assert (reply.status_code, reply.json()["code"]) == (409, "UpdatesRefused"), reply.text
        assert WHY in reply.json()["message"]
        assert "Turn that off" in reply.json()["message"]
    document = requests.get(f"{url}/fleet", timeout=10).json()
    assert (document["serving"], document["committed"]["label"], document["last_update"]) == (2, "base", None)
