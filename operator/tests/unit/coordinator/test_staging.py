"""Staged versions: who copies from whom, what is kept, what fits the limit and the model, and the tickets."""

from __future__ import annotations

from collections import Counter

import pytest

from sglang_rollout.api.weights_spec import Staging, Transport, Weights
from sglang_rollout.coordinator.tickets import complete_body, read_ticket, upload_ticket
from sglang_rollout.coordinator.update import staging
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import StagedUpdate, Update
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.ports import AGENT_ACK, AGENT_STAGE, STORE_OPEN
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.staged import Shard, StagedTensor
from sglang_rollout.wire.states import StagedVersion

KEY = Credentials("key")


def make_fleet(size_limit: str = "1Gi", copies: int = 2) -> Fleet:
    policy = Weights(transport=Transport.STAGED, staging=Staging(size_limit=size_limit, copies=copies))
    return Fleet(name="fleet", term=1, policy=policy)


def shard(*tensors: tuple[str, list[int]]) -> Shard:
    return Shard(tensors=[StagedTensor(name=name, dtype="BF16", shape=shape) for name, shape in tensors])


@pytest.mark.parametrize("fanout", [1, 2, 4, 64])
@pytest.mark.parametrize("pods", [1, 2, 5, 64, 100])
def test_no_pod_has_more_children_than_the_fanout_and_every_way_ends_at_the_store(pods: int, fanout: int) -> None:
    names = [f"e{number}" for number in range(pods)]
    tree = staging.parents_in_tree(names, fanout)
    assert list(tree) == names
    assert max(Counter(parents[0] for parents in tree.values()).values()) <= fanout
    for name, parents in tree.items():
        assert parents[-1] == STORE
        assert name not in parents
        assert all(names.index(parent) < names.index(name) for parent in parents[:-1]), "no pod copies from a pod below it"


@pytest.mark.parametrize(("copies", "kept"), [(2, ["committed", "open"]), (1, ["open"])])
def test_the_committed_version_makes_room_only_if_there_is_room_for_one(copies: int, kept: list[str]) -> None:
    fleet = make_fleet(copies=copies)
    fleet.weights.staged = StagedVersion(update="committed", digest="d", bytes=1)
    assert staging.kept_updates(fleet) == ["committed"]
    fleet.transaction.update = Update({}, 0.0, staged=StagedUpdate("open", "store#1"))
    assert staging.kept_updates(fleet) == kept


@pytest.mark.parametrize(("text", "size"), [("20Gi", 20 * 2**30), ("15G", 15_000_000_000), ("1000", 1000), ("2Ti", 2 * 2**40)])
def test_the_size_limit_is_a_quantity(text: str, size: int) -> None:
    assert staging.size_limit(make_fleet(text)) == size


def test_a_version_over_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(RefusedError, match=r"has 4096 bytes, and weights\.staging\.sizeLimit allows 1000"):
        staging.refuse_large(staging.count_bytes([shard(("w", [2048]))]), staging.size_limit(make_fleet("1k")))


def test_a_tensor_that_comes_twice_is_found() -> None:
    assert staging.find_repeated([shard(("a", [2])), shard(("b", [2]), ("a", [2]))]) == "a"
    assert not staging.find_repeated([shard(("a", [2])), shard(("b", [2]))])


@pytest.mark.parametrize(
    ("dtype", "shape", "sentence"), [("int4", [2], "type 'int4' cannot be staged"), ("bfloat16", [-1], "is not a list of sizes")]
)
def test_tensors_that_no_file_can_hold_are_refused(dtype: str, shape: list[int], sentence: str) -> None:
    with pytest.raises(RefusedError, match=sentence):
        staging.shard_of({"names": ["w"], "dtypes": [dtype], "shapes": [shape]})


def test_tickets_differ_by_update_and_purpose_and_do_not_show_the_key() -> None:
    found = {read_ticket(KEY, "1"), read_ticket(KEY, "2"), upload_ticket(KEY, "1"), read_ticket(Credentials("other"), "1")}
    assert len(found) == 4
    assert not any("key" in ticket for ticket in found)
    assert KEY.derive("staged-read:1").sent == read_ticket(KEY, "1"), "derived as the credentials of engines are"


def test_calls_get_tickets_and_the_addresses_of_peers() -> None:
    urls = {"e0": "http://10.0.0.1:30031", STORE: "http://store:30031"}
    body = complete_body(AGENT_STAGE, {"update": "1", "parents": ["gone", "e0", STORE], "ticket": ""}, KEY, urls.get)
    assert body["parents"] == ["http://10.0.0.1:30031", "http://store:30031"]
    assert body["names"] == {"http://10.0.0.1:30031": "engine e0", "http://store:30031": "the weight store"}
    assert body["ticket"] == read_ticket(KEY, "1")
    group = complete_body(STORE_OPEN, {"update": "1", "ticket": "", "upload_ticket": "", "shards": []}, KEY, urls.get)
    assert (group["ticket"], group["upload_ticket"]) == (read_ticket(KEY, "1"), "")
    upload = complete_body(STORE_OPEN, {"update": "1", "ticket": "", "upload_ticket": "", "shards": [{}]}, KEY, urls.get)
    assert upload["upload_ticket"] == upload_ticket(KEY, "1")
    assert complete_body(AGENT_ACK, {"update": "1"}, KEY, urls.get) == {"update": "1"}
