"""Send cases to a fleet, and check after each group of them that every engine answers, and that no process ended or computed for long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import requests

from e2e.fuzz import processes
from e2e.fuzz.cases import Case
from sglang_rollout.sglang.api import GENERATE
from sglang_rollout.wire.ports import FLEET

GROUP = 8
"""Cases that are sent at once."""
CASE_SECONDS = 6.0
"""Time after which a request is ended. SGLang then aborts it."""
CHECK_SECONDS = 30.0
"""Longest time for an answer of an engine that works, while it ends aborted requests."""
CLASSIFY = "/classify"
PROBES = {GENERATE: {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}, CLASSIFY: {"input_ids": [5]}}
"""Valid bodies by path."""


@dataclass(frozen=True)
class Failure:
    """Cases after which an engine did not answer, or a process had ended or had computed for too long."""

    cases: Sequence[Case]
    problem: str


@dataclass
class Target:
    """A fleet. Cases go to its URL and to the gates of its engines."""

    url: str
    probe: str = GENERATE
    """Path at which an engine that works answers."""
    gates_only: bool = False
    """True to send all cases to the gates, and none to the URL."""
    gates: list[str] = field(init=False)
    boots: dict[str, str | None] = field(init=False)
    processes: dict[tuple[int, int], processes.Process] = field(init=False)
    """The fleet's processes before the cases that are sent next."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Number of answers by status; 0: no answer in time."""

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Read the gates and boot IDs of the fleet."""
        self.gates = [member["url"] for member in requests.get(self.url + FLEET, timeout=CHECK_SECONDS).json()["members"]]
        self.boots = self._boots()
        self.processes = processes.running()

    def send(self, case: Case, number: int) -> None:
        """Send a case to one of the places, which ``number`` selects. Without ``gates_only`` every second case goes to the URL."""
        place = self.url if number % 2 and not self.gates_only else self.gates[number // 2 % len(self.gates)]
        headers = {"Content-Type": "application/json"}
        try:
            with requests.post(place + case.path, data=case.body(), headers=headers, timeout=CASE_SECONDS, stream=True) as reply:
                end = time.monotonic() + CASE_SECONDS
                for _ in reply.iter_content(65536):
                    if time.monotonic() > end:
                        break
                self.statuses[reply.status_code] += 1
        except requests.RequestException:
            self.statuses[0] += 1

    def find_problem(self, requests: int) -> str:
        """Return what is wrong after some requests; empty once each engine answers and each process of the fleet is what it was."""
        before, self.processes = self.processes, processes.running()
        return processes.find_problem(before, self.processes, requests) or self._find_silent_engine()

    def _find_silent_engine(self) -> str:
        end = time.monotonic() + CHECK_SECONDS
        while True:
            problem = next(filter(None, map(self._why_not_answering, self.gates)), "")
            boots = self._boots()
            if restarted := [name for name, boot in boots.items() if boot not in (None, self.boots[name])]:
                return f"restarted: {', '.join(restarted)}"
            if not problem and None not in boots.values():
                return ""
            if time.monotonic() > end:
                return problem or f"unknown boot IDs: {boots}"
            time.sleep(0.2)

    def _why_not_answering(self, gate: str) -> str:
        try:
            reply = requests.post(gate + self.probe, json=PROBES[self.probe], timeout=CHECK_SECONDS)
        except requests.RequestException as error:
            return f"{gate} does not answer: {error}"
        return "" if reply.ok else f"{gate} answers {reply.status_code}: {reply.text[:300]}"

    def _boots(self) -> dict[str, str | None]:
        members = requests.get(self.url + FLEET, timeout=CHECK_SECONDS).json()["members"]
        return {member["name"]: member["boot_id"] for member in members}


def groups(cases: Iterable[Case], size: int = GROUP) -> Iterator[list[Case]]:
    """Yield the cases in groups."""
    rest = iter(cases)
    while group := list(islice(rest, size)):
        yield group


def run(target: Target, cases: Iterable[Case], size: int = GROUP) -> Failure | None:
    """Send the cases, and return the first group of this size after which an engine fails; None if all engines survive."""
    with ThreadPoolExecutor(GROUP) as pool:
        for turn, group in enumerate(groups(cases, size)):
            list(pool.map(target.send, group, range(turn * 3, turn * 3 + len(group))))
            if problem := target.find_problem(len(group)):
                return Failure(group, problem)
    return None
