"""Do all ranks of a process group use the same NCCL? Compared before an engine joins, as far as it is known. Pure.

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

FIELD = "nccl"
"""Field of ``/init_weights_update_group`` in which our client describes its NCCL. Other trainers send none and are not compared."""
COMPARED = ("NCCL_CUMEM_ENABLE",)
"""Settings that must agree on all ranks."""


def check_nccl(fleet: Fleet, names: Iterable[str], backend: str, said: Mapping[str, Any]) -> None:
    """Raise RefusedError if the ranks of a process group would not understand each other. ``said``: fields of the trainer's call."""
    if backend != "nccl":
        return
    trainer = _trainers(said)
    sides = {"the trainer": trainer} if trainer is not None else {}
    for name in names:
        status = fleet.engines[name].status
        if status is not None and status.nccl is not None:
            sides[f"engine {name}"] = status.nccl
    different = _difference(sides)
    if different:
        raise RefusedError(f"{different} No engine has joined anything.", fleet=fleet.advice())


def _trainers(said: Mapping[str, Any]) -> Nccl | None:
    if FIELD not in said:
        return None
    try:
        return Nccl.model_validate(said[FIELD])
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]) or FIELD
        raise RefusedError(f"{FIELD}: {where}: {error.errors()[0]['msg']}.") from None


def _difference(sides: Mapping[str, Nccl]) -> str:
    """Return the first difference between two sides, as a sentence with the way out."""
    versions = {side: nccl.version for side, nccl in sides.items() if nccl.version}
    found = _first_difference(versions)
    if found:
        (one, a), (other, b) = found
        return f"{one} has NCCL {a}, {other} has NCCL {b}: all ranks need the same version. Install the same nvidia-nccl package on both."
    for key in COMPARED:
        found = _first_difference({side: nccl.settings[key] for side, nccl in sides.items() if key in nccl.settings})
        if found:
            (one, a), (other, b) = found
            return f"{one} runs with {key}={a}, {other} with {key}={b}: all ranks need the same. Set it in the environment of one of them."
    return ""


def _first_difference(values: Mapping[str, str]) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the first side and the first that differs from it."""
    pairs = list(values.items())
    return next(((pairs[0], pair) for pair in pairs if pair[1] != pairs[0][1]), None)
