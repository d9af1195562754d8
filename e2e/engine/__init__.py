"""Real SGLang servers on the CPU as plain processes, for tests and for ``CLUSTER=none``.

    with start_engine(22001) as engine:          # with the tiny default model; ready when the block begins
        requests.post(f"{engine.url}/generate", json={"text": "alpha", "sampling_params": {"max_new_tokens": 4}})

``make engine-venv`` creates the environment. ``python3 -m e2e.engine 22001`` runs one engine.
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
    """One ``sglang.launch_server`` with all its children in its own process group."""

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
        """Start the server without waiting. Its output is appended to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = start_child(
                self.command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def is_ready(self) -> bool:
        """Return whether the server has loaded its model and finished its warm-up."""
        try:
            with _OPENER.open(f"{self.url}/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def wait(self, seconds: float = _START_SECONDS) -> None:
        """Wait until the server is ready. Raises LabError with the end of its log if the server ends or is late."""
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            code = self.process.poll() if self.process else "not started"
            if code is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                state = f"ended with code {code}" if code is not None else f"was not ready after {seconds:.0f} s"
                raise LabError(f"the engine on port {self.port} {state}; the end of {self.log}:\n{tail}")
            time.sleep(0.3)

    def signal(self, number: int) -> None:
        """Send a signal to the server and all its children, for example SIGSTOP for a hung engine."""
        if self.process:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return  # all of them have ended already

    def kill(self) -> None:
        """Kill the server and its children, also if they are stopped or hung.

        SIGTERM is not used, because SGLang then takes 5 to 8 s to end and has nothing to save.
        """
        self.signal(signal.SIGKILL)
        if self.process:
            self.process.wait(_STOP_SECONDS)


def _dtype(model: Path) -> str:
    """Return the type of the weights on disk. By default, SGLang would serve float32 weights as float16."""
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
    """Return an engine that is not started yet. For the arguments see ``start_engine``. ``old``: run SGLang 0.5.20."""
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
    if tensor > 1:  # one group of cores per rank; otherwise SGLang needs as many NUMA nodes as ranks
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

    Args:
        port: Port of the server.
        model: Folder of the model; by default the tiny float32 Llama.
        args: More flags of ``sglang.launch_server``.
        tensor: Tensor parallel size.
        log: File that the server's output is appended to.
        env: More environment variables.
        wait: Wait until the engine is ready. Otherwise call ``engine.wait()`` before use, so that several engines start in parallel.
    """
    engine = make_engine(port, model=model, args=args, tensor=tensor, log=log, env=env)
    engine.start()
    try:
        if wait:
            engine.wait()
        yield engine
    finally:
        engine.kill()
