"""How weights reach the engines: ``spec.weights`` of the custom resource, as the coordinator reads it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sglang_rollout.sglang.api import PauseMode
from sglang_rollout.wire.message import Message


class Transport(StrEnum):
    """How weights may reach the engines, if not in every way that SGLang knows."""

    DISK = "disk"
    """From checkpoints only: the engines cannot take tensors over a group."""


class Deadlines(Message):
    """How long each step of a weight update may take, in seconds."""

    group: float = 120.0
    """Opening a group: the trainer's address becomes reachable and every engine has joined."""
    update: float = 300.0
    """One forwarded call of an open update (a bucket, begin, end)."""
    idle: float = 120.0
    """A paused or half-updated fleet that hears nothing from its trainer: after this the update is given up."""
    pause: float = 60.0
    """Pause or continue on every engine."""
    total: float = 1800.0
    """A pause or an update altogether, however lively its trainer is."""
    stuck: float = 30.0
    """An engine that has not answered a call of a given-up update for so long is restarted."""
    silent: float = 120.0
    """An engine that has no call to answer and gives no sign of life for so long is restarted."""


class OnLoss(StrEnum):
    """What a fleet does that is idle when its trainer is lost."""

    KEEP_SERVING = "keep_serving"
    PAUSE = "pause"


class TrainerLease(Message):
    """How long a trainer is believed to live without a word."""

    ttl: float = 20.0
    """Seconds of silence after which the trainer's store is asked for; the agents' own lease, too."""
    on_loss: OnLoss = OnLoss.KEEP_SERVING


class Verify(StrEnum):
    """When the engines' weights are compared before a commit."""

    ALWAYS = "always"
    EVERY_N = "every_n"
    OFF = "off"


class CatchUp(Message):
    """Where an engine that restarted gets the committed version, if not from the trainer's next push."""

    disk: str | None = None
    """A directory of our client's snapshots, or the path of the trainer's checkpoints with ``{version}`` in it."""
    parallel: int = Field(default=4, ge=1)
    """So many engines load at a time."""


class WeightsPolicy(Message):
    """How weights reach the engines; ``spec.weights`` of the custom resource, in wire form."""

    transport: Transport | None = None
    """None: over groups, or from disk."""
    backend: str = "nccl"
    """torch.distributed backend used when the trainer names none: ``nccl`` or ``gloo``."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """How the coordinator pauses engines when the trainer does not do it itself."""
    max_staleness: int = Field(default=0, ge=0)
    """How many commits an engine may be behind and still serve."""
    min_committed: int | str | None = None
    """How many engines must hold a new version so that it is committed: a number, or a share of the wanted ones ("75%").
    None: all that take part in the update."""
    verify: Verify = Verify.EVERY_N
    verify_every: int = Field(default=10, ge=1)
    """With ``every_n``: the first update of a coordinator's life, and then each n-th."""
    deadlines: Deadlines = Deadlines()
    trainer_lease: TrainerLease = TrainerLease()
    catch_up: CatchUp = CatchUp()
