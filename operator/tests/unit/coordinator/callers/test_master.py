"""Which addresses a trainer may name as ``master_address``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_rollout.api.security_spec import Security
from sglang_rollout.coordinator.callers import check as module
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.coordinator.callers.master import find_master, resolve_host
from sglang_rollout.coordinator.callers.pods import ROLLOUT_LABEL
from sglang_rollout.coordinator.update.requests import Master
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.reasons import RefusalCode
from tests.support.pods import make_pod, make_table

CALLER, RANK_0, STRANGER, ENGINE = "10.0.0.1", "10.0.0.2", "10.1.0.1", "10.0.0.9"
PODS = [
    make_pod("driver", address=CALLER, labels={"app": "train"}),
    make_pod("rank-0", address=RANK_0, labels={"app": "train"}),
    make_pod("other", address="10.0.0.3"),
    make_pod("e0", address=ENGINE, labels={ROLLOUT_LABEL: "fleet"}),
]
NAMES = {
    "localhost": ("::1", "127.0.0.1"),
    "rank-0.train": (RANK_0,),
    "headless": (STRANGER, RANK_0, CALLER),
    "trainer.example.org": (STRANGER,),
    "Trainer.example.org.": (STRANGER,),
    "metadata": ("169.254.169.254",),
}


def find(host: object, *, caller: str | None = CALLER, in_cluster: bool = True, is_current: bool = True, **security: Any) -> Master | None:
    spec = Security.model_validate(security)
    pods = make_table(*PODS)
    pods.own.is_current = is_current
    callers = CallerCheck(
        name="fleet", namespace="ml", security=lambda: spec, pods=pods, credentials=Credentials("c").derive, in_cluster=in_cluster
    )

    async def resolve(name: str) -> tuple[str, ...]:
        return NAMES[name] if name in NAMES else await resolve_host(name) if name[0] in "0123456789[:f" else ()

    return asyncio.run(find_master(callers, host, caller, resolve))


def allowed(host: object, **more: Any) -> str:
    master = find(host, **more)
    assert master is not None
    assert master.refusal is None, master.refusal
    return master.address


def refused(host: object, **more: Any) -> str:
    master = find(host, **more)
    assert master is not None
    assert master.refusal is not None, f"{master.address} was allowed"
    assert master.refusal.code is RefusalCode.INVALID_REQUEST
    return master.refusal.message


@pytest.fixture(autouse=True)
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEW_POD_POLLS", 1)


def test_trainers_name_their_own_pod_or_one_of_their_ranks() -> None:
    assert allowed(CALLER) == CALLER
    assert allowed(f"::ffff:{CALLER}") == CALLER
    assert allowed(RANK_0) == RANK_0
    assert allowed(RANK_0, trainers={"podSelector": {"matchLabels": {"app": "train"}}}) == RANK_0


def test_other_addresses_are_refused_with_what_is_allowed() -> None:
    message = refused(STRANGER)
    assert f"master_address {STRANGER} belongs to no trainer of this fleet." in message
    assert f"yours is {CALLER}" in message
    assert "pods of namespace ml that belong to no rollout, and security.trainerAddresses" in message
    assert "callers that security.trainers selects" in refused("10.0.0.3", trainers={"podSelector": {"matchLabels": {"app": "train"}}})
    refused(ENGINE)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "::ffff:127.0.0.1", "127.1", "0.0.0.0", "::"])
@pytest.mark.parametrize("control", ["Trainers", "Open"])
def test_loopback_is_no_trainer_and_the_refusal_names_the_callers_address(host: str, control: str) -> None:
    message = refused(host, control=control)
    if control == "Trainers":
        assert f"yours is {CALLER}" in message


@pytest.mark.parametrize("control", ["Trainers", "Token", "Open"])
@pytest.mark.parametrize("host", ["169.254.169.254", "fd00:ec2::254", "[FD00:EC2:0:0::254]", "168.63.129.16", "::ffff:168.63.129.16"])
def test_the_metadata_service_is_never_a_trainer(control: str, host: str) -> None:
    message = refused(host, control=control, trainerAddresses=["0.0.0.0/0", "::/0"])
    assert "cloud" in message
    refused("metadata", control=control, trainerAddresses=["metadata"])


def test_a_name_is_sent_on_as_its_address() -> None:
    assert allowed("rank-0.train") == RANK_0
    assert allowed("headless") == CALLER, "the caller's own address comes first"
    assert allowed("headless", caller="10.9.9.9") == RANK_0
    assert "(10.1.0.1) belongs to no trainer" in refused("trainer.example.org")
    assert "cannot be resolved" in refused("nowhere.invalid")


def test_addresses_and_names_of_the_spec_are_allowed() -> None:
    assert allowed(STRANGER, trainerAddresses=[STRANGER]) == STRANGER
    assert allowed(STRANGER, trainerAddresses=["10.1.0.0/16"]) == STRANGER
    assert allowed("Trainer.example.org.", trainerAddresses=["trainer.example.org"], caller=None) == STRANGER
    assert allowed(STRANGER, trainerAddresses=["trainer.example.org"]) == STRANGER
    assert allowed("fd00::7", trainerAddresses=["fd00::/64"]) == "fd00::7"
    refused("10.2.0.1", trainerAddresses=["10.1.0.0/16", "trainer.example.org"])


def test_nodes_of_cidrs_are_trainers() -> None:
    assert allowed("192.168.0.7", trainers={"podSelector": {}, "cidrs": ["192.168.0.0/24"]}) == "192.168.0.7"


def test_a_caller_with_a_token_names_its_own_address_or_a_trainers_pod() -> None:
    assert allowed("203.0.113.5", control="Token", caller="203.0.113.5") == "203.0.113.5"
    assert allowed(RANK_0, control="Token", caller="203.0.113.5") == RANK_0
    refused("203.0.113.6", control="Token", caller="203.0.113.5")
    assert "yours is" not in refused("203.0.113.6", control="Token", caller="127.0.0.1"), "as through kubectl port-forward"


def test_an_open_fleet_takes_every_address_unless_the_spec_names_some() -> None:
    assert allowed(STRANGER, control="Open") == STRANGER
    assert allowed(STRANGER, control="Open", trainerAddresses=["10.1.0.0/16"]) == STRANGER
    refused("10.2.0.1", control="Open", trainerAddresses=["10.1.0.0/16"])
    assert allowed(STRANGER, control="Open", caller=STRANGER, trainerAddresses=["10.3.0.0/16"]) == STRANGER


def test_only_callers_that_are_no_trainers_get_no_reasons() -> None:
    def hides(caller: str | None, control: str) -> bool:
        master = find("127.0.0.1", caller=caller, control=control)
        assert master is not None
        return master.hides_reasons

    assert hides(STRANGER, "Open")
    assert hides(None, "Open")
    assert not hides(CALLER, "Open")
    assert not hides(STRANGER, "Token"), "only a caller with a token gets here"


def test_an_unknown_address_is_refused_for_now_while_pods_cannot_be_watched() -> None:
    master = find(STRANGER, is_current=False)
    assert master is not None
    assert master.refusal is not None
    assert master.refusal.code is RefusalCode.UNAVAILABLE


def test_a_fleet_without_kubernetes_takes_every_address() -> None:
    assert find("localhost", in_cluster=False) is None


@pytest.mark.parametrize("host", [None, 7, "", " "])
def test_a_body_without_a_host_is_left_to_the_check_of_the_body(host: object) -> None:
    assert find(host) is None


@pytest.mark.parametrize("host", ["a\0b", "x" * 300, "a b", "..", "\udcff", "xn--" + "é" * 70])
async def test_a_text_that_is_no_name_has_no_address(host: str) -> None:
    assert await resolve_host(host) == ()
