"""Faults, restarts and tokens of the stand-in engine, without torch and without a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from sglang_rollout.agent.engine import Engine
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.plugin.refusal import ABOVE_LIMIT, Refusal, read_refusal
from sglang_rollout.plugin.settings import SETTINGS_VARIABLE, dump_settings
from sglang_rollout.staging.payload import loader_payload, loader_request
from sglang_rollout.testing import Fault, Kind, Phase, StandIn, StandInFleet, app, decode, encode, expected_tokens
from sglang_rollout.wire.staged import Shard, StagedTensor
from tests.support.ports import free_port
from tests.support.staged import fill_shard, open_copy

PATIENCE = 60.0
"""Maximum seconds of a request. No test measures speed."""
ASK = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 6}}


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with StandIn() as made:
        yield made


def post(engine: StandIn, path: str, body: Any = None, timeout: float = PATIENCE) -> requests.Response:
    return requests.post(engine.url + path, json={} if body is None else body, timeout=timeout)


def tokens(engine: StandIn) -> list[int]:
    return list(post(engine, "/generate", ASK).json()["output_ids"])


# --- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_follow_from_the_weights(engine: StandIn) -> None:
    assert tokens(engine) == expected_tokens(engine.tensors(), [4, 5], 6)


def test_one_changed_bit_changes_the_tokens() -> None:
    state: dict[str, Any] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(4, dtype=np.uint8)}
    before = expected_tokens(state, [1], 8)
    assert expected_tokens(dict(reversed(state.items())), [1], 8) == before, "the order of names does not matter"
    assert expected_tokens(state, [2], 8) != before
    state["b"][3] = 1
    assert expected_tokens(state, [1], 8) != before
    assert expected_tokens({"a": state["a"].reshape(3, 2), "b": state["b"]}, [1], 8) != before


def test_engine_holds_the_given_weights() -> None:
    state = {"a": np.ones(3, dtype=np.float32)}
    with StandIn(state=state) as engine:
        assert tokens(engine) == expected_tokens(state, [4, 5], 6)


def test_text_and_tokens_convert_into_each_other() -> None:
    assert encode(decode([17, 4, 2047])) == [17, 4, 2047]
    assert encode("alpha beta") == encode(" alpha  beta ")
    assert all(3 <= token < 2048 for token in encode("alpha t9999"))


# --- restarts ----------------------------------------------------------------------------------------------------------


def test_restart_keeps_only_the_port_and_the_faults(engine: StandIn) -> None:
    url, boot = engine.url, engine.boot_id
    info = requests.get(f"{url}/server_info", timeout=PATIENCE).json()
    post(engine, "/update_weight_version", {"new_version": "7"})
    post(engine, "/begin_weight_update")
    engine.faults.add("unavailable", "flush")
    engine.restart()
    again = requests.get(f"{url}/server_info", timeout=PATIENCE).json()
    assert (engine.url, engine.weight_version) == (url, "default")
    assert engine.boot_id != boot
    assert again["startup_time"] != info["startup_time"]
    assert post(engine, "/begin_weight_update").status_code == 200
    assert post(engine, "/flush_cache").status_code == 503


def test_killed_engine_breaks_connections_and_refuses_new_ones(engine: StandIn) -> None:
    post(engine, "/pause_generation")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(post, engine, "/generate", ASK)
        time.sleep(0.2)
        engine.kill()
        with pytest.raises(requests.ConnectionError):
            held.result(PATIENCE)
    assert (engine.alive, engine.boot_id) == (False, None)
    with pytest.raises(requests.ConnectionError):
        tokens(engine)
    engine.kill()
    assert tokens(engine.start())


def test_engines_of_a_fleet_share_no_changes() -> None:
    with StandInFleet(engines=3) as fleet:
        assert len({engine.boot_id for engine in fleet}) == 3
        assert tokens(fleet[0]) == tokens(fleet[1])
        post(fleet[1], "/update_weight_version", {"new_version": "x"})
        assert [engine.weight_version for engine in fleet] == ["default", "x", "default"]
        fleet[0].kill()
        assert tokens(fleet[1])


def test_old_release_has_no_sessions() -> None:
    with StandIn(sessions=False) as engine:
        assert requests.get(f"{engine.url}/begin_weight_update", timeout=PATIENCE).status_code == 404
        assert post(engine, "/begin_weight_update").status_code == 404
        assert requests.get(f"{engine.url}/server_info", timeout=PATIENCE).json()["version"] == "0.5.20"
        (load,) = requests.get(f"{engine.url}/get_load", timeout=PATIENCE).json()
        assert load.pop("ts_tic") > 0
        assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0, "num_pending_tokens": 0}
        body = {"names": [], "dtypes": [], "shapes": [], "group_name": "g"}
        assert "not in []" in post(engine, "/update_weights_from_distributed", body).json()["message"]


def test_engine_is_unready_after_a_failed_health_check_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_HEALTH_STEP_SECONDS", 0.1)
    with StandIn(health_seconds=0.15) as engine:
        post(engine, "/pause_generation", {"mode": "retract"})
        assert requests.get(f"{engine.url}/health_generate", timeout=PATIENCE).status_code == 503
        post(engine, "/continue_generation")
        assert requests.get(f"{engine.url}/ready", timeout=PATIENCE).status_code == 503
        assert requests.get(f"{engine.url}/health_generate", timeout=PATIENCE).status_code == 200
        assert requests.get(f"{engine.url}/ready", timeout=PATIENCE).status_code == 200


# --- faults ------------------------------------------------------------------------------------------------------------

CALLS = {
    Phase.PAUSE: "/pause_generation",
    Phase.CONTINUE: "/continue_generation",
    Phase.BEGIN: "/begin_weight_update",
    Phase.END: "/end_weight_update",
    Phase.FLUSH: "/flush_cache",
    Phase.CHECK: "/weights_checker",
    Phase.DESTROY: "/destroy_weights_update_group",
    Phase.DISK: "/update_weights_from_disk",
    Phase.GENERATE: "/generate",
    Phase.VERSION: "/update_weight_version",
    Phase.INIT: "/init_weights_update_group",
}
BODIES: dict[Phase, dict[str, Any]] = {
    Phase.DISK: {"model_path": "/nowhere"},
    Phase.GENERATE: ASK,
    Phase.VERSION: {"new_version": "9"},
    Phase.INIT: {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"},
}


@pytest.mark.parametrize("phase", [phase for phase in CALLS if phase is not Phase.INIT])
def test_engine_dies_in_a_phase(engine: StandIn, phase: Phase) -> None:
    boot = engine.boot_id
    number = engine.faults.add("die", phase)
    with pytest.raises(requests.ConnectionError):
        post(engine, CALLS[phase], BODIES.get(phase))
    for _ in range(50):
        if not engine.alive:
            break
        time.sleep(0.02)
    assert not engine.alive
    (hit,) = engine.fired
    assert (hit.kind, hit.phase, hit.boot_id, hit.fault, hit.port) == ("die", phase, boot, number, engine.port)
    assert abs(hit.at - time.time()) < 5
    engine.start()
    post(engine, CALLS[phase], BODIES.get(phase))
    assert len(engine.fired) == 1, "once means once"


@pytest.mark.parametrize("phase", [Phase.BEGIN, Phase.FLUSH, Phase.CHECK])
def test_hang_blocks_the_scheduler_until_the_engine_is_killed(engine: StandIn, phase: Phase) -> None:
    engine.faults.add("hang", phase)
    with pytest.raises(requests.Timeout):
        post(engine, CALLS[phase], timeout=0.3)
    for path in ("/model_info", "/v1/models", "/ping", "/ready"):
        assert requests.get(engine.url + path, timeout=PATIENCE).status_code == 200, path
    assert_hanging(engine, ("POST", "/destroy_weights_update_group"), ("POST", "/generate"), ("GET", "/server_info"))
    engine.restart()
    assert post(engine, CALLS[phase]).status_code == 200
    assert tokens(engine)


def test_hanging_pause_blocks_requests_and_updates(engine: StandIn) -> None:
    engine.faults.add("hang", "pause")
    with pytest.raises(requests.Timeout):
        post(engine, "/pause_generation", timeout=0.3)
    assert_hanging(engine, *(("POST", path) for path in ("/begin_weight_update", "/continue_generation", "/generate")))


def assert_hanging(engine: StandIn, *calls: tuple[str, str]) -> None:
    """Assert that none of these calls is answered."""
    with ThreadPoolExecutor(len(calls)) as pool:
        asked = [pool.submit(requests.request, method, engine.url + path, json=ASK, timeout=0.3) for method, path in calls]
    assert [type(future.exception()) for future in asked] == [requests.ReadTimeout] * len(calls)


def test_slow_call_succeeds_after_its_delay(engine: StandIn) -> None:
    engine.faults.add("slow", "begin", seconds=0.4)
    began = time.monotonic()
    assert post(engine, "/begin_weight_update").status_code == 200
    assert time.monotonic() - began >= 0.4


def test_unavailable_refuses_the_given_number_of_calls(engine: StandIn) -> None:
    engine.faults.add("unavailable", "begin", times=2)
    assert [post(engine, "/begin_weight_update").status_code for _ in range(4)] == [503, 503, 200, 400]


def test_fault_without_a_limit_lasts_until_it_is_removed(engine: StandIn) -> None:
    number = engine.faults.add("unavailable", "flush", times=None)
    assert [post(engine, "/flush_cache").status_code for _ in range(4)] == [503] * 4
    assert engine.faults.remove(number)
    assert not engine.faults.remove(number)
    assert post(engine, "/flush_cache").status_code == 200


def test_wrong_version_is_reported(engine: StandIn) -> None:
    engine.faults.add("wrong_version", "version")
    engine.faults.add("slow", "version", seconds=0.0)
    assert post(engine, "/update_weight_version", {"new_version": "8"}).json()["new_version"] == "8"
    assert engine.weight_version == "8-wrong"
    assert [hit.kind for hit in engine.fired] == ["wrong_version", "slow"]


@pytest.mark.parametrize(
    ("kind", "phase"), [("drop", "begin"), ("corrupt", "flush"), ("nccl", "update"), ("oom", "end"), ("wrong_version", "pause")]
)
def test_fault_that_cannot_happen_in_its_phase_is_refused(engine: StandIn, kind: str, phase: str) -> None:
    with pytest.raises(ValueError, match="cannot happen in phase"):
        engine.faults.add(kind, phase)
    reply = post(engine, "/stand_in/faults", {"kind": kind, "phase": phase})
    assert (reply.status_code, "cannot happen in phase" in reply.json()["message"]) == (400, True)


def test_faults_over_http(engine: StandIn) -> None:
    number = post(engine, "/stand_in/faults", {"kind": "slow", "phase": "flush", "times": None, "seconds": 0}).json()["number"]
    post(engine, "/flush_cache")
    faults = requests.get(f"{engine.url}/stand_in/faults", timeout=PATIENCE).json()
    (armed,) = faults["armed"]
    assert (armed["number"], armed["kind"], armed["phase"], armed["left"]) == (number, "slow", "flush", None)
    (hit,) = faults["fired"]
    assert (hit["kind"], hit["phase"], hit["boot_id"]) == ("slow", "flush", engine.boot_id)
    url = f"{engine.url}/stand_in/faults"
    assert requests.delete(url, params={"number": 99}, timeout=PATIENCE).status_code == 404
    assert requests.delete(url, params={"number": number}, timeout=PATIENCE).status_code == 200
    assert requests.get(url, timeout=PATIENCE).json()["armed"] == []


def test_restart_and_state_over_http(engine: StandIn) -> None:
    state = requests.get(f"{engine.url}/stand_in/state", timeout=PATIENCE).json()
    assert (state["boot_id"], state["pid"], state["session"]) == (engine.boot_id, os.getpid(), False)
    post(engine, "/stand_in/restart")
    end = time.monotonic() + 5
    while engine.boot_id in (state["boot_id"], None):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert tokens(engine)


def test_fault_is_parsed_from_words() -> None:
    assert Fault.parse("die:init") == Fault(kind=Kind.DIE, phase=Phase.INIT)
    assert Fault.parse("slow:update:3").times == 3
    assert Fault.parse("hang:end:always").times is None
    for wrong in ("die", "die:nowhere", "nothing:init", "die:init:0", "die:init:1:2"):
        with pytest.raises(ValueError):  # noqa: PT011 - two kinds of message: ours and pydantic's
            Fault.parse(wrong)


# --- as a process ------------------------------------------------------------------------------------------------------


def up(url: str) -> bool:
    """Wait until a process that was just started answers; it may not have bound its port yet."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            return requests.get(f"{url}/ready", timeout=PATIENCE).status_code == 200
        except requests.ConnectionError:
            time.sleep(0.05)
    return False


