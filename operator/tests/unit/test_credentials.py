"""Credentials of the calls between the fleet's own processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.credentials import CredentialFile, Credentials


def test_the_first_is_sent_and_all_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("new\nold\n")
    found = CredentialFile(file)
    assert found.header == {"Authorization": "Bearer new"}
    assert [found.accept(given) for given in ("new", "old", "", "new\nold", "Ünew", "\udcff")] == [True, True, False, False, False, False]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    found = CredentialFile(file)
    file.write_text("second")
    assert (found.sent, found.accept("one"), found.accept("second")) == ("second", False, True)


@pytest.mark.parametrize("text", ["", " \n", None])
def test_the_last_credentials_stay_while_the_file_has_none(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    found = CredentialFile(file)
    file.unlink()
    if text is not None:
        file.write_text(text)
    assert (found.sent, found.accept("one")) == ("one", True)


def test_a_file_without_credentials_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ValueError, match="has no credential"):
        CredentialFile(tmp_path / "token")
    with pytest.raises(FileNotFoundError):
        CredentialFile(tmp_path / "absent")


def test_no_credentials_accept_nothing() -> None:
    assert not Credentials().accept("")


def test_the_credential_of_an_engine_stays_the_same_between_releases() -> None:
    assert Credentials("key").derive("demo-engine-0").sent == "d4fb22a309adc9ddd51074ba0a94dfc1d397e02302308d29514a781368a91966"


LINES = st.lists(st.text("abc", min_size=1), min_size=1, max_size=3, unique=True)


@given(LINES, st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
def test_a_credential_proves_one_engine(lines: list[str], engines: list[str]) -> None:
    key = Credentials(*lines)
    own, other = (key.derive(engine) for engine in engines)
    assert [own.accept(line) for line in own.lines()] == [True] * len(lines)
    assert not any(own.accept(line) for line in (*other.lines(), *lines))
    assert own.sent == Credentials(lines[0]).derive(engines[0]).sent, "the first line of the key decides what is sent"


def test_the_credentials_of_an_engine_follow_the_file_of_the_key(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    key = CredentialFile(file)
    before = key.derive("e0")
    file.write_text("second\none")
    assert key.derive("e0").accept(before.sent)
    assert key.derive("e0").sent != before.sent
