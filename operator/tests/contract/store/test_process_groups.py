"""The weight store as rank 1 of trainers' process groups, over real gloo."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from e2e.engine import environment
from e2e.kube import eventually

from sglang_rollout.staging.copies import MANIFEST
from sglang_rollout.wire.ports import STORE_JOIN, STORE_RECEIVE
from tests.contract.support.engine_servers import Peer
from tests.contract.support.store_process import StoreProcess, TensorRow, new_update, shard_of
from tests.support.paths import package_variables

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SMALL: list[TensorRow] = [("a", "bfloat16", [3, 5]), ("b", "float32", [7]), ("c", "uint8", [1])]
LARGE: list[TensorRow] = [("embed", "bfloat16", [4096, 2500]), ("head", "float32", [1000, 5001])]
"""Two tensors of 20 MB: three pieces, and one that both tensors share."""


def sealed(store: StoreProcess, update: str, step: int = 1) -> str:
    status, body = store.seal(update, step)
    assert status == 200, body
    return store.updates()[update]


@pytest.mark.parametrize("flat", [True, False], ids=["flattened bucket", "one broadcast per tensor"])
def test_a_version_arrives_in_several_buckets(store: StoreProcess, trainer: Peer, flat: bool) -> None:
    update = new_update()
    assert store.open(update)[0] == 200
    assert store.join(trainer, "g")[1]["groups"] == ["g"]
    digests = [store.receive(trainer, update, tensors, flat=flat, seed=seed) for seed, tensors in enumerate((SMALL, LARGE))]
    assert len(sealed(store, update)) == 64
    assert [store.data_digest(update, shard) for shard in range(2)] == digests
    described = json.loads((store.volume / update / MANIFEST).read_text())
    assert described["version"]["label"] == "1"
    assert store.leave("g")[1]["groups"] == []


@pytest.mark.parametrize("how", ["stateless", "client"])
def test_a_store_that_frameworks_make_otherwise_is_joined_too(store: StoreProcess, mortal: Peer, how: str) -> None:
    """Without a registered process group, and our client's, which does not wait for clients. All other tests use torch's rendezvous."""
    update = new_update()
    store.open(update)
    assert store.join(mortal, "g", how)[1]["groups"] == [mortal.group]
    digest = store.receive(mortal, update, SMALL, flat=True)
    sealed(store, update)
    assert store.data_digest(update, 0) == digest


def test_a_second_attempt_to_join_does_not_count_as_another_rank(store: StoreProcess, mortal: Peer) -> None:
    """Rank 0 waits for a third rank, which the store's attempts must not replace: rank 0 would block in gloo instead of failing."""
    mortal.send_command("open", group="g", world=3, seconds=30)
    opened = mortal.read_answer()
    for _ in range(2):
        status, reply = store.call(STORE_JOIN, store.at(opened, deadline=6))
        assert (status, reply["code"]) == (400, "RankZeroAbsent")
        assert "rank 0 did not open it with world_size 2 and backend gloo within" in reply["message"]
    assert "2/3 clients joined" in mortal.read_answer()["error"]


def test_a_join_that_is_refused_is_not_counted(store: StoreProcess, mortal: Peer) -> None:
    mortal.send_command("open", group="g", seconds=5)
    assert store.call(STORE_JOIN, store.at(mortal.read_answer(), backend="nccl"))[0] >= 400
    assert "1/2 clients joined" in mortal.read_answer()["error"]


def test_an_empty_tensor_is_broadcast_too(store: StoreProcess, trainer: Peer) -> None:
    update = new_update()
    store.open(update)
    store.join(trainer, "g")
    digest = store.receive(trainer, update, [("empty", "float32", [0]), *SMALL], flat=False)
    sealed(store, update)
    assert store.data_digest(update, 0) == digest


def test_two_process_groups_bring_one_version(store: StoreProcess, trainers: list[Peer]) -> None:
    update = new_update()
    store.open(update)
    for stage, trainer in enumerate(trainers):
        store.join(trainer, f"pp-{stage}")
    assert store.status()["groups"] == ["pp-0", "pp-1"]
    digests = [
        store.receive(trainer, update, [(f"{stage}.weight", "float32", [100])], flat=True, seed=stage)
        for stage, trainer in enumerate(trainers)
    ]
    sealed(store, update)
    assert [store.data_digest(update, shard) for shard in range(2)] == digests


