"""Faults of the stand-in in a real process group of gloo, with a trainer that is killed, and with hangs as in NCCL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.engine import Engine, LabError, environment

from sglang_rollout.testing import expected_tokens
from sglang_rollout.testing.policy import read_folder
from tests.contract.support.engine_servers import Peer, Server, peer, stand_in
from tests.support.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

SCALE = 1.5


class Pair:
    """Two engines in one process."""

    def __init__(self, process: Server) -> None:
        self.process = process
        self.engines = [process.url, process.url.replace(str(process.engine.port), str(process.engine.port + 1))]

    def fault(self, at: int, **fault: Any) -> None:
        reply = requests.post(f"{self.engines[at]}/stand_in/faults", json=fault, timeout=5)
        assert reply.status_code == 200, reply.text

    def fired(self, at: int) -> list[tuple[str, str]]:
        hits = requests.get(f"{self.engines[at]}/stand_in/faults", timeout=5).json()["fired"]
        return [(hit["kind"], hit["phase"]) for hit in hits]

    def post(self, at: int, path: str, body: Any = None, timeout: float = 30) -> tuple[int, Any]:
        reply = requests.post(self.engines[at] + path, json=body or {}, timeout=timeout)
        return reply.status_code, reply.json()

    def tokens(self, at: int) -> list[int]:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 6}}
        return list(self.post(at, "/generate", body)[1]["output_ids"])

    def update(self, trainer: Peer, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
        """Send one update call to both, and return their answers or errors, and the outcome of the trainer's broadcast."""
        body = trainer.describe(SCALE, flat=True) | {"weight_version": "v1"} | fields
        asked = [self.process.pool.submit(self.post, at, "/update_weights_from_distributed", body) for at in (0, 1)]
        sent = trainer.send()
        if "error" in sent:
            trainer.kill()  # otherwise an engine that received nothing yet waits until the process group's time-out
        answers: list[Any] = []
        for future in asked:
            try:
                answers.append(future.result(10))
            except requests.RequestException as error:
                answers.append(type(error))
        return answers, sent


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    engine = stand_in(free_port(row=2), tmp_path / "log", "--engines", "2", "--token-ms", "0")
    engine.start()
    try:
        engine.wait()
        yield Pair(Server("stand-in", engine))
    finally:
        engine.kill()


@pytest.fixture
def trainer() -> Iterator[Peer]:
    with peer() as made:
        yield made


@pytest.fixture
def joined(pair: Pair, trainer: Peer) -> Peer:
    assert [status for status, _ in trainer.open(pair.engines)] == [200, 200]
    for at in (0, 1):
        assert pair.post(at, "/begin_weight_update")[0] == 200
    return trainer


def wanted(trainer: Peer, folder: Path) -> list[int]:
    trainer.save(SCALE, folder)
    return expected_tokens(read_folder(folder), [1, 2], 6)


def test_engine_that_drops_a_bucket_reports_success_and_keeps_its_tokens(pair: Pair, joined: Peer, tmp_path: Path) -> None:
    before = pair.tokens(0)
    pair.fault(1, kind="drop", phase="received")
    answers, sent = pair.update(joined)
    assert ([status for status, _ in answers], sent) == ([200, 200], {"sent": True})
    assert (pair.tokens(0), pair.tokens(1)) == (wanted(joined, tmp_path / "w"), before)
    assert (pair.fired(0), pair.fired(1)) == ([], [("drop", "received")])


def test_corrupted_byte_changes_the_tokens_and_one_checksum(pair: Pair, joined: Peer) -> None:
    pair.fault(1, kind="corrupt", phase="received")
    answers, _ = pair.update(joined)
    assert [status for status, _ in answers] == [200, 200]
    assert pair.tokens(0) != pair.tokens(1)
    good, bad = (pair.post(at, "/weights_checker")[1]["ranks"][0]["checksums"] for at in (0, 1))
    assert sum(good[name] != bad[name] for name in good) == 1


def test_wrong_version_is_reported_with_the_right_weights(pair: Pair, joined: Peer) -> None:
    pair.fault(1, kind="wrong_version", phase="received", value="v0")
    pair.update(joined)
    labels = [requests.get(f"{url}/model_info", timeout=5).json()["weight_version"] for url in pair.engines]
    assert (labels, pair.tokens(0) == pair.tokens(1)) == (["v1", "v0"], True)