def test_process_with_one_engine_dies_by_sigkill_and_leaves_a_record(tmp_path: Path) -> None:
    port, hits = free_port(), tmp_path / "hits"
    line = [sys.executable, "-m", "sglang_rollout.cli", "stand-in", "--port", str(port), "--fault", "die:begin", "--hits", str(hits)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert up(f"http://127.0.0.1:{port}")
        with pytest.raises(requests.ConnectionError):
            requests.post(f"http://127.0.0.1:{port}/begin_weight_update", json={}, timeout=PATIENCE)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait(PATIENCE)
    (hit,) = [json.loads(text) for text in hits.read_text().splitlines()]
    assert (hit["kind"], hit["phase"], hit["port"]) == ("die", "begin", port)


def test_process_with_two_engines_outlives_one_engine_and_ends_at_sigterm() -> None:
    port = free_port(row=2)
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_rollout.testing", "--port", str(port), "--engines", "2", "--fault", "die:flush"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert up(f"http://127.0.0.1:{port + 1}")
        with pytest.raises(requests.ConnectionError):
            requests.get(f"http://127.0.0.1:{port}/flush_cache", timeout=PATIENCE)
        assert requests.get(f"http://127.0.0.1:{port + 1}/ready", timeout=PATIENCE).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)


