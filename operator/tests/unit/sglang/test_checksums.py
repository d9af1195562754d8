"""Checksums of engines with data-parallel replicas, in the order of SGLang's answers, which varies."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.sglang.checksums import find_unequal_replicas, parse_checksums


def answer(*rows: tuple[int, int, str], is_list: bool = True) -> dict[str, Any]:
    """Return SGLang's answer for (replica, rank, checksum). Replicas of a rank report the same rank."""
    places = [{"role": "target", "dp_rank": replica, "dp_size": 1, "rank": rank, "size": 2} for replica, rank, _ in rows]
    return {
        "ranks": [
            {"per_gpu_checksum": checksum, "parallelism_info": [place] if is_list else place}
            for place, (_, _, checksum) in zip(places, rows, strict=True)
        ]
    }


@pytest.mark.parametrize("is_list", [True, False], ids=["new", "old"])
def test_checksums_have_one_order_whichever_replica_answers_first(is_list: bool) -> None:
    rows = [(0, 0, "a"), (1, 0, "b"), (0, 1, "c"), (1, 1, "d")]
    for order in (rows, rows[::-1], [rows[1], rows[0], rows[3], rows[2]]):
        assert parse_checksums(answer(*order, is_list=is_list)) == ("a", "b", "c", "d")


def test_replicas_of_a_rank_must_be_equal_and_ranks_need_not() -> None:
    assert find_unequal_replicas(answer((1, 0, "a"), (0, 0, "a"), (1, 1, "b"), (0, 1, "b"))) == ""
    assert find_unequal_replicas(answer((1, 0, "a"), (0, 0, "a"), (1, 1, "c"), (0, 1, "b"))) == "rank 1 has b and c"
    assert find_unequal_replicas({"ranks": []}) == ""
