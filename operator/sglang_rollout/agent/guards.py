"""Refusals of control calls that would harm the engine. Pure.

Some calls end SGLang's process, for example a restore of memory that is not released. Some block it, for example the name of an open
process group. After others it would serve a mixture of weights, for example a resume after half an update. :func:`refusal` refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_rollout.agent import handles
from sglang_rollout.agent import state as s
from sglang_rollout.agent.interruption import Cause
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.sglang.api import (
    DEFAULT_GROUP,
    DEFAULT_PAUSE_MODE,
    DISK_LOAD_FORMATS,
    FLATTENED,
    GROUP_LOAD_FORMATS,
    MEMORY_TAGS,
    TENSOR_LOAD_FORMATS,
    ControlCall,
    MemoryTag,
)
from sglang_rollout.wire import find_lone_surrogate
from sglang_rollout.wire.arguments import find_update_problem
from sglang_rollout.wire.reasons import Refusal, RefusalCode
from sglang_rollout.wire.states import EngineState, FleetState, describe_state

NOT_OFFERED: Mapping[ControlCall, str] = {
    ControlCall.LOAD_ADAPTER_FROM_TENSORS: "its tensors belong to the ranks of one engine; use load_lora_adapter with a shared path",
    ControlCall.UPDATE_IPC: "it has no session; use update_weights_from_distributed, or update_weights_from_tensor on the same GPUs",
    ControlCall.INIT_SEND_GROUP: "a peer that fails can block the serving engine forever",
    ControlCall.SEND_WEIGHTS: "with an unknown process group it ends the engine's process",
}
"""SGLang's calls that are refused, and why."""
NO_TENSORS: Mapping[ControlCall, str] = {ControlCall.UPDATE_TENSOR: "only engines with spec.mode Hybrid receive handles of tensors"}
"""The calls that are refused in other modes, and why."""
FORWARDED = frozenset(ControlCall) - NOT_OFFERED.keys() - {ControlCall.ABORT_REQUEST}
"""SGLang's control calls that an agent forwards, one at a time. An abort may overtake these calls."""
_NEED_WEIGHTS = frozenset(
    {
        ControlCall.BEGIN_UPDATE,
        ControlCall.UPDATE_DISTRIBUTED,
        ControlCall.UPDATE_TENSOR,
        ControlCall.UPDATE_DISK,
        ControlCall.CHECK_WEIGHTS,
        ControlCall.GET_WEIGHTS,
    }
)
"""Calls that would read or write released memory."""
_SELECTING = frozenset({ControlCall.BEGIN_UPDATE, ControlCall.UPDATE_DISTRIBUTED, ControlCall.UPDATE_TENSOR, ControlCall.CHECK_WEIGHTS})
"""Calls with a ``selector`` (SGLang 0.5.21 and later): ``target`` means the model, ``draft`` its draft model, ``all`` (default) both."""


