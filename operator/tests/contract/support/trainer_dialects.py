"""Trainers of other projects: their exact HTTP calls, and gloo broadcasts from processes that have torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from e2e.chaos.tokens import FEW, PROMPT
from e2e.child import start_child
from e2e.engine import Engine, environment

from sglang_rollout.plugin.install import LOADER
from sglang_rollout.testing import expected_tokens
from sglang_rollout.testing.policy import read_folder
from tests.contract.support.engine_servers import Peer, peer, sglang, stand_in
from tests.support.ports import free_port

SCALES = (0.6, 0.8, 1.5)
"""Factors of the model's tensors, which give weights that differ from each other and from the model's own."""
OLD = {"stand-in": (), "old": (0, 1), "mixed": (0,), "sglang": (), "sglang-old": (0, 1), "sglang-mixed": (0,)} | {
    "staged": (), "staged-mixed": (0,), "sglang-staged": (), "sglang-staged-mixed": (0,), "staged-data": (), "sglang-staged-data": (),
    "sglang-unchecked": (), "sglang-staged-unchecked": (), "sglang-experts": (), "sglang-staged-experts": (),
}  # fmt: skip
"""Indexes of the engines of each kind that are SGLang 0.5.20, or behave like it."""
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, prompt, tokens, *scales = sys.argv[1:]
prompt, found = torch.tensor([json.loads(prompt)]), []
for scale in map(float, scales):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({name: tensor * scale for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        done = model.generate(prompt, max_new_tokens=int(tokens), do_sample=False, eos_token_id=None, pad_token_id=0)
    found.append(done[0, prompt.shape[1]:].tolist())
print(json.dumps(found))
"""


@dataclass
class Fleet:
    """Engines behind one URL."""

    kind: str
    url: str
    engines: list[Engine]
    names: list[str]
    """The model's tensors."""
    expected: dict[float, list[int]] = field(default_factory=dict)
    """Tokens that engines generate with the weights of each scale."""
    ranks: int = 2
    """Ranks of a process group beside the trainer's."""
    folder: Path = field(default_factory=Path)
    """Folder with the logs, and with the state of ``sglang-rollout local``."""

    def document(self) -> dict[str, Any]:
        reply = requests.get(f"{self.url}/fleet", timeout=10)
        return dict(reply.json()) if reply.ok else {}

    def committed(self) -> dict[str, Any]:
        return dict(self.document()["committed"])

    def serving(self, number: int, within: float) -> None:
        end = time.monotonic() + within
        while True:
            try:
                found = self.document()
            except requests.RequestException as error:
                found = {"error": str(error)}
            if found.get("serving") == number:
                return
            assert time.monotonic() < end, f"{number} engines did not serve within {within:g} s: {found}"
            time.sleep(0.1)

    def generate(self, url: str | None = None) -> tuple[list[int], str]:
        """Return tokens and version of the fleet, or of one engine without its gate."""
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": FEW}}
        end = time.monotonic() + 30
        while True:
            reply = requests.post(f"{url or self.url}/generate", json=body, timeout=60)
            if reply.ok:
                break
            # smg learns of engines a moment after they serve, and answers 503 until then.
            assert reply.status_code == 503, reply.text
            assert time.monotonic() < end, reply.text
            time.sleep(0.1)
        return reply.json()["output_ids"], reply.json()["meta_info"]["weight_version"]

    def others(self) -> list[float]:
        """Return two scales of weights that the fleet does not hold."""
        tokens, _ = self.generate()
        return [scale for scale, expected in self.expected.items() if expected != tokens][:2]

    def everywhere(self) -> list[tuple[list[int], str]]:
        return [self.generate(), *(self.generate(engine.url) for engine in self.engines)]


def model_of(kind: str) -> Path:
    """Return the folder of the model that engines of a kind serve."""
    return environment.model("--arch", "qwen3moe") if kind.endswith("-experts") else environment.model()


def _expected(kind: str, folder: Path) -> dict[float, list[int]]:
    model = model_of(kind)
    if kind.startswith("sglang"):
        command = [str(environment.python(make=False)), "-c", REFERENCE, str(model), json.dumps(PROMPT), str(FEW), *map(str, SCALES)]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        return dict(zip(SCALES, json.loads(out.splitlines()[-1]), strict=True))
    found = {}
    with peer() as made:
        for scale in SCALES:
            made.save(scale, folder / str(scale))
            found[scale] = expected_tokens(read_folder(folder / str(scale)), PROMPT, FEW)
    return found


def is_staged(kind: str) -> bool:
    """Return whether fleets of a kind have transport Staged."""
    return "staged" in kind


def _engine(kind: str, index: int, folder: Path) -> Engine:
    old, log = index in OLD[kind], folder / f"engine-{index}.log"
    if kind.endswith("-data"):
        return _two_replicas(kind, log)
    loader = ["--custom-weight-loader", LOADER] if is_staged(kind) else []
    if kind.endswith("-unchecked"):
        model = copy_without_weights(environment.model(), folder / f"model-{index}")
        return sglang(free_port(), log, args=["--load-format", "dummy", *loader], model=model)
    if not kind.startswith("sglang"):
        return stand_in(free_port(), log, *(["--old"] if old else []), *loader)
    return sglang(free_port(), log, old=old, args=loader, model=model_of(kind))


