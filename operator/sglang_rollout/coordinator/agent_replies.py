"""Read the replies of agents. Pure: no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.json_text import load_json
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.sglang.checksums import parse_checksums
from sglang_rollout.wire.agent import AgentStatus, CheckpointReply, PreflightReply
from sglang_rollout.wire.ports import (
    AGENT_ACK,
    AGENT_ACTIVATE,
    AGENT_CHECKPOINT,
    AGENT_DROP,
    AGENT_FENCE,
    AGENT_PREFLIGHT,
    AGENT_RUN,
    AGENT_STAGE,
    AGENT_SYNC,
    STORE_COMMIT,
    STORE_DROP,
    STORE_FETCH,
    STORE_JOIN,
    STORE_LEAVE,
    STORE_OPEN,
    STORE_PREFLIGHT,
    STORE_RECEIVE,
    STORE_SEAL,
    STORE_STATUS,
)
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.staged import ActivateReply, StoreStatus

MAX_MESSAGE_CHARACTERS = 2000
MAX_JSON_VALUES = 4_000_000
"""Most values of a document: 100 rows of a tensor of 30,000 columns, with room. A value takes up to 100 bytes in Python's memory.

An engine's answer of 64 MiB could hold 20 million empty objects, which would take more than the coordinator's memory.
"""
STORE_PATHS = frozenset(
    {STORE_STATUS, STORE_OPEN, STORE_JOIN, STORE_LEAVE, STORE_RECEIVE, STORE_SEAL, STORE_DROP, STORE_FETCH, STORE_COMMIT}
)
"""Paths that the weight store answers with its status."""
REPLIES: Mapping[str, type[AgentStatus | PreflightReply | CheckpointReply | ActivateReply | StoreStatus]] = {
    **dict.fromkeys((AGENT_SYNC, AGENT_RUN, AGENT_ACK, AGENT_FENCE, AGENT_STAGE, AGENT_DROP), AgentStatus),
    **dict.fromkeys(STORE_PATHS, StoreStatus),
    **dict.fromkeys((AGENT_PREFLIGHT, STORE_PREFLIGHT), PreflightReply),
    AGENT_CHECKPOINT: CheckpointReply,
    AGENT_ACTIVATE: ActivateReply,
}
"""Message with which an agent, or the weight store, answers a call, by path."""


def parse_json(data: bytes) -> Any:
    """Return the JSON of an answer, its text, or a message if it has too many values.

    Lone surrogates become question marks, because the record cannot store them.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        return f"The answer holds more than {MAX_JSON_VALUES} values."
    try:
        found = load_json(data)
        if data.isascii() and b"\\" not in data:
            return found  # the usual case: the document cannot contain a surrogate
        return load_json(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except ValueError:
        return data[:MAX_MESSAGE_CHARACTERS].decode("utf-8", "replace").strip()


def parse_result(path: str, status: int, body: Any) -> Result:
    """Return the result of a call at ``path``. ``body`` is a reply of the agent, or of the engine that the agent has called."""
    if not 200 <= status < 300:
        return _failed_result(path, status, body)
    fields = body if isinstance(body, dict) else {}
    if path in REPLIES:
        return _reply_result(path, status, fields)
    # SGLang says 200 and success: false in some places.
    ok = fields.get("success") is not False
    if ok and path == ControlCall.CHECK_WEIGHTS.path:
        return _checksum_result(status, body)
    return Result(ok=ok, status=status, message=_message(body))


def _failed_result(path: str, status: int, body: Any) -> Result:
    """Return the result of a call that was refused or failed."""
    fields = body if isinstance(body, dict) else {}
    named = fields.get("code") if path in (*STORE_PATHS, AGENT_ACTIVATE) else None
    code = next((code for code in RefusalCode if code.value == named), None)
    wrote = path != AGENT_ACTIVATE or fields.get("wrote") is not False
    return Result(ok=False, status=status, message=_message(body) or f"HTTP {status}.", code=code, wrote=wrote)


def _reply_result(path: str, status: int, fields: Mapping[str, Any]) -> Result:
    """Return the result of a call that an agent answers with a message of this project."""
    try:
        reply = REPLIES[path].model_validate(fields)
    except ValidationError as error:
        where = "; ".join(str(problem["loc"]) for problem in error.errors()[:3])
        return Result(ok=False, status=status, message=f"the answer of its agent is not valid (fields {where}).")
    if isinstance(reply, AgentStatus):
        return Result(ok=True, status=status, agent=reply)
    if isinstance(reply, StoreStatus):
        return Result(ok=True, status=status, store=reply)
    if isinstance(reply, ActivateReply):
        checksums = tuple(reply.checksums) if reply.checksums is not None else None
        return Result(ok=True, status=status, checksums=checksums, flushed=reply.flushed, running=reply.running, changed=reply.changed)
    result = Result(ok=True, status=status)
    if reply.refusal is not None:
        result = Result(ok=False, status=status, message=reply.refusal.message, code=reply.refusal.code)
    if isinstance(reply, PreflightReply):
        return result
    names = None if reply.names is None else frozenset(reply.names)
    return replace(
        result, digest=reply.digest, bytes=reply.bytes or None, path=reply.path, names=names, compared=reply.compared,
        unchecked=tuple(reply.unchecked), why_unchecked=reply.why_unchecked, shapes=reply.shapes, is_random=reply.is_random,
    )  # fmt: skip


def _checksum_result(status: int, body: Any) -> Result:
    checksums = parse_checksums(body)
    if checksums is None:
        return Result(ok=False, status=status, message="its answer holds no checksum of each rank.")
    return Result(ok=True, status=status, message=_message(body), checksums=checksums)


def _message(body: Any) -> str:
    """Return the message in a reply. SGLang uses ``message`` (``error_message`` for adapters), proxies and FastAPI other fields."""
    if isinstance(body, dict):
        body = body.get("message") or body.get("error_message") or body.get("error") or body.get("detail") or ""
    if isinstance(body, list):
        body = "; ".join(str(part) for part in body)
    return str(body or "").strip()[:MAX_MESSAGE_CHARACTERS]
