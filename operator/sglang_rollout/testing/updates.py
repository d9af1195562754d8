"""SGLang's calls that change weights or adapters, with its conditions, messages and deaths.

Calls about weights return (success, message). An adapter changes no tokens here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_rollout.testing.boot import Boot, in_thread
from sglang_rollout.testing.faults import Fault, Kind, Phase
from sglang_rollout.testing.policy import ITEM_SIZES, Held, Incomplete, read_folder

if TYPE_CHECKING:
    from sglang_rollout.testing.process_groups import Rank

Outcome = tuple[bool, str]
Described = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor in a request."""

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free. "
    "Including non-PyTorch memory, this process has 77.90 GiB memory in use."
)
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
PARTIAL = (
    "Failed to update parameter online: {}. The full weights of the ModelRunner are partially updated. Please discard the whole weights."
)


class Refused(Exception):
    """The update cannot be received or written; the message is torch's or SGLang's own."""


async def init_group(boot: Boot, body: Mapping[str, Any]) -> Outcome:
    """``/init_weights_update_group``: joins as SGLang does, with one rank per tensor-parallel rank, and blocks the scheduler meanwhile."""
    name = str(body.get("group_name", "weight_update_group"))
    async with boot.scheduler():
        effects = await boot.reach(Phase.INIT)
        if not name:
            await boot.died("the group's name is empty")
        try:
            nccl = any(fault.kind is Kind.NCCL for fault in effects)
            await _join(boot, name, _ranks(await in_thread(load_groups), boot, name, body, nccl=nccl))
        except Exception as error:  # noqa: BLE001 - the answer quotes any error of torch
            return False, f"Failed to initialize custom process group: {error}."
        return True, "Succeeded to initialize custom process group."


def load_groups() -> Any:
    """Import the module that needs torch. The first import takes seconds: never call this in an event loop."""
    from sglang_rollout.testing import process_groups  # noqa: PLC0415

    return process_groups


def _ranks(groups: Any, boot: Boot, name: str, body: Mapping[str, Any], *, nccl: bool) -> list[Rank]:
    """Create the ranks as SGLang does: each tensor-parallel rank is a member, at the offset plus its number."""
    return [
        groups.Rank(
            host=str(body["master_address"]),
            port=int(body["master_port"]),
            group=name,
            rank=int(body["rank_offset"]) + number,
            world_size=int(body["world_size"]),
            nccl=nccl,
        )
        for number in range(boot.setup.tensor_size)
    ]


async def _join(boot: Boot, name: str, ranks: list[Rank]) -> None:
    boot.joining.extend(ranks)  # so that a kill finds them
    try:
        if name in boot.groups:
            await asyncio.gather(*(in_thread(rank.reach) for rank in ranks))
            raise Refused("The specified group name has already been created, please use a different group name")
        await asyncio.gather(*(in_thread(rank.join) for rank in ranks))
        boot.groups[name] = ranks
    finally:
        boot.joining.clear()


async def destroy_group(boot: Boot, body: Mapping[str, Any]) -> Outcome:
    """``/destroy_weights_update_group``."""
    async with boot.scheduler():
        await boot.reach(Phase.DESTROY)
        ranks = boot.groups.pop(str(body.get("group_name", "weight_update_group")), None)
        if ranks is None:
            return False, "The group to be destroyed does not exist."
        for rank in ranks:
            rank.kill()
        return True, "Succeeded to destroy custom process group."


async def begin(boot: Boot, _: Mapping[str, Any]) -> Outcome:
    """``/begin_weight_update``."""
    async with boot.exclusive():
        await boot.reach(Phase.BEGIN)
        if boot.session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        boot.session = True
        return True, "Success"


async def end(boot: Boot, _: Mapping[str, Any]) -> Outcome:
    """``/end_weight_update``."""
    async with boot.exclusive():
        await boot.reach(Phase.END)
        if not boot.session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        boot.session = False
        return True, "Success"


async def from_group(boot: Boot, body: Mapping[str, Any]) -> Outcome:
    """``/update_weights_from_distributed``."""
    if body.get("abort_all_requests"):
        boot.abort(None)
    async with boot.exclusive():
        success, message, label = await _receive_and_write(boot, body)
    return label_update(boot, success, message, label)


