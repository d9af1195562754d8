from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.api.security_spec import Security
from sglang_rollout.coordinator.callers.pods import ENDED_AFTER_SECONDS, MAX_PAST_ADDRESSES, ROLLOUT_LABEL, SILENT_SECONDS, Caller, PodTable
from sglang_rollout.coordinator.callers.policy import (
    AccountToken,
    BadToken,
    Credential,
    Policy,
    StaticToken,
    authorize,
    needs_all_namespaces,
)
from sglang_rollout.wire.access import PathKind
from sglang_rollout.wire.reasons import Refusal, RefusalCode
from tests.support.pods import make_pod, make_table

ADDRESS = "10.0.0.1"


def decide(
    pod: Mapping[str, Any] | None = None,
    *,
    kind: PathKind = PathKind.CONTROL,
    address: str | None = ADDRESS,
    token: Credential = None,
    local: bool = False,
    namespaces: Mapping[str, Mapping[str, str]] | None = None,
    **security: Any,
) -> Caller | Refusal:
    pods = make_table(*([pod] if pod is not None else []))
    pods.set_namespaces(namespaces or {})
    return authorize(kind, address, token, pods, Policy(Security.model_validate(security), namespace="ml", trusts_loopback=local))


def refused(verdict: Caller | Refusal) -> Refusal:
    assert isinstance(verdict, Refusal), f"{verdict} was allowed"
    return verdict


def test_a_pod_of_the_namespace_controls_the_fleet_by_default() -> None:
    assert decide(make_pod()) == Caller("ml", "trainer", "Job/train")


def test_ranks_of_one_job_are_one_caller() -> None:
    assert decide(make_pod("train-0")) == decide(make_pod("train-1"))


def test_a_pod_of_another_namespace_is_refused_with_both_identities() -> None:
    refusal = refused(decide(make_pod("spy", namespace="other", account="default")))
    assert refusal.code is RefusalCode.FORBIDDEN
    assert "pod other/spy (ServiceAccount default)" in refusal.message
    assert "pods of namespace ml that belong to no rollout, and callers with a token" in refusal.message


def test_an_unknown_address_is_refused() -> None:
    assert refused(decide(None)).code is RefusalCode.FORBIDDEN


def test_a_caller_without_a_pod_learns_how_to_allow_host_network() -> None:
    assert "For a pod with hostNetwork, name this address in security.trainers.cidrs" in refused(decide(None)).message
    by_clients = refused(decide(None, kind=PathKind.DATA, generate="Clients"))
    assert "in security.clients.cidrs" in by_clients.message


def test_a_pod_of_a_rollout_is_never_a_trainer() -> None:
    engine = make_pod("fleet-engine-0-0", labels={ROLLOUT_LABEL: "fleet"})
    assert "belongs to the rollout fleet" in refused(decide(engine)).message
    refused(decide(engine, trainers={"podSelector": {}}))
    refused(decide(engine, trainers={"cidrs": ["10.0.0.0/8"]}))


@pytest.mark.parametrize("control", ["Trainers", "Token"])
def test_a_pod_of_a_rollout_cannot_use_a_token_that_it_has_taken_from_a_trainer(control: str) -> None:
    trainer, engine = make_pod(uid="t", address="10.0.0.9"), make_pod("fleet-engine-0-0", labels={ROLLOUT_LABEL: "fleet"})
    pods, policy = make_table(trainer, engine), Policy(Security.model_validate({"control": control}), namespace="ml")
    for token in (StaticToken(), AccountToken("ml", "trainer", "t")):
        assert isinstance(authorize(PathKind.CONTROL, "10.0.0.9", token, pods, policy), Caller)
        refusal = refused(authorize(PathKind.CONTROL, ADDRESS, token, pods, policy))
        assert (refusal.code, "No token is accepted from such a pod" in refusal.message) == (RefusalCode.FORBIDDEN, True)


