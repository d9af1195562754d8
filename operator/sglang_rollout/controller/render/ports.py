"""On which ports the parts of an engine listen: the one answer that pods, SGLang's arguments and the coordinator's intent share.

A pod with a network of its own has them all to itself, and every engine uses the same ones. Pods in the network of their node share its
ports, so there every engine has a block of its own, by its index:

    basePort + 20 * index   +0 gate   +1 SGLang   +2 agent   +3 torch's rendezvous   +4 … +17 rendezvous of several pods, attention groups
                           +18 metrics

Blocks begin at multiples of their size. So those of two fleets are either the same, which the scheduler sees and keeps apart, or have
nothing in common.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_rollout.api.network_spec import BLOCK
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.wire import ports as wire

_DERIVED = 14
"""SGLang 0.5.23 counts on from the port of ``--dist-init-addr``: 1 to 6 for its processes, 13 for a handshake of attention groups."""


class EnginePorts(NamedTuple):
    """The ports of one engine, the same in each of its pods."""

    gate: int
    engine: int
    agent: int
    rendezvous: int
    metrics: int
    nccl: int | None = None
    """``--nccl-port``; None: SGLang looks for a free one, as it may where nobody else listens."""

    @property
    def on_node(self) -> bool:
        """Whether they are ports of the node, which others may use as well."""
        return self.nccl is not None

    @property
    def of_sglang(self) -> tuple[int, ...]:
        """Those on which SGLang itself may listen."""
        own = (self.engine,) if self.nccl is None else (self.engine, self.nccl)
        return (*own, *range(self.rendezvous, self.rendezvous + _DERIVED))


OF_POD = EnginePorts(wire.GATE_PORT, wire.ENGINE_PORT, wire.AGENT_PORT, wire.RENDEZVOUS_PORT, wire.METRICS_PORT)
"""Those of every engine whose pods have networks of their own."""


def engine_ports(rollout: SGLangRollout, index: int) -> EnginePorts:
    """Return the ports of engine ``index``."""
    network = rollout.spec.engine.network
    if network is None or not network.host_network:
        return OF_POD
    first = network.first_port + BLOCK * index
    return EnginePorts(gate=first, engine=first + 1, agent=first + 2, nccl=first + 3, rendezvous=first + 4, metrics=first + 18)
