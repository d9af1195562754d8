"""A message quotes the start of a value, and never the work of writing all of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sglang_rollout.wire.arguments import find_count_problem, find_label_problem, find_number_problem, find_shape_problem
from sglang_rollout.wire.reasons import MAX_QUOTED_CHARACTERS, quote_value

LONG = int("9" * 4299)


@pytest.mark.parametrize("value", ["a'b", 3, -1.5, None, True, [1, 2], (3,), {"a": [None]}, list(range(30)), b"x", {1}])
def test_a_short_value_is_quoted_as_python_writes_it(value: object) -> None:
    assert quote_value(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [[LONG] * 20_000, {str(number): LONG for number in range(20_000)}, [[LONG] * 2000] * 2000, "x" * 10**7, LONG],
    ids=["list", "map", "nested", "text", "number"],
)
def test_a_long_value_is_quoted_at_once(value: object) -> None:
    began = time.process_time()
    assert len(quote_value(value)) <= MAX_QUOTED_CHARACTERS + 1
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("find", [find_count_problem, find_number_problem, find_label_problem, find_shape_problem])
@pytest.mark.parametrize("value", [-(10**5000), [10**5000], [-(10**5000)]], ids=["number", "list", "negative"])
def test_a_number_that_python_refuses_to_write_is_refused(find: Callable[[object, str], str | None], value: object) -> None:
    problem = find(value, "step")
    assert problem
    assert len(problem) < 400