def test_loopback_is_an_identity_only_without_kubernetes() -> None:
    assert refused(decide(address="127.0.0.1")).code is RefusalCode.UNAUTHENTICATED
    assert refused(decide(address="::1", trainers={"podSelector": {}})).code is RefusalCode.UNAUTHENTICATED
    assert isinstance(decide(address="127.0.0.1", local=True), Caller)
    assert "Authorization: Bearer" in refused(decide(address=ADDRESS, local=True)).message


def test_everyone_generates_by_default_and_reads_what_generation_needs() -> None:
    stranger = make_pod(namespace="other")
    for kind in (PathKind.HEALTH, PathKind.DATA, PathKind.READ):
        assert isinstance(decide(stranger, kind=kind), Caller)
    refused(decide(stranger, kind=PathKind.READ, generate="Clients"))
    assert isinstance(decide(stranger, kind=PathKind.HEALTH, generate="Clients"), Caller)


def test_a_trainer_also_generates_and_a_client_does_not_control() -> None:
    security: dict[str, Any] = {
        "generate": "Clients",
        "clients": {"podSelector": {"matchLabels": {"app": "eval"}}},
        "trainers": {"podSelector": {"matchLabels": {"app": "train"}}},
    }
    trainer, client = make_pod(labels={"app": "train"}), make_pod(labels={"app": "eval"})
    assert isinstance(decide(trainer, kind=PathKind.DATA, **security), Caller)
    assert isinstance(decide(client, kind=PathKind.DATA, **security), Caller)
    assert isinstance(decide(client, kind=PathKind.READ, **security), Caller)
    refused(decide(client, **security))
    refused(decide(make_pod(), kind=PathKind.DATA, **security))


@pytest.mark.parametrize("control", ["Token", "Open"])
def test_the_default_trainers_generate_only_if_control_paths_are_for_them(control: str) -> None:
    clients = {"podSelector": {"matchLabels": {"app": "eval"}}}
    security: dict[str, Any] = {"generate": "Clients", "clients": clients}
    assert isinstance(decide(make_pod(), kind=PathKind.DATA, **security), Caller)
    refused(decide(make_pod(), kind=PathKind.DATA, control=control, **security))
    assert isinstance(decide(make_pod(labels={"app": "eval"}), kind=PathKind.DATA, control=control, **security), Caller)


def test_labels_of_pod_and_namespace_must_both_fit() -> None:
    trainers = {"podSelector": {"matchLabels": {"app": "train"}}, "namespaceSelector": {"matchLabels": {"team": "a"}}}
    namespaces = {"other": {"team": "a"}, "ml": {}}
    assert isinstance(decide(make_pod(namespace="other", labels={"app": "train"}), namespaces=namespaces, trainers=trainers), Caller)
    refused(decide(make_pod(namespace="other"), namespaces=namespaces, trainers=trainers))
    refused(decide(make_pod(labels={"app": "train"}), namespaces=namespaces, trainers=trainers))


@pytest.mark.parametrize("operator", ["DoesNotExist", "NotIn"])
def test_no_selector_fits_a_namespace_whose_labels_are_not_known(operator: str) -> None:
    values = ["prod"] if operator == "NotIn" else []
    selector = {"matchExpressions": [{"key": "stage", "operator": operator, **({"values": values} if values else {})}]}
    trainers = {"podSelector": {"matchLabels": {"app": "train"}}, "namespaceSelector": selector}
    trainer = make_pod(namespace="new", labels={"app": "train"})
    assert refused(decide(trainer, namespaces={}, trainers=trainers)).code is RefusalCode.UNAVAILABLE
    assert isinstance(decide(trainer, namespaces={"new": {}}, trainers=trainers), Caller)
    assert refused(decide(make_pod(namespace="new"), namespaces={}, trainers=trainers)).code is RefusalCode.FORBIDDEN