def test_one_process_group_brings_several_versions(store: StoreProcess, trainer: Peer) -> None:
    store.join(trainer, "g")
    found: list[str] = []
    for step in (1, 2):
        update = new_update()
        store.open(update, keep=found)
        store.receive(trainer, update, SMALL, flat=True, seed=step)
        sealed(store, update, step)
        found.append(update)
    assert set(store.updates()) == set(found)


def test_a_trainer_that_dies_in_a_broadcast_fails_its_update_only(store: StoreProcess, trainer: Peer, mortal: Peer) -> None:
    kept, update = new_update(), new_update()
    dying, living = mortal, trainer
    store.open(kept)
    store.join(living, "living")
    store.receive(living, kept, SMALL, flat=True)
    sealed(store, kept)
    store.open(update, keep=[kept])
    store.join(dying, "dying")
    store.receive(dying, update, SMALL, flat=True)
    reply = store.announce(update, "dying", LARGE, flat=True)
    eventually("the bucket is announced", (store.volume / update / "00001.safetensors").exists, within=30)
    dying.kill()
    status, body = reply.result(60)
    assert (status, body["code"]) == (502, "UpstreamFailed")
    assert "Process group dying: The receiver could not receive" in body["message"]
    assert store.status()["groups"] == ["living"]
    assert set(store.updates()) == {kept}, "only the unfinished version is deleted"
    status, body = store.seal(update, 2)
    assert (status, body["code"]) == (409, "Conflict")
    assert "can only be dropped" in body["message"]
    assert store.open(update)[0] == 409, "the same update cannot begin again"
    following = new_update()
    store.open(following, keep=[kept])
    store.receive(living, following, SMALL, flat=True)
    sealed(store, following, 3)


def test_a_broadcast_that_never_comes_ends_at_the_deadline(store: StoreProcess, trainer: Peer) -> None:
    update = new_update()
    store.open(update)
    store.join(trainer, "g")
    status, body = store.announce(update, "g", SMALL, flat=True, deadline=0.5).result(60)
    assert (status, body["code"]) == (502, "UpstreamFailed")
    assert (store.status()["groups"], store.updates()) == ([], {})
    trainer.send_command("send", tensors=SMALL, seed=0, flat=True)
    trainer.read_answer()
    trainer.send_command("go")
    assert "closed by peer" in trainer.read_answer()["error"], "the trainer learns of it"


def test_leaving_ends_a_broadcast_that_waits(store: StoreProcess, trainer: Peer) -> None:
    update = new_update()
    store.open(update)
    store.join(trainer, "g")
    reply = store.announce(update, "g", SMALL, flat=True)
    eventually("the bucket is announced", (store.volume / update / "00000.safetensors").exists, within=30)
    status, body = store.announce(update, "g", SMALL, flat=True).result(60)
    assert (status, body["message"]) == (409, "Process group g receives another bucket.")
    store.leave("g")
    assert reply.result(60)[0] == 502


def test_a_group_under_the_same_name_replaces_the_first(store: StoreProcess, trainers: list[Peer]) -> None:
    first, second = trainers
    update = new_update()
    store.open(update)
    for trainer in (first, second):
        assert store.join(trainer, "g")[1]["groups"] == ["g"]
    digest = store.receive(second, update, SMALL, flat=True)
    store.leave("g")
    store.join(first, "g")
    store.receive(first, update, LARGE, flat=True)
    sealed(store, update)
    assert store.data_digest(update, 0) == digest


def test_a_process_group_over_nccl_is_refused_without_a_gpu_before_the_trainer_is_called(store: StoreProcess) -> None:
    body = {"group_name": "n", "master_address": "127.0.0.1", "master_port": 1, "backend": "nccl", "deadline": 60}
    status, reply = store.call(STORE_JOIN, body)
    assert (status, reply["code"]) == (400, "BackendUnavailable")
    assert "backend nccl needs a GPU, and torch finds none beside the weight store: set weights.store.gpu" in reply["message"]
    assert store.status()["groups"] == []


