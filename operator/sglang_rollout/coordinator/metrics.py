"""Prometheus metrics of the coordinator."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire import ports
from sglang_rollout.wire.record import UpdateOutcome
from sglang_rollout.wire.states import FleetState
from sglang_rollout.wire.weights import EngineState

PREFIX = "sglang_rollout_coordinator"
# From a call on an idle engine (milliseconds) to a bucket of a large model (minutes).
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_CALLS = (
    *(ControlCall.INIT_GROUP, ControlCall.DESTROY_GROUP, ControlCall.BEGIN_UPDATE, ControlCall.UPDATE_DISTRIBUTED),
    *(ControlCall.UPDATE_DISK, ControlCall.UPDATE_TENSOR, ControlCall.END_UPDATE, ControlCall.PAUSE, ControlCall.CONTINUE),
    *(ControlCall.FLUSH_CACHE, ControlCall.CHECK_WEIGHTS, ControlCall.RELEASE_MEMORY, ControlCall.RESUME_MEMORY),
    *(ControlCall.LOAD_ADAPTER, ControlCall.UNLOAD_ADAPTER),
)
PATHS = (
    *(call.path for call in _CALLS),
    *(ports.AGENT_SYNC, ports.AGENT_RUN, ports.AGENT_PREFLIGHT, ports.AGENT_CHECKPOINT, ports.AGENT_ACK, ports.AGENT_FENCE),
)
"""Calls that the coordinator makes on several engines."""


class Metrics:
    """The coordinator's own registry: no process-wide state.

    Series whose labels are known start at 0: ``increase()`` does not see a first failure that makes its own series.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engines = Gauge(f"{PREFIX}_engines", "Engines by state", ["state"], registry=self.registry)
        self._serving = Gauge(f"{PREFIX}_serving", "Engines with an open gate", registry=self.registry)
        self._run = Gauge(f"{PREFIX}_committed_run", "Run of the committed version", registry=self.registry)
        self._step = Gauge(f"{PREFIX}_committed_step", "Step of the committed version within its run", registry=self.registry)
        self._epoch = Gauge(f"{PREFIX}_epoch", "Epoch of the members", registry=self.registry)
        self._term = Gauge(f"{PREFIX}_term", "Term of this coordinator", registry=self.registry)
        self._paused = Gauge(f"{PREFIX}_paused", "1 while the fleet is paused", registry=self.registry)
        self._updates = Counter(f"{PREFIX}_updates", "Weight updates that ended", ["outcome"], registry=self.registry)
        self._calls = Histogram(f"{PREFIX}_fan_out_seconds", "Calls on all engines", ["path"], buckets=BUCKETS, registry=self.registry)
        self._failures = Counter(f"{PREFIX}_fan_out_failures", "Engines on which a call failed", ["path"], registry=self.registry)
        self._counted: Tally[UpdateOutcome] = Tally()
        for outcome in UpdateOutcome:
            self._updates.labels(outcome.value)
        for state in EngineState:
            self._engines.labels(state.value)
        for path in PATHS:
            self._failures.labels(path)

    def count(self, ended: Tally[UpdateOutcome]) -> None:
        """Raise the counter of ended updates to ``ended``, the numbers by outcome."""
        for outcome, number in (ended - self._counted).items():
            self._updates.labels(outcome.value).inc(number)
        self._counted = Tally(ended)

    def fan_out(self, path: str, seconds: float, results: Mapping[str, Result]) -> None:
        """Count one call on several engines."""
        path = path.partition("?")[0]
        self._calls.labels(path).observe(seconds)
        self._failures.labels(path).inc(sum(not result.ok for result in results.values()))

    def text(self, machine: Machine | None) -> bytes:
        """The Prometheus text format. Figures of the machine's facts are taken now: facts change far more often than anybody asks."""
        if machine is not None:
            self._observe(machine.fleet)
        return generate_latest(self.registry)

    def _observe(self, fleet: Fleet) -> None:
        states: dict[str, int] = {state.value: 0 for state in EngineState}
        for engine in fleet.engines.values():
            states[engine.row().state.value] += 1
        for state, number in states.items():
            self._engines.labels(state).set(number)
        self._serving.set(sum(engine.serving for engine in fleet.engines.values()))
        self._epoch.set(fleet.epoch)
        self._term.set(fleet.term)
        self._paused.set(fleet.pause is not None or fleet.applied_state is FleetState.PAUSED)
        if fleet.committed is not None:
            self._run.set(fleet.committed.run)
            self._step.set(fleet.committed.step)