def test_fleet_leaves_no_thread() -> None:
    before = threading.active_count()
    with StandInFleet(engines=2) as fleet:
        fleet[0].faults.add("hang", "flush")
        with pytest.raises(requests.Timeout):
            post(fleet[0], "/flush_cache", timeout=0.2)
    assert threading.active_count() == before


@pytest.mark.parametrize("sessions", [True, False])
async def test_agent_controls_the_stand_in(sessions: bool) -> None:
    with StandIn(sessions=sessions, tensor=2, weight_version="base") as stand_in:
        async with Engine(stand_in.url) as engine:
            facts = await engine.identify(await engine.read_label(), None)
            assert (facts.live_label, facts.launch_label, facts.tensor_size) == ("base", "base", 2)
            assert facts.sglang_version == ("0.5.23" if sessions else "0.5.20")
            assert await engine.count_requests() == 0
            for _ in range(2):  # the agent ends a session that a dead trainer left open
                assert (await engine.call("begin_weight_update", {})).status == 200
            await asyncio.to_thread(stand_in.restart)
            assert (await engine.identify("base", None)).boot_id != facts.boot_id


# --- staged versions -----------------------------------------------------------------------------------------------------


def load_staged(engine: StandIn, tmp_path: Path) -> tuple[requests.Response, list[dict[str, Any]]]:
    """Load a version with one changed tensor, as an agent does. Return the answer and the verdicts."""
    copy = open_copy(tmp_path)
    held = engine.tensors()["model.norm.weight"]
    tensor = StagedTensor(name="model.norm.weight", dtype="F32", shape=list(held.shape))
    fill_shard(copy, Shard(tensors=[tensor]), bytes(len(held.data)))
    copy.seal()
    request = loader_request(copy, tmp_path, "attempt")
    post(engine, "/begin_weight_update")
    body = {"serialized_named_tensors": [loader_payload(request)] * 2, "load_format": LOADER, "weight_version": "7", "flush_cache": False}
    answer = post(engine, "/update_weights_from_tensor", body)
    return answer, [json.loads(file.read_text()) for file in sorted(tmp_path.glob("rank-*.json"))]


