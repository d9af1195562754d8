from pathlib import Path

import pytest

from sglang_rollout.trainer import FleetError, connect
from sglang_rollout.trainer.credentials import CA_VARIABLES, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, find_credentials
from tests.unit.trainer.support.scripted_fleet import FakeFleet


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, *CA_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def test_without_a_token_no_header_is_sent(fake: FakeFleet) -> None:
    connect(fake.url).close()
    assert set(fake.authorizations) == {None}


def test_each_call_carries_the_token(fake: FakeFleet) -> None:
    with connect(fake.url, token="s3cret") as fleet:
        fleet.document()
    assert set(fake.authorizations) == {"Bearer s3cret"}


def test_a_replaced_file_is_read_again(fake: FakeFleet, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with connect(fake.url, token_file=token) as fleet:
        token.write_text("second")
        fleet.document()
        token.unlink()
        with pytest.raises(FleetError, match="cannot be read"):
            fleet.document()
    assert fake.authorizations == ["Bearer first", "Bearer first", "Bearer second"]


def test_variables_apply_where_no_argument_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "of-variable")
    monkeypatch.setenv(CA_VARIABLES[0], "/ca.crt")
    assert find_credentials(None, None, None).token == "of-variable"
    assert find_credentials(None, None, None).ca == "/ca.crt"
    assert find_credentials("mine", None, "/mine.crt").ca == "/mine.crt"
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "file"))
    found = find_credentials(None, None, None)
    assert (found.token, found.token_file) == (None, tmp_path / "file")
    assert find_credentials("mine", None, None).token_file is None


def test_the_first_variable_with_authorities_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in reversed(CA_VARIABLES):
        monkeypatch.setenv(name, f"/{name}")
        assert find_credentials(None, None, None).ca == f"/{name}"


def test_token_and_file_exclude_each_other() -> None:
    with pytest.raises(FleetError, match="not both"):
        find_credentials("a", "b", None)