def test_a_pod_that_may_be_a_proxy_is_no_caller_yet() -> None:
    proxies = {"namespaceSelector": {"matchLabels": {"role": "gateway"}}}
    assert refused(decide(make_pod(), namespaces={}, proxies=proxies)).code is RefusalCode.UNAVAILABLE
    assert isinstance(decide(make_pod(), namespaces={"ml": {}}, proxies=proxies), Caller)
    assert isinstance(decide(make_pod(), namespaces={}, proxies=proxies, token=StaticToken()), Caller)


def test_expressions_of_a_selector() -> None:
    def is_allowed(labels: dict[str, str], **expression: Any) -> bool:
        selector = {"matchExpressions": [{"key": "app", **expression}]}
        return isinstance(decide(make_pod(labels=labels), trainers={"podSelector": selector}), Caller)

    assert is_allowed({"app": "a"}, operator="In", values=["a", "b"])
    assert not is_allowed({}, operator="In", values=["a", "b"])
    assert is_allowed({}, operator="NotIn", values=["a"])
    assert not is_allowed({"app": "a"}, operator="NotIn", values=["a"])
    assert is_allowed({"app": ""}, operator="Exists")
    assert not is_allowed({"app": ""}, operator="DoesNotExist")


def test_service_accounts_select_pods_and_name_their_namespace() -> None:
    trainers = {"serviceAccounts": ["trainer", "other/ray"]}
    assert isinstance(decide(make_pod(), trainers=trainers), Caller)
    assert isinstance(decide(make_pod(namespace="other", account="ray"), trainers=trainers), Caller)
    refused(decide(make_pod(account="default"), trainers=trainers))
    refused(decide(make_pod(namespace="other"), trainers=trainers))


def test_blocks_of_addresses_are_for_callers_outside_of_pods_too() -> None:
    trainers = {"cidrs": ["192.168.0.0/16", "fd00::/8"]}
    assert decide(address="192.168.3.4", trainers=trainers) == Caller(owner="192.168.3.4")
    assert isinstance(decide(address="fd00::7", trainers=trainers), Caller)
    refused(decide(address="10.0.0.9", trainers=trainers))
    refused(decide(make_pod(), trainers=trainers))  # cidrs alone select no pod


def test_what_is_no_block_of_addresses_selects_no_caller() -> None:
    trainers = {"cidrs": ["1:2:3:4:5:6:7:8:9::/64", "192.168.0.0/16"]}
    refused(decide(address="10.0.0.9", trainers=trainers))
    assert isinstance(decide(address="192.168.3.4", trainers=trainers), Caller)


def test_hosts_of_pods_with_the_network_of_their_node_are_no_identity() -> None:
    refused(decide(make_pod(host_network=True)))


def test_an_address_of_two_live_pods_is_refused_and_one_of_an_ended_pod_is_not() -> None:
    pods = make_table(make_pod("a"), make_pod("b"))
    policy = Policy(Security(), namespace="ml")
    assert "2 pods have the address" in refused(authorize(PathKind.CONTROL, ADDRESS, None, pods, policy)).message
    pods.update(pods.own, make_pod("a", phase="Succeeded"))
    assert isinstance(authorize(PathKind.CONTROL, ADDRESS, None, pods, policy), Caller)


def test_a_caller_is_gone_when_its_last_pod_has_ended() -> None:
    pods = PodTable("ml", lambda: 0.0)
    assert not pods.is_gone("ml/Pod/a"), "no pod is known yet"
    pods.replace(pods.own, [make_pod("a", owner=""), make_pod("b", owner="")])
    assert not pods.is_gone("ml/Pod/a")
    pods.update(pods.own, make_pod("a", owner="", phase="Failed"))
    assert pods.is_gone("ml/Pod/a")
    assert [pods.is_gone(caller) for caller in ("ml/Pod/b", "token", "10.0.0.1", "localhost", "")] == [False] * 5
    pods.own.is_current = False
    assert not pods.is_gone("ml/Pod/a"), "its pods may have come back"