def refusal(  # noqa: PLR0911, PLR0912 - one line per rule
    state: s.State, call: str, body: dict[str, Any], *, is_activation: bool = False
) -> Refusal | None:
    """Return why ``call`` must not be sent to the engine now; None if it may.

    Args:
        state: State of the agent.
        call: Name of the call.
        body: JSON body.
        is_activation: True if the agent itself makes the call to load a staged version.
    """
    record = state.record
    if not state.up:
        return Refusal(state.down.code, f"{call}: the engine is not up: {state.down.message}.")
    if record.pending:
        return _conflict(f"{call}: the engine has not answered {record.pending} yet, and it takes one control call at a time.")
    if why := find_lone_surrogate(body) or find_update_problem(body):
        return _invalid(f"{call}: {why}")
    if call == ControlCall.CONTINUE and record.state is EngineState.DIRTY:
        return _conflict(f"{call}: {s.closed_message(state)} Resuming would serve that mixture; /agent/fence gives the update up first.")
    if call in _NEED_WEIGHTS and MemoryTag.WEIGHTS in record.interruption.released:
        return _conflict(f"{call}: the engine's weights are released; {ControlCall.RESUME_MEMORY} comes first.")
    if call == ControlCall.CONTINUE and record.interruption.released:
        return _conflict(f"{call}: {s.closed_message(state)} {ControlCall.RESUME_MEMORY} comes first.")
    if call in (ControlCall.UPDATE_DISTRIBUTED, ControlCall.UPDATE_TENSOR) and not record.session:
        return _conflict(f"{call} must run between begin_weight_update and end_weight_update, and no session is open.")
    if call == ControlCall.UPDATE_DISTRIBUTED and group_of(body) not in record.groups:
        return _invalid(
            f"{call}: this engine is in no process group {group_of(body)!r}; its process groups: {', '.join(record.groups) or 'none'}."
        )
    if refused := _draft_refusal(state.facts, call):
        return refused
    if call == ControlCall.END_UPDATE and not record.session:
        return _invalid(f"{call}: no weight update session is open.")
    if call == ControlCall.INIT_GROUP:
        return _init_refusal(record, body)
    if call in (ControlCall.RELEASE_MEMORY, ControlCall.RESUME_MEMORY):
        return _memory_refusal(call, record, body)
    if call == ControlCall.UPDATE_TENSOR:
        return _tensors_refusal(state.facts, body, is_activation=is_activation)
    return _value_refusal(call, body)


def _conflict(message: str) -> Refusal:
    return Refusal(RefusalCode.CONFLICT, message)


def _invalid(message: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, message)


def group_of(body: dict[str, Any]) -> str:
    """Return the process group that a call names."""
    return str(body.get("group_name", DEFAULT_GROUP))


def name_of(call: str, body: dict[str, Any]) -> str:
    """Return the version label, pause mode, adapter or process group that a call names."""
    if call == ControlCall.SET_VERSION:
        return str(body.get("new_version", ""))
    if call == ControlCall.PAUSE:
        return str(body.get("mode", DEFAULT_PAUSE_MODE))
    if call in (ControlCall.LOAD_ADAPTER, ControlCall.UNLOAD_ADAPTER):
        return str(body.get("lora_name", ""))
    return group_of(body)


def tags_of(call: str, body: dict[str, Any], released: list[str]) -> tuple[str, ...]:
    """Return the memory tags of a call. Without ``tags``, a release means all tags that are not released, a restore all that are."""
    tags = body.get("tags")
    if call == ControlCall.RELEASE_MEMORY:
        named = tags if isinstance(tags, list) and tags else MEMORY_TAGS
        return tuple(str(tag) for tag in named if tag not in released)
    return tuple(str(tag) for tag in tags) if isinstance(tags, list) and tags else tuple(released)


def details_of(call: str, body: dict[str, Any], released: list[str]) -> tuple[str, ...]:
    """Return the memory tags of a call, or the path of an adapter to load."""
    if call == ControlCall.LOAD_ADAPTER:
        return (str(body.get("lora_path", "")),)
    return tags_of(call, body, released) if call in (ControlCall.RELEASE_MEMORY, ControlCall.RESUME_MEMORY) else ()


def prepare_body(call: str, body: dict[str, Any], record: s.EngineRecord, facts: s.EngineFacts | None) -> dict[str, Any]:
    """Return the body that the engine receives.

    Tensors of the model never reach a draft model with weights of its own: SGLang would write those whose names match, or end.
    """
    if call in _SELECTING and facts is not None and facts.has_external_draft:
        return {**body, "selector": "target"}
    if call == ControlCall.SET_VERSION:
        # SGLang's default is to abort every running request.
        return {**body, "abort_all_requests": False}
    if call in (ControlCall.RELEASE_MEMORY, ControlCall.RESUME_MEMORY):
        return {**body, "tags": list(tags_of(call, body, record.interruption.released))}
    return body


def _draft_refusal(facts: s.EngineFacts | None, call: str) -> Refusal | None:
    """Refuse what would change a draft model that has weights of its own."""
    if call == ControlCall.UPDATE_DISK and facts is not None and facts.has_external_draft:
        return _invalid(
            f"{call}: the engine has a draft model with weights of its own, which SGLang would overwrite from this folder:"
            " use a process group or staged versions, or start the engine without --speculative-draft-model-path."
        )
    return None