THROUGH_A_DEVICE = """
import io, sys, threading
from datetime import timedelta
from pathlib import Path
import torch
from sglang_rollout.store import receiver
from sglang_rollout.testing.trainer_group import broadcast, choose_port, open_group
path, seconds = Path(sys.argv[1]), 60.0
sizes = [20_000_000, 0, 3]
sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
port = choose_port()

def send():
    broadcast(open_group(host="127.0.0.1", port=port, group="g", world_size=2, timeout=timedelta(seconds=seconds)), sent)

threading.Thread(target=send, daemon=True).start()
where = dict(host="127.0.0.1", port=port, group="g", rank=1, world_size=2, backend="gloo", deadline=seconds)
member = receiver.Member(**where, device="cpu")
receiver.receive_into_file(member, io.StringIO(), path=path, data_start=5, sizes=sizes, deadline=seconds)
assert path.read_bytes() == b"head:" + b"".join(tensor.numpy().tobytes() for tensor in sent)
"""


def test_bytes_that_arrive_in_the_memory_of_a_device_are_copied_into_the_shard(engine_environment: None, tmp_path: Path) -> None:
    """As with NCCL, which does not run here: memory of the processor takes the place of the GPU's, and gloo that of NCCL."""
    shard = tmp_path / "shard"
    shard.write_bytes(b"head:" + bytes(20_000_003))
    command = [str(environment.python(make=False)), "-c", THROUGH_A_DEVICE, str(shard)]
    done = subprocess.run(command, env=package_variables(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_an_address_where_no_store_listens_is_refused_at_the_deadline(store: StoreProcess) -> None:
    body = {"group_name": "nowhere", "master_address": "127.0.0.1", "master_port": 1, "deadline": 6}
    status, reply = store.call(STORE_JOIN, body)
    assert (status, reply["code"]) == (400, "MasterUnreachable")
    assert "no store of rank 0 answers at 127.0.0.1:1: check master_address and master_port" in reply["message"]
    assert store.status()["groups"] == []


@pytest.mark.parametrize(("value", "wrong"), [("group", "another"), ("world", 3)])
def test_a_rank_0_that_opens_something_else_is_named_as_the_cause(store: StoreProcess, mortal: Peer, value: str, wrong: Any) -> None:
    mortal.send_command("open", **({"group": "g", "world": 2, "seconds": 30} | {value: wrong}))
    opened = mortal.read_answer() | {"group": "g"}
    status, reply = store.call(STORE_JOIN, store.at(opened, deadline=6))
    assert (status, reply["code"]) == (400, "RankZeroAbsent")
    assert "give rank 0 the values of this call" in reply["message"]


def test_a_bucket_above_the_limit_is_refused_with_both_numbers(store: StoreProcess, trainer: Peer) -> None:
    update = new_update()
    store.open(update, size_limit=100)
    store.join(trainer, "g")
    status, body = store.announce(update, "g", [("a", "float32", [50])], flat=True).result(60)
    assert (status, body["code"]) == (400, "InvalidRequest")
    assert "200" in body["message"]
    assert "100" in body["message"]


def test_a_bucket_for_an_unknown_update_or_process_group_is_refused(store: StoreProcess) -> None:
    update = new_update()
    body = {"update": update, "group_name": "g", "shard": shard_of(SMALL), "flattened": True}
    assert store.call(STORE_RECEIVE, body)[1]["code"] == "NotFound"
    store.open(update)
    status, reply = store.call(STORE_RECEIVE, body)
    assert (status, reply["message"]) == (409, "Process group g is not open.")
    assert store.updates() == {update: ""}, "nothing was lost"


def test_the_processes_end_with_the_store(store: StoreProcess, trainer: Peer) -> None:
    store.join(trainer, "g")
    assert store.process is not None
    children = Path(f"/proc/{store.process.pid}/task/{store.process.pid}/children").read_text().split()
    assert children
    store.restart()
    eventually("the receivers end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), within=30)
    assert store.status()["groups"] == []
