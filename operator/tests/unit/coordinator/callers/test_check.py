from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.api.security_spec import Security
from sglang_rollout.coordinator.callers import check as module
from sglang_rollout.coordinator.callers.check import CallerCheck, is_own_address
from sglang_rollout.coordinator.callers.pods import ROLLOUT_LABEL, Caller
from sglang_rollout.coordinator.callers.tokens import TokenFile
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.access import CALLER_HEADER, POD_PATHS, RELAYED_AUTHORIZATION_HEADER, RELAYED_CALLER_HEADER, PathKind
from sglang_rollout.wire.reasons import Refusal, RefusalCode
from tests.support.pods import make_pod, make_table
from tests.support.virtual_time import run

KEY = Credentials("c0ntrol")
OWN, OTHER = KEY.derive("e0").sent, KEY.derive("e1").sent
RELAYED = "/fleet/engines/e0/flush_cache"
ENGINE = make_pod("e0", address="10.0.0.9", labels={ROLLOUT_LABEL: "fleet"})


def make_check(*pods: dict[str, Any], security: Security | None = None, **more: Any) -> CallerCheck:
    return CallerCheck(
        name="fleet",
        namespace="ml",
        security=lambda: security or Security(),
        pods=make_table(*pods),
        credentials=KEY.derive,
        **more,
    )


def decide(check: CallerCheck, path: str = "/pause_generation", peer: str = "127.0.0.1", **headers: str) -> Caller | Refusal:
    names = {
        "caller": CALLER_HEADER,
        "relayed": RELAYED_CALLER_HEADER,
        "relayed_token": RELAYED_AUTHORIZATION_HEADER,
        "authorization": "Authorization",
        "host": "Host",
    }
    return run(check.check(path, {names[key]: value for key, value in headers.items()}, peer))


def code_of(verdict: Caller | Refusal) -> object:
    assert isinstance(verdict, Refusal), f"{verdict} was allowed"
    return verdict.code


def test_the_caller_is_the_pod_at_the_address_that_the_front_names() -> None:
    assert decide(make_check(make_pod()), caller="::ffff:10.0.0.1") == Caller("ml", "trainer", "Job/train")


def test_without_the_front_only_calls_of_the_router_pod_are_answered() -> None:
    check = make_check(make_pod())
    assert all(isinstance(decide(check, path), Caller) for path in POD_PATHS)
    assert code_of(decide(check)) is RefusalCode.UNAUTHENTICATED
    assert code_of(decide(check, "/generate")) is RefusalCode.UNAUTHENTICATED


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.9"], ids=["port-forward", "another machine"])
def test_refused_look_at_the_fleet_names_the_command_that_needs_no_token(address: str) -> None:
    refusal = decide(make_check(make_pod()), "/fleet", caller=address)
    assert isinstance(refusal, Refusal)
    assert refusal.message.endswith("To look without a token: sglang-rollout status fleet -n ml")
    push = decide(make_check(make_pod()), "/update_weights_from_distributed", caller=address)
    assert isinstance(push, Refusal)
    assert "sglang-rollout status" not in push.message, "the command is no way to push"


def test_without_kubernetes_no_command_reads_the_fleet_without_a_token() -> None:
    refusal = decide(make_check(in_cluster=False), "/fleet", caller="192.0.2.7")
    assert isinstance(refusal, Refusal)
    assert "sglang-rollout status" not in refusal.message


def test_without_kubernetes_programs_of_this_machine_need_no_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    check = make_check(in_cluster=False, token_file=TokenFile(token))
    assert isinstance(decide(check), Caller)
    assert isinstance(decide(check, caller="127.0.0.1"), Caller)
    assert code_of(decide(check, caller="192.0.2.7")) is RefusalCode.UNAUTHENTICATED
    assert isinstance(decide(check, caller="192.0.2.7", authorization="Bearer s3cret"), Caller)


def test_without_kubernetes_the_machines_own_addresses_are_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_own_address", lambda address: address == "192.0.2.7")
    local, in_cluster = make_check(in_cluster=False), make_check()
    assert isinstance(decide(local, caller="192.0.2.7"), Caller)
    assert code_of(decide(local, caller="192.0.2.8")) is RefusalCode.UNAUTHENTICATED
    assert code_of(decide(in_cluster, caller="192.0.2.7")) is RefusalCode.FORBIDDEN


