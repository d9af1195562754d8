"""The wire of an SGLang engine: one suite of assertions, run against the real server and against the stand-in that claims to be like it."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.engine import LabError, environment
from wire_lab import Peer, Server, peer, server

from sglang_rollout.trainer.testing import expected_tokens
from sglang_rollout.trainer.testing.disk import read_folder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

META = {
    "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens", "completion_tokens", "cached_tokens",
    "weight_versions", "cached_tokens_details", "dp_rank", "e2e_latency",
}  # fmt: skip
LOGPROBS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
FLUSHED = "Cache flushed.\nPlease check backend logs"
OPEN_ALREADY = "a weight-update session is already open; call end_weight_update() first"
NONE_OPEN = "no weight-update session is open; call begin_weight_update() first"
OUTSIDE = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"


@pytest.fixture(scope="module", params=["stand-in", "sglang"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with server(request.param, tmp_path_factory.mktemp("wire")) as made:
        yield made


@pytest.fixture
def engine(running: Server) -> Iterator[Server]:
    running.settle()
    yield running
    running.settle()


@pytest.fixture
def trainer() -> Iterator[Peer]:
    with peer() as made:
        yield made


@pytest.fixture
def joined(engine: Server, trainer: Peer) -> Iterator[Peer]:
    """A trainer in a group with the engine, which is paused and in a session."""
    assert trainer.open([engine]) == [(200, {"success": True, "message": "Succeeded to initialize custom process group."})]
    assert engine.post("/pause_generation", {"mode": "retract"})[0] == 200
    assert engine.post("/begin_weight_update", {}) == (200, {"success": True, "message": "Success"})
    yield trainer
    engine.post("/destroy_weights_update_group", {"group_name": trainer.group})


def refused(answer: tuple[int, Any], *places: str) -> None:
    """SGLang's validation error."""
    status, body = answer
    assert (status, body["object"], body["type"], body["code"]) == (400, "error", "Bad Request", 400)
    assert "validation error" in body["message"]
    for place in places:
        assert place in body["message"]


# --- what it says about itself -----------------------------------------------------------------------------------------


def test_model_info(engine: Server) -> None:
    status, info = engine.get("/model_info")
    assert status == 200
    assert {
        "model_path": str(environment.model()), "served_model_name": str(environment.model()), "tokenizer_path": str(environment.model()),
        "is_generation": True, "preferred_sampling_params": None, "weight_version": "base", "load_format": "auto", "reasoning_parser": None,
        "tool_call_parser": None, "disaggregation_mode": "null", "has_image_understanding": False, "has_audio_understanding": False,
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    }.items() <= info.items()  # fmt: skip
    assert engine.get("/get_model_info") == (200, info)


def test_server_info(engine: Server) -> None:
    status, info = engine.get("/server_info")
    assert status == 200
    assert {
        "version": "0.5.23", "frontend": "python", "tp_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "ep_size": 1, "nnodes": 1,
        "node_rank": 0, "port": engine.engine.port, "host": "127.0.0.1", "weight_version": "base", "context_length": 2048,
        "nccl_port": None, "device": "cpu", "dtype": "float32", "api_key": None, "admin_api_key": None, "enable_memory_saver": False,
        "max_running_requests": 16, "max_total_num_tokens": 16384, "max_req_input_len": 2042, "served_model_name": str(environment.model()),
    }.items() <= info.items()  # fmt: skip
    assert isinstance(info["random_seed"], int)
    assert isinstance(info["startup_time"]["tokenizer_e2e"], float)
    assert f"--port {engine.engine.port}" in info["launch_command"]
    assert info["internal_states"][0]["world_size"] == 1
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 16
    again = engine.get("/get_server_info")[1]
    assert {key: again[key] for key in ("random_seed", "startup_time", "launch_command")} == {
        key: info[key] for key in ("random_seed", "startup_time", "launch_command")
    }


