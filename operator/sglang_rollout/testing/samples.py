"""``/generate``: from the fields of a request to prompts, tokens, and replies in SGLang's shape."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_rollout.testing.boot import Boot, Running
from sglang_rollout.testing.policy import advance, decode, encode, logprob, next_token, start
from sglang_rollout.testing.replies import BadRequest, Unhandled

_DEFAULT_TOKENS = 128
"""SGLang's default of max_new_tokens."""
_MAX_STOPS, _MAX_PATTERN_BYTES = 32, 256
"""SGLang's limits of ``stop`` and ``stop_regex``: entries in each, and the length of a pattern."""
_MISSING = "Either text, input_ids or input_embeds should be provided."
_NO_ADAPTERS = (
    "LoRA adapter '{}' was requested, but LoRA is not enabled. Please launch the server with --enable-lora flag and preload adapters using"
    " --lora-paths or /load_lora_adapter endpoint."
)


@dataclass(frozen=True)
class Prompt:
    """One requested completion."""

    rid: str
    ids: list[int]
    limit: int
    stop_ids: frozenset[int]
    logprobs: bool
    logprob_start: int


@dataclass(frozen=True)
class Wanted:
    """A parsed body."""

    prompts: list[Prompt]
    single: bool
    stream: bool


def parse(boot: Boot, body: Mapping[str, Any]) -> Wanted:
    """Return the prompts of a body, n times each. Raises BadRequest as SGLang would."""
    given = body.get("input_ids") if body.get("input_ids") is not None else body.get("text")
    if given is None:
        raise BadRequest(_MISSING)
    _check_adapter(boot, body.get("lora_path"))
    if body.get("input_ids") == []:
        raise BadRequest("input_ids cannot be empty.")
    if given == []:
        return Wanted([], False, bool(body.get("stream")))
    single = isinstance(given, str) or not isinstance(given[0], list | str)
    each = [given] if single else given
    params = body.get("sampling_params")
    params = {} if params is None else params
    its_params = params if isinstance(params, list) else [params] * len(each)
    samples = _samples_per_prompt(its_params)
    single = single and samples <= 1
    if (not single and samples < 1) or (single and isinstance(params, list)):
        raise Unhandled
    rids = _rids(body.get("rid"), len(each), single=single, samples=samples)
    prompts = [
        _prompt(boot, _fields_of(body, number), said, fields, rids[number])
        for number, (said, fields) in enumerate(zip(each, its_params, strict=True))
        for _ in range(max(samples, 1))
    ]
    return Wanted(prompts, single, bool(body.get("stream")))


def _samples_per_prompt(params: Sequence[Mapping[str, Any]]) -> int:
    """Return ``n``, which must be the same for all prompts of a batch. For a single prompt, SGLang takes integers below 1 as 1."""
    wanted = [fields.get("n", 1) for fields in params]
    if any(n != wanted[0] for n in wanted):
        raise BadRequest("The parallel_sample_num should be the same for all samples in sample params.")
    if not wanted or wanted[0] is None:
        raise Unhandled
    return int(wanted[0])


def _check_adapter(boot: Boot, adapter: Any) -> None:
    if isinstance(adapter, str) and not boot.setup.lora:
        raise BadRequest(_NO_ADAPTERS.format(adapter))
    if isinstance(adapter, str) and adapter not in boot.ever_loaded:
        raise BadRequest(f"Got LoRA adapter that has never been loaded: {adapter}")


def _rids(given: Any, prompts: int, *, single: bool, samples: int) -> list[str | None]:
    """Return the request ID of each prompt; None if SGLang makes one, as it does for each of several samples."""
    if given is None or samples > 1:
        return [None] * prompts
    if isinstance(given, list):
        return given
    return [str(given)] if single else [f"{given}_{number}" for number in range(prompts)]