REBOUND = ["attacker.example:1", "attacker.example", "192.0.2.1:1", "[2001:db8::1]", "", "localhost.attacker.example", "\udcff", "a:b:c"]
OWN_HOSTS = ["localhost:1", "LOCALHOST.", "a.localhost", "127.0.0.1:1", "127.8.8.8", "[::1]:1", "fleet.example:1", "box", "192.0.2.7"]


@pytest.mark.parametrize("host", REBOUND)
def test_without_kubernetes_a_page_with_a_rebound_name_is_no_program_of_this_machine(tmp_path: Path, host: str) -> None:
    (tmp_path / "token").write_text("s3cret")
    check = make_check(in_cluster=False, token_file=TokenFile(tmp_path / "token"))
    for path in ("/pause_generation", "/fleet", "/server_info"):
        for caller in ("127.0.0.1", "::1"):
            verdict = decide(check, path, caller=caller, host=host)
            assert code_of(verdict) is RefusalCode.FORBIDDEN
            assert isinstance(verdict, Refusal)
            assert "is not this machine" in verdict.message
    assert isinstance(decide(check, "/health", caller="127.0.0.1", host=host), Caller)
    assert isinstance(decide(check, caller="127.0.0.1", host=host, authorization="Bearer s3cret"), Caller)
    assert isinstance(decide(check, "/server_info", caller="192.0.2.7", host=host), Caller), "open to other machines under every name"


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_without_kubernetes_names_of_this_machine_are_accepted(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(module, "is_own_address", lambda address: address == "192.0.2.7")
    monkeypatch.setattr(socket, "gethostname", lambda: "Box")
    check = make_check(in_cluster=False, url_host="fleet.example")
    assert isinstance(decide(check, "/fleet", caller="127.0.0.1", host=host), Caller)


def test_in_a_cluster_every_name_of_the_url_is_accepted() -> None:
    assert isinstance(decide(make_check(make_pod()), caller="10.0.0.1", host="fleet.example"), Caller)


def test_only_addresses_of_the_machines_interfaces_are_its_own() -> None:
    assert is_own_address("127.0.0.1")
    for address in ("192.0.2.1", "2001:db8::1", "fe80::1"):
        assert not is_own_address(address)


def test_a_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    check = make_check(token_file=TokenFile(token))

    def is_accepted(value: str) -> bool:
        return isinstance(decide(check, caller="127.0.0.1", authorization=f"bearer {value}"), Caller)

    assert not is_accepted("first")
    assert not is_accepted("")
    token.write_text("first")
    assert is_accepted("first")
    replacement = tmp_path / "new"
    replacement.write_text("other")
    os.replace(replacement, token)
    assert is_accepted("other")
    assert not is_accepted("first")
    token.unlink()
    assert not is_accepted("other")


@pytest.mark.parametrize("header", ["Bearer", "Bearer  ", "Basic s3cret", "Bearer \udcff", "Bearer s3cret2", "", "s3cret"])
def test_no_other_header_is_a_token(tmp_path: Path, header: str) -> None:
    (tmp_path / "token").write_text("s3cret")
    check = make_check(token_file=TokenFile(tmp_path / "token"))
    assert code_of(decide(check, caller="127.0.0.1", authorization=header)) is RefusalCode.UNAUTHENTICATED


def test_an_agent_names_the_trainer_whose_call_it_relays() -> None:
    check = make_check(ENGINE, make_pod())
    relay = {"caller": "10.0.0.9", "authorization": f"Bearer {OWN}"}
    assert decide(check, RELAYED, relayed="10.0.0.1", **relay) == Caller("ml", "trainer", "Job/train")
    assert code_of(decide(check, RELAYED, relayed="10.0.0.9", **relay)) is RefusalCode.FORBIDDEN
    assert code_of(decide(check, RELAYED, relayed="", **relay)) is RefusalCode.FORBIDDEN


def test_an_agent_passes_on_the_token_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    security = Security.model_validate({"control": "Token", "token": {"secretName": "t"}})
    check = make_check(ENGINE, make_pod(), security=security, token_file=TokenFile(tmp_path / "token"))
    relay = {"caller": "10.0.0.9", "authorization": f"Bearer {OWN}", "relayed": "10.0.0.1"}
    assert code_of(decide(check, RELAYED, **relay)) is RefusalCode.UNAUTHENTICATED
    assert code_of(decide(check, RELAYED, relayed_token="Bearer other", **relay)) is RefusalCode.UNAUTHENTICATED
    assert code_of(decide(check, RELAYED, relayed_token=f"Bearer {OWN}", **relay)) is RefusalCode.UNAUTHENTICATED
    assert isinstance(decide(check, RELAYED, relayed_token="Bearer s3cret", **relay), Caller)
    for own in ("10.0.0.9", "127.0.0.1", "::ffff:127.0.0.1", "::1"):  # code in the engine's pod has taken the token
        assert code_of(decide(check, RELAYED, relayed_token="Bearer s3cret", **relay | {"relayed": own})) is RefusalCode.FORBIDDEN
    not_an_agent = relay | {"authorization": "Bearer other"}
    assert isinstance(decide(check, RELAYED, relayed_token="Bearer s3cret", **not_an_agent), Refusal)


@pytest.mark.parametrize(
    ("path", "caller", "authorization"),
    [
        (RELAYED, "10.0.0.9", ""),
        (RELAYED, "10.0.0.9", "Bearer other"),
        (RELAYED, "10.0.0.9", f"Bearer {OTHER}"),
        (RELAYED, "10.0.0.9", f"Bearer {KEY.sent}"),
        (f"/x{RELAYED}", "10.0.0.9", f"Bearer {OWN}"),
        (RELAYED, "10.0.0.5", f"Bearer {OWN}"),
        ("/pause_generation", "10.0.0.9", f"Bearer {OWN}"),
    ],
)
def test_no_other_call_names_another_caller(path: str, caller: str, authorization: str) -> None:
    others = make_pod("o", address="10.0.0.5", labels={ROLLOUT_LABEL: "other"})
    verdict = decide(make_check(ENGINE, others, make_pod()), path, caller=caller, relayed="10.0.0.1", authorization=authorization)
    assert code_of(verdict) is RefusalCode.FORBIDDEN


def test_the_token_of_the_agents_opens_no_path() -> None:
    check = make_check(make_pod("spy", namespace="other"))
    assert code_of(decide(check, caller="10.0.0.1", authorization=f"Bearer {OWN}")) is RefusalCode.FORBIDDEN


def test_a_call_waits_for_the_pod_that_the_watch_has_not_reported_yet() -> None:
    check = make_check()

    async def call() -> Caller | Refusal:
        asyncio.get_running_loop().call_later(1.0, check.pods.update, check.pods.own, make_pod())
        return await check.check("/pause_generation", {CALLER_HEADER: "10.0.0.1"}, None)

    assert run(call()) == Caller("ml", "trainer", "Job/train")


def test_only_calls_from_a_few_addresses_wait_and_others_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 0)
    check = make_check()

    async def call() -> tuple[object, float]:
        verdict = await check.check("/pause_generation", {CALLER_HEADER: "10.0.0.1"}, None)
        return code_of(verdict), asyncio.get_running_loop().time()

    assert run(call()) == (RefusalCode.UNAVAILABLE, 0.0)


def test_many_calls_from_one_address_without_a_pod_take_no_place_of_a_new_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 2)
    check = make_check()

    async def call(address: str) -> Caller | Refusal:
        return await check.check("/pause_generation", {CALLER_HEADER: address}, None)

    async def calls() -> tuple[list[Caller | Refusal], Caller | Refusal]:
        asyncio.get_running_loop().call_later(1.0, check.pods.update, check.pods.own, make_pod())
        outsiders = [asyncio.create_task(call("10.0.0.66")) for _ in range(100)]
        await asyncio.sleep(0)
        trainer = await call("10.0.0.1")
        return list(await asyncio.gather(*outsiders)), trainer

    outsiders, trainer = run(calls())
    assert trainer == Caller("ml", "trainer", "Job/train")
    assert {code_of(verdict) for verdict in outsiders} == {RefusalCode.FORBIDDEN}
    assert not check._waiting


def test_until_the_spec_is_known_no_caller_is_allowed() -> None:
    check = make_check(make_pod())
    check.security = lambda: None
    for kind in (PathKind.CONTROL, PathKind.READ, PathKind.DATA):
        assert code_of(run(check.check_kind(kind, "10.0.0.1", None))) is RefusalCode.UNAVAILABLE