def test_models_and_loads(engine: Server) -> None:
    status, models = engine.get("/v1/models")
    (row,) = models.pop("data")
    assert (status, models) == (200, {"object": "list"})
    assert isinstance(row.pop("created"), int)
    name = str(environment.model())
    assert row == {"id": name, "object": "model", "owned_by": "sglang", "root": name, "parent": None, "max_model_len": 2048}
    status, loads = engine.get("/v1/loads")
    assert (status, loads["version"], loads["num_accelerators"], len(loads["loads"])) == (200, "0.5.23", 1, 1)
    row = loads["loads"][0]
    assert {
        "dp_rank": 0,
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "max_total_num_tokens": 16384,
        "max_running_requests": 16,
    }.items() <= row.items()
    assert {"num_used_tokens", "num_total_tokens", "token_usage", "gen_throughput", "cache_hit_rate", "utilization"} <= set(row)


def test_health(engine: Server) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert engine.get(path) == (200, ""), path
    began = time.monotonic()
    assert engine.get("/health_generate") == (200, "")
    assert time.monotonic() - began >= 1


def test_unknown_paths_and_wrong_methods(engine: Server) -> None:
    missing, wrong = {"detail": "Not Found"}, {"detail": "Method Not Allowed"}
    assert engine.get("/get_load") == (404, missing)
    assert engine.post("/nosuch", {}) == (404, missing)
    assert engine.get("/generate") == (405, wrong)
    assert engine.get("/begin_weight_update") == (405, wrong)


@pytest.mark.parametrize("path", ["/begin_weight_update", "/continue_generation", "/generate", "/abort_request", "/pause_generation"])
def test_a_call_without_a_body_is_refused(engine: Server, path: str) -> None:
    refused(engine.post(path), "'missing'", "body")
    reply = requests.post(engine.url + path, data="no", headers={"Content-Type": "application/json"}, timeout=30)
    refused((reply.status_code, reply.json()))


# --- generation --------------------------------------------------------------------------------------------------------


def test_generate(engine: Server) -> None:
    reply = engine.generate(4)
    assert set(reply) == {"text", "output_ids", "meta_info"}
    meta = reply["meta_info"]
    assert set(meta) - {"response_sent_to_client_ts"} == META
    assert (len(reply["output_ids"]), meta["completion_tokens"], meta["prompt_tokens"]) == (4, 4, 3)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["weight_version"] == engine.label()
    assert meta["weight_versions"] == [{"version": engine.label(), "start": 0, "end": 4}]
    assert engine.generate(4)["output_ids"] == reply["output_ids"]
    assert engine.generate(0)["output_ids"] == []
    assert engine.generate(2, rid="mine")["meta_info"]["id"] == "mine"


