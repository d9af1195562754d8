"""Measure what the check of callers costs.

    python -m bench.callers [--pairs 20]

Two stand-in engines behind a complete ``sglang-rollout local``. Each comparison alternates its two ways, and prints the ratio within
each pair: geometric mean and 95 % confidence interval.

flood    the median of ten pushes, without and with a client that sends control calls to the fleet's URL as fast as it gets their
         refusals. The aim is a ratio of at most 1.1.
request  a request for tokens, with ``generate: Open`` and with ``generate: Clients``, which asks the coordinator about each caller
push     a push to two stand-in engines, with ``control: Open`` and with ``control: Token``
call     the decision about one control call of a known pod among 1000, with ``control: Open`` and with ``control: Trainers``

For requests, pushes and calls, it also prints the added microseconds, and the added processor time of the fleet's processes. For the
flood, it prints the added processor time of the fleet in one second without a push.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from bench.common import cpu_seconds, free_port, get, machine, save
from bench.fleets import LocalFleet, Program, bare_coordinator, below, ended, local_fleet, stand_ins, until
from bench.latency import body
from bench.pusher import pusher
from e2e.child import start_child

from sglang_rollout.api.security_spec import ControlAccess, Security
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.coordinator.callers.pods import PodTable
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.access import CALLER_HEADER

FLOOD_SECONDS = 1.5
"""Time for which a flood runs before its push. A push without a flood waits as long."""
FLOOD_BEGIN_SECONDS = 5.0
"""Time of a flood before the first pair. In each flood the coordinator refuses up to 1000 calls in 10 s, and the front all others."""
FLOOD_CONNECTIONS = 16
FLOOD_ADDRESS = "127.0.0.2"
REFUSED_CALL = b"POST /pause_generation HTTP/1.1\r\nHost: fleet\r\nOrigin: http://example.com\r\nContent-Length: 0\r\n\r\n"
"""A call as a web page sends it. A fleet without Kubernetes refuses no other call of its own machine."""
REQUESTS, CALLS, PUSHES, PODS = 50, 2000, 10, 1000


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, and the ends of its 95 % confidence interval."""
    mean = fmean(values)
    half = 1.96 * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def compare(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the ratio of the second to the first value of each pair, and the difference in microseconds, with their intervals."""
    ratio = [math.exp(value) for value in interval([math.log(second / first) for first, second in pairs])]
    added = interval([(second - first) * 1e6 for first, second in pairs])
    return {
        "pairs": len(pairs),
        "milliseconds": [round(fmean(way) * 1000, 3) for way in zip(*pairs, strict=True)],
        "ratio": [round(value, 3) for value in ratio],
        "added_us": [round(value, 1) for value in added],
    }


def alternate(number: int, ways: tuple[Callable[[], float], Callable[[], float]]) -> list[tuple[float, float]]:
    """Measure both ways in turns, in an order that alternates, and return the pairs."""
    pairs = []
    for index in range(number):
        if index % 2:
            second = ways[1]()
            pairs.append((ways[0](), second))
        else:
            pairs.append((ways[0](), ways[1]()))
    return pairs


# --- flood ---------------------------------------------------------------------------------------------------------------


class Flood:
    """A client that sends refused control calls from an address of its own while it is on: the next call as soon as it gets an answer.

    It uses plain sockets, so that the client itself needs little of the processor that it shares with the fleet.
    """

    def __init__(self, url: str) -> None:
        self.seconds = 0.0
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self._answers = [0] * FLOOD_CONNECTIONS

    @property
    def answers(self) -> int:
        """Number of refused calls."""
        return sum(self._answers)

    @contextmanager
    def running(self, before: float = FLOOD_SECONDS) -> Iterator[None]:
        """Send calls for ``before`` seconds and for the length of the block."""
        stop = threading.Event()
        threads = [threading.Thread(target=self._send, args=(stop, index)) for index in range(FLOOD_CONNECTIONS)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        time.sleep(before)
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            self.seconds += time.monotonic() - began

    def _send(self, stop: threading.Event, index: int) -> None:
        while not stop.is_set():
            with socket.create_connection(self._address, timeout=30, source_address=(FLOOD_ADDRESS, 0)) as connection:
                while not stop.is_set():
                    connection.sendall(REFUSED_CALL)
                    answer = connection.recv(65536)
                    if not answer:
                        break
                    if not answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 429 ")):
                        raise SystemExit(f"a refused call got {answer[:100]!r}")
                    self._answers[index] += 1


def flood(fleet: LocalFleet, pairs: int) -> dict[str, Any]:
    """Compare pushes without and with a flood."""
    client = Flood(fleet.url)
    with pusher(fleet.url) as trainer:
        trainer.push(5)  # opens the process group; the first pushes are compared by checksums

        def push() -> float:
            return median(end - began for began, end in trainer.push(PUSHES))

        def push_alone() -> float:
            time.sleep(FLOOD_SECONDS)
            return push()

        def push_in_flood() -> float:
            with client.running():
                return push()

        with client.running(FLOOD_BEGIN_SECONDS):
            push()
        result = compare(alternate(pairs, (push_alone, push_in_flood)))
    idle = idle_cpu(fleet)
    with client.running():
        added = idle_cpu(fleet) - idle
    return {
        "what": "flood",
        **result,
        "refused_per_second": round(client.answers / client.seconds),
        "cpu_ms_per_second": round(added * 1000),
    }


def idle_cpu(fleet: LocalFleet) -> float:
    """Return the processor seconds that the fleet's processes use in one second without a push."""
    pids, seconds = list(below(fleet.roots)), 10 * FLOOD_SECONDS
    used = cpu_seconds(pids)
    time.sleep(seconds)
    return (cpu_seconds(pids) - used) / seconds


# --- requests ------------------------------------------------------------------------------------------------------------


@contextmanager
def checking_front(addresses: Mapping[str, str]) -> Iterator[LocalFleet]:
    """Run a second front and batch server over a fleet's smg and coordinator, as with ``generate: Clients``."""
    smg, coordinator = addresses["smg"], addresses["coordinator"]
    listen, batches = (f"127.0.0.1:{free_port()}" for _ in range(2))
    program = (sys.executable, "-m", "sglang_rollout.cli")
    with TemporaryDirectory(prefix="rollout-bench-") as folder, ExitStack() as stack:
        lines = (
            ("batches", "--listen", batches, "--smg-url", f"http://{smg}", "--coordinator-url", f"http://{coordinator}"),
            (
                "proxy",
                "front",
                "--listen",
                listen,
                "--smg",
                smg,
                "--coordinator",
                coordinator,
                "--batches",
                batches,
                "--runtime-dir",
                folder,
            ),
        )
        programs: list[Program] = []
        for line in lines:
            log = stack.enter_context((Path(folder) / f"{line[0]}.log").open("wb"))
            process = stack.enter_context(ended(start_child([*program, *line, "--check-data-callers"], stdout=log, stderr=log)))
            programs.append(Program(process, Path(log.name)))
        url = f"http://{listen}"
        until(f"{url} answers", lambda: bool(get(f"{url}/fleet")), programs=programs)
        yield LocalFleet(url, [], programs)


def requests(fleet: LocalFleet, checking: LocalFleet, pairs: int) -> dict[str, Any]:
    """Compare requests for one token through both fronts."""
    pids = [pid for roots in (fleet.roots, checking.roots) for pid in below(roots)]
    cpu: dict[str, float] = {fleet.url: 0.0, checking.url: 0.0}

    def block(url: str) -> float:
        used = cpu_seconds(pids)
        seconds = asyncio.run(one_by_one(url)) / REQUESTS
        cpu[url] += cpu_seconds(pids) - used
        return seconds

    for url in cpu:
        block(url)  # connections of the fronts
    cpu = dict.fromkeys(cpu, 0.0)
    result = compare(alternate(pairs, (lambda: block(fleet.url), lambda: block(checking.url))))
    added = (cpu[checking.url] - cpu[fleet.url]) / (pairs * REQUESTS)
    return {"what": "request", **result, "added_cpu_us": round(added * 1e6)}


async def one_by_one(url: str) -> float:
    """Send requests one after the other, and return their seconds together."""
    async with aiohttp.ClientSession() as session:
        began = time.monotonic()
        for number in range(REQUESTS):
            async with session.post(f"{url}/generate", json=body(number, stream=False)) as reply:
                reply.raise_for_status()
                await reply.read()
        return time.monotonic() - began


# --- pushes --------------------------------------------------------------------------------------------------------------


def pushes(pairs: int) -> dict[str, Any]:
    """Compare pushes to two fleets that run side by side: one is open, the other demands a token."""
    with ExitStack() as stack:
        fleets, trainers = [], []
        for token in ("", "a-token-of-the-benchmark"):
            fleet = stack.enter_context(bare_coordinator(stack.enter_context(stand_ins(2)), token=token))
            trainer = stack.enter_context(pusher(fleet.url, *(["--token", token] if token else [])))
            trainer.push(5)  # opens the process group; the first pushes are compared by checksums
            fleets.append(fleet)
            trainers.append(trainer)
        cpu = [0.0, 0.0]

        def block(index: int) -> float:
            pids = list(below(fleets[index].roots))
            used = cpu_seconds(pids)
            seconds = median(end - began for began, end in trainers[index].push(PUSHES))
            cpu[index] += cpu_seconds(pids) - used
            return seconds

        result = compare(alternate(pairs, (lambda: block(0), lambda: block(1))))
    return {"what": "push", **result, "added_cpu_us": round((cpu[1] - cpu[0]) / (pairs * PUSHES) * 1e6)}


# --- calls ---------------------------------------------------------------------------------------------------------------


def calls(pairs: int) -> dict[str, Any]:
    """Compare decisions about a control call."""
    checks = [make_check(access) for access in (ControlAccess.OPEN, ControlAccess.TRAINERS)]
    headers = {CALLER_HEADER: "10.0.3.7"}
    cpu = [0.0, 0.0]

    def block(index: int) -> float:
        async def decide() -> None:
            for _ in range(CALLS):
                await checks[index].check("/pause_generation", headers, "127.0.0.1")

        began, used = time.perf_counter(), time.process_time()
        asyncio.run(decide())
        cpu[index] += time.process_time() - used
        return (time.perf_counter() - began) / CALLS

    result = compare(alternate(pairs, (lambda: block(0), lambda: block(1))))
    return {"what": "call", **result, "added_cpu_us": round((cpu[1] - cpu[0]) / (pairs * CALLS) * 1e6, 2)}


def make_check(access: ControlAccess) -> CallerCheck:
    """Return a check with the default settings but ``control``, in a namespace with many pods."""
    security = Security(control=access)
    pods = PodTable("rl", time.time)
    found = (
        {
            "metadata": {"uid": str(index), "namespace": "rl", "name": f"pod-{index}", "labels": {"app": "trainer"}},
            "spec": {},
            "status": {"phase": "Running", "podIP": f"10.0.{index // 250}.{index % 250}"},
        }
        for index in range(PODS)
    )
    pods.replace(pods.own, found)
    return CallerCheck(name="demo", namespace="rl", security=lambda: security, pods=pods, credentials=Credentials("control").derive)


# -------------------------------------------------------------------------------------------------------------------------


def inner_addresses(fleet: LocalFleet) -> dict[str, str]:
    """Return the addresses of smg and coordinator, from the command line of the batch server."""
    words = next(line.split() for line in below(fleet.roots).values() if "sglang_rollout.cli batches" in line)
    return {name: words[words.index(f"--{name}-url") + 1].removeprefix("http://") for name in ("smg", "coordinator")}


def show(row: Mapping[str, Any]) -> None:
    """Print one row."""
    (first, second), (ratio, low, high), (added, least, most) = row["milliseconds"], row["ratio"], row["added_us"]
    more = "".join(f", {name} {row[name]}" for name in ("refused_per_second", "cpu_ms_per_second", "added_cpu_us") if name in row)
    print(
        f"{row['what']:<8} {first} → {second} ms, ratio {ratio} ({low} to {high}), added {added} µs ({least} to {most}){more}", flush=True
    )


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    facts = machine()
    rows = [calls(pairs), pushes(pairs)]
    for row in rows:
        show(row)
    with stand_ins(2) as urls, local_fleet(urls) as fleet:
        with checking_front(inner_addresses(fleet)) as checking:
            rows.append(requests(fleet, checking, pairs))
        show(rows[-1])
        rows.append(flood(fleet, pairs))
        show(rows[-1])
    save("callers", facts, {"rows": rows})


if __name__ == "__main__":
    main()
