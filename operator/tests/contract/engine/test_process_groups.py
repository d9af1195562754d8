"""Contract of an engine: update sessions and process groups."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import requests

from sglang_rollout.testing import expected_tokens
from sglang_rollout.testing.policy import read_folder
from tests.contract.support.engine_servers import Peer, Server, peer, refused, server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

OPEN_ALREADY = "a weight-update session is already open; call end_weight_update() first"
NONE_OPEN = "no weight-update session is open; call begin_weight_update() first"
OUTSIDE = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"


def test_sessions(engine: Server) -> None:
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}
    assert engine.post("/update_weights_from_distributed", body) == (400, {"success": False, "message": OUTSIDE})
    assert engine.post("/end_weight_update", {}) == (400, {"success": False, "message": NONE_OPEN})
    assert engine.post("/begin_weight_update", {}) == (200, {"success": True, "message": "Success"})
    assert engine.post("/begin_weight_update", {}) == (400, {"success": False, "message": OPEN_ALREADY})
    missing = "Failed to receive weights: Group none not in []. Please call `init_weights_update_group` first."
    assert engine.post("/update_weights_from_distributed", body) == (400, {"success": False, "message": missing})
    refused(engine.post("/update_weights_from_distributed", {"names": ["a"]}), "dtypes", "shapes")
    assert engine.post("/end_weight_update", {}) == (200, {"success": True, "message": "Success"})


def test_groups(engine: Server, trainer: Peer) -> None:
    no_group = (400, {"success": False, "message": "The group to be destroyed does not exist."})
    assert engine.post("/destroy_weights_update_group", {}) == no_group
    refused(engine.post("/init_weights_update_group", {}), "master_address", "master_port", "rank_offset", "world_size")
    assert trainer.open([engine])[0][0] == 200
    with peer() as other:
        other.group = trainer.group
        other.send_command("open", group=other.group, world=2)
        status, body = engine.post("/init_weights_update_group", other.at(other.read_answer()["port"], 0, 2))
    taken = "The specified group name has already been created, please use a different group name"
    assert (status, body["success"], taken in body["message"]) == (400, False, True)
    assert body["message"].startswith("Failed to initialize custom process group: ")
    gone = (200, {"success": True, "message": "Succeeded to destroy custom process group."})
    assert engine.post("/destroy_weights_update_group", {"group_name": trainer.group}) == gone
    assert engine.post("/destroy_weights_update_group", {"group_name": trainer.group}) == no_group


def test_update_without_a_pause_waits_for_running_requests(engine: Server, trainer: Peer) -> None:
    assert trainer.open([engine])[0][0] == 200
    running = engine.start_long()
    begun = engine.later("/begin_weight_update", {})
    time.sleep(0.5)
    assert not begun.done()
    engine.post("/abort_request", {"abort_all": True})
    assert begun.result(5)[0] == 200
    assert running.result(5)["meta_info"]["finish_reason"]["type"] == "abort"
    engine.post("/destroy_weights_update_group", {"group_name": trainer.group})


def test_silent_trainer_blocks_the_scheduler_until_it_is_killed(engine: Server, joined: Peer) -> None:
    body = joined.describe(1.1)
    update = engine.later("/update_weights_from_distributed", body)
    time.sleep(0.5)
    assert not update.done()
    assert engine.get("/model_info")[0] == 200
    with pytest.raises(requests.Timeout):
        engine.ask("GET", "/server_info", timeout=1.5)
    joined.kill()
    status, answer = update.result(20)
    assert (status, answer["success"], answer["message"].startswith("Failed to receive weights: ")) == (400, False, True)
    assert engine.post("/end_weight_update", {})[0] == 200
    assert engine.post("/destroy_weights_update_group", {"group_name": joined.group})[0] == 200
    with peer() as successor:
        assert successor.open([engine])[0][0] == 200
        assert engine.post("/begin_weight_update", {})[0] == 200
        assert successor.push(engine, 1.0, {"weight_version": "healed"})[0] == 200
        engine.post("/destroy_weights_update_group", {"group_name": successor.group})
    assert engine.label() == "healed"


def test_two_engines_in_one_group(engine: Server, trainer: Peer, tmp_path: Path) -> None:
    """The second engine is always a stand-in, which can join a process group together with SGLang."""
    with server("stand-in", tmp_path) as second:
        assert [status for status, _ in trainer.open([engine, second])] == [200, 200]
        for each in (engine, second):
            each.post("/begin_weight_update", {})
        body = trainer.describe(0.75, flat=True) | {"weight_version": "both"}
        asked = [each.later("/update_weights_from_distributed", body) for each in (engine, second)]
        assert trainer.send() == {"sent": True}
        assert [future.result(30)[0] for future in asked] == [200, 200]
        for each in (engine, second):
            each.post("/end_weight_update", {})
        assert (engine.label(), second.label()) == ("both", "both")
        trainer.save(0.75, tmp_path / "saved")
        wanted = expected_tokens(read_folder(tmp_path / "saved"), [11, 22, 33], 8)
        assert second.generate(8)["output_ids"] == wanted
        engine.post("/destroy_weights_update_group", {"group_name": trainer.group})
