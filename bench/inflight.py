"""Check requests that are in flight when weights are pushed: real engines, ``weights.pauseMode: Retract``, streamed answers.

    python -m bench.inflight [--pushes 5]

Clients stream long answers from the fleet's URL all the time while a trainer pushes. Requests in flight at the begin of a push are
counted. Each must end with all of its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp
from bench.common import machine, save
from bench.fleets import local_fleet, real_engines
from bench.pusher import Pusher, pusher
from e2e.engine import environment

CLIENTS, TOKENS, BETWEEN = 12, 400, 3.0
"""With this number of clients on two cores, an answer takes a few seconds, which is longer than a push."""


@dataclass
class Answer:
    """One streamed request."""

    began: float
    ended: float = 0.0
    tokens: int = 0
    versions: int = 1
    error: str = ""
    longest_gap: float = 0.0

    @property
    def complete(self) -> bool:
        """True if the answer has all of its tokens."""
        return not self.error and self.tokens == TOKENS


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> Answer:
    """Send one request and read its answer to the end, or to its failure."""
    answer, last, meta = Answer(time.monotonic()), 0.0, dict[str, Any]()
    params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [10 + number % 1900, 20, 30], "sampling_params": params, "stream": True}
    try:
        async with session.post(f"{url}/generate", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    meta = json.loads(line[6:])["meta_info"]
                    now = time.monotonic()
                    answer.longest_gap, last = max(answer.longest_gap, now - last if last else 0.0), now
        answer.tokens, answer.versions = meta.get("completion_tokens", 0), len(meta.get("weight_versions", [0]))
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    return answer


async def run(url: str, trainer: Pusher, pushes: int) -> tuple[list[Answer], list[tuple[float, float]]]:
    """Run clients and pushes in parallel, and return all answers and the begin and end of each push."""
    answers: list[Answer] = []
    spans: list[tuple[float, float]] = []
    numbers, stop = itertools.count(), asyncio.Event()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            while not stop.is_set():
                answers.append(await stream(session, url, next(numbers)))

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
            for _ in range(pushes):
                await asyncio.sleep(BETWEEN)
                spans += await asyncio.to_thread(trainer.push)
            stop.set()
    return answers, spans


def summary(answers: list[Answer], spans: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the outcomes of the requests in flight when a push began, and of all others."""
    caught = [answer for answer in answers if any(answer.began < began < answer.ended for began, _ in spans)]
    return {
        "pushes": len(spans),
        "push_ms": round(median(ended - began for began, ended in spans) * 1000),
        "requests": len(answers),
        "in_flight": len(caught),
        "in_flight_complete": sum(answer.complete for answer in caught),
        "in_flight_of_two_versions": sum(answer.versions > 1 for answer in caught),
        "others_complete": sum(answer.complete for answer in answers) - sum(answer.complete for answer in caught),
        "failed": [answer.error or f"{answer.tokens} tokens" for answer in answers if not answer.complete],
        "longest_gap_s": round(max(answer.longest_gap for answer in caught), 2) if caught else None,
    }


def main() -> int:
    """Measure, print and write the result. Returns 1 if a request failed, because that is a defect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=5)
    options = parser.parse_args()
    facts = machine()
    model = environment.model()
    with real_engines(2, model=model) as engines, local_fleet(engines) as fleet, pusher(fleet.url, "--model", str(model)) as trainer:
        trainer.push()  # opens the process group, and is not counted
        found = summary(*asyncio.run(run(fleet.url, trainer, options.pushes)))
    for key, value in found.items():
        print(f"{key:<26} {value}")
    save("inflight", facts, {"engines": 2, "clients": CLIENTS, "tokens": TOKENS, **found})
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
