"""The shell and Python blocks of the pages, run against the fleet of stand-ins that docs/get-started/one-machine.md starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e.child import start_child
from e2e.engine import environment
from e2e.kube import eventually
from e2e.pages import SHELL_RULES, Block, Runner, blocks_for, is_like

from sglang_rollout.checkpoints.format import build_header
from sglang_rollout.testing.policy import default_state
from tests.contract.support.local_fleet import wait_routed, wait_serving
from tests.support.paths import OPERATOR, TRAINERS
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(300)]

START = "docs/get-started/one-machine.md"
"""The page that starts the fleet, with two engines."""
SERVERS = blocks_for(Runner.SERVER)
Server = tuple[subprocess.Popen[bytes], Path]
"""A process and the file of its standard output."""
PROGRAM = """#!/bin/sh
# sglang-rollout; stand-ins run with the engine environment's Python, because their process groups need torch.
case $1 in stand-in) python={engine} ;; *) python={project} ;; esac
exec "$python" -m sglang_rollout.cli "$@"
"""


@dataclass(frozen=True)
class Place:
    """A folder and free ports, in place of the paths and ports that pages name."""

    folder: Path
    first_port: int

    @classmethod
    def prepare(cls, folder: Path) -> Place:
        """Create the model and the checkpoint that pages name, and the programs."""
        for model in ("models/policy", "ckpt/policy/step-40"):
            write_model(folder / model)
        programs = folder / "bin"
        programs.mkdir()
        (programs / "sglang-rollout").write_text(PROGRAM.format(engine=environment.python(make=False), project=sys.executable))
        (programs / "sglang-rollout").chmod(0o755)
        return cls(folder, free_port(row=20))

    @property
    def fleet(self) -> str:
        """URL of the fleet that pages call localhost:30000."""
        return f"http://127.0.0.1:{self.first_port}"

    def rewrite(self, text: str) -> str:
        """Return a block with this place's ports, paths and host names. Pages use the ports 30000 to 30009 and 30100 to 30109."""
        text = re.sub(r"\b30([01])0(\d)\b", lambda found: str(self.first_port + 10 * int(found[1]) + int(found[2])), text)
        text = re.sub(r"\b(?:demo|policy)-router:", "127.0.0.1:", text)
        return re.sub(r'(?<=")/(?=(?:ckpt|models)/)', f"{self.folder}/", text)

    def variables(self) -> dict[str, str]:
        """Return the environment of a block. A block that shards its model is the only rank of `torchrun`."""
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        more = {"PATH": path, "PYTHONPATH": str(OPERATOR), "OMP_NUM_THREADS": "1", "NO_PROXY": "*", "no_proxy": "*"}
        return os.environ | rank | more

    def run(self, *command: str) -> str:
        """Run a command to its end and return its output."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout


def write_model(folder: Path) -> None:
    """Write the stand-in's base weights as a model folder."""
    folder.mkdir(parents=True)
    tensors = default_state()
    header = build_header((name, "F32", tensor.shape) for name, tensor in tensors.items())
    (folder / "model.safetensors").write_bytes(header + b"".join(tensor.data for tensor in tensors.values()))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))


@contextmanager
def started(block: Block, place: Place) -> Iterator[list[Server]]:
    """Run the commands of a block beside each other until the ``with`` block ends. They have printed what the page shows."""
    commands = re.sub(r"\\\n", " ", place.rewrite(block.text)).splitlines()
    with ExitStack() as stack:
        servers = []
        for number, command in enumerate(commands):
            log = place.folder / f"{Path(block.page).stem}-{block.line}-{number}.log"
            with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
                child = start_child(["bash", "-c", f"exec {command}"], cwd=place.folder, env=place.variables(), stdout=out, stderr=err)
            stack.callback(child.wait, 30)
            stack.callback(child.terminate)
            servers.append((child, log))
            wait_for_output(command, child, log)
        if shown := block.output:
            eventually(shown, lambda: is_like("".join(log.read_text() for _, log in servers), place.rewrite(shown)), within=30)
        yield servers


def wait_for_output(command: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a command has printed something, which the programs of this project do when they listen."""
    eventually(f"{command} prints something", lambda: log.read_text() or child.poll() is not None, within=120)
    assert child.poll() is None, log.read_text() + log.with_suffix(".err").read_text()


@pytest.fixture(scope="module")
def place(engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The place in which the page's fleet runs."""
    made = Place.prepare(tmp_path_factory.mktemp("pages"))
    with ExitStack() as stack:
        servers = [server for block in SERVERS if block.page == START for server in stack.enter_context(started(block, made))]
        wait_serving(made.fleet, 2, 90, *servers[-1])
        wait_routed(made.fleet, 2)
        yield made


@pytest.mark.parametrize("block", blocks_for(Runner.SHELL), ids=str)
def test_shell_block_runs(place: Place, block: Block) -> None:
    output = place.run("bash", "-c", SHELL_RULES + place.rewrite(block.text))
    assert block.output is None or is_like(output, place.rewrite(block.output)), output


@pytest.mark.parametrize("block", blocks_for(Runner.PYTHON), ids=str)
def test_python_block_runs(place: Place, block: Block) -> None:
    file = place.folder / "block.py"
    file.write_text(place.rewrite(block.text))
    python, model = str(environment.python(make=False)), str(place.folder / "models/policy")
    place.run(python, str(TRAINERS / "page_block.py"), place.fleet, model, str(file), str(block))


@pytest.mark.parametrize("block", [block for block in SERVERS if block.page != START], ids=str)
def test_server_block_starts(engine_environment: None, tmp_path: Path, block: Block) -> None:
    with started(block, Place.prepare(tmp_path)) as servers:
        assert all(child.poll() is None for child, _ in servers)