def test_out_of_memory_when_writing_leaves_a_mixture(pair: Pair, joined: Peer) -> None:
    before = pair.tokens(1)
    pair.fault(1, kind="oom", phase="received")
    answers, _ = pair.update(joined)
    status, body = answers[1]
    assert (answers[0][0], status) == (200, 400)
    assert body["message"].startswith("Failed to update parameter online: CUDA out of memory.")
    assert body["message"].endswith("partially updated. Please discard the whole weights.")
    assert pair.tokens(1) not in (before, pair.tokens(0))


def test_out_of_memory_before_receiving_is_answered_at_once(pair: Pair, joined: Peer) -> None:
    pair.fault(0, kind="oom", phase="update")
    body = joined.describe(SCALE, flat=True)
    status, answer = pair.post(0, "/update_weights_from_distributed", body, timeout=5)
    assert (status, answer["message"].startswith("Failed to receive weights: CUDA out of memory.")) == (400, True)


@pytest.mark.parametrize("phase", ["update", "received"])
def test_engine_that_dies_in_an_update_breaks_its_connections(pair: Pair, joined: Peer, phase: str) -> None:
    pair.fault(1, kind="die", phase=phase)
    answers, sent = pair.update(joined)
    assert answers[1] is requests.ConnectionError
    if phase == "update":  # rank 0 sends to this engine, and sees that its connections close
        assert "error" in sent
    with pytest.raises(requests.ConnectionError):
        pair.tokens(1)
    assert pair.tokens(0)


def test_engine_can_be_killed_while_it_joins_and_while_it_receives(pair: Pair, trainer: Peer) -> None:
    """gloo offers no way to end these waits."""
    trainer.group = "g"
    trainer.send_command("open", group="g", world=3)
    port = trainer.read_answer()["port"]
    joining = pair.process.pool.submit(pair.post, 0, "/init_weights_update_group", trainer.at(port, 0, 3))
    time.sleep(0.5)
    assert not joining.done()
    requests.post(f"{pair.engines[0]}/stand_in/restart", timeout=5)
    assert isinstance(joining.exception(5), requests.ConnectionError)
    with peer() as second:
        assert [status for status, _ in second.open(pair.engines)] == [200, 200]
        for at in (0, 1):
            pair.post(at, "/begin_weight_update")
        body = second.describe(SCALE, flat=True)
        waiting = pair.process.pool.submit(pair.post, 1, "/update_weights_from_distributed", body)
        time.sleep(0.5)
        requests.post(f"{pair.engines[0]}/stand_in/kill", timeout=5)
        assert "error" in second.send(), "the trainer sees the death of a member"
        assert waiting.result(10)[0] in (200, 400)


def test_nccl_semantics(pair: Pair, trainer: Peer) -> None:
    """The join returns before the ranks are connected. If the trainer dies, the update call never returns, and only a kill helps."""
    pair.fault(0, kind="nccl", phase="init")
    trainer.group = "n"
    trainer.send_command("open", group="n", world=2)
    port = trainer.read_answer()["port"]
    assert pair.post(0, "/init_weights_update_group", trainer.at(port, 0, 2))[0] == 200
    assert trainer.read_answer() == {"joined": True}
    pair.post(0, "/begin_weight_update")
    body = trainer.describe(SCALE, flat=True)
    asked = pair.process.pool.submit(pair.post, 0, "/update_weights_from_distributed", body)
    assert trainer.send() == {"sent": True}
    assert asked.result(10)[0] == 200, "the update works while the trainer runs"
    asked = pair.process.pool.submit(pair.post, 0, "/update_weights_from_distributed", trainer.describe(SCALE, flat=True))
    time.sleep(0.3)
    trainer.kill()
    time.sleep(2)
    assert not asked.done(), "gloo would fail at once"
    for path in ("/destroy_weights_update_group", "/end_weight_update", "/generate"):
        with pytest.raises(requests.Timeout):
            pair.post(0, path, {"group_name": "n", "text": "a"}, timeout=1)
    assert requests.get(f"{pair.engines[0]}/model_info", timeout=5).status_code == 200
    requests.post(f"{pair.engines[0]}/stand_in/restart", timeout=5)
    assert isinstance(asked.exception(5), requests.ConnectionError)
    time.sleep(0.3)
    assert pair.tokens(0) == pair.tokens(1), "the restarted engine has base weights"
    assert pair.fired(0) == [("nccl", "init")]


