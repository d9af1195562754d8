"""Compare NCCL of the trainer and of the engines before a process group opens. Pure.

NCCL exchanges versions when the ranks first meet and then fails, or hangs if they differ in how they share memory (NVIDIA-NeMo/RL#3612):
minutes into the first broadcast, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.wire.agent import Nccl
from sglang_rollout.wire.reasons import RefusedError

NCCL_FIELD = "nccl"
"""Field of ``/init_weights_update_group`` in which our client describes its NCCL. Other trainers send none and are not compared."""
NCCL_SETTINGS = ("NCCL_CUMEM_ENABLE",)
"""Settings that must agree on all ranks."""


def check_nccl(fleet: Fleet, names: Iterable[str], backend: str, said: Mapping[str, Any]) -> None:
    """Raise RefusedError if the ranks would use different NCCL versions or settings. ``said``: fields of the trainer's call."""
    if backend != "nccl":
        return
    trainer = _trainers_nccl(said)
    sides = {"the trainer": trainer} if trainer is not None else {}
    for name in names:
        status = fleet.engines[name].status if name in fleet.engines else None
        if status is not None and status.nccl is not None:
            sides[f"engine {name}"] = status.nccl
    different = _nccl_difference(sides)
    if different:
        raise RefusedError(f"{different} No engine has joined anything.", fleet=fleet.advice())


def _trainers_nccl(said: Mapping[str, Any]) -> Nccl | None:
    if NCCL_FIELD not in said:
        return None
    try:
        return Nccl.model_validate(said[NCCL_FIELD])
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]) or NCCL_FIELD
        raise RefusedError(f"{NCCL_FIELD}: {where}: {error.errors()[0]['msg']}.") from None


def _nccl_difference(sides: Mapping[str, Nccl]) -> str:
    """Return the first difference between two sides, and its remedy, as a sentence; empty if there is none."""
    versions = {side: nccl.version for side, nccl in sides.items() if nccl.version}
    found = _first_different(versions)
    if found:
        (one, a), (other, b) = found
        return f"{one} has NCCL {a}, {other} has NCCL {b}: all ranks need the same version. Install the same nvidia-nccl package on both."
    for key in NCCL_SETTINGS:
        found = _first_different({side: nccl.settings[key] for side, nccl in sides.items() if key in nccl.settings})
        if found:
            (one, a), (other, b) = found
            return f"{one} runs with {key}={a}, {other} with {key}={b}: all ranks need the same. Set it in the environment of one of them."
    return ""


def _first_different(values: Mapping[str, str]) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the first side and the first that differs from it."""
    pairs = list(values.items())
    return next(((pairs[0], pair) for pair in pairs if pair[1] != pairs[0][1]), None)
