import pytest
from pydantic import TypeAdapter, ValidationError

from sglang_rollout.api.security_spec import Cidr, ControlAccess, GenerateAccess, Security, ServiceAccountName, TrainerAddress


def test_by_default_trainers_control_and_everyone_generates() -> None:
    security = Security()
    assert (security.control, security.generate) == (ControlAccess.TRAINERS, GenerateAccess.OPEN)


@pytest.mark.parametrize(
    "block", ["10.1.0.0/16", "192.168.7.9/32", "fd00:1::/64", "2001:db8::1/128", "10.0.0.0/9", "255.255.255.255/32", "1:2:3:4:5:6:7:8/128"]
)
def test_block_of_addresses_is_accepted(block: str) -> None:
    assert TypeAdapter(Cidr).validate_python(block) == block


@pytest.mark.parametrize(
    "block",
    [
        *("10.1.0.0", "10.1.0.0/33", "10.1/16", "trainer/16", "fd00::/129", "/8", "10.0.0.0/8 "),
        *("999.1.1.1/24", "010.0.0.1/8", "10.0.0.256/32", "fd00:1/64", ":/8", "fd00:::/8", "fd00::1::2/64", "::ffff:10.0.0.1/128"),
    ],
)
def test_other_text_is_no_block(block: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Cidr).validate_python(block)


@pytest.mark.parametrize(
    ("name", "accepted"), [("trainer", True), ("ml/trainer", True), ("a/b/c", False), ("/trainer", False), ("Ml", False)]
)
def test_name_of_a_service_account(name: str, accepted: bool) -> None:
    adapter: TypeAdapter[str] = TypeAdapter(ServiceAccountName)
    if accepted:
        assert adapter.validate_python(name) == name
    else:
        with pytest.raises(ValidationError):
            adapter.validate_python(name)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        *((text, True) for text in ("10.1.0.1", "10.1.0.0/16", "fd00::7", "fd00::/64", "trainer", "trainer-0.ml.svc", "a.example.org.")),
        *((text, False) for text in ("", "999.1.1.1", "10.1", "10.0.0.1/33", "a b", "a:80", "[fd00::7]", "http://a", "-a", "a..b", "a/16")),
    ],
)
def test_address_of_a_trainer(text: str, accepted: bool) -> None:
    adapter: TypeAdapter[str] = TypeAdapter(TrainerAddress)
    if accepted:
        assert adapter.validate_python(text) == text
    else:
        with pytest.raises(ValidationError):
            adapter.validate_python(text)
