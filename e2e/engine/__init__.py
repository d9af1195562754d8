"""Real SGLang servers on the CPU as plain processes, for tests and for ``CLUSTER=none``.

    with start_engine(22001) as engine:          # the tiny default model; ready when the block begins
        requests.post(f"{engine.url}/generate", json={"text": "alpha", "sampling_params": {"max_new_tokens": 4}})

Make the environment first with ``make engine-venv``. By hand: ``python3 -m e2e.engine 22001``.
"""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.child import start_child
from e2e.cluster.paths import cache_root
from e2e.cluster.say import LabError
from e2e.engine import environment

__all__ = ["Engine", "LabError", "start_engine"]

# Two engines that start at once on two busy cores took 60 s.
_START_SECONDS = 240.0
_STOP_SECONDS = 10.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Engine:
    """One ``sglang.launch_server`` with all its children in a process group of its own."""

    port: int
    command: Sequence[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server and return at once; the log is appended to."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = start_child(
                self.command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def is_ready(self) -> bool:
        """Say whether the server has loaded its model and finished its warm-up."""
        try:
            with _OPENER.open(f"{self.url}/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def wait(self, seconds: float = _START_SECONDS) -> None:
        """Wait until the server is ready; a LabError tells the last lines of its log when it is not in time or ends."""
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            code = self.process.poll() if self.process else "not started"
            if code is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                state = f"ended with code {code}" if code is not None else f"was not ready after {seconds:.0f} s"
                raise LabError(f"the engine on port {self.port} {state}; the end of {self.log}:\n{tail}")
            time.sleep(0.3)

    def signal(self, number: int) -> None:
        """Send a signal to the server and all its children: SIGSTOP makes a stuck engine, SIGKILL a dead one."""
        if self.process:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return  # all of them have ended already

    def kill(self) -> None:
        """End the server and its children as a lost machine would; nothing is left, also of a stopped or stuck server.

        There is no polite way beside it: SGLang takes 5 to 8 s to end on SIGTERM and has nothing to save.
        """
        self.signal(signal.SIGKILL)
        if self.process:
            self.process.wait(_STOP_SECONDS)


def _dtype(model: Path) -> str:
    """Return the type the weights have on disk: left alone, SGLang would serve float32 weights as float16."""
    config = json.loads((model / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def make_engine(
    port: int,
    *,
    model: Path | None = None,
    args: Sequence[str] = (),
    tensor: int = 1,
    log: Path | None = None,
    env: dict[str, str] | None = None,
    old: bool = False,
) -> Engine:
    """Return an engine that is not started yet; see ``start_engine`` for the arguments. ``old``: of SGLang 0.5.20."""
    weights = model or environment.model()
    command = [
        str(environment.python(make=False)),
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(weights),
        "--device",
        "cpu",
        "--dtype",
        _dtype(weights),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--weight-version",
        "base",
        # Without a limit the cache takes 72 % of the machine's memory.
        "--max-total-tokens",
        "16384",
        "--max-running-requests",
        "16",
        "--context-length",
        "2048",
        "--sleep-on-idle",  # an idle scheduler spins on a core otherwise
        "--tp-size",
        str(tensor),
        *args,
    ]
    patches = {"SGLANG_CPU_PATCHES": "checksum" if old else "paused-sleep"}
    variables = environment.environment_variables(old=old) | patches | (env or {})
    if tensor > 1:  # one group of cores per rank; else SGLang wants as many NUMA nodes as ranks
        variables = environment.SEVERAL_RANKS | variables
        variables.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(i % (os.cpu_count() or 1)) for i in range(tensor)))
    return Engine(port, command, log or cache_root() / "logs" / f"engine-{port}.log", variables)


@contextmanager
def start_engine(
    port: int,
    *,
    model: Path | None = None,
    args: Sequence[str] = (),
    tensor: int = 1,
    log: Path | None = None,
    env: dict[str, str] | None = None,
    wait: bool = True,
) -> Iterator[Engine]:
    """Run a real engine on 127.0.0.1:``port`` for the length of the block.

    ``model`` is a folder (default: the tiny float32 Llama), ``args`` are more flags of ``sglang.launch_server``, ``tensor``
    its tensor parallel size, ``log`` a file to append to, ``env`` more environment. With ``wait=False`` several can start
    side by side; call ``engine.wait()`` before use.
    """
    engine = make_engine(port, model=model, args=args, tensor=tensor, log=log, env=env)
    engine.start()
    try:
        if wait:
            engine.wait()
        yield engine
    finally:
        engine.kill()
