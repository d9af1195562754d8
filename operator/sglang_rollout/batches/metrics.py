"""Prometheus metrics of the batch server."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_rollout.batches.memory import Budget

PREFIX = "sglang_rollout_batches"


class _BudgetCollector(Collector):
    """Reads the budget at each scrape."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield GaugeMetricFamily(f"{PREFIX}_memory_bytes", "Memory that bodies and answers take", value=self._budget.used)
        yield CounterMetricFamily(f"{PREFIX}_refused", "Requests refused because others had taken the memory", value=self._budget.refused)


def make_metrics(budget: Budget) -> CollectorRegistry:
    """Return a registry with the metrics."""
    registry = CollectorRegistry()
    registry.register(_BudgetCollector(budget))
    return registry
