"""Measure the memory of each container of the operator at its largest permitted load: ``python -m bench.memory``.

Prints the peak of the resident memory of each process and its children. The memory limits in
``sglang_rollout/controller/render/resources.py`` are at least twice these figures, because a container's memory also contains the buffers
of its sockets. Writes ``bench/results/memory.json``. Needs a limit of 20,000 open files.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from aiohttp import web
from bench.common import free_port, get, machine, save
from bench.fleets import bare_coordinator, below, ended, stand_ins, until
from e2e.child import start_child

from sglang_rollout.api.limits_spec import Limits, limits_options
from sglang_rollout.batches.routes import MAX_BODY_BYTES
from sglang_rollout.bounded import MESSAGE_BYTES, open_session
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import Peer
from sglang_rollout.proxy.config import FRONT_CONNECTIONS, GATE_CONNECTIONS
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import TERM_HEADER

FRONT_BYTES, GATE_BYTES = 59_000, 4000
"""Bytes of an unfinished body: nearly as many as the front, and the gate, wait for."""
ADDRESSES = [f"127.0.0.{number}" for number in range(2, 10)]
"""Addresses of clients. Three addresses cannot use all connections."""
CONTROL_BYTES = 8 * 2**20
AGENT_BYTES = 16 * 2**20
ENGINES = 64
PROMPTS = 2**18
"""Largest value of ``engine.limits.promptsPerRequest``."""
BATCH_SECONDS = 45.0
"""Time in which the batch server receives its bodies."""
SMG_REQUESTS, SMG_BYTES = 1024, 2**20


@contextmanager
def part(folder: Path, *line: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of our commands."""
    with (folder / "log").open("ab") as log:
        process = start_child([sys.executable, "-m", "sglang_rollout.cli", *line], stdout=log, stderr=log)
    with ended(process):
        yield process


def peak_mib(pid: int) -> int:
    """Return the sum of the largest resident memories of a process and its descendants."""
    kib = 0
    for each in below([pid]):
        with suppress(OSError):
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
            kib += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
    return kib >> 10


