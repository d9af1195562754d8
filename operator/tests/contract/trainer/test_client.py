"""The client library and the example trainer against a whole fleet on this machine: two real engines behind `sglang-rollout local`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import requests
from e2e.cluster.say import LabError
from e2e.engine import environment
from e2e.kube import eventually

from sglang_rollout.trainer import connect
from tests.contract.support.local_fleet import Urls
from tests.support.paths import OPERATOR, REPOSITORY, TRAINERS

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(900)]

EXAMPLE = REPOSITORY / "examples" / "trainer" / "train.py"


@pytest.fixture
def url(urls: Urls) -> str:
    return urls.fleet


def engine_python(*args: str, seconds: float) -> str:
    """Run a script with torch and this project's package, and return its standard output."""
    variables = environment.environment_variables()
    variables["PYTHONPATH"] = os.pathsep.join([str(OPERATOR), variables["PYTHONPATH"]])
    command = [str(environment.python(make=False)), *args]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def case(url: str) -> Callable[[str], dict[str, Any]]:
    def run(name: str) -> dict[str, Any]:
        out = engine_python(str(TRAINERS / "client_cases.py"), name, url, str(environment.model()), seconds=240)
        reply: dict[str, Any] = json.loads(out.splitlines()[-1])
        return reply

    return run


def test_a_sampling_parameter_that_smg_would_drop_is_refused_before_it_is_sent(url: str) -> None:
    with connect(url, timeout=60) as fleet:
        names = set(fleet.document().sampling_params)
        assert {"max_new_tokens", "sampling_seed", "watermark", "stop_regex"} < names, "the list of the engines' own release"
        with pytest.raises(ValueError, match=r"'max_tokens', .* The nearest name is 'max_new_tokens'"):
            fleet.generate(["alpha"], sampling_params={"temperature": 0, "max_tokens": 4})


def test_all_samples_of_a_prompt_come_back_through_the_url(url: str) -> None:
    params = {"temperature": 0, "max_new_tokens": 4}
    with connect(url, timeout=60) as fleet:
        one = [sample.output_ids for sample in fleet.generate(["alpha", "beta"], sampling_params=params)]
        several = [
            fleet.generate(["alpha", "beta"], n=4, sampling_params=params),
            fleet.generate(["alpha", "beta"], sampling_params=params | {"n": 4}),
        ]
    for samples in several:
        assert [(each.prompt_index, each.sample_index) for each in samples] == [(i, k) for i in range(2) for k in range(4)]
        assert [each.output_ids for each in samples] == [one[0]] * 4 + [one[1]] * 4


def test_an_interrupt_aborts_requests_on_the_engines(urls: Urls) -> None:
    def running() -> int:
        replies = [requests.get(f"{engine}/v1/loads", timeout=10).json() for engine in urls.engines]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for reply in replies for load in reply["loads"])

    def interrupt() -> None:
        eventually("samples are generated", lambda: running() > 0, within=60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with connect(urls.fleet, timeout=60) as fleet:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            fleet.generate(["alpha", "beta"] * 4, n=16, sampling_params={"max_new_tokens": 1900, "ignore_eos": True})
        # Without the abort, 243,200 tokens keep the two engines busy for minutes.
        eventually("the engines are idle", lambda: running() == 0, within=60)
        assert len(fleet.generate(["alpha"], n=2, sampling_params={"max_new_tokens": 2})) == 2


def test_engines_hold_the_pushed_weights_with_any_bucket_size(case: Callable[[str], dict[str, Any]]) -> None:
    rows = case("buckets")["rows"]
    assert [row["equal"] for row in rows] == [True] * 4
    single, few, one, mixed = (row["buckets"] for row in rows)
    assert single > few > one == mixed == 1
    assert rows[0]["bytes"] == rows[1]["bytes"] == rows[2]["bytes"] > rows[3]["bytes"]


def test_a_tensor_that_does_not_fit_is_refused_and_the_next_push_succeeds(case: Callable[[str], dict[str, Any]]) -> None:
    seen = case("wrong_shape")
    assert "'lm_head.weight' has shape [5, 5], in the engines' model [2048, 128]. Nothing was sent" in seen["refused"]
    assert seen["untouched"] == 2
    assert seen["failed"].startswith("transfer: ")
    assert "loaded_weight" in seen["failed"]
    assert seen["seconds"] < 20
    assert seen["serving"] == 0, "engines that saw a part of a failed push must not serve"
    assert seen["healed"]


def test_a_refused_group_ends_the_rendezvous_at_once(case: Callable[[str], dict[str, Any]]) -> None:
    seen = case("wrong_world")
    assert seen["seconds"] < 10
    assert f"world_size={seen['world_size']}" in seen["failed"]


def test_a_push_after_the_group_was_lost_opens_a_new_one(case: Callable[[str], dict[str, Any]]) -> None:
    seen = case("lost_group")
    assert seen["failed"]
    assert seen["seconds"] < 20
    assert seen["equal"]


def test_weights_with_wrong_checksums_are_not_committed(case: Callable[[str], dict[str, Any]]) -> None:
    seen = case("checksums")
    assert "holds other weights than the trainer says" in seen["failed"]
    assert (seen["pushed"], seen["equal"]) == ("2", True)


def test_closing_a_group_does_not_wait_for_an_unreachable_peer() -> None:
    """The destructor of torch's gloo group waits for its broadcast, until a timeout of minutes."""
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    assert engine_python(str(TRAINERS / "silent_peer.py"), seconds=120).split() == ["running"]


def test_workers_of_a_data_loader_leave_the_trainer_its_connections_and_its_process_group() -> None:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    seen = json.loads(engine_python(str(TRAINERS / "forks.py"), seconds=120))
    assert seen == {"strange": [], "closed": "ended with 0", "destroyed": 0, "received": True}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_the_reward_of_the_example_rises_only_with_pushes(url: str, tmp_path: Path, seed: int) -> None:
    def final_reward(*more: str) -> float:
        out = tmp_path / "curve.json"
        small = ["--steps", "14", "--batch", "32", "--tokens", "12", "--learning-rate", "4e-3", "--no-check"]
        fixed = ["--url", url, "--model", str(environment.model()), "--seed", str(seed), "--out", str(out)]
        engine_python(str(EXAMPLE), *fixed, *small, *more, seconds=240)
        return float(mean(row["reward"] for row in json.loads(out.read_text())["rows"][-3:]))

    pushed, frozen = final_reward(), final_reward("--no-push")
    assert frozen < 0.35, "without pushes the reward stays low"
    assert pushed - frozen > 0.15


def test_the_example_checks_every_engine(url: str) -> None:
    fixed = ["--url", url, "--model", str(environment.model()), "--steps", "4", "--batch", "8"]
    out = engine_python(str(EXAMPLE), *fixed, seconds=240)
    assert "after each of 4 pushes: greedy tokens equal the policy's; 4 pushes changed them" in out
