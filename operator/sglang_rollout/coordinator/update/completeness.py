"""The rule that says when an engine holds every tensor of a version. Pure.

SGLang writes the tensors that it receives, keeps the others, and ignores names that its model does not have. So the names that a trainer
announces say which tensors may have changed, and an engine is complete when an update holds

* every name that may have been written to the engine since it was last clean (:class:`Doubt`), and
* every name that this run has committed, unless the engine held the committed version when it joined the update, and
* every name of the model, if nothing is known about the weights that the engine started with.

A trainer that has asked for a new run (``POST /fleet/run``) may drop names. Nothing of the runs before may be left then: an engine that
does not hold ``model.path`` needs every name that was committed, or restarts.

A name that no push ever wrote keeps its value of ``model.path``. A name that the model does not have is not needed (:func:`find_lacking`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from sglang_rollout.coordinator.update.tensor_names import TensorNames


@dataclass
class Doubt:
    """What engines may hold beside a version: tensors of updates that did not end on them.

    The names are those of all engines together. A name is forgotten when no engine may hold it any more.
    """

    names: TensorNames = field(default_factory=TensorNames)
    engines: dict[str, str] = field(default_factory=dict)
    """Boot ID of each engine that may hold them."""
    restarts: set[str] = field(default_factory=set)
    """Those of these engines that must restart, because no later update is known to replace what they hold."""
    asked_at: float = float("-inf")
    """When restarts were last requested."""

    def begin(self, name: str, boot: str) -> None:
        """Note that an engine may receive tensors from now on."""
        if self.engines.get(name) != boot:
            self.engines[name] = boot
            self.restarts.discard(name)

    def end(self, names: Iterable[str]) -> None:
        """Note that these engines are clean, or that their processes have ended."""
        for name in names:
            self.engines.pop(name, None)
            self.restarts.discard(name)
        if not self.engines:
            self.names = TensorNames()

    def has(self, name: str, boot: str | None) -> bool:
        """Return True if this run of an engine's process may hold tensors beside a version."""
        return boot is not None and self.engines.get(name) == boot

    def must_restart(self, name: str, boot: str | None) -> bool:
        """Return True if this run of an engine's process must end."""
        return self.has(name, boot) and name in self.restarts


@dataclass(frozen=True)
class Held:
    """What an engine held when it joined an update."""

    committed: bool = False
    """The committed version."""
    base: bool = False
    """What ``model.path`` holds."""
    doubt: bool = False
    """Perhaps tensors of an update that did not end on the engine."""
    blank: bool = False
    """Nothing that is known: its weights were released, or its agent lost its record."""


@dataclass(frozen=True)
class Model:
    """The tensors that an engine has loaded at its start, or why they are not known."""

    shapes: Mapping[str, list[int] | None] | None = None
    """Shape of each tensor by name; None for a shape means that its values are packed. None: not known."""
    required: frozenset[str] = frozenset()
    """Names that a version of the whole model must have."""
    why_unchecked: str = ""
    """Why the tensors are not known, as a clause."""
    is_random: bool = False
    """True if the engine was started with random weights (``--load-format dummy``)."""

    @property
    def is_known(self) -> bool:
        """True if the tensors are known."""
        return self.shapes is not None


@dataclass(frozen=True)
class Lacking:
    """The names that an update would have to hold for an engine, and does not."""

    names: TensorNames
    required: int
    """How many names the engine needs."""
    is_committed: bool
    """True if the run has committed one of these names, or the model has it and its weights are not known. A restart does not help then."""

    def __str__(self) -> str:
        first = self.names.first()
        return f"{len(self.names)} of {self.required} tensors of a complete push{f', the first is {first}' if first else ''}"


@dataclass(frozen=True)
class Rule:
    """Everything about a fleet and an update that the rule needs beside the engine."""

    sent: TensorNames
    """Names that the update holds."""
    committed: TensorNames
    """Names that this run has committed; empty for an update that begins a new run on engines that all hold ``model.path``."""
    doubt: TensorNames
    """Names of :class:`Doubt`."""
    model: Model
    starts_at_base: bool = False
    """True if the fleet serves what ``model.path`` holds."""
    opens_run: bool = False
    """True if the trainer has asked for a new run, and the update is its first."""

    def find_lacking(self, held: Held) -> Lacking | None:
        """Return what the update lacks for an engine; None if the engine is complete.

        Names that the model does not have are not needed: an engine ignores them, or they write into a tensor that another name of the
        model has.
        """
        needs_all = held.blank or (self.model.is_random and (self.starts_at_base or not held.committed))
        lasting = TensorNames(self.model.required) if needs_all else TensorNames()
        required = lasting
        if self.opens_run:
            required |= TensorNames() if held.base else self.committed
        elif not held.committed:
            lasting = required = lasting | self.committed
        if held.doubt and not held.committed:
            required |= self.doubt
        if self.model.shapes is not None:
            listed = TensorNames(self.model.shapes)
            lasting, required = lasting & listed, required & listed
        missing = required - self.sent
        return Lacking(missing, len(required), len(lasting - self.sent) > 0) if len(missing) else None

    def find_dropped(self, held: Held) -> TensorNames:
        """Return the names outside the model that an engine may hold, or that its fleet has committed, and that the update lacks.

        The model does not have them, so nothing of them should be left. Checksums tell.
        """
        if self.model.shapes is None or held.committed:
            return TensorNames()
        known = self.committed | self.doubt if held.doubt else self.committed
        return known - TensorNames(self.model.shapes) - self.sent


def find_lacking(rule: Rule, engines: Mapping[str, Held]) -> dict[str, Lacking]:
    """Return the engines that the update leaves incomplete, and what each of them lacks."""
    found = {name: rule.find_lacking(held) for name, held in engines.items()}
    return {name: lacking for name, lacking in found.items() if lacking is not None}


# --- names that the model does not have -------------------------------------------------------------------------------

OUTSIDE_CHECKPOINTS = ("lm_head.weight", "rotary_emb.inv_freq")
"""Ends of the names of tensors that a trainer may send although the checkpoint lacks them: the output layer that a model shares with its
embedding, and frequencies that every engine computes by itself."""


def find_foreign(names: Iterable[str], model: Model) -> list[str]:
    """Return the names that the model does not have and may not get, in order; none if the model's tensors are not known."""
    if model.shapes is None:
        return []
    return [name for name in names if name not in model.shapes and not name.endswith(OUTSIDE_CHECKPOINTS)]


def find_misshapen(tensors: Iterable[tuple[str, Collection[int] | None]], model: Model) -> list[str]:
    """Return the tensors that have another shape than in the model, as clauses."""
    shapes = model.shapes or {}
    found = []
    for name, shape in tensors:
        expected = shapes.get(name)
        if expected is not None and shape is not None and list(shape) != expected:
            found.append(f"{name} has shape {list(shape)}, expected {expected}")
    return found