def listens(port: int) -> bool:
    """Return whether a process listens at a loopback port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def unfinished_bodies(port: int, number: int, size: int) -> Iterator[None]:
    """Open connections from several addresses, and send the start of a body on each."""
    head = b"POST /generate HTTP/1.1\r\nHost: fleet\r\nContent-Type: application/json\r\nContent-Length: 900000\r\n\r\n"
    with ExitStack() as stack:
        for index in range(number):
            connection = stack.enter_context(socket.socket())
            connection.bind((ADDRESSES[index % len(ADDRESSES)], 0))
            connection.connect(("127.0.0.1", port))
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.send(head + b'{"text": "' + b"x" * size)
        time.sleep(5)
        yield


def proxy(folder: Path, *line: str, connections: int, size: int) -> int:
    """Return the peak of a front or a gate whose connections all have unfinished bodies of ``size`` bytes."""
    port = free_port()
    with part(folder, "proxy", *line, "--listen", f"127.0.0.1:{port}") as process:
        until(f"the {line[0]} listens", lambda: listens(port))
        with unfinished_bodies(port, connections, size):
            return peak_mib(process.pid)


def front(folder: Path) -> int:
    """Return the peak of a front."""
    return proxy(folder, "front", "--runtime-dir", str(folder / "front"), connections=FRONT_CONNECTIONS, size=FRONT_BYTES)


def gate(folder: Path) -> int:
    """Return the peak of a closed gate."""
    return proxy(folder, "gate", "--socket", str(folder / "gate.sock"), connections=GATE_CONNECTIONS, size=GATE_BYTES)


async def post_all(url: str, bodies: Sequence[bytes], headers: dict[str, str] | None = None, seconds: float = 60.0) -> list[int]:
    """Send all bodies at once, and return the statuses that arrive in time."""
    statuses: list[int] = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=seconds)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send(body: bytes) -> None:
            given = {"Content-Type": "application/json", **(headers or {})}
            with suppress(TimeoutError, aiohttp.ClientError):
                async with session.post(url, data=body, headers=given) as reply:
                    statuses.append(reply.status)
                    await reply.read()

        await asyncio.gather(*map(send, bodies))
    return statuses


async def never_answer(request: web.Request) -> web.Response:
    """Read a request and wait."""
    await request.read()
    await asyncio.sleep(3600)
    return web.Response()


async def batches(folder: Path) -> int:
    """Return the peak of a batch server that receives bodies until it refuses more."""
    stub, port = free_port(), free_port()
    app = web.Application(client_max_size=2 * MAX_BODY_BYTES)
    app.router.add_post("/{path:.*}", never_answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", stub).start()
    ids = json.dumps({"input_ids": [[12345] * 2**14] * 550}, separators=(",", ":")).encode()
    texts = json.dumps({"text": ["x" * 250] * PROMPTS}).encode()
    emoji = json.dumps({"text": ["x" * 1000 + "\U0001f600"] * 50_000}, ensure_ascii=False).encode()
    small = json.dumps({"input_ids": [[7]] * PROMPTS, "other": [{}] * 2**20}).encode()
    assert max(map(len, (ids, texts, emoji, small))) < MAX_BODY_BYTES
    line = ["batches", "--listen", f"127.0.0.1:{port}", "--smg-url", f"http://127.0.0.1:{stub}", "--coordinator-url", "http://127.0.0.1:9"]
    line += limits_options(Limits(prompts_per_request=PROMPTS, samples_per_request=PROMPTS))
    try:
        with part(folder, *line) as process:
            await asyncio.to_thread(until, "the batch server listens", lambda: listens(port))
            bodies = [ids, small, emoji, *[texts] * 8, ids, ids]
            statuses = await post_all(f"http://127.0.0.1:{port}/generate", bodies, seconds=BATCH_SECONDS)
            print(f"batches: refused {statuses}")
            return peak_mib(process.pid)
    finally:
        await runner.cleanup()


def coordinator(folder: Path) -> int:
    """Return the peak of a coordinator that sends eight of the largest control calls at once to all engines."""
    body = _control_body(80_000)
    assert len(body) < CONTROL_BYTES
    with stand_ins(ENGINES) as urls, bare_coordinator(urls) as fleet:
        url = f"{fleet.url}{ControlCall.ABORT_REQUEST.path}"
        print(f"coordinator: {asyncio.run(post_all(url, [body] * 8))}")
        return peak_mib(fleet.roots[1])


def agent(folder: Path) -> int:
    """Return the peak of an agent that passes four of the largest calls at once to its engine."""
    port = free_port()
    (folder / "token").write_text("bench")
    body = _control_body(160_000)
    assert len(body) < AGENT_BYTES
    line = ["agent", "--name", "e0", "--listen", f"127.0.0.1:{port}", "--gate-socket", str(folder / "none.sock")]
    line += ["--state-dir", str(folder / "agent"), "--token-file", str(folder / "token"), "--engine-url"]
    with stand_ins(1) as urls, part(folder, *line, urls[0]) as process:
        until("the agent sees the engine", lambda: bool(get(f"http://127.0.0.1:{port}/health")))
        url = f"http://127.0.0.1:{port}{ControlCall.ABORT_REQUEST.path}"
        print(f"agent: {asyncio.run(_call_agent(url, [body] * 4))}")
        return peak_mib(process.pid)


async def _call_agent(url: str, bodies: Sequence[bytes]) -> list[int]:
    """Make all calls at once, as the coordinator does, and return the statuses."""
    peer = Peer(Credentials("bench"))
    async with open_session(timeout=aiohttp.ClientTimeout(total=60)) as session:
        calls = (peer.call(session, "POST", url, body, {TERM_HEADER: "1"}, limit=MESSAGE_BYTES) for body in bodies)
        return [answer.status for answer in await asyncio.gather(*calls)]


def _control_body(tensors: int) -> bytes:
    """Return the body of a call that every engine answers, with as many tensors as an update of a large model has."""
    names = [f"model.layers.{number}.mlp.experts.{number}.gate_proj.weight" for number in range(tensors)]
    described = {"names": names, "dtypes": ["bfloat16"] * tensors, "shapes": [[7168, 2048]] * tensors}
    return json.dumps({"rid": "unknown", **described}).encode()


async def smg(folder: Path) -> int:
    """Return the peak of an smg with 1,024 requests of 1 MiB, which it keeps for a retry."""
    stub, port, metrics = free_port(), free_port(), free_port()
    app = web.Application(client_max_size=2 * SMG_BYTES)
    app.router.add_post("/{path:.*}", never_answer)
    app.router.add_get("/{path:.*}", _describe_engine)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", stub).start()
    line = ["proxy", "smg", "--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{metrics}", "--policy", "RoundRobin"]
    try:
        with part(folder, *line) as process:
            await asyncio.to_thread(until, "smg listens", lambda: listens(port))
            async with aiohttp.ClientSession() as session:
                await session.post(f"http://127.0.0.1:{port}/workers", json={"url": f"http://127.0.0.1:{stub}"})
            await asyncio.sleep(5)
            body = json.dumps({"text": "x" * SMG_BYTES}).encode()[: SMG_BYTES - 20] + b'"}'
            print(f"smg: {await post_all(f'http://127.0.0.1:{port}/generate', [body] * SMG_REQUESTS, seconds=30)}")
            return peak_mib(process.pid)
    finally:
        await runner.cleanup()


async def _describe_engine(request: web.Request) -> web.Response:
    """Answer as an engine that is up."""
    found = {"model_path": "m", "served_model_name": "m", "tokenizer_path": "m", "is_generation": True, "tp_size": 1, "dp_size": 1}
    return web.json_response({**found, "version": "0.5.23"})


def operator(folder: Path) -> int:
    """Return the peak of the operator's work for a rollout of 1,000 engines, which it reads, plans and reports."""
    with (folder / "log").open("wb") as log:
        process = start_child([sys.executable, "-c", _OPERATOR], stdout=subprocess.PIPE, stderr=log)
    out, _ = process.communicate(timeout=120)
    return int(out) >> 10


_OPERATOR = """
import resource
import sglang_rollout.controller.main
from bench.plans import SETTINGS, make_plan, observe_fleet
fleet = observe_fleet(1000, 1, serving=True)
make_plan(fleet, SETTINGS)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


MEASURES: dict[str, Callable[[Path], int]] = {
    "front": front,
    "gate": gate,
    "coordinator": coordinator,
    "agent": agent,
    "operator": operator,
    "batches": lambda folder: asyncio.run(batches(folder)),
    "smg": lambda folder: asyncio.run(smg(folder)),
}


def main() -> None:
    """Measure, print, and write the result."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    facts = machine()
    peaks = {}
    with TemporaryDirectory(prefix="rollout-bench-") as name:
        for part_name, measure in MEASURES.items():
            folder = Path(name) / part_name
            folder.mkdir()
            peaks[part_name] = measure(folder)
            print(f"{part_name:<12} {peaks[part_name]:>6} MiB", flush=True)
    save("memory", facts, {"peak_mib": peaks})


if __name__ == "__main__":
    main()
