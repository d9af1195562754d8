"""Actions that several cases share: push a version, generate, run a client."""

from __future__ import annotations

import json
import pathlib
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import requests

from e2e.kube import Kubectl, eventually
from e2e.machine_token import HEADERS

QUESTION: dict[str, Any] = {
    "input_ids": [11, 22, 33],
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
}
KILL = "kill -KILL $(cat /proc/1/task/1/children)"
"""Kills the children of a container's first process: no signal from inside the container kills that process itself."""
_ASK = (
    "import json, requests, sys\n"
    "engines, body = map(json.loads, sys.argv[1:])\n"
    "print(json.dumps({name: requests.post(url, json=body, timeout=60).json() for name, url in engines.items()}))\n"
)
PUSH, FORWARD = ((pathlib.Path(__file__).parent / name).read_text() for name in ("push.py", "forward.py"))


def push(
    kubectl: Kubectl, rollout: str, version: str, seed: int, model: str = "/models/tiny", *, prefix: str = "", check: bool = True
) -> dict[str, Any]:
    """Push new weights from the client pod and return what each engine then answers. Seed 0 pushes the model's own weights.

    Args:
        kubectl: The namespace of the fleet.
        rollout: Name of the rollout.
        version: Label of the version.
        seed: Seed of the weights.
        model: Folder of the model.
        prefix: Prepended to the name of each tensor.
        check: False: the client does not compare the tensors with the engines' model (``check_model``).
    """
    words = [f"http://{rollout}-router:30000", version, str(seed), "" if check else "unchecked", model, prefix]
    out = kubectl.exec("client", "python", "-", *words, stdin=PUSH, timeout=240)
    return dict(json.loads(out.strip().splitlines()[-1]))


def forward(kubectl: Kubectl, model: str, seed: int, *adapter: str) -> list[int]:
    """Return the tokens of a plain forward pass for the request of :func:`generate`, with the weights of a push and of an adapter."""
    out = kubectl.exec("client", "python", "-", model, str(seed), *adapter, stdin=FORWARD, timeout=120)
    return list(json.loads(out.strip().splitlines()[-1]))


def ask_engines(kubectl: Kubectl, url: str, **more: Any) -> dict[str, Any]:
    """Send the request of :func:`generate` from the client pod to each engine, and return the answers by engine."""
    engines = {member["name"]: f"{member['url']}/generate" for member in document(url)["members"]}
    words = (json.dumps(engines), json.dumps(QUESTION | more))
    return dict(json.loads(kubectl.exec("client", "python", "-", *words, stdin=_ASK, timeout=120)))


def generate(url: str, tokens: int = 8, **more: Any) -> requests.Response:
    """Send one greedy request to the fleet's URL."""
    body = QUESTION | {"sampling_params": QUESTION["sampling_params"] | {"max_new_tokens": tokens}}
    return requests.post(f"{url}/generate", json=body | more, timeout=60)


def document(url: str) -> dict[str, Any]:
    """Return ``GET /fleet``."""
    reply = requests.get(f"{url}/fleet", headers=HEADERS, timeout=10)
    reply.raise_for_status()
    return dict(reply.json())


def serving(url: str, count: int, within: float = 240) -> dict[str, Any]:
    """Wait until ``count`` engines have an open gate, and return the discovery document."""
    seen: dict[str, Any] = {}

    def probe() -> bool:
        seen.update(document(url))
        return bool(seen["serving"] == count)

    try:
        eventually(f"{count} engines serve", probe, within=within, every=1)
    except AssertionError as error:
        error.add_note(f"last seen: {json.dumps(seen)}")
        raise
    return seen


@dataclass
class Client:
    """A trainer's sampling loop: sends greedy requests and records each answer's status, tokens and version."""

    url: str
    statuses: list[tuple[float, int, str]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    answers: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Client:
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(70)

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                reply = generate(self.url)
            except requests.RequestException as error:
                self.statuses.append((time.time(), 0, str(error)))
                time.sleep(0.2)
                continue
            self.statuses.append((time.time(), reply.status_code, reply.text[:200]))
            if reply.ok:
                body = reply.json()
                version = body["meta_info"]["weight_version"]
                self.versions.append(version)
                self.answers.add((version, tuple(body["output_ids"])))
            time.sleep(0.05)

    @property
    def failures(self) -> list[tuple[float, int, str]]:
        """Requests whose status was not 200."""
        return [entry for entry in self.statuses if entry[1] != 200]
