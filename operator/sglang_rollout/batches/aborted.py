"""Answers to requests that were aborted before an engine had them: SGLang's "Abort in waiting queue". Pure, but for the clock.

SGLang 0.5.23 writes them in ``TokenizerManager._handle_abort_req``, and builds OpenAI's answers from them. Only the time at which an
answer left the engine (``response_sent_to_client_ts``) is missing here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_rollout.batches.split import encode
from sglang_rollout.sglang.api import CHAT_COMPLETIONS, GENERATE

STREAM_TYPE = "text/event-stream; charset=utf-8"
_MESSAGE = "Abort in waiting queue"
_MOST_SAMPLES = 65_536
"""Largest value of ``engine.limits.samplesPerPrompt``."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a request with one prompt asks for, as far as the answer to an aborted one shows it."""

    path: str = GENERATE
    rid: str = ""
    """Request ID; empty if the client gave none."""
    samples: int = 1
    logprobs: bool = False
    stream: bool = False
    model: str = ""


def read_form(path: str, body: Mapping[str, Any]) -> Form:
    """Return the form of a request with one prompt. The values are not checked yet."""
    holder = body.get("sampling_params") if path == GENERATE else body
    count = holder.get("n") if isinstance(holder, Mapping) else None
    prompts = body.get("prompt")
    samples = count if isinstance(count, int) else 1
    samples *= len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return Form(
        path=path,
        rid=str(body.get("rid") or ""),
        samples=max(1, min(samples, _MOST_SAMPLES)),
        logprobs=body.get("return_logprob") is True,
        stream=bool(body.get("stream")),
        model=str(body.get("model") or ""),
    )


class AbortedError(Exception):
    """A prompt was aborted before an engine answered it."""

    def __init__(self, form: Form, weight_version: str, seconds: float) -> None:
        super().__init__("The request was aborted before an engine had it (/abort_request).")
        self.form = form
        self.weight_version = weight_version
        """Label of the version that the fleet had committed."""
        self.seconds = seconds
        """Seconds since the prompt arrived."""


def make_samples(error: AbortedError) -> list[dict[str, Any]]:
    """Return the samples of one prompt, as ``/generate`` answers them."""
    form, found = error.form, []
    for _ in range(form.samples):
        meta: dict[str, Any] = {
            "id": form.rid if form.rid and form.samples == 1 else uuid.uuid4().hex,
            "finish_reason": {"type": "abort", "message": _MESSAGE},
            "weight_version": error.weight_version,
            "e2e_latency": error.seconds,
            "weight_versions": _list_versions(error),
        }
        if form.logprobs:
            meta |= {"input_token_logprobs": [], "output_token_logprobs": [], "output_token_logprobs_length": 0}
        found.append({"text": "", "output_ids": [], "meta_info": {**meta, "completion_tokens": 0}})
    return found


def encode_samples(error: AbortedError) -> bytes:
    """Return the answer to one prompt of a batch: a sample, or the list of its samples."""
    samples = [encode(sample) for sample in make_samples(error)]
    return samples[0] if len(samples) == 1 else b"[" + b",".join(samples) + b"]"


def encode_answer(error: AbortedError) -> tuple[str, bytes]:
    """Return content type and body of the answer to a request with one prompt."""
    form = error.form
    if not form.stream:
        return "application/json", encode_samples(error) if form.path == GENERATE else encode(_make_completion(error))
    if form.path == GENERATE:
        samples = make_samples(error)
        parts = samples if form.samples == 1 else [{**sample, "index": index} for index, sample in enumerate(samples)]
    else:
        parts = _make_events(error)
    return STREAM_TYPE, b"".join(b"data: %s\n\n" % encode(part) for part in parts) + b"data: [DONE]\n\n"


def _list_versions(error: AbortedError) -> list[dict[str, Any]]:
    """Return the versions of no tokens, as SGLang lists them."""
    return [{"version": error.weight_version, "start": 0, "end": 0}]


def _make_completion(error: AbortedError) -> dict[str, Any]:
    """Return OpenAI's answer."""
    kind = "text_completion"
    content: dict[str, Any] = {"text": ""}
    if error.form.path == CHAT_COMPLETIONS:
        kind, content = "chat.completion", {"message": {"role": "assistant", "content": "", "reasoning_content": None}}
    usage: dict[str, Any] = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0, "prompt_tokens_details": None}
    usage |= {"reasoning_tokens": 0, "completion_tokens_details": None}
    metadata = {"weight_version": error.weight_version, "weight_versions": _list_versions(error)}
    choices = [_make_choice(index, content, "abort") for index in range(error.form.samples)]
    return {**_begin(error, kind), "choices": choices, "usage": usage, "metadata": metadata}


def _make_events(error: AbortedError) -> list[dict[str, Any]]:
    """Return the events of OpenAI's stream. In a chat, each choice begins with an event that has the role."""
    numbers = range(error.form.samples)
    if error.form.path != CHAT_COMPLETIONS:
        begin = _begin(error, "text_completion")
        return [{**begin, "choices": [_make_choice(index, {"text": ""}, "abort")], "usage": None} for index in numbers]
    begin, empty = _begin(error, "chat.completion.chunk"), {"reasoning_content": None}
    first = [_make_choice(index, {"delta": {**empty, "role": "assistant", "content": ""}}, None) for index in numbers]
    last = [_make_choice(index, {"delta": empty}, "abort") for index in numbers]
    return [{**begin, "choices": [choice]} for choice in (*first, *last)]


def _begin(error: AbortedError, kind: str) -> dict[str, Any]:
    form = error.form
    return {"id": form.rid or uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": form.model}


def _make_choice(index: int, content: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason, "matched_stop": None}
