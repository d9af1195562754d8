"""The loader of staged versions as a stand-in imitates it: ``/update_weights_from_tensor`` with a custom loader.

Every rank of a stand-in reads the same files, checks them as the real loader does, and writes its verdict. SGLang answers with success
also if a rank has refused, and ends if a rank raises.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rollout.testing.boot import Boot, in_thread
from sglang_rollout.testing.faults import Fault, Kind, Phase
from sglang_rollout.testing.policy import Held, Incomplete, read_file
from sglang_rollout.testing.updates import OUT_OF_MEMORY, PARTIAL, Outcome, Refused, finish, label_update, reported_label, spoil, write

LATER_STAGES_SECONDS = 0.3
"""Time after the answer at which the ranks of later pipeline stages have loaded: SGLang answers when the first stage has."""
_HANDLES = (None, "direct", "flattened_bucket")
"""Values of ``load_format`` with which SGLang reads handles of tensors."""


@dataclass(frozen=True)
class _Request:
    """What the payload of one rank asks."""

    fields: Mapping[str, Any]
    rank: int

    def write_verdict(self, *, ok: bool, wrote: bool, message: str = "", ended: bool = True) -> None:
        """Replace the verdict of the rank. Raises OSError."""
        path = Path(self.fields["verdicts"]) / f"rank-{self.rank}.json"
        verdict = {"ok": ok, "wrote": wrote, "message": message, "rank": str(self.rank), "id": self.fields.get("id", ""), "ended": ended}
        new = path.with_suffix(".json.new")
        new.write_text(json.dumps(verdict))
        os.replace(new, path)


async def from_tensor(boot: Boot, body: Mapping[str, Any]) -> Outcome:
    """``/update_weights_from_tensor``, for a custom loader only."""
    if body.get("abort_all_requests"):
        boot.abort(None)
    async with boot.exclusive():
        success, message, label = await _load(boot, body)
    return label_update(boot, success, message, label)


async def _load(boot: Boot, body: Mapping[str, Any]) -> tuple[bool, str, str | None]:
    form, payloads = body.get("load_format"), body["serialized_named_tensors"]
    if boot.setup.sessions and not boot.session:
        return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()", None
    if boot.setup.updates_refused:
        return False, boot.setup.updates_refused, None
    if form in _HANDLES:
        return False, "A stand-in receives no handles of tensors.", None
    if form not in boot.setup.loaders or len(payloads) < boot.setup.tensor_size:
        await boot.died(f"a rank cannot load: load_format {form!r}, {len(payloads)} payloads")
    requests = [_Request(read_payload(payloads[rank % boot.setup.tensor_size]), rank) for rank in range(boot.setup.ranks)]
    effects = await boot.reach(Phase.LOAD)
    tensors: dict[str, Held] = {}
    if not any(fault.kind is Kind.DROP for fault in effects):
        willing = [request for request in requests if not _refuses(effects, request)]
        tensors = await _read(willing)
        problem = await _write(boot, tensors, willing) if tensors else ""
        if problem:
            return False, problem, None
    label = reported_label(effects, body.get("weight_version"))
    success, message = finish(boot, body, label, "Success")
    return success, message, label


def read_payload(payload: str) -> dict[str, Any]:
    """Return the loader's request in an entry of ``serialized_named_tensors``. The pickle is read and not executed."""
    for _, argument, _ in pickletools.genops(base64.b64decode(payload)):
        if isinstance(argument, str) and argument.startswith("{"):
            request = json.loads(argument)
            if isinstance(request, dict) and "shards" in request:
                return request
    raise ValueError("the payload names no staged version")


def _refuses(effects: list[Fault], request: _Request) -> bool:
    """Write the refusal of a rank that a fault makes refuse; a fault without ``value`` makes every rank refuse."""
    hit = any(fault.kind is Kind.REFUSE and fault.value in (None, str(request.rank)) for fault in effects)
    if hit:
        request.write_verdict(ok=False, wrote=False, message="Nothing was loaded: refused on purpose")
    return hit


async def _read(requests: list[_Request]) -> dict[str, Held]:
    """Return the tensors. If the files are not as announced, every rank refuses, and there are none."""
    if not requests:
        return {}
    try:
        return await in_thread(lambda: _read_files(requests[0].fields))
    except (OSError, ValueError, Incomplete) as error:
        for request in requests:
            request.write_verdict(ok=False, wrote=False, message=f"Nothing was loaded: {type(error).__name__}: {error}")
        return {}


def _read_files(fields: Mapping[str, Any]) -> dict[str, Held]:
    tensors: dict[str, Held] = {}
    for name, size in zip(fields["shards"], fields["sizes"], strict=True):
        path = Path(fields["folder"]) / name
        found = path.stat().st_size
        if found != size:
            raise ValueError(f"{path} has {found} bytes, not {size}")
        tensors |= read_file(path)
    return tensors


async def _write(boot: Boot, tensors: Mapping[str, Held], requests: list[_Request]) -> str:
    """Write the tensors, and return why that failed; empty if it did not. Where the real loader raises, the engine ends."""
    first_stage = [request for request in requests if request.rank < boot.setup.tensor_size]
    for request in first_stage:
        request.write_verdict(ok=False, wrote=True, message="The load has begun and has not ended.", ended=False)
    items = list(tensors.items())
    try:
        write(boot, items[: len(items) // 2])
        effects = await boot.reach(Phase.WRITE)
        if any(fault.kind is Kind.RAISE for fault in effects):
            raise Refused("it raises on purpose")
        if any(fault.kind is Kind.OOM for fault in effects):
            return PARTIAL.format(OUT_OF_MEMORY)
        write(boot, spoil(effects, items[len(items) // 2 :]))
    except Refused as error:
        for request in requests:
            request.write_verdict(ok=False, wrote=True, message=f"The load broke off: {error}")
        await boot.died(f"the loader raised: {error}")
    for request in first_stage:
        request.write_verdict(ok=True, wrote=True)
    task = asyncio.create_task(_end_later_stages([request for request in requests if request not in first_stage]))
    boot.calls.add(task)
    task.add_done_callback(boot.calls.discard)
    return ""


async def _end_later_stages(requests: list[_Request]) -> None:
    if requests:
        await asyncio.sleep(LATER_STAGES_SECONDS)
    for request in requests:
        request.write_verdict(ok=True, wrote=True)
