"""Which operation answers which request."""

from __future__ import annotations

from collections.abc import Callable

from sglang_rollout.coordinator.update import adapters as lora
from sglang_rollout.coordinator.update import colocated as sharing
from sglang_rollout.coordinator.update import memory, sources, transaction
from sglang_rollout.coordinator.update import process_groups as groups
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.requests import (
    Answer,
    Begin,
    CloseGroup,
    Continue,
    End,
    Flush,
    FromDisk,
    LoadAdapter,
    NewRun,
    OpenGroup,
    Pause,
    ReleaseMemory,
    Request,
    ResumeMemory,
    SetLabel,
    UnloadAdapter,
    Update,
)
from sglang_rollout.coordinator.update.steps import Operation


def operation(fleet: Fleet, request: Request) -> Operation[Answer]:
    """Return the operation of a request. On a fleet that shares its GPUs some requests mean something else."""
    return sharing.operation(fleet, request) or _OPERATIONS[type(request)](fleet, request)


_OPERATIONS: dict[type[Request], Callable[..., Operation[Answer]]] = {
    OpenGroup: groups.open_group,
    CloseGroup: groups.close_group,
    Pause: transaction.pause,
    Continue: transaction.continue_all,
    Begin: transaction.begin,
    Update: sources.receive_from_group,
    End: transaction.end,
    Flush: transaction.flush,
    SetLabel: transaction.set_label,
    NewRun: transaction.new_run,
    FromDisk: sources.load_from_disk,
    LoadAdapter: lora.load,
    UnloadAdapter: lora.unload,
    ReleaseMemory: memory.release,
    ResumeMemory: memory.resume,
}
