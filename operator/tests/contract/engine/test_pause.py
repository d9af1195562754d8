"""Contract of an engine: pause, abort, flush."""

from __future__ import annotations

import time

import pytest

from tests.contract.support.engine_servers import Server, refused

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

FLUSHED = "Cache flushed.\nPlease check backend logs"


def test_flush(engine: Server) -> None:
    for status, text in (engine.get("/flush_cache"), engine.ask("POST", "/flush_cache")):
        assert (status, text.startswith(FLUSHED)) == (200, True)
    refused(engine.get("/flush_cache?timeout=-1"), "query", "timeout")
    running = engine.start_long()
    assert engine.get("/flush_cache") == (400, "Flush cache failed.\n")
    assert engine.post("/abort_request", {"abort_all": True}) == (200, "")
    assert running.result(30)["meta_info"]["finish_reason"]["type"] == "abort"


def test_requests_continue_after_a_pause(engine: Server) -> None:
    running = engine.start_long()
    paused = (200, {"message": "Generation paused successfully.", "status": "ok"})
    assert engine.post("/pause_generation", {"mode": "in_place"}) == paused
    assert (engine.get("/ready")[0], engine.get("/ping")[0]) == (503, 200)
    assert engine.get("/flush_cache")[0] == 400
    held = engine.later("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}})
    time.sleep(0.5)
    assert not held.done()
    assert not running.done()
    continued = (200, {"message": "Generation continued successfully.", "status": "ok"})
    assert engine.post("/continue_generation", {}) == continued
    assert held.result(30)[0] == 200
    meta = running.result(60)["meta_info"]
    assert (meta["finish_reason"]["type"], meta["num_retractions"]) == ("length", 0)
    assert engine.get("/ready")[0] == 200
    assert engine.post("/continue_generation", {}) == continued


def test_cache_is_flushed_while_requests_are_retracted_and_answers_name_their_versions(engine: Server) -> None:
    before = engine.label()
    running = engine.start_long()
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.get("/flush_cache")[0] == 200
    changed = engine.post("/update_weight_version", {"new_version": "mid", "abort_all_requests": False})
    assert changed == (200, {"success": True, "message": "Weight version updated to mid", "new_version": "mid"})
    engine.post("/continue_generation", {})
    meta = running.result(60)["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"], second) == (before, 0, {"version": "mid", "start": first["end"], "end": 1500})
    assert (meta["weight_version"], meta["num_retractions"], engine.label()) == ("mid", 1, "mid")


def test_pause_with_abort_ends_running_requests(engine: Server) -> None:
    running = engine.start_long()
    assert engine.post("/pause_generation", {})[0] == 200
    reply = running.result(5)
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < 1500


def test_abort(engine: Server) -> None:
    mine = [engine.pool.submit(engine.generate, 1500, rid=rid) for rid in ("mine", "mine-2")]
    running = engine.start_long()
    for body in ({}, {"rid": ""}, {"rid": "min"}):  # no request has this ID
        assert engine.post("/abort_request", body) == (200, "")
    time.sleep(0.3)
    assert not any(request.done() for request in mine)
    assert engine.post("/abort_request", {"rid": "mine"}) == (200, "")
    for request in mine:
        assert request.result(5)["meta_info"]["finish_reason"]["type"] == "abort", "its ID begins with that of the abort"
    assert not running.done()
    # Retracted requests are aborted at once. Requests that arrive during the pause are not in the scheduler yet, and are kept.
    engine.post("/pause_generation", {"mode": "retract"})
    held = engine.pool.submit(engine.generate, 2)
    time.sleep(0.3)
    engine.post("/abort_request", {"abort_all": True})
    assert running.result(5)["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    engine.post("/continue_generation", {})
    assert held.result(30)["meta_info"]["finish_reason"]["type"] == "length"


def test_setting_a_version_aborts_requests_by_default(engine: Server) -> None:
    running = engine.start_long()
    assert engine.post("/update_weight_version", {"new_version": "now"})[0] == 200
    assert running.result(5)["meta_info"]["finish_reason"]["type"] == "abort"
    refused(engine.post("/update_weight_version", {}), "new_version")


def test_unknown_pause_mode_is_refused(engine: Server) -> None:
    refused(engine.post("/pause_generation", {"mode": "bogus"}), "literal_error", "mode")