def test_nccl_join_returns_before_all_ranks_have_joined(pair: Pair, trainer: Peer) -> None:
    pair.fault(0, kind="nccl", phase="init")
    trainer.group = "early"
    trainer.send_command("open", group="early", world=3)
    port = trainer.read_answer()["port"]
    assert pair.post(0, "/init_weights_update_group", trainer.at(port, 0, 3), timeout=5)[0] == 200
    assert pair.post(1, "/init_weights_update_group", trainer.at(port, 1, 3))[0] == 200
    assert trainer.read_answer() == {"joined": True}


def test_each_tensor_parallel_rank_joins(trainer: Peer, tmp_path: Path) -> None:
    engine = stand_in(free_port(), tmp_path / "log", "--tensor", "2", "--token-ms", "0")
    engine.start()
    try:
        engine.wait()
        made = Server("stand-in", engine)
        assert [status for status, _ in trainer.open([made], world=3)] == [200]
        made.post("/begin_weight_update", {})
        assert trainer.push(made, SCALE)[0] == 200
        assert made.get("/server_info")[1]["tp_size"] == 2
        ranks = made.post("/weights_checker")[1]["ranks"]
        assert [rank["parallelism_info"][0]["tp_rank"] for rank in ranks] == [0, 1]
        assert made.generate(6, input_ids=[1, 2])["output_ids"] == wanted(trainer, tmp_path / "w")
    finally:
        engine.kill()


def test_closed_process_group_leaves_no_open_file(trainer: Peer, tmp_path: Path) -> None:
    engine = stand_in(free_port(), tmp_path / "log")
    engine.start()
    try:
        engine.wait()
        made = Server("stand-in", engine)
        held = []
        for _ in range(5):
            assert [status for status, _ in trainer.open([made])] == [200]
            assert made.post("/destroy_weights_update_group", {"group_name": trainer.group})[0] == 200
            held.append(files(engine))
        assert held[-1] == held[0]
    finally:
        engine.kill()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_fifty_engines_of_one_process_join_one_process_group(trainer: Peer, tmp_path: Path) -> None:
    """One update with the default model. The process stays below the 1.5 GB that docs/how-to/test-without-gpus.md promises."""
    first = free_port(row=50)
    engine = stand_in(first, tmp_path / "log", "--engines", "50", "--token-ms", "0")
    engine.command = [part for part in engine.command if part not in ("--model", str(environment.model()))]
    engine.start()
    try:
        engine.wait()
        made = Server("stand-in", engine, ThreadPoolExecutor(50))
        urls = [f"http://127.0.0.1:{first + number}" for number in range(50)]
        idle = resident(engine)
        assert [status for status, _ in trainer.open(urls)] == [200] * 50
        for url in urls:
            assert requests.post(f"{url}/begin_weight_update", json={}, timeout=10).status_code == 200
        body = trainer.describe(names=["model.norm.weight"], shape=[16]) | {"weight_version": "v1"}
        asked = [made.pool.submit(requests.post, f"{url}/update_weights_from_distributed", json=body, timeout=60) for url in urls]
        assert trainer.send() == {"sent": True}
        assert [future.result().status_code for future in asked] == [200] * 50
        prompt = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
        assert len({tuple(requests.post(f"{url}/generate", json=prompt, timeout=10).json()["output_ids"]) for url in urls}) == 1
        print(f"resident: {idle} MiB idle, {resident(engine)} MiB in a group and after an update")
        assert resident(engine) < 1430  # MiB: 1.5 GB
    finally:
        engine.kill()


def resident(engine: Engine) -> int:
    """Return VmRSS of the process in MiB."""
    assert engine.process is not None
    status = Path(f"/proc/{engine.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


def files(engine: Engine) -> int:
    """Return the number of open files without sockets. A socket closes only after its peer has noticed."""
    assert engine.process is not None
    links = []
    for entry in Path(f"/proc/{engine.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(entry.readlink()))
    return sum(not link.startswith("socket:") for link in links)
