"""Faults of a fleet with transport Staged: its processes, its volumes, its pieces, and the loader in its engines."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.chaos.matrix import Fault, MissedError, Strike, aim_signal
from e2e.chaos.staged_stack import StagedStack
from sglang_rollout.local.plan import STORE

PHASES = ("idle", "stage", "canary", "activate", "commit", "resume")
BEFORE_ACTIVATION = ("idle", "stage", "canary")
"""Phases in which no fault may change what an engine serves."""
SLOW_OUTCOME_WITHIN = 60.0
"""Maximum seconds until the trainer learns the outcome if a process hangs: its deadline, and that of the processes after it."""
COPIED_WITHIN = 20.0
"""Maximum seconds until a pod has copied a piece, or has refused it."""
WRONG_BYTES = "arrived with other bytes than announced"
"""What an agent logs about a peer that sends wrong bytes."""
LAST_BYTES = 16
"""Bytes at the end of a shard that are set wrong."""


@dataclass(frozen=True)
class StagedFault(Fault):
    """How a part of a fleet with transport Staged fails."""

    phases: tuple[str, ...] = PHASES
    """Phases in which the fault has an effect."""
    in_pod: bool = False
    """True if one engine, or its pod, fails. This must not reach the trainer."""
    fails: bool = False
    """True if the push must fail."""
    fenced: tuple[int, ...] | None = None
    """Engines without which the version must be committed; None: any."""
    needs_mount: bool = False
    """True if the volumes must be mounts."""
    needs_three: bool = False
    """True if two engines are too few."""


def skip_reason(fault: Fault, phase: str, stack: StagedStack) -> str:
    """Return why a cell is not run; empty if it is run."""
    if not isinstance(fault, StagedFault):
        return ""
    if phase not in fault.phases:
        return "the fault has no effect in this phase"
    if fault.needs_mount and not stack.can_mount:
        return "only root can mount the volumes"
    return "two engines are too few" if fault.needs_three and stack.number < 3 else ""


# --- processes -------------------------------------------------------------------------------------------------------


def _engine(number: int) -> Callable[[StagedStack], Strike]:
    def aim(stack: StagedStack) -> Strike:
        index = stack.victim

        def strike() -> None:
            stack.engines.processes[index].signal(number)
            if number == signal.SIGSTOP:
                stack.hung_since[index] = time.monotonic()

        return strike

    return aim


def _pod(part: str, number: int = signal.SIGKILL) -> Callable[[StagedStack], Strike]:
    return lambda stack: aim_signal(part, stack.pids(part, stack.victim), number)


def _part(part: str, number: int = signal.SIGKILL) -> Callable[[StagedStack], Strike]:
    return lambda stack: aim_signal(part, stack.pids(part), number)


def _trainer(number: int) -> Callable[[StagedStack], Strike]:
    return lambda stack: aim_signal("the trainer", [stack.trainer.process.pid] if stack.trainer is not None else [], number)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# --- volumes ---------------------------------------------------------------------------------------------------------


def _full(name: str, volume: str, **more: Any) -> StagedFault:
    return StagedFault(
        f"volume of {name} full",
        lambda stack: lambda: stack.fill(volume),
        undo=lambda stack: stack.empty(volume),
        needs_mount=True,
        **more,
    )


def _read_only(name: str, volume: str, **more: Any) -> StagedFault:
    return StagedFault(
        f"volume of {name} read-only",
        lambda stack: lambda: stack.remount(volume, "ro"),
        undo=lambda stack: stack.remount(volume, "rw"),
        needs_mount=True,
        **more,
    )


# --- pieces ----------------------------------------------------------------------------------------------------------


def _wrong_bytes(stack: StagedStack) -> Strike:
    """Let the pod of engine 0 send wrong bytes to the pod of engine 1.

    Agent 1 is stopped until the bytes in the file of agent 0 are wrong. The other agents are stopped until the bytes are right again.
    So the version is not complete in all pods before that, and engine 0 does not load wrong bytes.
    """
    log = stack.agent_log(1)
    held = {index: stack.pids("agent", index) for index in range(1, stack.number)}

    def strike() -> None:
        read = log.stat().st_size
        update = stack.open_update()
        try:
            stack.until("the pod of engine 0 has a piece", lambda: _arrived(stack, update), COPIED_WITHIN)
            with flipped(_arrived(stack, update)):
                send_signal(held[1], signal.SIGCONT)
                stack.until("agent 1 refuses the bytes", lambda: WRONG_BYTES in log.read_text(errors="replace")[read:], COPIED_WITHIN)
        except AssertionError as error:
            raise MissedError(str(error)) from error
        finally:
            for pids in held.values():
                send_signal(pids, signal.SIGCONT)

    for pids in held.values():
        send_signal(pids, signal.SIGSTOP)
    return strike


def _arrived(stack: StagedStack, update: str) -> list[Path]:
    """Return the shards whose last bytes have arrived in the pod of engine 0."""
    return [file for file in stack.shards("local-engine-0", update) if any(_last_bytes(file))] if update else []


def _last_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        start = 8 + struct.unpack("<Q", opened.read(8))[0]
        opened.seek(max(start, file.stat().st_size - LAST_BYTES))
        return opened.read()


@contextmanager
def flipped(files: list[Path]) -> Iterator[None]:
    """Set the last bytes of files wrong for the time of the context."""
    right = {file: _last_bytes(file) for file in files}
    for file, data in right.items():
        _write_end(file, bytes(byte ^ 255 for byte in data))
    try:
        yield
    finally:
        for file, data in right.items():
            _write_end(file, data)


def _write_end(file: Path, data: bytes) -> None:
    with suppress(FileNotFoundError), file.open("r+b") as opened:
        opened.seek(-len(data), os.SEEK_END)
        opened.write(data)


# --- the loader ------------------------------------------------------------------------------------------------------


def _truncate(stack: StagedStack, *engines: int) -> Strike:
    """Cut the end off the copies of engines: their loaders refuse before the first write."""

    def strike() -> None:
        for engine in engines:
            file = _copy(stack, engine)[0]
            stack.spoil(file, file.read_bytes()[:-1])

    return strike


def _misshape(stack: StagedStack, engine: int) -> Strike:
    """Swap the sizes of a tensor in the copy of an engine: its loader raises at this tensor, after others were written."""

    def strike() -> None:
        for file in reversed(_copy(stack, engine)):
            data = file.read_bytes()
            changed = swap_sizes(data)
            if changed != data:
                stack.spoil(file, changed)
                return
        raise LookupError("no tensor has two different sizes")

    return strike


def _copy(stack: StagedStack, engine: int) -> list[Path]:
    files = stack.shards(stack.engine_names[engine], stack.open_update())
    if not files:
        raise MissedError(f"the pod of engine {engine} has no copy of the open update")
    return files


def swap_sizes(data: bytes) -> bytes:
    """Return a safetensors file in which the last tensor with two different sizes has these swapped; the same bytes if there is none."""
    size = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + size].decode()
    for entry in reversed([entry for name, entry in json.loads(text).items() if name != "__metadata__"]):
        shape = entry["shape"]
        if len(shape) == 2 and shape[0] != shape[1]:
            old, new = (json.dumps(each, separators=(",", ":")) for each in (shape, shape[::-1]))
            at = text.rindex(f'"shape":{old}')
            changed = text[:at] + text[at:].replace(old, new, 1)
            return data[:8] + changed.encode() + data[8 + size :]
    return data


_LOADS = ("canary", "activate")
"""Phases in which engines load a version."""


def _loader(name: str, aim: Callable[[StagedStack], Strike]) -> StagedFault:
    return StagedFault(name, aim, undo=StagedStack.repair, phases=_LOADS, in_pod=True)


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        StagedFault("engine killed", _engine(signal.SIGKILL), in_pod=True),
        StagedFault("engine hung", _engine(signal.SIGSTOP), in_pod=True, outcome_within=SLOW_OUTCOME_WITHIN),
        StagedFault("agent killed", _pod("agent"), part="agent", in_pod=True),
        StagedFault("gate killed", _pod("gate"), part="gate", in_pod=True),
        StagedFault("coordinator killed", _part("coordinator"), part="coordinator"),
        StagedFault("front killed", _part("front"), part="front"),
        StagedFault("store killed", _part("store"), part="store"),
        StagedFault(
            "store stopped",
            _part("store", signal.SIGSTOP),
            part="store",
            undo=lambda stack: send_signal(stack.pids("store"), signal.SIGCONT),
            outcome_within=SLOW_OUTCOME_WITHIN,
        ),
        StagedFault("trainer killed", _trainer(signal.SIGKILL), kills_trainer=True),
        StagedFault("trainer stopped", _trainer(signal.SIGSTOP), kills_trainer=True),
        StagedFault("peer sends wrong bytes", _wrong_bytes, phases=("stage",), in_pod=True, fenced=(), needs_three=True),
        _full("an engine", "local-engine-0", phases=("stage",), in_pod=True, fenced=(0,)),
        _read_only("an engine", "local-engine-0", phases=("stage", "canary", "activate"), in_pod=True),
        _full("the store", STORE, phases=("stage",), fails=True),
        _read_only("the store", STORE, phases=("stage",), fails=True),
        _loader("loader refuses", lambda stack: _truncate(stack, stack.victim)),
        _loader("loader raises", lambda stack: _misshape(stack, stack.victim)),
        StagedFault(
            "all engines refuse",
            lambda stack: _truncate(stack, *range(stack.number)),
            undo=StagedStack.repair,
            phases=("canary",),
            fails=True,
        ),
        StagedFault(
            "agent stopped",
            _pod("agent", signal.SIGSTOP),
            part="agent",
            undo=lambda stack: send_signal(stack.pids("agent", stack.victim), signal.SIGCONT),
            in_pod=True,
            outcome_within=SLOW_OUTCOME_WITHIN,
        ),
    )
}
