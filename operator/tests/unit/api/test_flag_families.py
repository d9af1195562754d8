"""Each flag of SGLang and smg is harmless, needs to be accepted, or is unknown."""

from __future__ import annotations

import re

import pytest

from sglang_rollout.api.engine_flags import FLAGS, LORA_FLAGS
from sglang_rollout.api.flag_families import ENGINE_FAMILIES, ROUTER_FAMILIES, Family, rules_of_families
from sglang_rollout.api.network_spec import PORT_FLAGS
from sglang_rollout.proxy.address import Address
from sglang_rollout.proxy.smg import smg_args

UNKNOWN = "no family"


def judge(families: tuple[Family, ...], flag: str) -> set[str]:
    """Return the subjects of the families that refuse the flag; empty if it is harmless."""
    found = {family for family in families if any(flag.startswith(beginning) for beginning in family.flags)}
    return {family.subject for family in found if family.risk} if found else {UNKNOWN}


@pytest.mark.parametrize(
    ("flag", "family"),
    [
        ("--enable-custom-logit-processor", "code from requests"),
        ("--tool-server", "code from requests"),
        ("--tool-server=demo", "code from requests"),
        ("--kv-events-config", "further listeners"),
        ("--remote-instance-weight-loader-backend", "other sources of weights"),
        ("--no-such-flag", UNKNOWN),
        ("--enable-custom", UNKNOWN),
        ("--forward-hooks", UNKNOWN),
    ],
)
def test_risky_and_unknown_flags_of_sglang_need_to_be_accepted(flag: str, family: str) -> None:
    assert judge(ENGINE_FAMILIES, flag) == {family}


@pytest.mark.parametrize(
    ("flag", "family"),
    [
        ("--enable-wasm", "WebAssembly"),
        ("--storage-hook-wasm-path", "WebAssembly"),
        ("--mcp-config-path", "tools"),
        ("--enable-mesh", "mesh"),
        ("--mesh-peer-urls", "mesh"),
        ("--enable-igw", "other control planes"),
        ("--jwt-issuer", "credentials of smg"),
        ("--redis-url", UNKNOWN),
    ],
)
def test_risky_and_unknown_flags_of_smg_need_to_be_accepted(flag: str, family: str) -> None:
    assert judge(ROUTER_FAMILIES, flag) == {family}


@pytest.mark.parametrize(
    "flag", sorted({*FLAGS.values(), *LORA_FLAGS, "--device", "--sleep-on-idle", "--is-embedding", "--max-total-tokens"})
)
def test_flags_of_fields_and_of_the_documentation_are_harmless(flag: str) -> None:
    assert judge(ENGINE_FAMILIES, flag) == set()


@pytest.mark.parametrize("flag", PORT_FLAGS)
def test_flags_for_ports_open_further_listeners(flag: str) -> None:
    assert judge(ENGINE_FAMILIES, flag) == {"further listeners"}


def test_flags_that_the_operator_sets_for_smg_can_be_changed() -> None:
    address = Address("127.0.0.1", 1)
    owned = {"--host", "--port", "--prometheus-host", "--prometheus-port", "--policy", "--model-alias"}
    given = smg_args(listen=address, metrics_listen=address, policy="Random", served_name="m")
    assert {flag for flag in given if flag.startswith("--") and judge(ROUTER_FAMILIES, flag)} == owned


def test_the_messages_name_family_flags_reason_and_field() -> None:
    rules = rules_of_families("router", ROUTER_FAMILIES, ())
    risky = [family for family in ROUTER_FAMILIES if family.risk]
    assert len(rules) == len(risky) + 1
    for family, rule in zip(risky, rules, strict=False):
        assert all(text in rule["message"] for text in (family.subject, *family.flags, family.risk, "router.acceptFlags"))
    assert all(re.fullmatch(r"[a-z0-9-]+", word) for family in (*ENGINE_FAMILIES, *ROUTER_FAMILIES) for word in family.beginnings.split())
