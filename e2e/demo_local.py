"""``make demo CLUSTER=none``: two real CPU engines, ``sglang-rollout local`` and the example trainer as plain processes. No root."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import requests

from e2e.child import start_child
from e2e.cluster.say import LabError, say, step, wait_until
from e2e.demo import draw
from e2e.engine import environment, start_engine

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "out"
FLEET = "127.0.0.1:21100"
ENGINES = (21101, 21102)


@contextmanager
def local_fleet(engines: tuple[str, ...], state: pathlib.Path) -> Iterator[str]:
    """Run ``sglang-rollout local`` in front of the engines and yield its URL."""
    command = [str(pathlib.Path(sys.executable).with_name("sglang-rollout")), "local", "--listen", FLEET, "--backend", "gloo"]
    command += ["--state-dir", str(state), *(word for engine in engines for word in ("--engine", engine))]
    log = OUT / "local.log"
    with log.open("w") as sink:
        child = start_child(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        url = f"http://{FLEET}"

        def serving() -> bool:
            if child.poll() is not None:
                raise LabError(f"sglang-rollout local ended with {child.returncode}: {log.read_text()[-500:]}")
            try:
                return bool(requests.get(f"{url}/fleet", timeout=5).json()["serving"] == len(engines))
            except (requests.RequestException, ValueError, KeyError):
                return False

        wait_until(serving, seconds=60, what=f"not every engine serves; see {log}")
        yield url
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()


def train(url: str, curve: pathlib.Path, *arguments: str) -> None:
    """Run the example trainer with the engine environment's torch."""
    command = [environment.python(), str(ROOT / "examples/trainer/train.py"), "--url", url, "--model", str(environment.model())]
    done = subprocess.run(
        [*map(str, command), "--out", str(curve), *arguments],
        env=environment.environment_variables()
        | {"PYTHONPATH": f"{ROOT / 'operator'}:{environment.environment_variables()['PYTHONPATH']}"},
        timeout=400,
        check=False,
    )
    if done.returncode:
        raise LabError(f"the trainer ended with exit code {done.returncode}")


def main() -> None:
    """Run the demo without a cluster."""
    began = time.monotonic()
    OUT.mkdir(exist_ok=True)
    with ExitStack() as stack:
        with step("two real SGLang engines load their model"):
            engines = [stack.enter_context(start_engine(port, log=OUT / f"engine-{port}.log", wait=False)) for port in ENGINES]
            for engine in engines:
                engine.wait()
        state = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-rollout-")))
        with step("sglang-rollout local: gate and agent per engine, smg, coordinator, front"):
            url = stack.enter_context(local_fleet(tuple(engine.url for engine in engines), state))
        with step("trainer that pushes no weights: its reward does not rise"):
            train(url, OUT / "flat.json", "--no-push")
        with step("trainer that pushes its weights through the URL after every step"):
            train(url, OUT / "pushed.json")
        document = requests.get(f"{url}/fleet", timeout=5).json()
        say(f"\nGET {url}/fleet: committed {json.dumps(document['committed'])}, {document['serving']} engines serve")
    with step("draw both curves"):
        draw(OUT, json.loads((OUT / "pushed.json").read_text()), json.loads((OUT / "flat.json").read_text()))
    say(f"\nDone in {time.monotonic() - began:.0f} s; no process keeps running. Reward curves: {OUT / 'reward.png'}, logs: {OUT}")


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        say(f"demo: {error}")
        sys.exit(1)
