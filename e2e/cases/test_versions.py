"""Which version answers, who is behind, and where a user sees it."""

from __future__ import annotations

import re

import requests

from e2e.cases.actions import document, generate
from e2e.cases.stand import Stand
from e2e.chaos.talk import Trainer
from e2e.kube import eventually

PARAMS = {"temperature": 0, "max_new_tokens": 6}


def columns(stand: Stand) -> dict[str, str]:
    """``kubectl get sglr -o wide`` as a dict. A column may be empty, so each is what stands below its name."""
    header, row = stand.kubectl("get", "sglr", stand.name, "-o", "wide").splitlines()[:2]
    starts = [found.start() for found in re.finditer(r"\S+", header)]
    bounds = zip(starts, [*starts[1:], None], strict=True)
    return {header[start:end].strip(): row[start:end].strip() for start, end in bounds}


def leave_behind(stand: Stand) -> tuple[Trainer, str, str]:
    """Drain engine 2 while a trainer's group is opened: it then holds an older version than the fleet. The trainer and both versions."""
    trainer = stand.trainer()
    old = stand.push(trainer)
    stand.kubectl.exec(f"{stand.engine(2)}-0", "touch", "/run/rollout/drain", container="engine")
    eventually("it takes part in no group", lambda: stand.row(2)["rank_offset"] is None, within=20)
    new = stand.push(trainer)
    stand.kubectl.exec(f"{stand.engine(2)}-0", "rm", "-f", "/run/rollout/drain", container="engine")
    eventually("it could take part again", lambda: stand.row(2)["rank_offset"] is not None, within=20)
    return trainer, old, new


def test_latest_only_keeps_an_older_version_away_and_says_how_it_comes_back(stand: Stand) -> None:
    trainer, old, new = leave_behind(stand)
    assert document(stand.url)["serving"] == 2
    eventually("the engine waits for weights", lambda: stand.condition("WaitingForWeights")["status"] == "True", within=15)
    message = stand.condition("WaitingForWeights")["message"]
    for part in (stand.engine(2), f"holds version {old}", f"serves {new}", "needs a new group"):
        assert part in message, message
    eventually("the column STALE counts it", lambda: columns(stand)["STALE"] == "1", within=15)
    assert (columns(stand)["READY"], columns(stand)["SKEW"], columns(stand)["VERSION"]) == ("2/3", "0", new)
    assert {generate(stand.url).headers["X-Weight-Version"] for _ in range(12)} == {new}
    stand.push(trainer)
    stand.serve()
    eventually("nobody is stale", lambda: columns(stand)["STALE"] == "0", within=15)


def test_max_staleness_lets_an_older_version_serve_and_shows_the_skew(stand: Stand) -> None:
    with stand.policy(versionPolicy="MaxStaleness", maxStaleness=1):
        trainer, old, new = leave_behind(stand)
        stand.serve()
        eventually("the column SKEW says how far it is behind", lambda: columns(stand)["SKEW"] == "1", within=15)
        weights = stand.status()["weights"]
        assert (weights["oldestServing"], weights["newestServing"], weights["stale"]) == (old, new, 1)
        assert {answered(stand) for _ in range(30)} <= {old, new}, "which engine answers is the router's choice"
        assert document(stand.url)["committed"]["label"] == new
        latest = stand.push(trainer)
        stand.serve()
        eventually("no skew", lambda: columns(stand)["SKEW"] == "0", within=15)
    assert answered(stand) == latest


def answered(stand: Stand) -> str:
    """The version of one answer; its header and its body must agree."""
    reply = generate(stand.url)
    assert reply.headers["X-Weight-Version"] == reply.json()["meta_info"]["weight_version"]
    return str(reply.headers["X-Weight-Version"])


def test_a_batch_through_the_url_comes_back_in_order_from_all_engines(stand: Stand) -> None:
    trainer = stand.trainer()
    label = stand.push(trainer)
    prompts = [[number, number + 1] for number in range(1, 13)]

    def ask(prompt: object) -> requests.Response:
        return requests.post(f"{stand.url}/generate", json={"input_ids": prompt, "sampling_params": PARAMS}, timeout=60)

    single = [ask(prompt).json()["output_ids"] for prompt in prompts]
    batch = ask(prompts)
    assert batch.status_code == 200, batch.text
    assert [answer["output_ids"] for answer in batch.json()] == single
    assert len({tuple(tokens) for tokens in single}) == len(prompts), "each prompt has tokens of its own"
    assert batch.headers["X-Weight-Version"] == label
    assert {answer["meta_info"]["weight_version"] for answer in batch.json()} == {label}