def _fields_of(body: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the fields that may have one value for each prompt, with the value of one prompt."""
    found = {key: body.get(key) for key in ("return_logprob", "logprob_start_len")}
    return {key: value[number] if isinstance(value, list) else value for key, value in found.items()}


def _prompt(boot: Boot, body: Mapping[str, Any], said: str | list[int], params: Mapping[str, Any], rid: str | None) -> Prompt:
    limit = _DEFAULT_TOKENS if params.get("max_new_tokens") is None else int(params["max_new_tokens"])
    if limit < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {limit}.")
    _check_stops(params)
    for token in params.get("logit_bias") or ():
        if not 0 <= int(token) < boot.setup.vocabulary:
            raise BadRequest(f"logit_bias must has keys in [0, {boot.setup.vocabulary - 1}], got {token}.")
    ids = encode(said, boot.setup.vocabulary) if isinstance(said, str) else [int(token) for token in said]
    longest = boot.setup.context_length
    if len(ids) + limit > longest and params.get("max_new_tokens") is not None:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {longest} tokens. You requested a total of "
            f"{len(ids) + limit} tokens: {len(ids)} tokens from the input messages and {limit} tokens for the completion. Please reduce "
            "the number of tokens in the input messages or the completion to fit within the limit."
        )
    return Prompt(
        rid=rid or uuid.uuid4().hex,
        ids=ids,
        limit=min(limit, longest - len(ids)),
        stop_ids=frozenset(params.get("stop_token_ids") or ()),
        logprobs=bool(body["return_logprob"]),
        logprob_start=-1 if body["logprob_start_len"] is None else int(body["logprob_start_len"]),
    )


def _check_stops(params: Mapping[str, Any]) -> None:
    """Refuse more or longer strings and patterns than SGLang accepts, which limits only the length of patterns."""
    for name, what in (("stop", "stop strings"), ("stop_regex", "stop_regex patterns")):
        given = params.get(name) or []
        each = [given] if isinstance(given, str) else given
        if len(each) > _MAX_STOPS:
            raise BadRequest(f"at most {_MAX_STOPS} {what} are allowed, got {len(each)}")
        for size in (len(one.encode("utf-8", "surrogatepass")) for one in each if name == "stop_regex"):
            if size > _MAX_PATTERN_BYTES:
                raise BadRequest(f"stop_regex is {size} bytes, over the {_MAX_PATTERN_BYTES}-byte limit")


async def produce(boot: Boot, prompt: Prompt) -> AsyncIterator[dict[str, Any]]:
    """Yield a reply after each token of a prompt. The last reply has the finish reason. Waits while the engine is paused."""
    await boot.unpaused()
    async with boot.lock.reader():
        if not prompt.ids or any(not 0 <= token < boot.setup.vocabulary for token in prompt.ids):
            await boot.died("the prompt is empty, or a token of it is outside the vocabulary")
        request = Running(prompt.rid, prompt.ids)
        key = uuid.uuid4().hex
        boot.requests[key] = request
        context, reason = start(prompt.ids), None
        try:
            while reason is None:
                await boot.turn(request)
                if not request.aborted and len(request.tokens) < prompt.limit:
                    token = next_token(boot.weights.policy, context, boot.setup.vocabulary)
                    request.logprobs.append(logprob(boot.weights.policy, context))
                    request.tokens.append(token)
                    context = advance(context, token)
                    boot.generated += 1
                reason = _reason(prompt, request)
                yield _reply(boot, prompt, request, reason)
        finally:
            del boot.requests[key]


def _reason(prompt: Prompt, request: Running) -> dict[str, Any] | None:
    if request.aborted and request.waiting:
        return {"type": "abort", "message": "Abort in waiting queue"}
    if request.aborted:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if request.tokens and request.tokens[-1] in prompt.stop_ids:
        return {"type": "stop", "matched": request.tokens[-1]}
    if len(request.tokens) >= prompt.limit:
        return {"type": "length", "length": len(request.tokens)}
    return None


def _reply(boot: Boot, prompt: Prompt, request: Running, reason: dict[str, Any] | None) -> dict[str, Any]:
    count = len(request.tokens)
    meta: dict[str, Any] = {
        "id": prompt.rid,
        "finish_reason": reason,
        "prompt_tokens": len(prompt.ids),
        "weight_version": boot.weight_version,
        "num_retractions": request.retractions,
    }
    if prompt.logprobs:
        first = prompt.logprob_start if prompt.logprob_start >= 0 else len(prompt.ids)
        meta["input_token_logprobs"] = [[None if not at else -1.0, prompt.ids[at], None] for at in range(first, len(prompt.ids))]
        meta["output_token_logprobs"] = [[lp, token, None] for lp, token in zip(request.logprobs, request.tokens, strict=True)]
        meta["output_token_logprobs_length"] = count
    meta |= {"reasoning_tokens": 0, "completion_tokens": count, "cached_tokens": 0}
    if reason is not None:
        meta["weight_versions"] = spans(request.changes, boot.scheduler_version, count)
        meta["weight_version"] = meta["weight_versions"][-1]["version"]
        meta["e2e_latency"] = time.monotonic() - request.started
    meta |= {"cached_tokens_details": None, "dp_rank": None}
    # A stop token ends the output and is not shown in its text.
    shown = request.tokens[:-1] if reason and reason["type"] == "stop" else request.tokens
    return {"text": decode(shown), "output_ids": list(request.tokens), "meta_info": meta}


def spans(changes: list[tuple[str, int]], current: str, count: int) -> list[dict[str, Any]]:
    """Return SGLang's ``weight_versions``: which version generated which tokens, end exclusive."""
    found: list[dict[str, Any]] = []
    for version, end in [*changes, (current, count)]:
        if found and end <= found[-1]["end"]:
            continue
        if found and found[-1]["version"] == version:
            found[-1]["end"] = end
            continue
        found.append({"version": version, "start": found[-1]["end"] if found else 0, "end": end})
    return found
