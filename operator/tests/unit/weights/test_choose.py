"""Names of versions: labels, run/step, and IDs of updates."""

from __future__ import annotations

import pytest

from sglang_rollout.weights.choose import NoSuchVersionError, choose_version
from sglang_rollout.wire.states import Version

VERSIONS = {
    "a" * 32: Version(run=1, step=7, label="seven"),
    "b" * 32: Version(run=2, step=7, label="7"),
    "c" * 32: Version(run=3, step=7, label="7"),
    "d" * 32: None,
}


@pytest.mark.parametrize(("name", "update"), [("seven", "a"), ("1/7", "a"), ("2/7", "b"), ("c" * 32, "c"), ("d" * 32, "d")])
def test_a_version_is_found_by_each_of_its_names(name: str, update: str) -> None:
    assert choose_version(name, VERSIONS) == update * 32


def test_a_name_of_no_version_or_of_several_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(
        NoSuchVersionError, match=r"There is no version '8' here\. There are: 3/7 .*, 2/7 .*, 1/7 \(label seven, update a+\), "
    ):
        choose_version("8", VERSIONS)
    with pytest.raises(NoSuchVersionError, match=r"Several versions are called '7': 3/7 .*, 2/7 "):
        choose_version("7", VERSIONS)
    with pytest.raises(NoSuchVersionError, match="There are: none"):
        choose_version("7", {})