def test_while_the_watch_is_down_known_pods_are_allowed_and_new_ones_are_asked_to_try_again() -> None:
    pods = make_table(make_pod())
    pods.own.is_current = False
    policy = Policy(Security(), namespace="ml")
    assert isinstance(authorize(PathKind.CONTROL, ADDRESS, None, pods, policy), Caller)
    assert refused(authorize(PathKind.CONTROL, "10.0.0.2", None, pods, policy)).code is RefusalCode.UNAVAILABLE


def test_callers_behind_a_proxy_need_a_token() -> None:
    gateway = make_pod("gateway", labels={"app": "gateway"})
    proxies = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    assert refused(decide(gateway, proxies=proxies)).code is RefusalCode.UNAUTHENTICATED
    assert isinstance(decide(gateway, proxies=proxies, token=StaticToken()), Caller)


def test_control_token_accepts_tokens_only() -> None:
    assert refused(decide(make_pod(), control="Token")).code is RefusalCode.UNAUTHENTICATED
    assert isinstance(decide(make_pod(), control="Token", token=StaticToken()), Caller)


def test_a_meaningless_token_takes_nothing_from_an_allowed_pod_and_is_named_in_a_refusal() -> None:
    bad = BadToken("it is no token of this rollout")
    assert isinstance(decide(make_pod(), token=bad), Caller)
    assert "Its token is not accepted: it is no token of this rollout." in refused(decide(token=bad)).message


@pytest.mark.parametrize("kind", list(PathKind))
def test_an_open_fleet_refuses_no_caller(kind: PathKind) -> None:
    assert isinstance(decide(None, kind=kind, address=None, control="Open"), Caller)


def test_a_deleted_pod_counts_until_its_grace_period_has_ended() -> None:
    now = 0.0
    pods = PodTable("ml", lambda: now)
    pods.replace(pods.own, [make_pod(deleted="1970-01-01T00:01:00Z")])
    policy = Policy(Security(), namespace="ml")
    now = 59.0 + ENDED_AFTER_SECONDS
    assert isinstance(authorize(PathKind.CONTROL, ADDRESS, None, pods, policy), Caller)
    now = 60.0 + ENDED_AFTER_SECONDS
    assert refused(authorize(PathKind.CONTROL, ADDRESS, None, pods, policy)).code is RefusalCode.FORBIDDEN
    assert pods.find("ml-train-0") is None
    pods.update(pods.own, make_pod("next"))
    assert isinstance(authorize(PathKind.CONTROL, ADDRESS, None, pods, policy), Caller), "the address has a new pod"


def test_while_a_watch_is_silent_only_the_trainer_that_holds_the_fleet_continues_by_its_address() -> None:
    now = 0.0
    pods = PodTable("ml", lambda: now)
    pods.replace(pods.own, [make_pod(), make_pod("b", address="10.0.0.2", owner="Job/b")])
    policy = Policy(Security(), namespace="ml", holder="ml/Job/train")
    now = SILENT_SECONDS + 1
    assert isinstance(authorize(PathKind.CONTROL, ADDRESS, None, pods, policy), Caller)
    assert refused(authorize(PathKind.CONTROL, "10.0.0.2", None, pods, policy)).code is RefusalCode.UNAVAILABLE
    assert isinstance(authorize(PathKind.READ, "10.0.0.2", None, pods, policy), Caller)
    assert isinstance(authorize(PathKind.CONTROL, "10.0.0.2", StaticToken(), pods, policy), Caller)
    token = AccountToken("ml", "trainer", "ml-b")
    assert isinstance(authorize(PathKind.CONTROL, "10.0.0.2", token, pods, policy), Caller)
    pods.note_report(pods.own)
    assert isinstance(authorize(PathKind.CONTROL, "10.0.0.2", None, pods, policy), Caller)