def test_a_staged_version_is_read_from_its_folder(tmp_path: Path) -> None:
    with StandIn(loaders=[LOADER], tensor=2) as engine:
        answer, verdicts = load_staged(engine, tmp_path)
        assert answer.json()["success"]
        assert [(verdict["ok"], verdict["id"]) for verdict in verdicts] == [(True, "attempt")] * 2
        assert not any(engine.tensors()["model.norm.weight"].data)
        assert engine.weight_version == "7"
        assert post(engine, "/server_info").status_code == 405
        assert requests.get(engine.url + "/server_info", timeout=PATIENCE).json()["custom_weight_loader"] == [LOADER]


def test_a_loader_that_refuses_is_answered_with_success(tmp_path: Path) -> None:
    with StandIn(loaders=[LOADER], tensor=2) as engine:
        before = engine.tensors()
        engine.faults.add("refuse", "load")
        answer, verdicts = load_staged(engine, tmp_path)
        assert answer.json()["success"]
        assert [(verdict["ok"], verdict["wrote"]) for verdict in verdicts] == [(False, False)] * 2
        assert (engine.tensors(), engine.weight_version) == (before, "7")


def test_an_engine_without_the_loader_ends(tmp_path: Path) -> None:
    with StandIn(tensor=2) as engine, pytest.raises(requests.ConnectionError):
        load_staged(engine, tmp_path)


