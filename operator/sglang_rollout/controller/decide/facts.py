"""What is said about a fleet beneath its conditions: which engines are wanted, serve, are away, and what stands in their way. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_rollout.api.conditions import Reason
from sglang_rollout.api.status import AvoidedNode, EnginePhase
from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.elastic import comes_later
from sglang_rollout.controller.decide.engine_status import EngineView
from sglang_rollout.controller.decide.sentences import sentence
from sglang_rollout.controller.decide.serving import router_ready, router_refused
from sglang_rollout.controller.decide.view import World
from sglang_rollout.controller.render import names

SEVERITY = (
    Reason.IMAGE_PULL_FAILED,
    Reason.CREATE_FAILED,
    Reason.ENGINE_CRASHED,
    Reason.RESTART_BUDGET_EXHAUSTED,
    Reason.INSUFFICIENT_CAPACITY,
    Reason.WAITING_FOR_QUEUE,
    Reason.PODS_NOT_READY,
    Reason.ROUTER_NOT_READY,
    Reason.WEIGHTS_DIVERGED,
    Reason.WAITING_FOR_WEIGHTS,
    Reason.UPDATING_WEIGHTS,
    Reason.TRAINER_LOST,
    Reason.PAUSED,
    Reason.ASLEEP,
)
"""Of several engines that do not serve, the one that comes first here is spoken of."""

_COMES_AND_GOES = frozenset({Reason.INSUFFICIENT_CAPACITY, Reason.WAITING_FOR_QUEUE, Reason.PODS_NOT_READY, Reason.WAITING_FOR_WEIGHTS})
"""What is as it should be for an engine beyond the base."""

_FOR_ROOM = frozenset({Reason.INSUFFICIENT_CAPACITY, Reason.WAITING_FOR_QUEUE})
"""Others have to make room, or give quota."""


@dataclass(frozen=True)
class Failure:
    """Why an action of the plan could not be carried out."""

    reason: Reason
    sentence: str


@dataclass(frozen=True)
class Facts:
    """What the conditions are made from."""

    world: World
    wanted: list[EngineView]
    leaving: list[EngineView]
    failure: Failure | None
    router: bool
    """The router runs."""
    avoided: Sequence[AvoidedNode] = ()
    """Nodes that engines are kept off."""

    @classmethod
    def of(cls, world: World, views: Sequence[EngineView], failure: Failure | None, avoided: Sequence[AvoidedNode] = ()) -> Facts:
        """Sort out ``views``."""
        replicas = world.rollout.spec.engines if world.rollout else 0
        return cls(world, list(views[:replicas]), list(views[replicas:]), failure, router_ready(world), avoided)

    @property
    def serving(self) -> int:
        """How many wanted engines serve."""
        return sum(view.row.phase is EnginePhase.SERVING for view in self.wanted)

    @property
    def outdated(self) -> list[EngineView]:
        """Wanted engines with a pod that was made from an older spec."""
        return [view for view in self.wanted if not view.row.updated and self.world.pods_of(view.row.name)]

    @property
    def base(self) -> list[EngineView]:
        """Wanted engines without which the fleet is not whole."""
        return self.wanted[: self.world.rollout.spec.base if self.world.rollout else 0]

    @property
    def away(self) -> list[EngineView]:
        """Wanted engines that do not serve."""
        return [view for view in self.wanted if view.reason is not None]

    @property
    def coming(self) -> list[EngineView]:
        """Wanted engines that are not up."""
        return [view for view in self.wanted if view.row.phase in {EnginePhase.PENDING, EnginePhase.STARTING, EnginePhase.STOPPING}]

    @property
    def waiting(self) -> list[EngineView]:
        """Of those that come, the ones that only wait: for room, for quota, or for an obstacle to go. The worst is the first."""
        pending = [view for view in self.coming if view.row.phase is EnginePhase.PENDING]
        found = [view for view in pending if self.obstacle or view.reason in _FOR_ROOM or comes_later(self.world, view.row.name)]
        return sorted(found, key=_severity)

    @property
    def worst(self) -> EngineView | None:
        """The engine to speak of if not all serve. One beyond the base comes and goes, and only a failure is worth a word."""
        away = [view for view in self.away if view in self.base or view.reason not in _COMES_AND_GOES]
        return min(away, key=_severity, default=None)

    @property
    def obstacle(self) -> Failure | None:
        """What could not be carried out, or what the cluster lacks for an engine that has no node."""
        cluster = self.world.cluster
        if self.failure or not any(view.row.phase is EnginePhase.PENDING for view in self.wanted):
            return self.failure
        if cluster.queue_problem:
            return Failure(Reason.QUEUE_NOT_FOUND, cluster.queue_problem)
        return Failure(Reason.GANG_NOT_POSSIBLE, cluster.gang_problem) if cluster.gang_problem else None

    @property
    def router_why(self) -> str:
        """Why the router does not run, as a sentence."""
        for pod in self.world.router_pods():
            found = pods.trouble(pod)
            if found:
                return sentence(f"Router pod {pod['metadata']['name']}: {found.text}")
            nowhere = pods.unschedulable(pod)
            if nowhere:
                return sentence(f"Router pod {pod['metadata']['name']}: no node can take it: {nowhere}")
            if pods.node_of(pod) is None:
                return f"Router pod {pod['metadata']['name']} waits for the scheduler."
        name, refused = names.router_name(self.world.cr["metadata"]["name"]), router_refused(self.world)
        return sentence(f"The pod of Deployment {name} cannot be created: {refused}") if refused else "The router is starting."


def _severity(view: EngineView) -> int:
    return SEVERITY.index(view.reason) if view.reason in SEVERITY else 99