def test_while_a_watch_is_silent_blocks_name_no_address_that_belongs_or_belonged_to_a_pod() -> None:
    now = 0.0
    pods = PodTable("ml", lambda: now)
    ending = make_pod("c", address="10.0.0.3", owner="Job/c", deleted="1970-01-01T00:00:01Z")
    pods.replace(pods.own, [make_pod(), make_pod("b", address="10.0.0.2", owner="Job/b"), ending, make_pod("d", address="10.0.0.4")])
    pods.remove(pods.own, make_pod("d", address="10.0.0.4"))
    security = Security.model_validate({"trainers": {"cidrs": ["10.0.0.0/24", "192.168.0.0/24"]}})
    policy = Policy(security, namespace="ml", holder="ml/Job/train")
    addresses = [ADDRESS, "10.0.0.2", "10.0.0.3", "10.0.0.4", "192.168.0.7"]

    def verdicts(policy: Policy) -> list[bool]:
        return [isinstance(authorize(PathKind.CONTROL, address, None, pods, policy), Caller) for address in addresses]

    assert all(verdicts(policy))
    now = SILENT_SECONDS + 1
    assert verdicts(policy) == [True, False, False, False, True], "no pod has the address of a node"
    assert refused(authorize(PathKind.CONTROL, "10.0.0.4", None, pods, policy)).code is RefusalCode.UNAVAILABLE
    assert verdicts(replace(policy, holder="10.0.0.4")) == [False, False, False, True, True]
    assert isinstance(authorize(PathKind.READ, "10.0.0.4", None, pods, policy), Caller)
    pods.note_report(pods.own)
    assert all(verdicts(policy))


def test_addresses_of_pods_that_are_gone_are_remembered_while_their_namespaces_are_watched_and_not_without_limit() -> None:
    now = 0.0
    pods = PodTable("ml", lambda: now)
    pods.replace(pods.watch_others(), [make_pod("a", namespace="other", address="10.0.0.5")])
    pods.replace(pods.own, [make_pod("b", address="10.0.0.6")])
    pods.replace(pods.own, [])
    pods.forget_others()
    now = SILENT_SECONDS + 1
    assert (pods.is_silent_at("10.0.0.5"), pods.is_silent_at("10.0.0.6")) == (False, True)
    for number in range(MAX_PAST_ADDRESSES):
        pods.update(pods.own, make_pod("c", uid="c", address=f"10.{1 + number // 65536}.{number // 256 % 256}.{number % 256}"))
    pods.replace(pods.own, [])
    now += SILENT_SECONDS + 1
    assert (pods.is_silent_at("10.0.0.6"), pods.is_silent_at("10.1.0.0")) == (False, True)


def test_without_the_right_for_other_namespaces_own_trainers_call_and_others_get_the_reason() -> None:
    pods = PodTable("ml", lambda: 0.0)
    pods.replace(pods.own, [make_pod()])
    pods.watch_others().forbidden.add("pods")
    trainers = {"serviceAccounts": ["trainer", "other/ray"]}
    policy = Policy(Security.model_validate({"trainers": trainers}), namespace="ml")
    assert isinstance(authorize(PathKind.CONTROL, ADDRESS, None, pods, policy), Caller)
    refusal = refused(authorize(PathKind.CONTROL, "10.0.0.2", None, pods, policy))
    assert refusal.code is RefusalCode.FORBIDDEN
    assert "NotAllowed" in refusal.message
    by_label = Policy(Security.model_validate({"trainers": {"namespaceSelector": {"matchLabels": {"team": "a"}}}}), namespace="ml")
    assert "NotAllowed" in refused(authorize(PathKind.CONTROL, ADDRESS, None, pods, by_label)).message
    token = AccountToken("other", "ray", "other-x")
    assert "NotAllowed" in refused(authorize(PathKind.CONTROL, "10.0.0.2", token, pods, policy)).message


def test_an_account_of_the_own_namespace_needs_no_other_namespaces() -> None:
    def needs(**trainers: Any) -> bool:
        return needs_all_namespaces(Security.model_validate({"trainers": trainers}), "ml")

    assert not needs(serviceAccounts=["trainer", "ml/trainer"])
    assert needs(serviceAccounts=["ml/trainer", "other/ray"])
    assert needs(namespaceSelector={})
