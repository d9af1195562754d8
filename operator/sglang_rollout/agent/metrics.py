"""What Prometheus learns from an agent."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import Reply
from sglang_rollout.agent.state import gate_may_open
from sglang_rollout.wire.weights import EngineState


class Metrics:
    """The agent's metrics; gauges are read off the agent when they are asked for."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._registry = CollectorRegistry()
        prefix = "sglang_rollout_agent_"
        self._gauges = {
            name: Gauge(prefix + name, text, registry=self._registry)
            for name, text in {
                "engine_up": "1 while the engine answers and has warmed up.",
                "gate_may_open": "1 while the engine holds the committed version.",
                "gate_open": "1 while the gate itself says that requests pass.",
                "weights_dirty": "1 while the engine holds a mixture of weights.",
                "paused": "1 while the engine is paused.",
                "committed_step": "Step of the committed version within its run.",
                "version_step": "Step of the version that the engine holds, -1 if it holds none.",
                "term": "Highest coordinator term seen.",
            }.items()
        }
        self._calls = Counter(
            prefix + "control_calls", "Control calls by name and HTTP status.", ["call", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            prefix + "control_seconds",
            "Seconds until the engine answered a control call.",
            ["call"],
            buckets=(0.01, 0.05, 0.25, 1, 5, 30, 120, 600),
            registry=self._registry,
        )
        agent.observer = self.observe

    def observe(self, call: str, reply: Reply, seconds: float) -> None:
        """Count one control call."""
        self._calls.labels(call, str(reply.status)).inc()
        self._seconds.labels(call).observe(seconds)

    def text(self) -> bytes:
        """The present values in Prometheus' text format."""
        state, memory, view = self._agent.state, self._agent.state.memory, self._agent.view
        values: dict[str, float] = {
            "engine_up": state.up,
            "gate_may_open": gate_may_open(state),
            "gate_open": view is not None and view.up,
            "weights_dirty": memory.state is EngineState.DIRTY,
            "paused": memory.paused,
            "committed_step": memory.committed.step if memory.committed else 0,
            "version_step": memory.version.step if memory.version else -1,
            "term": memory.term,
        }
        for name, value in values.items():
            self._gauges[name].set(float(value))
        return generate_latest(self._registry)
