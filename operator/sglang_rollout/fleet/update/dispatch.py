"""Which script answers which request."""

from __future__ import annotations

from collections.abc import Callable

from sglang_rollout.fleet.update import disk, groups, lora, memory, sharing, transaction
from sglang_rollout.fleet.update.calls import Script
from sglang_rollout.fleet.update.requests import (
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
from sglang_rollout.fleet.update.state import Fleet


def script(fleet: Fleet, request: Request) -> Script[Answer]:
    """The script of a request: on a fleet that shares its GPUs some requests mean something else."""
    return sharing.script(fleet, request) or _SCRIPTS[type(request)](fleet, request)


_SCRIPTS: dict[type[Request], Callable[..., Script[Answer]]] = {
    OpenGroup: groups.open_group,
    CloseGroup: groups.close_group,
    Pause: transaction.pause,
    Continue: transaction.resume_all,
    Begin: transaction.begin,
    Update: transaction.update,
    End: transaction.end,
    Flush: transaction.flush,
    SetLabel: transaction.set_label,
    NewRun: transaction.new_run,
    FromDisk: disk.from_disk,
    LoadAdapter: lora.load,
    UnloadAdapter: lora.unload,
    ReleaseMemory: memory.release,
    ResumeMemory: memory.resume,
}
