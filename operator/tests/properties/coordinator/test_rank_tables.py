"""Rank tables: every rank of the group is taken exactly once, and exactly one world size is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.coordinator.update.ranks import check_group, rank_table
from sglang_rollout.wire.reasons import RefusedError

sizes = st.lists(st.integers(1, 16), min_size=1, max_size=64)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"]


def engines(of: list[int]) -> list[tuple[str, int]]:
    return [(f"e{index}", size) for index, size in enumerate(of)]


def body(world_size: object, **changes: object) -> dict[str, object]:
    return {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": world_size, **changes}


@given(sizes)
def test_every_rank_is_taken_exactly_once(of: list[int]) -> None:
    table = rank_table(engines(of))
    offsets = table.offsets()
    taken = [0]
    for name, size in zip(table.names, table.sizes, strict=True):
        taken += range(offsets[name], offsets[name] + size)
    assert taken == list(range(table.world_size))


@given(sizes, st.integers(-5, 2000))
def test_only_the_right_world_size_is_accepted_and_a_refusal_names_it(of: list[int], world_size: int) -> None:
    table = rank_table(engines(of))
    if world_size == table.world_size:
        assert check_group(body(world_size), table).world_size == world_size
    else:
        with pytest.raises(RefusedError, match=f"Use world_size={table.world_size}."):
            check_group(body(world_size), table)


@given(st.dictionaries(st.sampled_from([*FIELDS, "pp_rank"]), json_values))
def test_any_body_is_accepted_or_refused_with_a_sentence(given_body: dict[str, object]) -> None:
    try:
        sentence, size = "", check_group(given_body, rank_table(engines([1, 2]))).world_size
    except RefusedError as refusal:
        sentence, size = str(refusal), 4
    assert size == 4
    assert len(sentence) < 500


def test_the_sentence_of_a_wrong_world_size() -> None:
    with pytest.raises(RefusedError) as caught:
        check_group(body(7), rank_table(engines([2, 2])))
    assert str(caught.value) == ("world_size 7 does not fit this fleet: rank_offset 1 + 4 GPUs on 2 engines [2, 2] = 5. Use world_size=5.")


def test_numbers_may_be_strings_and_unknown_fields_are_kept() -> None:
    spec = check_group(body("4", master_port="42569", rank_offset="1", pp_rank=0), rank_table(engines([1, 2])))
    assert (spec.port, spec.backend, spec.name, spec.extra) == (42569, None, "weight_update_group", {"pp_rank": 0})


def test_a_fleet_without_engines_asks_to_try_again() -> None:
    with pytest.raises(RefusedError) as caught:
        check_group(body(1), rank_table([]))
    assert caught.value.status == 503


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7", "[fd00::7]", "trainer.demo"])
def test_the_trainers_address_is_passed_on_unchanged(host: str) -> None:
    assert check_group(body(4, master_address=host), rank_table(engines([1, 2]))).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_an_address_that_means_all_of_a_machine_is_refused(host: str) -> None:
    with pytest.raises(RefusedError, match="is not an address to connect to"):
        check_group(body(4, master_address=host), rank_table(engines([1, 2])))
