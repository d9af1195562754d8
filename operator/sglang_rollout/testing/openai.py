"""``/v1/completions`` and ``/v1/chat/completions``: from their bodies to the fields of ``/generate``, and back to their answers. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_rollout.sglang.api import CHAT_COMPLETIONS
from sglang_rollout.testing.decode import SAMPLING_FIELDS, find_wrong_type
from sglang_rollout.testing.policy import decode
from sglang_rollout.testing.replies import BadRequest, Invalid

_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""
_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_KEPT = ("stream", "rid", "custom_logit_processor", "input_ids")


def to_generate(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``/generate`` for a body. Raises Invalid or BadRequest."""
    is_chat = path == CHAT_COMPLETIONS
    prompt = _chat_prompt(body) if is_chat else _completion_prompt(body)
    name, _, adapter = str(body.get("model") or "").partition(":")
    logprobs = body.get("top_logprobs") if is_chat else body.get("logprobs")
    params = _sampling_params(body)
    if not is_chat:
        params.setdefault("max_new_tokens", _COMPLETION_TOKENS)
    fields = {
        **prompt,
        **{key: body[key] for key in _KEPT if body.get(key) is not None},
        "sampling_params": params,
        "lora_path": body.get("lora_path") or (adapter if name and adapter else None),
        "return_logprob": bool(body.get("logprobs")),
        "top_logprobs_num": logprobs or 0,
    }
    if is_chat and "input_ids" in fields:
        del fields["text"]
    return fields


def _sampling_params(body: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in body.items():
        name = _NAMES.get(key, key)
        if value is None or name not in SAMPLING_FIELDS:
            continue
        if find_wrong_type(name, value):
            raise Invalid("type", ("body", key))
        found[name] = value
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        found["json_schema"] = json.dumps(form["json_schema"]["schema"])
    return found


def _completion_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    if "prompt" not in body:
        raise Invalid("missing", ("body", "prompt"))
    prompt = body["prompt"]
    items = prompt if isinstance(prompt, list) else [prompt]
    types = set(map(type, items)) | {type(token) for row in items if isinstance(row, list) for token in row}
    if not isinstance(prompt, str | list) or not (types <= {str} or types <= {int} or types <= {list, int}):
        raise Invalid("list_type", ("body", "prompt"))
    if not any(item == 0 or item for item in items):
        raise BadRequest("Prompt cannot be empty")
    return {"text" if str in types else "input_ids": prompt}


def _chat_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt of a chat. The template of a stand-in writes the role before each message."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
        raise Invalid("missing" if messages is None else "list_type", ("body", "messages"))
    if not messages:
        raise BadRequest("Messages cannot be empty.")
    words = [f"{one['role']} {_text_of(one.get('content'))}" for one in messages]
    return {"text": " ".join([*words, "assistant"])}


def _text_of(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in parts:
        if part.get("type") != "text":
            raise BadRequest(f"Model only supports text input; received unsupported content type '{part.get('type')}'.")
    return " ".join(str(part.get("text")) for part in parts)


def answer(path: str, model: str, replies: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """Return the answer to a request that is no stream.

    Args:
        path: Path of the request.
        model: Model that the request names.
        replies: Replies of ``/generate``, in the order of the prompts.
        samples: Replies of each prompt.
    """
    is_chat = path == CHAT_COMPLETIONS
    metas = [reply["meta_info"] for reply in replies]
    choices = []
    for index, reply in enumerate(replies):
        content = {"message": {"role": "assistant", "content": reply["text"], "reasoning_content": None}} if is_chat else {}
        choices.append(_choice(index, reply, content or {"text": reply["text"]}, is_chat=is_chat))
    asked, made = sum(meta["prompt_tokens"] for meta in metas[::samples]), sum(meta["completion_tokens"] for meta in metas)
    usage = {"prompt_tokens": asked, "total_tokens": asked + made, "completion_tokens": made}
    usage |= {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}
    versions = {key: metas[0][key] for key in ("weight_version", "weight_versions")}
    kind = "chat.completion" if is_chat else "text_completion"
    return {**_head(replies[0], kind, model), "choices": choices, "usage": usage, "metadata": versions}


def events(path: str, model: str, index: int, reply: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the events of a stream for a reply of ``/generate``. ``before``: the reply before it; None for the first one."""
    text = reply["text"][len(before["text"]) if before else 0 :]
    if path != CHAT_COMPLETIONS:
        head = _head(reply, "text_completion", model)
        return [{**head, "choices": [_choice(index, reply, {"text": text}, is_chat=False, before=before)], "usage": None}]
    ended, deltas = reply["meta_info"]["finish_reason"], []
    open_reply = {**reply, "meta_info": {**reply["meta_info"], "finish_reason": None}}
    if before is None:
        deltas.append(_choice(index, _without_logprobs(open_reply), _delta(role="assistant", content=""), is_chat=True))
    if text:
        deltas.append(_choice(index, open_reply, _delta(content=text), is_chat=True, before=before))
    if ended:
        deltas.append(_choice(index, _without_logprobs(reply), _delta(), is_chat=True))
    return [{**_head(reply, "chat.completion.chunk", model), "choices": [choice]} for choice in deltas]


def _delta(**fields: str) -> dict[str, Any]:
    return {"delta": {"reasoning_content": None, **fields}}


def _without_logprobs(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {**reply, "meta_info": {key: value for key, value in reply["meta_info"].items() if key != "output_token_logprobs"}}


def _head(reply: Mapping[str, Any], kind: str, model: str) -> dict[str, Any]:
    return {"id": reply["meta_info"]["id"], "object": kind, "created": int(time.time()), "model": model}


def _choice(
    index: int, reply: Mapping[str, Any], content: Mapping[str, Any], *, is_chat: bool, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    meta = reply["meta_info"]
    reason = meta["finish_reason"] or {}
    found = meta.get("output_token_logprobs")
    logprobs = None
    if found is not None:
        new = [(logprob, decode([token])) for logprob, token, _ in found[len(before["output_ids"]) if before else 0 :]]
        logprobs = _chat_logprobs(new) if is_chat else _completion_logprobs(new)
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def _completion_logprobs(tokens: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Return log-probabilities as completions have them. A stand-in knows only those of the generated tokens."""
    return {
        "text_offset": [-1] * len(tokens),
        "token_logprobs": [logprob for logprob, _ in tokens],
        "tokens": [token for _, token in tokens],
        "top_logprobs": [{token: logprob} for logprob, token in tokens],
    }


def _chat_logprobs(tokens: Sequence[tuple[float, str]]) -> dict[str, Any]:
    rows = [{"token": token, "bytes": list(token.encode()), "logprob": logprob} for logprob, token in tokens]
    return {"content": [{**row, "top_logprobs": [row]} for row in rows]}
