"""The versions that answer, and the columns and conditions that show engines with older versions."""

from __future__ import annotations

import re

import requests

from e2e.cases.actions import document, generate
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.chaos.trainer_process import Trainer
from e2e.kube import eventually

PARAMS = {"temperature": 0, "max_new_tokens": 6}


def columns(stand: StandInRollout) -> dict[str, str]:
    """Return ``kubectl get sglr -o wide`` as a dict. Columns are found by position, because a column may be empty."""
    header, row = stand.kubectl("get", "sglr", stand.name, "-o", "wide").splitlines()[:2]
    starts = [found.start() for found in re.finditer(r"\S+", header)]
    bounds = zip(starts, [*starts[1:], None], strict=True)
    return {header[start:end].strip(): row[start:end].strip() for start, end in bounds}


def leave_behind(stand: StandInRollout) -> tuple[Trainer, str, str]:
    """Drain engine 2 during a push, so that it keeps the older version. Returns the trainer and both versions."""
    trainer = stand.trainer()
    old = stand.push(trainer)
    stand.kubectl.exec(f"{stand.engine(2)}-0", "touch", "/run/rollout/drain", container="engine")
    eventually("the engine has no rank", lambda: stand.row(2)["rank_offset"] is None)
    new = stand.push(trainer)
    stand.kubectl.exec(f"{stand.engine(2)}-0", "rm", "-f", "/run/rollout/drain", container="engine")
    eventually("the engine has a rank again", lambda: stand.row(2)["rank_offset"] is not None)
    return trainer, old, new


def test_latest_only_fences_an_engine_with_an_older_version(stand: StandInRollout) -> None:
    trainer, old, new = leave_behind(stand)
    assert document(stand.url)["serving"] == 2
    eventually("the engine waits for weights", lambda: stand.condition("WaitingForWeights")["status"] == "True")
    message = stand.condition("WaitingForWeights")["message"]
    for part in (stand.engine(2), f"holds version {old}", f"serves {new}", "needs a new process group"):
        assert part in message, message
    eventually("the column STALE counts the engine", lambda: columns(stand)["STALE"] == "1")
    assert (columns(stand)["READY"], columns(stand)["SKEW"], columns(stand)["VERSION"]) == ("2/3", "0", new)
    assert {generate(stand.url).headers["X-Weight-Version"] for _ in range(12)} == {new}
    stand.push(trainer)
    stand.serve()
    eventually("no engine is stale", lambda: columns(stand)["STALE"] == "0")


def test_max_staleness_lets_an_engine_with_an_older_version_serve(stand: StandInRollout) -> None:
    with stand.policy(versionPolicy="MaxStaleness", maxStaleness=1):
        trainer, old, new = leave_behind(stand)
        stand.serve()
        eventually("the column SKEW shows the difference", lambda: columns(stand)["SKEW"] == "1")
        weights = stand.status()["weights"]
        assert (weights["oldestServing"], weights["newestServing"], weights["stale"]) == (old, new, 1)
        assert {answered(stand) for _ in range(30)} <= {old, new}, "which engine answers is the router's choice"
        assert document(stand.url)["committed"]["label"] == new
        latest = stand.push(trainer)
        stand.serve()
        eventually("no skew", lambda: columns(stand)["SKEW"] == "0")
    assert answered(stand) == latest


def answered(stand: StandInRollout) -> str:
    """Return the version of one answer, whose header and body must agree."""
    reply = generate(stand.url)
    assert reply.headers["X-Weight-Version"] == reply.json()["meta_info"]["weight_version"]
    return str(reply.headers["X-Weight-Version"])


def test_batch_is_answered_in_order_by_all_engines(stand: StandInRollout) -> None:
    trainer = stand.trainer()
    label = stand.push(trainer)
    prompts = [[number, number + 1] for number in range(1, 13)]

    def ask(prompt: object) -> requests.Response:
        return requests.post(f"{stand.url}/generate", json={"input_ids": prompt, "sampling_params": PARAMS}, timeout=60)

    single = [ask(prompt).json()["output_ids"] for prompt in prompts]
    batch = ask(prompts)
    assert batch.status_code == 200, batch.text
    assert [answer["output_ids"] for answer in batch.json()] == single
    assert len({tuple(tokens) for tokens in single}) == len(prompts), "the prompts have different tokens"
    assert batch.headers["X-Weight-Version"] == label
    assert {answer["meta_info"]["weight_version"] for answer in batch.json()} == {label}
