"""Prometheus metrics of the coordinator."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sglang_rollout.coordinator.update.events import Result
from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.coordinator.update.staging import count_copies
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire import ports
from sglang_rollout.wire.record import UpdateOutcome
from sglang_rollout.wire.states import EngineState, FleetState

PREFIX = "sglang_rollout_coordinator"
# From a call to an idle engine (milliseconds) to a bucket of a large model (minutes).
BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_CALLS = (
    *(ControlCall.INIT_GROUP, ControlCall.DESTROY_GROUP, ControlCall.BEGIN_UPDATE, ControlCall.UPDATE_DISTRIBUTED),
    *(ControlCall.UPDATE_DISK, ControlCall.UPDATE_TENSOR, ControlCall.END_UPDATE, ControlCall.PAUSE, ControlCall.CONTINUE),
    *(ControlCall.FLUSH_CACHE, ControlCall.CHECK_WEIGHTS, ControlCall.RELEASE_MEMORY, ControlCall.RESUME_MEMORY),
    *(ControlCall.LOAD_ADAPTER, ControlCall.UNLOAD_ADAPTER),
)
FAN_OUT_PATHS = (
    *(call.path for call in _CALLS),
    *(ports.AGENT_SYNC, ports.AGENT_RUN, ports.AGENT_PREFLIGHT, ports.AGENT_CHECKPOINT, ports.AGENT_ACK),
    *(ports.AGENT_FENCE, ports.AGENT_STAGE, ports.AGENT_DROP, ports.AGENT_ACTIVATE),
    *(ports.STORE_PREFLIGHT, ports.STORE_JOIN, ports.STORE_LEAVE, ports.STORE_OPEN, ports.STORE_RECEIVE, ports.STORE_SEAL),
    *(ports.STORE_DROP, ports.STORE_FETCH),
)
"""Paths that the coordinator calls on several engines, or on the weight store."""


class Metrics:
    """Metrics in a registry of their own.

    Counters with known labels start at 0, because ``increase()`` misses a first failure that creates its own series.

    Args:
        machine: Returns the state machine, or None until the record has been read.
    """

    def __init__(self, machine: Callable[[], Machine | None] = lambda: None) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_FleetCollector(machine))
        self._updates = Counter(f"{PREFIX}_updates", "Ended weight updates", ["outcome"], registry=self.registry)
        self._calls = Histogram(
            f"{PREFIX}_fan_out_seconds", "Duration of a call to all engines", ["path"], buckets=BUCKETS_SECONDS, registry=self.registry
        )
        self._failures = Counter(f"{PREFIX}_fan_out_failures", "Failed calls to an engine", ["path"], registry=self.registry)
        self._counted: Tally[UpdateOutcome] = Tally()
        for outcome in UpdateOutcome:
            self._updates.labels(outcome.value)
        for path in FAN_OUT_PATHS:
            self._failures.labels(path)

    def count_updates(self, ended: Tally[UpdateOutcome]) -> None:
        """Raise the counter of updates to ``ended``, the numbers by outcome since the start."""
        for outcome, number in (ended - self._counted).items():
            self._updates.labels(outcome.value).inc(number)
        self._counted = Tally(ended)

    def count_fan_out(self, path: str, seconds: float, results: Mapping[str, Result]) -> None:
        """Count one call to several engines."""
        path = path.partition("?")[0]
        self._calls.labels(path).observe(seconds)
        self._failures.labels(path).inc(sum(not result.ok for result in results.values()))


class _FleetCollector(Collector):
    """Gauges that each scrape reads from the state machine, which changes far more often than Prometheus scrapes."""

    def __init__(self, machine: Callable[[], Machine | None]) -> None:
        self._machine = machine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges. Without a state machine all of them are 0."""
        machine = self._machine()
        fleet = machine.fleet if machine is not None else None
        states = dict.fromkeys((state.value for state in EngineState), 0)
        for engine in fleet.engines.values() if fleet is not None else ():
            states[engine.row().state.value] += 1
        engines = GaugeMetricFamily(f"{PREFIX}_engines", "Engines by state of their weights", labels=["state"])
        for state, number in states.items():
            engines.add_metric([state], number)
        yield engines
        committed = fleet.committed if fleet is not None else None
        for name, help_text, value in (
            ("serving", "Engines with an open gate", sum(engine.serving for engine in fleet.engines.values()) if fleet else 0),
            ("committed_run", "Run of the committed version", committed.run if committed else 0),
            ("committed_step", "Step of the committed version within its run", committed.step if committed else 0),
            ("epoch", "Epoch of the members", fleet.epoch if fleet else 0),
            ("term", "Term of this coordinator", fleet.term if fleet else 0),
            ("paused", "1 while the fleet is paused", bool(fleet and (fleet.pause or fleet.applied_state is FleetState.PAUSED))),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", help_text, value=float(value))
        copies = GaugeMetricFamily(f"{PREFIX}_copies", "Pods, also of the weight store, with a complete copy of the committed version")
        held = count_copies(fleet) if fleet is not None else None
        if held is not None:  # without a weight store the metric has no value
            copies.add_metric([], held)
        yield copies
