"""SGLang 0.5.20, which has no update sessions: the same assertions for the real server and for the stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from tests.contract.support.engine_servers import Peer, Server, sglang, stand_in
from tests.support.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SCALE = 0.5


@pytest.fixture(scope="module", params=["stand-in", "sglang"])
def old(engine_environment: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("old") / "log"
    engine = stand_in(port, log, "--old") if request.param == "stand-in" else sglang(port, log, old=True)
    engine.start()
    try:
        engine.wait()
        yield Server(request.param, engine)
    finally:
        engine.kill()


def test_server_reports_its_version_and_has_no_sessions(old: Server) -> None:
    assert old.get("/server_info")[1]["version"] == "0.5.20"
    for path in ("/begin_weight_update", "/end_weight_update"):
        assert old.post(path, {})[0] == 404
    assert (old.get("/ping")[0], old.get("/ready")[0]) == (200, 200)
    status, loads = old.get("/get_load")
    assert (status, type(loads)) == (200, list)
    assert {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"} <= set(loads[0])


def test_checksums_name_no_role(old: Server) -> None:
    status, body = old.post("/weights_checker", {"action": "checksum"})
    assert (status, body["success"], body["message"]) == (200, True, "Success.")
    (rank,) = body["ranks"]
    assert rank["parallelism_info"] == {
        "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1,
    }  # fmt: skip
    assert {len(value) for value in rank["checksums"].values()} == {16}


def test_update_needs_no_session(old: Server, trainer: Peer) -> None:
    before = old.generate()["output_ids"]
    assert [status for status, _ in trainer.open([old])] == [200]
    old.post("/pause_generation", {"mode": "retract"})
    assert trainer.push(old, SCALE, {"weight_version": "v1", "flush_cache": True})[0] == 200
    old.post("/continue_generation", {})
    after = old.generate()
    assert (after["output_ids"] != before, after["meta_info"]["weight_version"]) == (True, "v1")
    assert old.post("/destroy_weights_update_group", {"group_name": trainer.group})[0] == 200


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_failed_flush_ends_the_server(old: Server, trainer: Peer, mode: str) -> None:
    assert [status for status, _ in trainer.open([old])] == [200]
    old.start_long()
    old.post("/pause_generation", {"mode": mode})
    assert old.get("/flush_cache")[0] == 400
    with pytest.raises(requests.ConnectionError):
        trainer.push(old, SCALE, {"flush_cache": True})
    assert old.has_ended(30)
    old.engine.kill()
    old.engine.start()
    old.engine.wait()


def test_flush_succeeds_after_a_pause_with_abort(old: Server, trainer: Peer) -> None:
    """The agent sends this mode to old servers instead of ``retract``."""
    assert [status for status, _ in trainer.open([old])] == [200]
    running = old.start_long()
    old.post("/pause_generation", {"mode": "abort"})
    assert running.result(10)["meta_info"]["finish_reason"]["type"] == "abort"
    assert trainer.push(old, SCALE, {"weight_version": "v2", "flush_cache": True})[0] == 200
    old.post("/continue_generation", {})
    assert old.generate()["meta_info"]["weight_version"] == "v2"
