"""What ``spec.state`` asks of a running fleet, and the sentences in which every part speaks of it."""

from __future__ import annotations

from enum import StrEnum


class FleetState(StrEnum):
    """What the spec holds a fleet in. A suspended fleet has no engines, so nothing is said to them."""

    ACTIVE = "active"
    PAUSED = "paused"
    """No engine generates; weight updates are taken."""
    ASLEEP = "asleep"
    """The engines' memory is released; neither tokens nor weights are taken."""


class FleetMode(StrEnum):
    """Whose GPUs a fleet uses, if not its own."""

    HYBRID = "hybrid"
    """The trainer's, which has their memory whenever it wants, and pushes weights to each engine by itself."""
    COLOCATED = "colocated"
    """The trainer's likewise. The engines keep the weights that they were started with."""


KEEPS_WEIGHTS = (
    "This fleet keeps the weights that it was started with (spec.mode: Colocated): it takes none from a trainer. Call"
    " /resume_memory_occupation and /release_memory_occupation; a policy that learns needs a fleet with mode Standalone or Hybrid."
)
"""Why a call about weights is refused."""
BY_HANDLES = (
    "This fleet shares its trainer's GPUs (spec.mode: Hybrid): each engine takes weights at its own URL by /update_weights_from_tensor, and"
    " none over the network. A fleet with mode Standalone opens groups."
)
"""Why a call about a group is refused."""
LENT = (
    "The fleet is asleep: its trainer, which shares the GPUs (spec.mode), has the memory of the engines, and nothing generates until the"
    " trainer calls /resume_memory_occupation."
)
"""Why nothing generates."""

_SENTENCES = {
    FleetState.ACTIVE: "",
    FleetState.PAUSED: (
        "The fleet is paused by its spec (spec.state: Paused): no engine generates until that is Active. Weight updates are taken."
    ),
    FleetState.ASLEEP: (
        "The fleet is asleep by its spec (spec.state: Asleep): the memory of its engines is released, and neither tokens nor"
        " weights are taken until that is Active or Paused."
    ),
}


def held_sentence(state: FleetState) -> str:
    """Why nothing generates, and until when; empty for an active fleet."""
    return _SENTENCES[state]