async def from_disk(boot: Boot, body: Mapping[str, Any]) -> Outcome:
    """``/update_weights_from_disk``: reads the folder's safetensors files. Wrong shapes and truncated files are the engine's end."""
    if body.get("abort_all_requests"):
        boot.abort(None)
    path = str(body["model_path"])
    async with boot.exclusive():
        if boot.setup.updates_refused:
            return False, boot.setup.updates_refused
        effects = await boot.reach(Phase.DISK)
        try:
            tensors = await in_thread(lambda: read_folder(Path(path)))
        except FileNotFoundError as error:
            return False, f"Failed to get weights iterator: {error}."
        except Incomplete as error:
            await boot.died(f"update_weights_from_disk: {error}")
            raise
        try:
            write(boot, spoil(effects, list(tensors.items())))
        except Refused as error:
            await boot.died(f"update_weights_from_disk: {error}")
        boot.model_path = path
        label = reported_label(effects, body.get("weight_version"))
        success, message = finish(boot, body, label, "Succeeded to update model weights.")
    return label_update(boot, success, message, label)


async def set_version(boot: Boot, body: Mapping[str, Any]) -> None:
    """``/update_weight_version``. Aborts all requests, unless ``abort_all_requests`` is false."""
    if body.get("abort_all_requests", True):
        boot.abort(None)
    effects = await boot.reach(Phase.VERSION)
    label = reported_label(effects, str(body["new_version"]))
    boot.record_version(label)
    boot.weight_version = str(label)