def _init_refusal(record: s.EngineRecord, body: dict[str, Any]) -> Refusal | None:
    name = group_of(body)
    if not name:
        return _invalid(f"{ControlCall.INIT_GROUP}: the process group needs a name; an empty name ends the engine's process.")
    if name in record.groups:
        return _invalid(
            f"{ControlCall.INIT_GROUP}: the engine is already in a process group {name!r}: destroy it first, or use a fresh name."
        )
    return None


def _value_refusal(call: str, body: dict[str, Any]) -> Refusal | None:
    form, action = body.get("load_format"), body.get("action", "checksum")
    if call == ControlCall.UPDATE_DISK and form is not None and form not in DISK_LOAD_FORMATS:
        return _invalid(
            f"{call}: load_format {form!r} may end the engine's process: use {' or '.join(DISK_LOAD_FORMATS)}, or leave it out."
        )
    if call == ControlCall.UPDATE_DISTRIBUTED and form not in GROUP_LOAD_FORMATS:
        return _invalid(f"{call}: load_format {form!r} is not supported: use {FLATTENED}, or leave it out.")
    if call == ControlCall.CHECK_WEIGHTS and action != "checksum":
        return _invalid(f"{call}: action {action!r} is not offered, only checksum: other actions change or copy the weights.")
    return None


def _tensors_refusal(facts: s.EngineFacts | None, body: dict[str, Any], *, is_activation: bool) -> Refusal | None:
    form, payloads, ranks = body.get("load_format"), body.get("serialized_named_tensors"), (facts and facts.tensor_size) or 1
    if form == LOADER and not is_activation:
        # The loader reads any folder that its payload names.
        return Refusal(RefusalCode.FORBIDDEN, f"{ControlCall.UPDATE_TENSOR}: only the engine's agent may use load_format {form!r}.")
    if form not in TENSOR_LOAD_FORMATS and not is_activation:
        advice = "use flattened_bucket or direct, or leave it out."
        return _invalid(f"{ControlCall.UPDATE_TENSOR}: load_format {form!r} may end the engine's process: {advice}")
    if not isinstance(payloads, list) or len(payloads) < ranks:
        needed = f"one payload for each of the engine's {ranks} ranks; a rank without a payload ends its process."
        return _invalid(f"{ControlCall.UPDATE_TENSOR}: serialized_named_tensors must hold {needed}")
    return None


def handles_refusal(body: dict[str, Any]) -> Refusal | None:
    """Return why SGLang must not unpickle the tensors of ``/update_weights_from_tensor``; None if it may. Takes milliseconds."""
    problems = (handles.find_problem(payload) for payload in body["serialized_named_tensors"])
    found = next(filter(None, problems), "")
    return _invalid(f"{ControlCall.UPDATE_TENSOR}: {found}") if found else None


def _memory_refusal(call: str, record: s.EngineRecord, body: dict[str, Any]) -> Refusal | None:
    tags = tags_of(call, body, record.interruption.released)
    unknown = [tag for tag in tags if tag not in MEMORY_TAGS]
    if unknown:
        return _invalid(f"{call}: {', '.join(unknown)} is no kind of memory: use {', '.join(MEMORY_TAGS)}.")
    if call == ControlCall.RELEASE_MEMORY:
        return _conflict(f"{call}: a weight update session is open on the engine: end it first.") if record.session else None
    if record.interruption.cause is Cause.SPEC and record.applied_state is FleetState.ASLEEP:
        return _conflict(f"{call}: {describe_state(record.applied_state)}")
    wrong = [tag for tag in tags if tag not in record.interruption.released]
    if not tags or wrong:
        what = ", ".join(wrong) or "nothing"
        return _conflict(
            f"{ControlCall.RESUME_MEMORY}: {what} is not released (released: {', '.join(record.interruption.released) or 'none'}); "
            "resuming memory that is not released ends the engine's process.",
        )
    return None
