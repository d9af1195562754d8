"""A fleet of stand-in engines for the cases: the engines' state, their faults, and trainers that push on command."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.cases.actions import document, serving
from e2e.chaos.trainer_process import MODULE, Trainer
from e2e.chaos.watch import Watch
from e2e.kube import Kubectl, Refused, condition, eventually
from e2e.stand_in import CKPT

_CALL = (
    "import sys, urllib.request as u\n"
    "r = u.Request('http://127.0.0.1:30001' + sys.argv[2], method=sys.argv[1], data=sys.argv[3].encode() or None)\n"
    "print(u.urlopen(r, timeout=10).read().decode())\n"
)
LABELS = itertools.count(1)


@dataclass
class StandInRollout:
    """One fleet of stand-ins. ``url`` reaches its router while the case runs."""

    kubectl: Kubectl
    name: str
    url: str
    engines: int
    folder: Path
    trainers: list[Trainer] = field(default_factory=list)

    def engine(self, index: int) -> str:
        """Return the name of an engine."""
        return f"{self.name}-engine-{index}"

    def ask(self, index: int, method: str, path: str, body: str = "") -> Any:
        """Call a stand-in directly, without its gate and agent."""
        out = self.kubectl.exec(f"{self.engine(index)}-0", "python3", "-c", _CALL, method, path, body, container="engine", timeout=30)
        return json.loads(out)

    def state(self, index: int) -> dict[str, Any]:
        """Return a stand-in's state."""
        return dict(self.ask(index, "GET", "/stand_in/state"))

    def fault(self, index: int, kind: str, phase: str, **more: Any) -> None:
        """Arm a fault of one engine."""
        self.ask(index, "POST", "/stand_in/faults", json.dumps({"kind": kind, "phase": phase, **more}))

    def calm(self) -> None:
        """Disarm the faults that did not hit."""
        for index in range(self.engines):
            self.ask(index, "DELETE", "/stand_in/faults")

    def members(self) -> list[dict[str, Any]]:
        """Return the engines' rows of the discovery document."""
        return list(document(self.url)["members"])

    def row(self, index: int) -> dict[str, Any]:
        """Return one engine's row."""
        return next(row for row in self.members() if row["name"] == self.engine(index))

    def label(self) -> str:
        """Return a label that no other case uses."""
        return f"v{next(LABELS)}"

    def trainer(self, *, url: str = "", snapshots: bool = False) -> Trainer:
        """Start a trainer in the trainers' pod. It pushes to ``url``, or to the fleet's URL."""
        command = ["kubectl", "-n", self.kubectl.namespace, "exec", "-i", "trainer", "-c", "trainer", "--", "python", "-m", MODULE]
        command.append(url or f"http://{self.name}-router:30000")
        made = Trainer([*command, *([CKPT] if snapshots else [])], self.folder / "trainer.log")
        self.trainers.append(made)
        return made

    def close(self) -> None:
        """End all trainers, also stopped ones."""
        for trainer in self.trainers:
            with contextlib.suppress(Refused):  # the trainer has ended already
                self.signal(trainer, "KILL")
            trainer.end()

    def signal(self, trainer: Trainer, name: str) -> None:
        """Send a signal to a trainer."""
        self.kubectl.exec("trainer", "sh", "-c", f"kill -{name} {trainer.pid}", container="trainer")

    def push(self, trainer: Trainer, watch: Watch | None = None, *, manner: str = "", within: float = 180) -> str:
        """Push a new version, which must succeed, and return its label."""
        label = self.label()
        tokens = trainer.begin(label, manner)
        if watch is not None:
            watch.expected[label] = tokens
        answer = trainer.outcome(within)
        assert answer["ok"], answer
        if watch is not None:
            watch.committed(label)
        return label

    def serve(self, count: int | None = None, within: float = 180) -> dict[str, Any]:
        """Wait until ``count`` engines serve, by default all of them."""
        return serving(self.url, self.engines if count is None else count, within)

    def status(self) -> dict[str, Any]:
        """Return the custom resource's ``status``."""
        return dict(self.kubectl.get("sglr", self.name)["status"])

    def condition(self, kind: str) -> dict[str, str]:
        """Return one condition."""
        return condition(self.kubectl.get("sglr", self.name), kind)

    def events(self) -> list[str]:
        """Return ``REASON message`` of every Event about the fleet, oldest first."""
        found = self.kubectl.list("events")
        ours = [event for event in found if event["involvedObject"].get("name") == self.name]
        ours.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime")))
        return [f"{event['reason']} {event['message']}" for event in ours]

    @contextlib.contextmanager
    def policy(self, **weights: Any) -> Iterator[None]:
        """Change fields of ``spec.weights`` for the length of the block."""
        before = self.kubectl.get("sglr", self.name)["spec"]["weights"]
        self._weights(before | weights)
        try:
            yield
        finally:
            self._weights(before)

    def _weights(self, weights: dict[str, Any]) -> None:
        """Replace ``spec.weights`` completely, because a merge would keep the previous inner fields."""
        patch = [{"op": "replace", "path": "/spec/weights", "value": weights}]
        self.kubectl("patch", "sglr", self.name, "--type=json", "-p", json.dumps(patch))
        wanted = self.kubectl.get("sglr", self.name)["metadata"]["generation"]

        def known() -> bool:
            record = self.kubectl.get("configmap", f"{self.name}-weights")["data"]["weights.json"]
            return bool(json.loads(record)["intent_generation"] >= wanted)

        eventually("the coordinator knows the new policy", known)


def let_all_serve(stand: StandInRollout) -> None:
    """Let all engines serve, in whatever state the previous case left them. A push readmits engines that wait for one."""
    eventually("all engines are up", lambda: all(row["boot_id"] for row in stand.members()))
    stand.calm()
    if document(stand.url)["serving"] == stand.engines and document(stand.url)["committed"]["run"]:
        return
    trainer = stand.trainer()
    deadline = time.monotonic() + 90
    while True:
        trainer.begin(stand.label())
        answer = trainer.outcome(180)
        if answer["ok"]:
            break
        assert time.monotonic() < deadline, answer
    trainer.end()
    stand.serve()
