"""Promtool evaluates the alerts of ``examples/monitoring`` on the metrics that a coordinator and an operator export."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e import promtool
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.say import LabError
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sglang_rollout.controller.metrics import Metrics as OperatorMetrics
from tests.contract.support.coordinator_process import Lab, fleet_lab

RULES = yaml.safe_load((REPOSITORY / "examples/monitoring/alerts.yaml").read_text())["spec"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
NAMES = {rule["alert"] for rule in ALERTS}
UPDATE_FAILED, NO_ENGINE, NOT_READY, VERSION_LOST, SNAPSHOT_FAILED, STALLED = (
    f"SGLangRollout{name}" for name in ("UpdateFailed", "NoEngineServes", "NotReady", "VersionLost", "SnapshotFailed", "OperatorStalled")
)
COPIES, FAILED_SNAPSHOTS = "sglang_rollout_coordinator_copies{}", "sglang_rollout_store_snapshot_failures_total{}"
"""Series that only a fleet with a weight store has."""
FAILED_UPDATES = 'sglang_rollout_coordinator_updates_total{outcome="Failed"}'
TRANSFER = "/update_weights_from_distributed"
UPDATE: dict[str, Any] = {"names": ["w"], "dtypes": ["torch.float32"], "shapes": [[2]], "group_name": "g", "weight_version": 1}
PHASE_MINUTES = 90
"""Minutes for which Prometheus sees each scrape."""
SOON, LATE = 2, 88
"""Minutes into a phase: after one or two scrapes; after every window and every ``for`` of the alerts."""

Scrape = dict[str, float]
"""Values by series."""
TARGET = 'namespace="n",rollout="a"'
"""Labels that Prometheus adds to the coordinator's series, and that the operator exports."""
LISTED: Scrape = {"sglang_rollout_operator_last_list_timestamp_seconds{}": 2e9}
"""Of an operator that lists the rollouts. Without this series the operator counts as stalled."""


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return promtool.find()
    except LabError as error:
        pytest.skip(str(error))


