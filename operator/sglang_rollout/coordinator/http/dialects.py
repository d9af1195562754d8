"""Dialects of trainers: bodies become requests, and answers get SGLang's shape.

The fleet accepts some bodies that SGLang refuses: empty bodies, ports and versions of the other type, no backend, no group name. It
also accepts the singular ``{name, dtype, shape}`` of older clients. Unknown fields are forwarded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from sglang_rollout.checkpoints.format import TORCH_DTYPES
from sglang_rollout.coordinator.update.requests import (
    Answer,
    AtEngine,
    Begin,
    Claim,
    CloseGroup,
    CommitUpload,
    Continue,
    End,
    Flush,
    FromDisk,
    LoadAdapter,
    Pause,
    ReleaseMemory,
    Request,
    ResumeMemory,
    SetLabel,
    Tensors,
    UnloadAdapter,
    Update,
    Upload,
)
from sglang_rollout.json_text import load_json
from sglang_rollout.sglang.api import (
    DEFAULT_PAUSE_MODE,
    DISK_LOAD_FORMATS,
    FLATTENED,
    GROUP_LOAD_FORMATS,
    MEMORY_TAGS,
    PAUSE_MODES,
    TENSOR_LOAD_FORMATS,
    ControlCall,
)
from sglang_rollout.wire import find_lone_surrogate
from sglang_rollout.wire.arguments import (
    MAX_PATH_CHARACTERS,
    MAX_TENSOR_PARALLEL_DIGITS,
    find_checksums_problem,
    find_folder_problem,
    find_label_problem,
    find_switch_problem,
    find_update_problem,
)
from sglang_rollout.wire.ports import CHECK_MODEL_FIELD
from sglang_rollout.wire.reasons import RefusedError, quote_value
from sglang_rollout.wire.staged import DIGEST_PATTERN, MAX_SHARDS, Shard
from sglang_rollout.wire.trainer import ControlReply

MAX_FLUSH_SECONDS = 60.0
STAGED, COMMITTED = "staged", "committed"
"""Values of ``wait`` in ``POST /fleet/updates/{update}/commit``: the state of the version in which the call is answered."""
MAX_ADAPTER_CHARACTERS = 256
ADAPTER_FIELDS = ("lora_name", "lora_path", "pinned")
"""Fields of ``/load_lora_adapter`` in SGLang 0.5.20 to 0.5.23. SGLang itself sets ``lora_id`` and ``rid`` of its request class."""
MAX_TENSOR_ROWS = 100
"""Largest ``truncate_size`` of ``/get_weights_by_name``; SGLang's default. All rows of a large tensor do not fit into one answer."""
Fields = Mapping[str, Any]


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; an empty body is an empty object. Raises RefusedError."""
    if not data.strip():
        return {}
    try:
        body = load_json(data)
    except UnicodeDecodeError as error:
        raise RefusedError(f"the body is not JSON: byte {error.start} is not UTF-8.") from error
    except json.JSONDecodeError as error:
        raise RefusedError(f"the body is not JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except ValueError as error:
        raise RefusedError("the JSON of the body cannot be parsed: it nests too deep, or a number is too long.") from error
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise RefusedError(f"the body must be a JSON object, not {type(body).__name__}.")
    if why := find_lone_surrogate(body):
        raise RefusedError(why)
    return body


def close_group(body: Fields) -> Request:
    """``/destroy_weights_update_group``. Without a name, close the only open group."""
    return CloseGroup(_name(body, "group_name"))


def pause(body: Fields) -> Request:
    """``/pause_generation``."""
    mode = body.get("mode")
    if mode is not None and mode not in PAUSE_MODES:
        raise RefusedError(f"mode {quote_value(mode)} is not a pause mode: use {', '.join(PAUSE_MODES)}.")
    # SGLang's default is written out, because the fleet must know the mode.
    mode = mode or DEFAULT_PAUSE_MODE
    return Pause(mode, {**body, "mode": mode})


def begin(body: Fields) -> Begin:
    """``/begin_weight_update``.

    ``weight_version`` and ``names`` are fields of this project here: a wrong label or too few tensors are refused before any is sent.
    """
    _refuse(find_update_problem(body))
    label = _label(body.get("weight_version"), "weight_version")
    forwarded = {key: value for key, value in body.items() if key not in ("weight_version", "names")}
    return Begin(forwarded, label, frozenset(body.get("names") or ()))


def end(body: Fields) -> End:
    """``/end_weight_update``. ``checksums`` is a field of this project."""
    return End(_checksums(body))


def upload(body: Fields) -> Upload:
    """``POST /fleet/updates``."""
    shards = body.get("shards")
    if not isinstance(shards, list) or not 0 < len(shards) <= MAX_SHARDS:
        raise RefusedError(
            f'shards is missing: it must be a list of 1 to {MAX_SHARDS} objects, {{"tensors": [{{"name", "dtype", "shape"}}]}}.'
        )
    try:
        parsed = tuple(Shard.model_validate(shard) for shard in shards)
    except ValidationError as error:
        problem = error.errors()[0]
        raise RefusedError(f"shards: {'.'.join(map(str, problem['loc']))}: {problem['msg']}.") from None
    checks = body.get(CHECK_MODEL_FIELD) is not False
    return Upload(parsed, _label(body.get("label"), "label"), check_model=checks, base=_base(body))


def _base(body: Fields) -> str:
    base = body.get("base") or ""
    if not isinstance(base, str) or re.fullmatch(f"|{DIGEST_PATTERN}", base) is None:
        raise RefusedError(f"base {quote_value(base)} is no digest: use the digest of the committed version in store.copies of GET /fleet.")
    return base


def commit_upload(update: str, body: Fields) -> CommitUpload:
    """``POST /fleet/updates/{update}/commit``."""
    wait = body.get("wait", COMMITTED)
    if wait not in (STAGED, COMMITTED):
        raise RefusedError(f"wait {quote_value(wait)} is not known: use {STAGED} or {COMMITTED}.")
    return CommitUpload(update, wait == COMMITTED, _checksums(body))


def _checksums(body: Fields) -> dict[int, tuple[str, ...]]:
    checksums = body.get("checksums") or {}
    _refuse(find_checksums_problem(checksums, "checksums"))
    return {int(size): tuple(ranks) for size, ranks in checksums.items()}


def update(body: Fields) -> Request:
    """``/update_weights_from_distributed``. Singular fields become lists, versions become strings."""
    forwarded = {key: value for key, value in body.items() if key not in {"name", "dtype", "shape"}}
    for singular, plural in (("name", "names"), ("dtype", "dtypes"), ("shape", "shapes")):
        if plural not in forwarded and singular in body:
            forwarded[plural] = [body[singular]]
    lengths = {}
    for plural in ("names", "dtypes", "shapes"):
        value = forwarded.get(plural)
        if not isinstance(value, list) or not value:
            raise RefusedError(f"{plural} is missing: it must be a list with one entry for each tensor.")
        lengths[plural] = len(value)
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{number} {plural}" for plural, number in lengths.items())
        raise RefusedError(f"the tensor lists differ in length: {shown}. Engines would wait for tensors that never come.")
    # Some clients send the dtype as torch prints it; SGLang looks it up by its bare name.
    forwarded["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in forwarded["dtypes"]]
    _check_tensors(forwarded)
    label = _label(body.get("weight_version"), "weight_version")
    if label is not None:
        forwarded["weight_version"] = label
    checks = forwarded.pop(CHECK_MODEL_FIELD, True) is not False
    return Update(_name(body, "group_name"), label, forwarded, check_model=checks)


def _check_tensors(body: Fields) -> None:
    """Refuse values that an engine would refuse only after other engines have begun to receive."""
    _refuse(find_update_problem(body))
    for number, dtype in enumerate(body["dtypes"]):
        if dtype not in TORCH_DTYPES:
            raise RefusedError(f"dtypes[{number}] {quote_value(dtype)} is not a type of torch: use for example bfloat16.")
    if CHECK_MODEL_FIELD in body:
        _refuse(find_switch_problem(body[CHECK_MODEL_FIELD], CHECK_MODEL_FIELD))
    form = body.get("load_format")
    if form not in GROUP_LOAD_FORMATS:
        raise RefusedError(f"load_format {quote_value(form)} is not supported: use {FLATTENED}, or leave it out.")


def from_disk(body: Fields) -> Request:
    """``/update_weights_from_disk``."""
    path = body.get("model_path")
    _refuse(find_folder_problem(path, "model_path") or find_update_problem(body))
    form = body.get("load_format")
    if form is not None and form not in DISK_LOAD_FORMATS:
        # Checked before any engine is called, because a loader that SGLang does not know ends its process.
        raise RefusedError(f"load_format {quote_value(form)} is not supported: use {' or '.join(DISK_LOAD_FORMATS)}, or leave it out.")
    return FromDisk(str(path), _label(body.get("weight_version"), "weight_version"), body)


def tensors(body: Fields) -> Tensors:
    """``/update_weights_from_tensor``, with one string for each rank of the engine."""
    handles = body.get("serialized_named_tensors")
    if not isinstance(handles, list) or not handles or not all(isinstance(handle, str) and handle for handle in handles):
        raise RefusedError("serialized_named_tensors is missing: it must be a list with one string for each rank of the engine.")
    _refuse(find_update_problem(body))
    form = body.get("load_format")
    if form not in TENSOR_LOAD_FORMATS:
        raise RefusedError(
            f"load_format {quote_value(form)} is not supported: use {', '.join(filter(None, TENSOR_LOAD_FORMATS))}, or leave it out."
        )
    return Tensors(_label(body.get("weight_version"), "weight_version"), body)


def set_label(body: Fields) -> SetLabel:
    """``/update_weight_version``."""
    label = _label(body.get("new_version"), "new_version")
    if label is None:
        raise RefusedError("new_version is missing: name the version that the open update becomes.")
    return SetLabel(label)


def flush(query: Mapping[str, str]) -> Flush:
    """``/flush_cache?timeout=``."""
    text = query.get("timeout")
    if not text:
        return Flush()
    try:
        timeout = float(text)
    except ValueError as error:
        raise RefusedError(f"timeout {quote_value(text)} is not a number of seconds.") from error
    if not 0 <= timeout <= MAX_FLUSH_SECONDS:
        raise RefusedError(f"timeout {timeout:g} is out of range: use 0 to {MAX_FLUSH_SECONDS:g} seconds.")
    return Flush(timeout)


def claim(body: Fields) -> Claim:
    """``/fleet/claim``."""
    take_over = body.get("take_over", False)
    if not isinstance(take_over, bool):
        raise RefusedError("take_over must be true or false.")
    return Claim(take_over)


def release_memory(body: Fields) -> ReleaseMemory:
    """``/release_memory_occupation``."""
    return ReleaseMemory(_tags(body))


def resume_memory(body: Fields) -> ResumeMemory:
    """``/resume_memory_occupation``."""
    return ResumeMemory(_tags(body))


def load_adapter(body: Fields) -> Request:
    """``/load_lora_adapter``. Refuse a field that SGLang ignores, because the trainer may rely on it."""
    _check_fields(ControlCall.LOAD_ADAPTER.path, body, ADAPTER_FIELDS)
    pinned = body.get("pinned", False)
    if not isinstance(pinned, bool):
        raise RefusedError(f"pinned {quote_value(pinned)} is neither true nor false.")
    name, path = _name(body, "lora_name"), _name(body, "lora_path")
    if name is None or path is None:
        raise RefusedError("lora_name and lora_path are missing: give a name, and a path that every engine can read.")
    for key, value, longest in (("lora_name", name, MAX_ADAPTER_CHARACTERS), ("lora_path", path, MAX_PATH_CHARACTERS)):
        if len(value) > longest:
            raise RefusedError(f"{key} is {len(value)} characters long: use at most {longest}.")
    return LoadAdapter(name, path, pinned)


def unload_adapter(body: Fields) -> Request:
    """``/unload_lora_adapter``."""
    _check_fields(ControlCall.UNLOAD_ADAPTER.path, body, ("lora_name",))
    name = _name(body, "lora_name")
    if name is None:
        raise RefusedError("lora_name is missing: name the adapter.")
    return UnloadAdapter(name)


def _check_fields(path: str, body: Fields, known: tuple[str, ...]) -> None:
    unknown = next((key for key in body if key not in known), None)
    if unknown is not None:
        raise RefusedError(f"{path} has no field {quote_value(unknown)}: SGLang ignores it. Use {', '.join(known)}. No engine was called.")


def weights_by_name(query: Fields, body: Fields) -> dict[str, Any]:
    """``/get_weights_by_name``. A GET may name the tensor in its query."""
    wanted = {**query, **body}
    name, size = _name(wanted, "name"), wanted.get("truncate_size", MAX_TENSOR_ROWS)
    if name is None:
        raise RefusedError("name is missing: name a tensor as the checkpoint does, for example model.norm.weight.")
    is_text = isinstance(size, str) and size.isascii() and size.isdigit() and len(size) <= MAX_TENSOR_PARALLEL_DIGITS
    rows = int(size) if is_text else size
    if not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= MAX_TENSOR_ROWS:
        raise RefusedError(f"truncate_size {quote_value(size)} is out of range: use 1 to {MAX_TENSOR_ROWS} rows.")
    return {"name": name, "truncate_size": rows}


def _tags(body: Fields) -> tuple[str, ...]:
    tags = body.get("tags")
    if tags is None or tags == []:
        return ()
    if not isinstance(tags, list) or any(tag not in MEMORY_TAGS for tag in tags):
        raise RefusedError(f"tags {quote_value(tags)} are not memory tags: use a list of {', '.join(MEMORY_TAGS)}.")
    return tuple(tags)


def format_answer(request: Request, answer: Answer) -> dict[str, Any]:
    """Return the body of an answer as SGLang's clients expect it."""
    call = request.call if isinstance(request, AtEngine) else request
    reply = ControlReply(success=answer.success, message=answer.message, fleet=dict(answer.fleet) or None)
    body = reply.model_dump(mode="json", exclude_none=True)
    if isinstance(call, Pause | Continue):
        body["status"] = "ok" if answer.success else "error"
    if isinstance(call, LoadAdapter | UnloadAdapter):
        body["error_message"] = ""
    if isinstance(call, SetLabel):
        body["new_version"] = call.label
    return body


def _name(body: Fields, key: str) -> str | None:
    value = body.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RefusedError(f"{key} {quote_value(value)} is not a name.")
    return value


def _label(value: object, key: str) -> str | None:
    if value is None or value == "":
        return None
    _refuse(find_label_problem(value, key))
    return str(value)


def _refuse(problem: str | None) -> None:
    """Raise RefusedError if there is a problem."""
    if problem is not None:
        raise RefusedError(problem)
