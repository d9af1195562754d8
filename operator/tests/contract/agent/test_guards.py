"""Calls that end or hang a real SGLang server, sent the way clients send them: each is refused with a reason, and the server survives."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e.engine import environment
from yarl import URL

from tests.contract.support.agent_pod import Pod, run_pod
from tests.contract.support.engine_servers import Server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
TENSOR = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "unknown"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(sglang_server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pod]:
    """Gate and agent in front of the engine."""
    sglang_server.settle()
    if sglang_server.label() != "base":
        sglang_server.restart()
    async with run_pod(tmp_path_factory.mktemp("pod"), sglang_server.url) as made:
        await made.open_with_base()
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def pod(guarded: Pod, sglang_server: Server) -> AsyncIterator[Pod]:
    """The same pod; check that the engine survives the test."""
    seed = sglang_server.get("/server_info")[1]["random_seed"]
    yield guarded
    assert (await guarded.generate(2)).status == 200, "the engine answers as before"
    assert sglang_server.get("/server_info")[1]["random_seed"] == seed, "the engine was restarted"


def params(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 3, **more}


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        (GENERATE, {"input_ids": [99999], "sampling_params": params()}, "input_ids holds token 99999; this model's tokens are 0 to 2047."),
        (GENERATE, {"input_ids": [5, -1], "sampling_params": params()}, "input_ids holds token -1; this model's tokens are 0 to 2047."),
        (GENERATE, {"input_ids": [[5], [2048]], "sampling_params": params()}, "input_ids holds token 2048"),
        (GENERATE, {"input_ids": [[5], []], "sampling_params": params()}, "input_ids is empty"),
        (GENERATE, {"text": "", "sampling_params": params()}, "The prompt has no token"),
        (GENERATE, {"text": ["a", ""], "sampling_params": params()}, "The prompt has no token"),
        (GENERATE, {"input_ids": [5] * 9000 + [99999] + [5] * 9000, "sampling_params": params()}, "input_ids holds token 99999"),
        (GENERATE, {"text": "a", "sampling_params": params(min_new_tokens=2, stop_token_ids=[99999])}, "stop_token_ids holds token 99999"),
        (GENERATE, {"text": "a", "sampling_params": params(min_new_tokens=2, stop_token_ids=[-7])}, "stop_token_ids holds token -7"),
        (GENERATE, {"text": "a", "sampling_params": params(top_k=2**31)}, "top_k is larger than 2147483647"),
        (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": 2049}, "larger than the vocabulary of 2048 tokens"),
        (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len is below -1"),
        (GENERATE, {"text": "a", "return_hidden_states": [False]}, "return_hidden_states is a list, and the request has one prompt"),
        (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": [0, -1]}, "top_logprobs_num is a list, and the request has"),
        (GENERATE, {"text": "a", "positional_embed_overrides": {"x": 1}}, "positional_embed_overrides is not offered"),
        (GENERATE, {"text": "a", "custom_labels": {"team": "a"}}, "custom_labels is not offered"),
        (COMPLETIONS, {"model": "default", "prompt": [99999], "max_tokens": 1}, "input_ids holds token 99999"),
        (COMPLETIONS, {"model": "default", "prompt": [[5], [-3]], "max_tokens": 1}, "input_ids holds token -3"),
        (COMPLETIONS, {"model": "default", "prompt": "a", "max_tokens": 1, "logprobs": 100000}, "larger than the vocabulary"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 3, "min_tokens": 2, "stop_token_ids": [99999]}, "stop_token_ids holds token 99999"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "input_ids": [99999]}, "input_ids holds token 99999"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 100000}, "larger than the vocabulary"),
        ("/v1/score", {"query": [5], "items": [[99999]], "label_token_ids": [5]}, "input_ids holds token 99999"),
        ("/v1/score", {"query": "", "items": [""], "label_token_ids": [5]}, "The prompt has no token"),
    ],
)
async def test_requests_for_tokens_that_end_the_engine(pod: Pod, path: str, body: dict[str, Any], sentence: str) -> None:
    answer = await pod.ask("POST", path, body)
    assert answer.status == 400, answer
    message = str(answer.body)
    assert "would_end_the_engine: " in message
    assert sentence in message


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"sampling_params": params(logit_bias={"99999": 1.0})}, "logit_bias must has keys in [0, 2047], got 99999."),
        ({"token_ids_logprob": [99999], "return_logprob": True}, "out-of-vocabulary token id 99999"),
        ({"lora_path": "unknown"}, "LoRA is not enabled"),
        ({"routed_dp_rank": 5}, "routed_dp_rank=5 out of range [0, 1)"),
        ({"session_params": {"id": "unknown"}}, "session id unknown does not exist"),
    ],
)
async def test_requests_that_sglang_refuses_itself_pass_the_plug_in(pod: Pod, body: dict[str, Any], sentence: str) -> None:
    answer = await pod.ask("POST", GENERATE, {"input_ids": [5, 6], "sampling_params": params(), **body})
    assert answer.status == 400, answer
    assert sentence in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("begin", "rest", "said"),
    [
        ('"sampling_params": {"logit_bias": {"' + "0" * 300, '05": "x"}}}', "expected f64"),
        ('"sampling_params": {"top_', 'k": 2147483648}}', "would_end_the_engine"),
        ('"input_ids": [5, 99', "999]}", "would_end_the_engine"),
    ],
    ids=["long key", "key", "number"],
)
async def test_a_value_that_is_cut_between_two_packets_is_checked(pod: Pod, begin: str, rest: str, said: str) -> None:
    head = '{"text": "' + "a " * 100 + '", ' if '"input_ids"' not in begin else "{"
    length = len(head + begin + rest)
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(pod.url).port)
    try:
        fields = f"Host: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        writer.write(f"POST /generate HTTP/1.1\r\n{fields}{head}{begin}".encode())
        await writer.drain()
        await asyncio.sleep(0.3)
        writer.write(rest.encode())
        answer = await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert said.encode() in answer


@pytest.mark.parametrize(
    ("call", "body", "status", "sentence"),
    [
        ("init_weights_update_group", {**GROUP, "group_name": ""}, 400, "an empty name ends the engine's process"),
        ("update_weights_from_distributed", TENSOR, 409, "must run between begin_weight_update and end_weight_update"),
        ("end_weight_update", {}, 400, "no weight update session is open"),
        ("resume_memory_occupation", {"tags": ["weights"]}, 409, "resuming memory that is not released ends the engine's process"),
        ("resume_memory_occupation", {}, 409, "resuming memory that is not released ends the engine's process"),
        ("release_memory_occupation", {"tags": ["bogus"]}, 400, "bogus is no kind of memory"),
        ("send_weights_to_remote_instance", {"master_address": "127.0.0.1", "ports": "1", "group_name": "x"}, 501, "ends the engine's"),
        ("init_weights_send_group_for_remote_instance", {}, 501, "can block the serving engine forever"),
        ("update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, 501, "only engines with spec.mode Hybrid receive handles"),
        ("update_weights_from_ipc", {"zmq_handles": {}}, 501, "use update_weights_from_distributed"),
        ("weights_checker", {"action": "reset_tensors"}, 400, "only checksum"),
        ("stop_expert_distribution_record", {}, 404, "offers no /stop_expert_distribution_record"),
        ("pd_role_switch", {"role": "prefill"}, 404, "offers no /pd_role_switch"),
        ("set_internal_state", {"server_args": {}}, 404, "offers no /set_internal_state"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}, 400, "LoRA is not enabled"),
        ("load_lora_adapter_from_tensors", {}, 501, "use load_lora_adapter with a shared path"),
    ],
)
async def test_control_calls_that_end_or_hang_the_engine(pod: Pod, call: str, body: dict[str, Any], status: int, sentence: str) -> None:
    answer = await pod.control(f"/{call}", body)
    assert answer.status == status, answer
    said = answer.body.get("message") or answer.body["error_message"]
    assert sentence in said
    assert sentence in answer.reason or len(said) > 200


async def test_an_unknown_loader_is_refused(pod: Pod) -> None:
    answer = await pod.control("/update_weights_from_disk", {"model_path": str(environment.model()), "load_format": "nosuch"})
    assert (answer.status, "use auto or safetensors" in answer.body["message"]) == (400, True), answer


@pytest.mark.parametrize("how", ["truncated", "misshapen"])
async def test_folders_that_end_the_engine_are_refused(pod: Pod, how: str, tmp_path: Path) -> None:
    """The coordinator makes this check before the call."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(environment.model(), folder)
    file = folder / "model.safetensors"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.write_bytes(file.read_bytes().replace(b'"shape":[2048,', b'"shape":[1024,', 1))
    answer = await pod.control("/agent/checkpoint", {"path": str(folder), "deadline": 20})
    assert answer.status == 200
    assert "model.safetensors" in answer.body["refusal"]["message"]


async def test_memory_is_not_released_under_a_running_request(pod: Pod) -> None:
    first = asyncio.Event()
    stream = asyncio.create_task(pod.stream(1500, first))
    await first.wait()
    answer = await pod.control("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert (answer.status, "ends the engine's process" in answer.body["message"]) == (409, True), answer
    await pod.control("/abort_request", {"abort_all": True})
    await stream