@dataclass
class Timeline:
    """Scrapes by phase, and the alerts that must fire in each phase."""

    scrapes: list[Scrape] = field(default_factory=list)
    expected: list[dict[str, Any]] = field(default_factory=list)

    def add(self, scrape: Scrape, *, soon: Collection[str] = (), late: Collection[str] = ()) -> None:
        """Add a phase in which Prometheus sees ``scrape``. Only the alerts ``soon`` fire at its beginning, and only ``late`` at its end."""
        begin = len(self.scrapes) * PHASE_MINUTES
        self.scrapes.append(scrape)
        for minute, firing in ((begin + SOON, soon), (begin + LATE, late)):
            for alert in sorted(NAMES):
                self.expected.append(
                    {
                        "expr": f'count by (namespace, rollout) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"labels": _labels(alert), "value": 1}] if alert in firing else [],
                    }
                )

    def check(self, program: Path, folder: Path) -> None:
        """Let promtool evaluate the rules."""
        names = sorted({name for scrape in self.scrapes for name in scrape})
        test = {
            "interval": "1m",
            "input_series": [{"series": _as_scraped(name), "values": " ".join(map(_steady, self._values(name)))} for name in names],
            "promql_expr_test": self.expected,
        }
        (folder / "rules.yaml").write_text(yaml.safe_dump(RULES))
        (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
        command = [str(program), "test", "rules", "test.yaml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def _values(self, series: str) -> Iterator[float | None]:
        return (scrape.get(series) for scrape in self.scrapes)


def _labels(alert: str) -> str:
    """Return the labels by which an alert names its rollout. The operator's own alert is about no rollout."""
    return "{}" if alert == STALLED else f"{{{TARGET}}}"


def _as_scraped(series: str) -> str:
    name, _, labels = series.partition("{")
    return f"{name}{{{TARGET},{labels}" if name.startswith(("sglang_rollout_coordinator_", "sglang_rollout_store_")) else series


def _steady(value: float | None) -> str:
    """Return one phase in promtool's notation; for None the series is missing, which Prometheus notices at the next scrape."""
    return f"stale _x{PHASE_MINUTES - 1}" if value is None else f"{value:.0f}x{PHASE_MINUTES - 1}"


def parsed(text: str) -> Scrape:
    """Return the samples that alerts use, without histograms and creation times."""
    families = (family for family in text_string_to_metric_families(text) if family.type != "histogram")
    samples = (sample for family in families for sample in family.samples if not sample.name.endswith("_created"))
    return {_series(sample.name, sample.labels): sample.value for sample in samples}


def _series(name: str, labels: dict[str, str]) -> str:
    pairs = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}"


def used_by_alerts(prefix: str) -> set[str]:
    """Return the series of one process that alerts name."""
    found = {
        name + (labels or "{}")
        for rule in ALERTS
        for name, labels in re.findall(r"(\w+)(\{[^}]*\})?", rule["expr"])
        if name.startswith(prefix)
    }
    assert found
    return found


def _names(series: Iterable[str]) -> set[str]:
    return {one.partition("{")[0] for one in series}


async def scraped(lab: Lab) -> Scrape:
    status, _, text = await lab.get("/fleet/metrics")
    assert status == 200
    return parsed(text) | LISTED


async def push(lab: Lab, *, fails: bool) -> None:
    """Make a complete update, or one in which the second engine refuses the tensors."""
    lab.agents[1].broken = {TRANSFER: "Failed to receive weights."} if fails else {}
    assert (await lab.open_group())[0] == 200
    assert (await lab.post("/begin_weight_update", {}))[0] == 200
    assert (await lab.post(TRANSFER, UPDATE))[0] == (400 if fails else 200)
    if not fails:
        assert (await lab.post("/end_weight_update", {}))[0] == 200
    await lab.serving(0 if fails else 2)


async def test_each_failed_update_alerts_once(program: Path, tmp_path: Path) -> None:
    timeline = Timeline()
    async with fleet_lab(tmp_path) as lab:
        await push(lab, fails=False)  # these agents list no tensors, so engines would restart after new names
        timeline.add(first := await scraped(lab))
        assert used_by_alerts("sglang_rollout_coordinator_") - first.keys() == {COPIES}
        await push(lab, fails=True)
        timeline.add(await scraped(lab), soon={UPDATE_FAILED}, late={NO_ENGINE})
        await push(lab, fails=True)  # again the same version
        timeline.add(await scraped(lab), soon={UPDATE_FAILED, NO_ENGINE}, late={NO_ENGINE})
        await lab.kill()
        lab.start()
        await lab.serving(0)
        timeline.add(restarted := await scraped(lab), soon={NO_ENGINE}, late={NO_ENGINE})
        await push(lab, fails=False)
        timeline.add(await scraped(lab))
        await push(lab, fails=True)
        timeline.add(last := await scraped(lab), soon={UPDATE_FAILED}, late={NO_ENGINE})
    timeline.check(program, tmp_path)
    assert [scrape[FAILED_UPDATES] for scrape in timeline.scrapes] == [0, 1, 2, 0, 0, 1]
    assert restarted.keys() == last.keys() == first.keys(), "every series exists before its first event"


def test_the_alerts_of_a_fleet_with_a_weight_store(program: Path, tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add(LISTED | {COPIES: 3, FAILED_SNAPSHOTS: 0})
    timeline.add(LISTED | {COPIES: 1, FAILED_SNAPSHOTS: 1}, soon={SNAPSHOT_FAILED})
    timeline.add(LISTED | {COPIES: 0, FAILED_SNAPSHOTS: 1}, late={VERSION_LOST})
    timeline.add(LISTED)  # another transport
    timeline.check(program, tmp_path)
    assert used_by_alerts("sglang_rollout_store_") == {FAILED_SNAPSHOTS}


def test_the_alerts_of_the_operator(program: Path, tmp_path: Path) -> None:
    metrics, timeline = OperatorMetrics(), Timeline()

    def see(**firing: Collection[str]) -> None:
        timeline.add(parsed(generate_latest(metrics.registry).decode()), **firing)

    see(late={STALLED})
    metrics.mark_relisted()
    metrics.set_ready(("n", "b"), "True")
    see()
    metrics.set_ready(("n", "a"), "False")
    see(late={NOT_READY})
    assert _names(used_by_alerts("sglang_rollout_operator_")) - _names(timeline.scrapes[-1]) == set()
    metrics.set_ready(("n", "a"), "True")
    see()
    timeline.add({}, late={STALLED})  # the operator does not run
    timeline.check(program, tmp_path)


@pytest.mark.parametrize("rule", [rule for rule in ALERTS if rule["alert"] != STALLED], ids=lambda rule: rule["alert"])
def test_the_summary_of_an_alert_names_its_rollout(rule: dict[str, Any]) -> None:
    assert "{{ $labels.namespace }}/{{ $labels.rollout }}" in rule["annotations"]["summary"]