# --- the plug-in -------------------------------------------------------------------------------------------------------


def test_limits_of_the_plug_in_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, dump_settings(reports="", limits={"samplesPerPrompt": 2}))
    with StandIn() as engine:
        reply = post(engine, "/generate", {"text": "a", "sampling_params": {"n": 3}})
        refusal = read_refusal(reply.json()["error"]["message"])
        assert (reply.status_code, refusal) == (
            400,
            Refusal(ABOVE_LIMIT, "n is 3, above the limit of 2; engine.limits.samplesPerPrompt raises it."),
        )
        assert len(post(engine, "/generate", {"text": "a", "sampling_params": {"n": 2}}).json()) == 2


def test_an_adapter_that_was_unloaded_is_refused() -> None:
    ask = {**ASK, "lora_path": "math"}
    with StandIn(lora=True) as engine, StandIn(lora=True, plugin=False) as unguarded:
        for each in (engine, unguarded):
            post(each, "/load_lora_adapter", {"lora_name": "math", "lora_path": "/math"})
            assert post(each, "/generate", ask).ok
            post(each, "/unload_lora_adapter", {"lora_name": "math"})
        assert post(engine, "/generate", ask).json()["error"]["message"].startswith("adapter_not_loaded: ")
        assert post(unguarded, "/generate", ask).ok


def test_an_engine_without_the_plug_in_ends() -> None:
    with StandIn(plugin=False) as engine:
        with pytest.raises(requests.ConnectionError):
            post(engine, "/generate", {"input_ids": [99999]})
        assert len(engine.deaths) == 1
