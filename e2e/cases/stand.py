"""A fleet of stand-in engines, as the cases see it: what they hold, what shall go wrong, and trainers that push on command."""

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
from e2e.chaos.talk import MODULE, Trainer
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
class Stand:
    """One fleet of stand-ins; ``url`` reaches its router for as long as the case runs."""

    kubectl: Kubectl
    name: str
    url: str
    engines: int
    folder: Path
    trainers: list[Trainer] = field(default_factory=list)

    def engine(self, index: int) -> str:
        """Name of an engine."""
        return f"{self.name}-engine-{index}"

    def ask(self, index: int, method: str, path: str, body: str = "") -> Any:
        """Call a stand-in past its gate and agent, as only a test does."""
        out = self.kubectl.exec(f"{self.engine(index)}-0", "python3", "-c", _CALL, method, path, body, container="engine", timeout=30)
        return json.loads(out)

    def state(self, index: int) -> dict[str, Any]:
        """What a stand-in knows of itself."""
        return dict(self.ask(index, "GET", "/stand_in/state"))

    def fault(self, index: int, kind: str, phase: str, **more: Any) -> None:
        """Arm a fault of one engine."""
        self.ask(index, "POST", "/stand_in/faults", json.dumps({"kind": kind, "phase": phase, **more}))

    def calm(self) -> None:
        """Disarm what did not land."""
        for index in range(self.engines):
            self.ask(index, "DELETE", "/stand_in/faults")

    def members(self) -> list[dict[str, Any]]:
        """The engines' rows of the discovery document."""
        return list(document(self.url)["members"])

    def row(self, index: int) -> dict[str, Any]:
        """One engine's row."""
        return next(row for row in self.members() if row["name"] == self.engine(index))

    def label(self) -> str:
        """A version's name that no other case uses."""
        return f"v{next(LABELS)}"

    def trainer(self, *, url: str = "", snapshots: bool = False) -> Trainer:
        """Start a trainer in the trainers' pod; ``url`` as seen from there, the fleet's own by default."""
        command = ["kubectl", "-n", self.kubectl.namespace, "exec", "-i", "trainer", "-c", "trainer", "--", "python", "-m", MODULE]
        command.append(url or f"http://{self.name}-router:30000")
        made = Trainer([*command, *([CKPT] if snapshots else [])], self.folder / "trainer.log")
        self.trainers.append(made)
        return made

    def close(self) -> None:
        """End all trainers, those that are stopped too."""
        for trainer in self.trainers:
            with contextlib.suppress(Refused):  # it has ended
                self.signal(trainer, "KILL")
            trainer.end()

    def signal(self, trainer: Trainer, name: str) -> None:
        """Send a signal to a trainer."""
        self.kubectl.exec("trainer", "sh", "-c", f"kill -{name} {trainer.pid}", container="trainer")

    def push(self, trainer: Trainer, watch: Watch | None = None, *, manner: str = "", within: float = 60) -> str:
        """Push a new version, which must succeed; its label."""
        label = self.label()
        tokens = trainer.begin(label, manner)
        if watch is not None:
            watch.expected[label] = tokens
        answer = trainer.outcome(within)
        assert answer["ok"], answer
        if watch is not None:
            watch.committed(label)
        return label

    def serve(self, count: int | None = None, within: float = 60) -> dict[str, Any]:
        """Wait until so many engines serve, all of them by default."""
        return serving(self.url, self.engines if count is None else count, within)

    def status(self) -> dict[str, Any]:
        """``status`` of the custom resource."""
        return dict(self.kubectl.get("sglr", self.name)["status"])

    def condition(self, kind: str) -> dict[str, str]:
        """One condition."""
        return condition(self.kubectl.get("sglr", self.name), kind)

    def events(self) -> list[str]:
        """``REASON message`` of every Event about the fleet, oldest first."""
        found = self.kubectl.list("events")
        ours = [event for event in found if event["involvedObject"].get("name") == self.name]
        ours.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime")))
        return [f"{event['reason']} {event['message']}" for event in ours]

    @contextlib.contextmanager
    def policy(self, **weights: Any) -> Iterator[None]:
        """Other fields of ``spec.weights`` for the length of the block."""
        before = self.kubectl.get("sglr", self.name)["spec"]["weights"]
        self._weights(before | weights)
        try:
            yield
        finally:
            self._weights(before)

    def _weights(self, weights: dict[str, Any]) -> None:
        """As a whole: a merge would keep what an inner field had before."""
        patch = [{"op": "replace", "path": "/spec/weights", "value": weights}]
        self.kubectl("patch", "sglr", self.name, "--type=json", "-p", json.dumps(patch))
        wanted = self.kubectl.get("sglr", self.name)["metadata"]["generation"]

        def known() -> bool:
            record = self.kubectl.get("configmap", f"{self.name}-weights")["data"]["weights.json"]
            return bool(json.loads(record)["intent_generation"] >= wanted)

        eventually("the coordinator knows the new policy", known, within=20)


def whole(stand: Stand) -> None:
    """All engines serve, whatever the case before left behind: a push brings back those that wait for one."""
    eventually("all engines are up", lambda: all(row["boot_id"] for row in stand.members()), within=120)
    stand.calm()
    if document(stand.url)["serving"] == stand.engines and document(stand.url)["committed"]["run"]:
        return
    trainer = stand.trainer()
    deadline = time.monotonic() + 90
    while True:
        trainer.begin(stand.label())
        answer = trainer.outcome(90)
        if answer["ok"]:
            break
        assert time.monotonic() < deadline, answer
    trainer.end()
    stand.serve()
