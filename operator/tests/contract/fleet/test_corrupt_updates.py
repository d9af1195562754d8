"""Trainers that do not send what they announce, and bytes that change on the way, are found and fenced.

With gloo an engine whose buffer is too small ends, and an engine whose buffer is too large accepts the bytes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import requests
from e2e.engine import environment

from sglang_rollout.testing.policy import read_folder
from sglang_rollout.wire.ports import CHECK_MODEL_FIELD
from tests.contract.support.engine_servers import Peer, peer
from tests.contract.support.local_fleet import Urls
from tests.contract.support.trainer_dialects import Fleet, Trainer, fleet, trainer

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(300)]

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
LIMIT = 4
"""Seconds that an engine may take for a bucket."""
QUICK = {"updateSeconds": LIMIT, "groupSeconds": 30, "pauseSeconds": 8, "idleSeconds": 20, "stuckSeconds": 60}
SCALE = 1.5
BITS = random.Random(7)


@pytest.fixture(scope="module")
def lab(engine_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet("stand-in", tmp_path_factory.mktemp("spoilt"), 3, verify="Always", minCommitted=2, deadlines=QUICK) as made:
        yield made


def begin(t: Trainer) -> None:
    engines, tried_until = len(t.fleet.document()["members"]), time.monotonic() + 20
    while t.get("/get_world_size")["world_size"] < engines:
        assert time.monotonic() < tried_until, "engines have not left the previous update"
        time.sleep(0.1)
    group = f"spoilt-{time.monotonic_ns()}"
    t.open(engines + 1, group=group, group_name=group)
    t.post("/begin_weight_update", {})


def update(t: Trainer, names: list[str], change: dict[str, Any], **how: Any) -> requests.Response:
    """Make an update call that does not announce what is broadcast."""
    body = t.peers[0].describe(SCALE, names=names, **how) | change
    asked = t.pool.submit(t.call, "POST", "/update_weights_from_distributed", body)
    t.peers[0].send_command("go")
    return asked.result(60)


def announce(t: Trainer, name: str) -> requests.Response:
    """Make an update call without a broadcast."""
    body = {"names": [name], "dtypes": ["float32"], "shapes": [[256, 128]], "group_name": t.peers[0].group}
    return t.call("POST", "/update_weights_from_distributed", body)


def send(t: Trainer, names: list[str]) -> None:
    """Send a correct bucket."""
    sent = t.send(SCALE, names, flat=True, load_format="flattened_bucket", group_name=t.peers[0].group)
    assert sent["success"] is True


def end(t: Trainer, checksums: dict[int, list[str]] | None = None) -> requests.Response:
    return t.call("POST", "/end_weight_update", {"checksums": checksums} if checksums else {})


def held(url: str) -> list[str]:
    """Return the checksums that an engine reports."""
    ranks = requests.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=30).json()["ranks"]
    return [str(rank["per_gpu_checksum"]) for rank in ranks]


@pytest.fixture(scope="module")
def t(lab: Fleet) -> Iterator[Trainer]:
    """Yield a trainer that several tests share."""
    with trainer(lab) as made:
        yield made


@pytest.fixture(scope="module")
def right(t: Trainer) -> dict[int, list[str]]:
    """Return the checksums after a correct push."""
    push_all(t)
    return {1: held(t.fleet.engines[0].url)}


def push_all(t: Trainer) -> None:
    """Push all tensors, as a trainer does after a failed update."""
    begin(t)
    send(t, t.fleet.names)
    assert end(t).json()["fleet"]["outcome"] == "Committed"
    t.fleet.serving(len(t.fleet.document()["members"]), 10)


@pytest.mark.parametrize(
    ("names", "change", "how"),
    [
        pytest.param([GATE, UP], {"names": [UP, GATE]}, {}, id="swapped"),
        pytest.param([GATE, UP], {"names": [UP, GATE]}, {"flat": True}, id="swapped-in-a-bucket"),
        pytest.param([UP], {"dtypes": ["float64"]}, {}, id="wider-type"),
    ],
)
def test_the_trainers_checksums_find_corruption_that_engines_cannot_see(
    t: Trainer, right: dict[int, list[str]], names: list[str], change: dict[str, Any], how: dict[str, Any]
) -> None:
    before = t.fleet.committed()
    begin(t)
    assert update(t, names, change, **how).ok, "every engine has accepted the same tensors"
    assert t.peers[0].read_answer() == {"sent": True}
    reply = end(t, right)
    assert (reply.status_code, "holds other weights than the trainer says" in reply.reason) == (400, True), reply.text
    assert (t.fleet.committed(), t.fleet.document()["serving"]) == (before, 0)
    push_all(t)


def test_a_repeated_bucket_changes_nothing(t: Trainer, right: dict[int, list[str]]) -> None:
    begin(t)
    for names in (t.fleet.names, [GATE, UP], [GATE, UP]):
        send(t, names)
    assert end(t, right).json()["fleet"]["outcome"] == "Committed"
    assert t.fleet.document()["serving"] == 3


def test_an_unannounced_broadcast_is_found(t: Trainer, right: dict[int, list[str]]) -> None:
    before = t.fleet.committed()
    begin(t)
    assert update(t, [GATE], {}, times=2).ok
    assert announce(t, UP).ok, "the engine receives the repeated bytes of the tensor before"
    assert t.peers[0].read_answer() == {"sent": True}
    reply = end(t, right)
    assert (reply.status_code, "holds other weights than the trainer says" in reply.reason) == (400, True), reply.text
    assert (t.fleet.committed(), t.fleet.document()["serving"]) == (before, 0)
    push_all(t)


def test_a_wrong_shape_is_refused_with_the_tensors_name(t: Trainer) -> None:
    before = t.fleet.committed()
    begin(t)
    # Otherwise the fleet refuses the shape before a byte is sent.
    reply = update(t, [UP], {"shapes": [[128, 256]], CHECK_MODEL_FIELD: False})
    assert t.peers[0].read_answer() == {"sent": True}
    assert (reply.status_code, reply.json()["fleet"]["phase"]) == (400, "transfer")
    assert "did not take the tensors: Failed to update parameter online: Attempted to load weight" in reply.json()["message"]
    assert (t.fleet.committed(), t.fleet.document()["serving"]) == (before, 0)
    push_all(t)


def spoil(one: Peer, engine: str, at: int, **how: Any) -> None:
    """Flip one bit of one tensor on one engine, bypassing its gate."""
    body = one.describe(SCALE, flip=[at, BITS.randrange(8)], **how) | {"flush_cache": False}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(requests.post, f"{engine}/update_weights_from_distributed", json=body, timeout=30)
        assert one.send() == {"sent": True}
        assert asked.result(30).ok


def places(number: int) -> Iterator[tuple[str, int]]:
    """Yield random bytes of the model; all tensors are equally likely."""
    tensors = read_folder(environment.model())
    for name in BITS.choices(list(tensors), k=number):
        yield name, BITS.randrange(len(tensors[name].data))


def test_a_flipped_bit_on_one_engine_is_found(t: Trainer) -> None:
    engines = t.fleet.engines
    begin(t)
    with ExitStack() as stack:
        behind = [stack.enter_context(peer()) for _ in engines]
        for one, engine in zip(behind, engines, strict=True):
            assert one.open([engine.url])[0][0] == 200
        for name, at in places(8):
            victim = BITS.randrange(len(behind))
            t.post("/begin_weight_update", {})
            send(t, t.fleet.names)
            spoil(behind[victim], engines[victim].url, at, names=[name])
            fenced = end(t).json()["fleet"]["fenced"]
            assert list(fenced) == [f"local-engine-{victim}"], f"byte {at} of {name}"
            assert "holds other weights than 2 engines of its shape (rank 0)" in fenced[f"local-engine-{victim}"]
            assert t.fleet.document()["serving"] == 2
    push_all(t)


@pytest.mark.parametrize("how", ["narrower type", "never sent"])
def test_an_engine_that_ends_or_hangs_in_a_broadcast_is_named(lab: Fleet, how: str) -> None:
    before = lab.committed()
    with trainer(lab) as t:
        begin(t)
        assert update(t, [GATE], {}).ok
        assert t.peers[0].read_answer() == {"sent": True}
        reply = announce(t, UP) if how == "never sent" else update(t, [UP], {"dtypes": ["float16"]})
        assert reply.status_code == 400
        sentence = "the engine has not answered within" if how == "never sent" else "the connection broke during"
        assert "did not take the tensors" in reply.reason
        assert sentence in reply.json()["message"]
        assert reply.json()["fleet"]["engine"].startswith("local-engine-")
        assert (lab.committed(), lab.document()["serving"]) == (before, 0)
    for engine in lab.engines:  # in a cluster the kubelet does this
        engine.kill()
        engine.start()
    for engine in lab.engines:
        engine.wait()
    with trainer(lab) as successor:
        push_all(successor)


def test_a_flipped_bit_on_a_real_engine_is_found(urls: Urls) -> None:
    """The trainer uses the checksums of the other engine: of two engines that differ, the fleet cannot name the wrong one."""
    (name, at), *_ = places(1)
    fleet = Fleet("sglang", urls.fleet, [], list(read_folder(environment.model())))
    with trainer(fleet) as t, peer() as behind:
        begin(t)
        assert behind.open([urls.engines[1]])[0][0] == 200
        before = fleet.committed()
        send(t, fleet.names)
        spoil(behind, urls.engines[1], at, names=[name])
        reply = end(t, {1: held(urls.engines[0])})
        assert (reply.status_code, fleet.committed()) == (400, before), f"byte {at} of {name}: {reply.text}"
        assert "engine local-engine-1 holds other weights than the trainer says" in reply.reason
        assert requests.post(f"{urls.engines[1]}/destroy_weights_update_group", json={"group_name": behind.group}, timeout=30).ok
        push_all(t)
