"""The version of the next update."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.coordinator.update.versions import history, newest, next_version, order_key
from sglang_rollout.wire.states import BASE, Version


def version(run: int, n: int, label: str | None = None) -> Version:
    return Version(run=run, step=n, label=label or str(n))


@pytest.mark.parametrize(
    ("committed", "label", "expected"),
    [
        (BASE, "1", (1, 1, "1")),
        (BASE, "0", (1, 0, "0")),
        (BASE, "640", (1, 640, "640")),
        (BASE, None, (1, 1, "1")),
        (BASE, "step-a", (1, 1, "step-a")),
        (version(1, 5), "6", (1, 6, "6")),
        (version(1, 5), "9", (1, 9, "9")),
        (version(1, 5), None, (1, 6, "6")),
        (version(1, 5), "v6", (1, 6, "v6")),
        (version(1, 5), "5", (2, 5, "5")),
        (version(1, 5), "1", (2, 1, "1")),
        (version(3, 0), "1", (3, 1, "1")),
        (version(1, 5), "9" * 30, (1, 6, "9" * 30)),
        (version(1, 5), "-3", (1, 6, "-3")),
        (version(1, 5), "٣", (1, 6, "٣")),
    ],
)
def test_next_version(committed: Version, label: str | None, expected: tuple[int, int, str]) -> None:
    found = next_version(committed, label)
    assert (found.run, found.step, found.label) == expected


def test_a_version_acknowledged_without_a_commit_is_never_reused() -> None:
    assert order_key(next_version(version(1, 5), "6", reserved=version(1, 6))) == (2, 6)
    assert order_key(next_version(version(1, 5), None, reserved=version(1, 6))) == (1, 7)
    assert order_key(next_version(BASE, "1", reserved=version(1, 1))) == (2, 1)


@given(st.integers(0, 5), st.integers(0, 100), st.none() | st.text(max_size=20) | st.integers(0, 200).map(str))
def test_versions_only_grow(run: int, n: int, label: str | None) -> None:
    committed = BASE if run == 0 else version(run, n)
    assert order_key(next_version(committed, label)) > order_key(committed)


def test_the_newest_version_wins() -> None:
    assert newest(None, None) is None
    assert newest(None, version(1, 9), version(2, 0)) == version(2, 0)


def test_a_requested_run_is_used() -> None:
    assert next_version(version(1, 5), "6", None, 2) == version(2, 6)
    assert next_version(version(1, 5), None, None, 2) == Version(run=2, step=1, label="1")
    assert next_version(version(2, 5), "6", None, 2) == version(2, 6), "it has begun already"


@given(st.lists(st.integers(1, 99), unique=True, max_size=9), st.integers(0, 5))
def test_history_keeps_the_newest_of_the_run(numbers: list[int], keep: int) -> None:
    seen = [version(1, n) for n in sorted(numbers)]
    found = history([BASE, *seen], version(1, 100), keep)
    assert found[-1] == version(1, 100)
    assert found == sorted([BASE, *seen, version(1, 100)], key=order_key)[-keep - 1 :]
    assert history(found, version(2, 1), keep) == [version(2, 1)], "another run is not comparable"