async def _receive_and_write(boot: Boot, body: Mapping[str, Any]) -> tuple[bool, str, str | None]:
    if boot.setup.sessions and not boot.session:
        return False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()", None
    try:
        described = _described(boot, body)
        if any(fault.kind is Kind.OOM for fault in await boot.reach(Phase.UPDATE)):
            raise Refused(OUT_OF_MEMORY)
        tensors = await _received(boot, body, described)
    except (Refused, RuntimeError) as error:
        return False, f"Failed to receive weights: {error}", None
    if boot.setup.updates_refused:
        return False, boot.setup.updates_refused, None  # as SGLang, which has received the tensors then
    effects = await boot.reach(Phase.RECEIVED)
    label = reported_label(effects, body.get("weight_version"))
    try:
        if not any(fault.kind is Kind.DROP for fault in effects):
            out_of_memory = any(fault.kind is Kind.OOM for fault in effects)
            write(boot, spoil(effects, tensors[: len(tensors) // 2] if out_of_memory else tensors))
            if out_of_memory:
                raise Refused(OUT_OF_MEMORY)
    except Refused as error:
        return False, PARTIAL.format(error), None
    success, message = finish(boot, body, label, "Succeeded to update parameter online.")
    if not success and not boot.setup.sessions:
        await boot.died("Cache flush failed after updating weights")
    return success, message, label


def _described(boot: Boot, body: Mapping[str, Any]) -> list[Described]:
    """Return the tensors of a request, checked as SGLang checks them before it receives any."""
    group = str(body.get("group_name", "weight_update_group"))
    if group not in boot.groups:
        raise Refused(f"Group {group} not in {list(boot.groups)}. Please call `init_weights_update_group` first.")
    flattened = body.get("load_format") == "flattened_bucket"
    names, dtypes, shapes = body["names"], body["dtypes"], body["shapes"]
    if flattened and not len(names) == len(dtypes) == len(shapes):
        raise Refused(_uneven(len(names), len(dtypes), len(shapes)))
    described = [(n, d, tuple(s)) for n, d, s in zip(names, dtypes, shapes, strict=False)]
    offset = 0
    for name, dtype, shape in described:
        if dtype not in ITEM_SIZES:
            raise Refused(f"module 'torch' has no attribute '{dtype}'")
        if flattened and any(size < 0 for size in shape):
            raise Refused(f"Negative dimension in received tensor {name}: torch.Size({list(shape)})")
        if flattened and offset % ITEM_SIZES[dtype]:
            raise Refused(f"Unaligned received tensor {name}: byte offset {offset}, dtype torch.{dtype}")
        offset += prod(shape) * ITEM_SIZES[dtype]
    if flattened and not described:
        raise Refused("Cannot create empty tensor bucket")
    return described


def _uneven(names: int, dtypes: int, shapes: int) -> str:
    """Return the message of Python's strict zip."""
    if names != dtypes:
        return f"zip() argument 2 is {'shorter' if dtypes < names else 'longer'} than argument 1"
    return f"zip() argument 3 is {'shorter' if shapes < names else 'longer'} than arguments 1-2"


async def _received(boot: Boot, body: Mapping[str, Any], described: Iterable[Described]) -> list[tuple[str, Held]]:
    """Receive the tensors. Every rank takes part in every broadcast; the bytes of the first rank are used."""
    described = list(described)
    sizes = [prod(shape) * ITEM_SIZES[dtype] for _, dtype, shape in described]
    flattened = body.get("load_format") == "flattened_bucket"
    ranks = boot.groups[str(body.get("group_name", "weight_update_group"))]
    wanted = [sum(sizes)] if flattened else sizes
    received = await asyncio.gather(*(in_thread(partial(_take_part, rank, wanted)) for rank in ranks))
    parts = received[0]
    if flattened:
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        parts = [parts[0][end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [(name, Held(dtype, shape, part)) for (name, dtype, shape), part in zip(described, parts, strict=True)]


def _take_part(rank: Rank, sizes: list[int]) -> list[bytes]:
    return [rank.receive(size) for size in sizes]


def write(boot: Boot, tensors: Iterable[tuple[str, Held]]) -> None:
    """Write in place, one tensor after the other, as a model loads: unknown names are skipped, own types kept, shapes must match."""
    for name, new in tensors:
        if name not in boot.weights:
            continue
        old = boot.weights[name]
        if new.shape != old.shape:
            raise Refused(f"Attempted to load weight (torch.Size({list(new.shape)})) into parameter (torch.Size({list(old.shape)}))")
        data = new.data
        if new.dtype != old.dtype:
            data = load_groups().converted(data, new.dtype, old.dtype)
        boot.weights.put(name, Held(old.dtype, old.shape, data))


def spoil(effects: list[Fault], tensors: list[tuple[str, Held]]) -> list[tuple[str, Held]]:
    """Return the tensors, with one wrong bit if there is such a fault."""
    if not any(fault.kind is Kind.CORRUPT for fault in effects) or not tensors:
        return tensors
    name, held = tensors[0]
    data = bytes([held.data[0] ^ 1]) + held.data[1:] if held.data else held.data
    return [(name, Held(held.dtype, held.shape, data)), *tensors[1:]]


def reported_label(effects: list[Fault], label: object) -> str | None:
    """Return the version that the engine reports after an update with this label."""
    for fault in effects:
        if fault.kind is Kind.WRONG_VERSION:
            return fault.value if fault.value is not None else f"{label}-wrong"
    return None if label is None else str(label)


def finish(boot: Boot, body: Mapping[str, Any], label: str | None, message: str) -> Outcome:
    """Record the version, then flush. As in SGLang, samples and /model_info disagree after a flush that fails."""
    boot.record_version(label)
    if body.get("flush_cache", True) and not boot.flush():
        return False, _NOT_FLUSHED
    return True, message


def label_update(boot: Boot, success: bool, message: str, label: str | None) -> Outcome:
    """Record the version of an update in the tokenizer process, as SGLang does after the scheduler has answered."""
    if success and label is not None:
        boot.weight_version = label
        return True, f"{message} Weight version updated to {label}."
    return success, message


_MAX_LORAS_PER_BATCH = 8
"""SGLang's default of ``--max-loras-per-batch``."""
_TOO_MANY_PINNED = (
    "Failed to load LoRA adapter {name} as a pinned adapter. It is not allowed to pin all slots in the LoRA memory pool to avoid"
    " starvation for unpinned adapters and base models. Please increase your `--max-loras-per-batch` or load it as unpinned LoRA adapters."
)


def load_adapter(boot: Boot, body: Mapping[str, Any]) -> dict[str, Any]:
    """``/load_lora_adapter``."""
    name, path = str(body["lora_name"]), str(body["lora_path"])
    if not boot.setup.lora:
        return _adapter_reply(boot, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
    if name in boot.adapters:
        return _adapter_reply(boot, f"Failed to load LoRA adapter {name} from {path}: it is already loaded.")
    if "missing" in path:
        return _adapter_reply(
            boot, f"Failed to load LoRA adapter {name}: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'."
        )
    if body.get("pinned"):
        if len(boot.pinned) >= _MAX_LORAS_PER_BATCH - 1:
            return _adapter_reply(boot, _TOO_MANY_PINNED.format(name=name))
        boot.pinned.add(name)
    boot.adapters[name] = path
    boot.ever_loaded.add(name)
    return _adapter_reply(boot, "")


def unload_adapter(boot: Boot, body: Mapping[str, Any]) -> dict[str, Any]:
    """``/unload_lora_adapter``."""
    name = str(body["lora_name"])
    if name not in boot.adapters:
        return _adapter_reply(boot, f"LoRA adapter {name} does not exist. Loaded LoRAs: {list(boot.adapters)}")
    del boot.adapters[name]
    boot.pinned.discard(name)
    return _adapter_reply(boot, "")


def _adapter_reply(boot: Boot, error: str) -> dict[str, Any]:
    return {"success": not error, "error_message": error, "loaded_adapters": dict(boot.adapters)}