def copy_without_weights(model: Path, folder: Path) -> Path:
    """Copy a model without its tensors, whose names are not known to any agent then. SGLang fills the weights at random."""
    return Path(shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*")))


def _two_replicas(kind: str, log: Path) -> Engine:
    """Return an engine with two data-parallel replicas, which needs no loader."""
    if not kind.startswith("sglang"):
        return stand_in(free_port(), log, "--data", "2")
    engine = sglang(free_port(), log, args=["--dp-size", "2"])
    cores = "|".join(str(replica % (os.cpu_count() or 1)) for replica in range(2))
    engine.environment = engine.environment | environment.SEVERAL_RANKS | {"SGLANG_CPU_OMP_THREADS_BIND": cores}
    return engine


@contextmanager
def fleet(kind: str, folder: Path, number: int = 2, *, options: Sequence[str] = (), serves: bool = True, **policy: Any) -> Iterator[Fleet]:
    """Run engines of a kind behind ``sglang-rollout local``.

    Args:
        kind: Kind of the engines.
        folder: Folder of logs and state.
        number: Number of engines.
        options: Further options of the command.
        serves: False: the fleet may not serve at its start.
        policy: Further fields of ``spec.weights``.
    """
    with ExitStack() as stack:
        made = []
        for index in range(number):
            engine = _engine(kind, index, folder)
            engine.start()
            stack.callback(engine.kill)
            made.append(engine)
        for engine in made:
            engine.wait()
        address = f"127.0.0.1:{free_port()}"
        line = [sys.executable, "-m", "sglang_rollout.cli", "local", "--listen", address, "--backend", "gloo"]
        line += ["--weights", json.dumps(policy), "--state-dir", str(folder / "state"), *options]
        line += [part for engine in made for part in ("--engine", engine.url)]
        if is_staged(kind):
            line += ["--transport", "Staged", "--staging-size-limit", "1Gi", "--store-python", str(environment.python(make=False))]
        with (folder / "local.log").open("ab") as log:
            local = start_child(line, stdout=log, stderr=log)
        stack.callback(local.wait, 30)
        stack.callback(local.terminate)
        names, ranks = list(read_folder(model_of(kind))), 1 if is_staged(kind) else number
        found = Fleet(kind, f"http://{address}", made, names, _expected(kind, folder), ranks, folder)
        if serves:
            found.serving(number, 90)
        yield found


@dataclass
class Trainer:
    """One trainer: its processes, and the outcomes of its calls."""

    fleet: Fleet
    peers: list[Peer]
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))
    commits: list[str] = field(default_factory=list)
    """Calls that changed the committed version."""
    answers: list[tuple[str, requests.Response]] = field(default_factory=list)

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        """Send a call, and record whether it changed the committed version. ``None``: send no body."""
        before = self.fleet.committed()
        reply = requests.request(method, self.fleet.url + path, json=body, timeout=60)
        if self.fleet.committed() != before:
            self.commits.append(path)
        self.answers.append((path, reply))
        return reply

    def get(self, path: str, body: Any = None) -> Any:
        reply = self.call("GET", path, body)
        assert reply.ok, f"GET {path}: {reply.status_code} {reply.text}"
        return reply.json() if reply.headers.get("Content-Type", "").startswith("application/json") else reply.text

    def post(self, path: str, body: Any = None) -> Any:
        reply = self.call("POST", path, body)
        assert reply.ok, f"POST {path}: {reply.status_code} {reply.text}"
        return reply.json()

    def open(
        self,
        world: int,
        *,
        group: str = "weight_update_group",
        who: int = 0,
        text_port: bool = False,
        how: str = "rendezvous",
        **fields: Any,
    ) -> None:
        """Open a process group in one of the ways of ``command_peer.py``: rank 0 listens and joins while the call is sent."""
        mine = self.peers[who]
        mine.group = group
        mine.send_command("open", group=group, world=world, how=how)
        port = mine.read_answer()["port"]
        body = {"master_address": "127.0.0.1", "master_port": str(port) if text_port else port, "rank_offset": 1, "world_size": world}
        asked = self.pool.submit(self.post, "/init_weights_update_group", body | fields)
        assert mine.read_answer() == {"joined": True}
        assert asked.result(60)["success"] is True

    def send(self, scale: float, names: list[str], *, who: int = 0, single: bool = False, flat: bool = False, **fields: Any) -> Any:
        """Send one update call with its broadcasts. ``single``: the form of one tensor without lists."""
        mine = self.peers[who]
        body = mine.describe(scale, names=names, **({"flat": True} if flat else {}))
        body.pop("group_name")
        if single:
            body = {singular: body[plural][0] for singular, plural in (("name", "names"), ("dtype", "dtypes"), ("shape", "shapes"))}
        asked: Future[Any] = self.pool.submit(self.post, "/update_weights_from_distributed", body | fields)
        assert mine.send() == {"sent": True}
        return asked.result(60)

    def buckets(self, parts: int = 2) -> list[list[str]]:
        """Return the names of the model's tensors in ``parts`` lists."""
        names = self.fleet.names
        size = -(-len(names) // parts)
        return [names[at : at + size] for at in range(0, len(names), size)]

    def world(self) -> int:
        info = self.get("/server_info")
        return 1 + int(info["tp_size"]) * int(info["dp_size"])


@contextmanager
def trainer(fleet: Fleet, processes: int = 1) -> Iterator[Trainer]:
    with ExitStack() as stack:
        yield Trainer(fleet, [stack.enter_context(peer()) for _ in range(processes)])


def has_sglangs_shape(path: str, reply: requests.Response) -> bool:
    """Return whether a trainer that was written for SGLang can read the answer."""
    if reply.request.method == "GET" or path == "/workers":
        return True
    body = reply.json()
    paused = path not in ("/pause_generation", "/continue_generation") or body.get("status") == "ok"
    return body["success"] is reply.ok and isinstance(body["message"], str) and paused