def test_generate_with_logprobs(engine: Server) -> None:
    reply = engine.generate(3, return_logprob=True)
    meta = reply["meta_info"]
    assert set(meta) - {"response_sent_to_client_ts"} == META | LOGPROBS
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in reply["output_ids"]]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert (meta["output_token_logprobs_length"], meta["input_token_logprobs"]) == (3, [])
    first = engine.generate(1, return_logprob=True, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    assert [entry[1:] for entry in first] == [[11, None], [22, None], [33, None]]
    assert first[0][0] is None


def test_generate_for_many(engine: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 2}
    texts = engine.post("/generate", {"text": ["alpha", "beta"], "sampling_params": params})[1]
    assert [set(reply) for reply in texts] == [{"text", "output_ids", "meta_info"}] * 2
    ids = engine.post("/generate", {"input_ids": [[5, 6], [7]], "sampling_params": [params, {**params, "max_new_tokens": 1}]})[1]
    assert [(len(reply["output_ids"]), reply["meta_info"]["prompt_tokens"]) for reply in ids] == [(2, 2), (1, 1)]
    twice = engine.post("/generate", {"text": "alpha", "sampling_params": {**params, "n": 2}})[1]
    assert [reply["output_ids"] for reply in twice] == [texts[0]["output_ids"]] * 2
    one = engine.post("/generate", {"text": "alpha", "sampling_params": params})[1]
    assert (one["text"], one["output_ids"]) == (texts[0]["text"], texts[0]["output_ids"])


def test_generate_stops_at_a_token(engine: Server) -> None:
    second = engine.generate(2)["output_ids"][1]
    params = {"temperature": 0, "max_new_tokens": 8, "stop_token_ids": [second]}
    reply = engine.generate(sampling_params=params)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": second}
    assert reply["output_ids"][-1] == second
    assert reply["text"] == engine.generate(reply["output_ids"].index(second))["text"]


def test_generate_as_a_stream(engine: Server) -> None:
    body = {"input_ids": [11, 22, 33], "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}}
    reply = requests.post(f"{engine.url}/generate", json=body, timeout=30)
    assert (reply.status_code, reply.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    whole = engine.generate(3)
    # A busy server sends what has come meanwhile as one event: each event tells the whole so far.
    counts = [len(part["output_ids"]) for part in parts]
    assert counts == sorted(set(counts))
    assert counts[-1] == 3
    assert (parts[-1]["text"], parts[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert [part["meta_info"]["finish_reason"] for part in parts] == [*[None] * (len(parts) - 1), {"type": "length", "length": 3}]
    for part in parts[:-1]:
        assert set(part["meta_info"]) - {"response_sent_to_client_ts"} == META - {"weight_versions", "e2e_latency"}
    assert set(parts[-1]["meta_info"]) == META


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {}}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0, got -1."),
        (
            {"input_ids": [5], "sampling_params": {"max_new_tokens": 99999}},
            "Requested token count exceeds the model's maximum context length of 2048 tokens. You requested a total of 100000 tokens: "
            "1 tokens from the input messages and 99999 tokens for the completion. "
            "Please reduce the number of tokens in the input messages or the completion to fit within the limit.",
        ),
    ],
)
def test_generate_refuses(engine: Server, body: dict[str, Any], message: str) -> None:
    assert engine.post("/generate", body) == (400, {"error": {"message": message}})


def test_generate_refuses_an_unknown_sampling_parameter_but_not_an_unknown_field(engine: Server) -> None:
    status, body = engine.post("/generate", {"text": "a", "sampling_params": {"bogus": 1}})
    assert (status, body["error"].startswith("unknown field `bogus`, expected one of `max_new_tokens`, `stop`")) == (400, True)
    assert engine.generate(1, bogus=1)["meta_info"]["completion_tokens"] == 1


# --- pause, abort, flush -----------------------------------------------------------------------------------------------


def test_flush(engine: Server) -> None:
    for status, text in (engine.get("/flush_cache"), engine.ask("POST", "/flush_cache")):
        assert (status, text.startswith(FLUSHED)) == (200, True)
    refused(engine.get("/flush_cache?timeout=-1"), "query", "timeout")
    running = engine.start_long()
    assert engine.get("/flush_cache") == (400, "Flush cache failed.\n")
    assert engine.post("/abort_request", {"abort_all": True}) == (200, "")
    assert running.result(30)["meta_info"]["finish_reason"]["type"] == "abort"


def test_pause_holds_new_requests_and_running_ones_go_on_after_it(engine: Server) -> None:
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


def test_retracted_requests_let_the_cache_be_flushed_and_carry_spans_of_versions(engine: Server) -> None:
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


def test_pause_abort_ends_what_runs(engine: Server) -> None:
    running = engine.start_long()
    assert engine.post("/pause_generation", {})[0] == 200
    reply = running.result(5)
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < 1500


def test_abort(engine: Server) -> None:
    mine = engine.pool.submit(engine.generate, 1500, rid="mine")
    running = engine.start_long()
    assert engine.post("/abort_request", {"rid": "mine"}) == (200, "")
    assert mine.result(5)["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.post("/abort_request", {}) == (200, "")
    time.sleep(0.3)
    assert not running.done()
    # Retracted requests are aborted at once. Held ones are not in the scheduler, and survive.
    engine.post("/pause_generation", {"mode": "retract"})
    held = engine.pool.submit(engine.generate, 2)
    time.sleep(0.3)
    engine.post("/abort_request", {"abort_all": True})
    assert running.result(5)["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    engine.post("/continue_generation", {})
    assert held.result(30)["meta_info"]["finish_reason"]["type"] == "length"


def test_setting_a_version_aborts_unless_told_not_to(engine: Server) -> None:
    running = engine.start_long()
    assert engine.post("/update_weight_version", {"new_version": "now"})[0] == 200
    assert running.result(5)["meta_info"]["finish_reason"]["type"] == "abort"
    refused(engine.post("/update_weight_version", {}), "new_version")


def test_an_unknown_pause_mode_is_refused(engine: Server) -> None:
    refused(engine.post("/pause_generation", {"mode": "bogus"}), "literal_error", "mode")


# --- weight updates over a group ---------------------------------------------------------------------------------------


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
        other.tell("open", group=other.group, world=2)
        status, body = engine.post("/init_weights_update_group", other.at(other.hear()["port"], 0, 2))
    taken = "The specified group name has already been created, please use a different group name"
    assert (status, body["success"], taken in body["message"]) == (400, False, True)
    assert body["message"].startswith("Failed to initialize custom process group: ")
    gone = (200, {"success": True, "message": "Succeeded to destroy custom process group."})
    assert engine.post("/destroy_weights_update_group", {"group_name": trainer.group}) == gone
    assert engine.post("/destroy_weights_update_group", {"group_name": trainer.group}) == no_group


@pytest.mark.parametrize("flat", [False, True])
def test_an_update_changes_tokens_checksums_and_the_version(engine: Server, joined: Peer, flat: bool) -> None:
    checksum = engine.post("/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"]
    status, body = joined.push(engine, 1.5, {"weight_version": "step-1", "flush_cache": True}, flat=flat)
    message = "Succeeded to update parameter online. Weight version updated to step-1."
    assert (status, body) == (200, {"success": True, "message": message})
    assert engine.post("/end_weight_update", {})[0] == 200
    engine.post("/continue_generation", {})
    after = engine.generate(16)
    assert (engine.label(), after["meta_info"]["weight_version"]) == ("step-1", "step-1")
    updated = engine.post("/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"]
    # The same weights again, the other way: the same content, so the same checksum and tokens.
    engine.post("/begin_weight_update", {})
    status, body = joined.push(engine, 1.5, flat=not flat)
    assert (status, body) == (200, {"success": True, "message": "Succeeded to update parameter online."})
    assert engine.label() == "step-1"
    engine.post("/end_weight_update", {})
    assert engine.post("/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"] == updated
    assert engine.generate(16)["output_ids"] == after["output_ids"]
    engine.post("/begin_weight_update", {})
    joined.push(engine, 0.5 if flat else 0.4, flat=flat)
    engine.post("/end_weight_update", {})
    assert engine.post("/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"] not in (checksum, updated)
    assert engine.generate(16)["output_ids"] != after["output_ids"]


def test_a_model_keeps_its_types_and_skips_names_that_it_does_not_know(engine: Server, joined: Peer) -> None:
    assert joined.push(engine, 2.0, {"weight_version": "exact"})[0] == 200  # powers of two: exact in bfloat16 only for what is
    before = engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"][0]["checksums"]
    assert joined.push(engine, 2.0, names=["model.norm.weight"], dtype="bfloat16")[0] == 200
    after = engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"][0]["checksums"]
    assert after == before  # the norm is all ones: the same numbers in the model's own type
    body = joined.describe(names=["lm_head.weight"]) | {"names": ["nobody.knows.weight"], "flush_cache": False}
    asked = engine.later("/update_weights_from_distributed", body)
    assert joined.send() == {"sent": True}
    assert asked.result(30)[0] == 200
    assert engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"][0]["checksums"] == before


def test_a_wrong_shape_leaves_a_partial_update(engine: Server, joined: Peer) -> None:
    status, body = joined.push(engine, 1.0, names=["model.norm.weight"], shape=[7])
    assert (status, body["success"]) == (400, False)
    assert body["message"].startswith("Failed to update parameter online: ")
    assert body["message"].endswith("The full weights of the ModelRunner are partially updated. Please discard the whole weights.")
    assert joined.push(engine, 1.0)[0] == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtypes": ["float31"]}, "module 'torch' has no attribute 'float31'"),
        ({"load_format": "flattened_bucket", "names": ["a", "b"]}, "zip() argument 2 is shorter than argument 1"),
        ({"load_format": "flattened_bucket", "names": [], "dtypes": [], "shapes": []}, "Cannot create empty tensor bucket"),
        ({"load_format": "flattened_bucket", "shapes": [[-1]]}, "Negative dimension in received tensor a: torch.Size([-1])"),
        (
            {"load_format": "flattened_bucket", "names": ["a", "b"], "dtypes": ["uint8", "float32"], "shapes": [[1], [1]]},
            "Unaligned received tensor b: byte offset 1, dtype torch.float32",
        ),
    ],
)
def test_what_cannot_be_received_is_refused_before_it_is(engine: Server, joined: Peer, change: dict[str, Any], message: str) -> None:
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": joined.group} | change
    answer = engine.post("/update_weights_from_distributed", body)
    assert answer == (400, {"success": False, "message": f"Failed to receive weights: {message}"})
    assert joined.push(engine, 1.0)[0] == 200, "the group is as good as before"


def test_a_flush_that_fails_leaves_the_version_behind(engine: Server, trainer: Peer) -> None:
    assert trainer.open([engine])[0][0] == 200
    before = engine.label()
    running = engine.start_long()
    engine.post("/pause_generation", {"mode": "in_place"})
    engine.post("/begin_weight_update", {})
    status, body = trainer.push(engine, 1.25, {"weight_version": "unflushed", "flush_cache": True})
    assert (status, body["message"].startswith("Weights were updated, but the cache was not flushed because requests")) == (400, True)
    assert engine.label() == before
    engine.post("/end_weight_update", {})
    engine.post("/continue_generation", {})
    assert [span["version"] for span in running.result(60)["meta_info"]["weight_versions"]] == [before, "unflushed"]
    assert engine.post("/update_weight_version", {"new_version": "again", "abort_all_requests": False})[0] == 200
    engine.post("/destroy_weights_update_group", {"group_name": trainer.group})


def test_an_unpaused_update_waits_for_running_requests(engine: Server, trainer: Peer) -> None:
    assert trainer.open([engine])[0][0] == 200
    running = engine.start_long()
    begun = engine.later("/begin_weight_update", {})
    time.sleep(0.5)
    assert not begun.done()
    engine.post("/abort_request", {"abort_all": True})
    assert begun.result(5)[0] == 200
    assert running.result(5)["meta_info"]["finish_reason"]["type"] == "abort"
    engine.post("/destroy_weights_update_group", {"group_name": trainer.group})


def test_a_silent_trainer_blocks_the_scheduler_and_a_dead_one_frees_it(engine: Server, joined: Peer) -> None:
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
    """The second one is always a stand-in: it joins what SGLang joins."""
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


# --- checksums, memory, disk -------------------------------------------------------------------------------------------


def test_checksums(engine: Server) -> None:
    status, body = engine.post("/weights_checker", {"action": "checksum"})
    assert (status, set(body)) == (200, {"success", "message", "ranks", "per_engine_checksum"})
    assert (body["success"], body["message"]) == (True, "Success.")
    (rank,) = body["ranks"]
    assert set(rank) == {"checksums", "per_gpu_checksum", "parallelism_info"}
    assert rank["parallelism_info"] == [
        {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}
    ]
    assert {len(value) for value in rank["checksums"].values()} == {16}
    assert (len(rank["per_gpu_checksum"]), len(body["per_engine_checksum"])) == (64, 64)
    assert engine.post("/weights_checker") == engine.get("/weights_checker") == (200, body)
    assert engine.post("/weights_checker", {"action": "bogus"}) == (400, {"success": False, "message": "Unsupported action='bogus'"})


def test_memory_is_released_and_resumed(engine: Server) -> None:
    for tags in ({"tags": ["kv_cache"]}, {"tags": ["weights", "kv_cache"]}, {}):
        assert engine.post("/release_memory_occupation", tags) == (200, None)
        assert engine.post("/resume_memory_occupation", tags) == (200, None)
    assert engine.generate(2)["meta_info"]["completion_tokens"] == 2


def test_an_update_from_disk(engine: Server, trainer: Peer, tmp_path: Path) -> None:
    before = engine.generate(16)["output_ids"]
    (tmp_path / "config.json").write_text((environment.model() / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((environment.model() / name).read_bytes())
    trainer.save(0.6, tmp_path)
    label = engine.label()
    status, body = engine.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert (status, body) == (200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})
    info = engine.get("/model_info")[1]
    assert (info["weight_version"], info["model_path"], info["served_model_name"]) == (label, str(tmp_path), str(tmp_path))
    assert engine.generate(16)["output_ids"] != before
    status, body = engine.post("/update_weights_from_disk", {"model_path": str(environment.model()), "weight_version": "disk"})
    assert (status, body["message"]) == (200, "Succeeded to update model weights. Weight version updated to disk.")
    assert (engine.label(), engine.get("/v1/models")[1]["data"][0]["id"]) == ("disk", str(environment.model()))


def test_an_update_from_a_folder_without_weights_changes_nothing(engine: Server, tmp_path: Path) -> None:
    before = engine.generate(8)["output_ids"], engine.label()
    for path in ("/nonexistent", str(tmp_path)):
        status, body = engine.post("/update_weights_from_disk", {"model_path": path, "weight_version": "never"})
        assert (status, body["success"], body["num_paused_requests"]) == (400, False, 0)
        assert body["message"].startswith("Failed to get weights iterator: ")
    assert (engine.generate(8)["output_ids"], engine.label()) == before
    refused(engine.post("/update_weights_from_disk", {}), "model_path")


# --- deaths ------------------------------------------------------------------------------------------------------------


def truncated(folder: Path) -> dict[str, Any]:
    whole = (environment.model() / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return {"model_path": str(folder)}


def misshapen(folder: Path) -> dict[str, Any]:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(28))
    return {"model_path": str(folder)}


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("/update_weights_from_disk", truncated),
        ("/update_weights_from_disk", misshapen),
        ("/resume_memory_occupation", lambda _: {"tags": ["weights"]}),
        ("/generate", lambda _: {"input_ids": [99999], "sampling_params": {"max_new_tokens": 1}}),
    ],
    ids=["truncated-file", "wrong-shape", "resume-unreleased", "token-outside-vocabulary"],
)
def test_calls_that_end_the_server(engine: Server, path: str, make: Any, tmp_path: Path) -> None:
    """The next test finds a new life: base weights and version, and another identity."""
    (tmp_path / "config.json").write_text((environment.model() / "config.json").read_text())
    before = engine.get("/server_info")[1]
    engine.post("/update_weight_version", {"new_version": "lost"})
    with pytest.raises(requests.ConnectionError):
        engine.ask("POST", path, make(tmp_path), timeout=60)
    assert engine.gone()
    engine.restart()
    after = engine.get("/server_info")[1]
    assert engine.label() == "base"
    assert (after["random_seed"], after["startup_time"]) != (before["random_seed"], before["startup_time"])
