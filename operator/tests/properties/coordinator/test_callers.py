"""Whatever the watch reports and in whatever order, only a live, selected pod controls the fleet."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.api.security_spec import Security
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.coordinator.callers.pods import ROLLOUT_LABEL, Caller, PodTable, normalize_address
from sglang_rollout.coordinator.callers.policy import Policy, authorize
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_AUTHORIZATION_HEADER, RELAYED_CALLER_HEADER, PathKind
from sglang_rollout.wire.reasons import Refusal
from tests.support.account_tokens import ApiServer, make_claims, make_key, sign
from tests.support.pods import fill, make_pod, make_table
from tests.support.virtual_time import run

NAMES = ("a", "b", "c")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "fd00::1", "")
POLICY = Policy(Security(), namespace="ml")

pods = st.builds(
    make_pod,
    st.sampled_from(NAMES),
    namespace=st.sampled_from(["ml", "other"]),
    address=st.sampled_from(ADDRESSES),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
    host_network=st.booleans(),
    labels=st.sampled_from([{}, {ROLLOUT_LABEL: "fleet"}]),
)
steps = st.one_of(
    st.tuples(st.just("list"), st.lists(pods, max_size=4, unique_by=lambda pod: pod["metadata"]["uid"])),
    st.tuples(st.sampled_from(["update", "remove"]), pods),
    st.tuples(st.just("lost"), st.none()),
)


def _play(history: list[tuple[str, Any]]) -> tuple[PodTable, dict[str, dict[str, Any]]]:
    """Return the table after a history, and the newest object of each existing pod. Each event arrives at the watch of its namespace."""
    table = make_table()
    feeds = {"ml": table.own, "other": table.others or table.watch_others()}
    existing: dict[str, dict[str, Any]] = {}
    for step, value in history:
        if step == "list":
            fill(table, value)
            existing = {pod["metadata"]["uid"]: pod for pod in value}
        elif step == "lost":
            table.own.is_current = False
        else:
            feed, uid = feeds[value["metadata"]["namespace"]], value["metadata"]["uid"]
            if step == "update":
                table.update(feed, value)
                existing[uid] = value
            else:
                table.remove(feed, value)
                existing.pop(uid, None)
    return table, existing


@given(st.lists(steps, max_size=12))
def test_the_table_holds_exactly_the_live_pods(history: list[tuple[str, Any]]) -> None:
    table, existing = _play(history)
    for address in filter(None, ADDRESSES):
        live = {
            uid
            for uid, pod in existing.items()
            if pod["status"].get("podIP") == address
            and pod["status"]["phase"] not in {"Succeeded", "Failed"}
            and not pod["spec"].get("hostNetwork")
        }
        assert {pod.uid for pod in table.at(address)} == live


@given(st.lists(steps, max_size=12), st.sampled_from(ADDRESSES[:3]))
def test_only_the_one_live_pod_of_the_namespace_outside_of_rollouts_controls_the_fleet(
    history: list[tuple[str, Any]], address: str
) -> None:
    table, _ = _play(history)
    found = table.at(address)
    is_trainer = len(found) == 1 and found[0].namespace == "ml" and found[0].rollout is None
    verdict = authorize(PathKind.CONTROL, address, None, table, POLICY)
    assert isinstance(verdict, Caller) == is_trainer
    if is_trainer:
        assert verdict == found[0].caller


@given(st.ip_addresses(v=4))
def test_an_address_has_one_form(address: Any) -> None:
    assert normalize_address(f"::ffff:{address}") == normalize_address(f" [{address}]") == str(address)


@given(st.text(max_size=12))
def test_any_text_is_an_address_or_nothing(text: str) -> None:
    found = normalize_address(text)
    assert found is None or normalize_address(found) == found


LABELS = st.dictionaries(st.sampled_from(["app", "team"]), st.sampled_from(["a", "b"]), max_size=2)
SELECTORS = st.one_of(
    st.just({}),
    st.builds(lambda labels: {"matchLabels": labels}, LABELS),
    st.builds(lambda key: {"matchExpressions": [{"key": key, "operator": "DoesNotExist"}]}, st.sampled_from(["app", "team"])),
)
CIDRS = st.sampled_from(["10.0.0.0/8", "10.0.0.1/32", "fd00::/8", "1:2:3:4:5:6:7:8:9::/64"])
ACCOUNTS = st.sampled_from(["trainer", "ml/trainer", "other/trainer", "other/ray"])
CALLERS = st.fixed_dictionaries(
    {},
    optional={
        "podSelector": SELECTORS,
        "namespaceSelector": SELECTORS,
        "serviceAccounts": st.lists(ACCOUNTS, max_size=2),
        "cidrs": st.lists(CIDRS, max_size=2),
    },
)
SPECS = st.fixed_dictionaries(
    {"control": st.sampled_from(["Trainers", "Token", "Open"]), "generate": st.sampled_from(["Open", "Clients", "Token"])},
    optional={
        "trainers": CALLERS,
        "clients": CALLERS,
        "proxies": st.fixed_dictionaries({}, optional={"podSelector": SELECTORS, "namespaceSelector": SELECTORS}),
        "token": st.just({"audience": "other"}),
    },
)


def _encode(*parts: Any) -> str:
    """Return an unsigned token."""
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts)


KEYS = st.sampled_from(["alg", "kid", "crit", "b64", "pod", "uid", "secret", "sub"])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["alg", "kid", "crit", "b64", "pod", "uid", "secret", "sub"]), inner)
    ),
    max_leaves=6,
)
CLAIMS = st.dictionaries(st.sampled_from(["sub", "aud", "exp", "nbf", "iss", "kubernetes.io"]), JSON, max_size=3)
TOKENS = st.one_of(
    st.text(max_size=20),
    st.builds(_encode, JSON, JSON, JSON),
    st.builds(
        lambda header: _encode({"alg": "ES256", "kid": "ec"} | header, {}, "x"), st.dictionaries(st.text(max_size=4), JSON, max_size=2)
    ),
    st.builds(lambda claims: sign(make_key("ec"), make_claims() | claims), CLAIMS),
    st.just("." * 3000),
    st.just(f"{base64.urlsafe_b64encode(b'[' * 5000).decode()}.e30.e30"),
)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        CALLER_HEADER: st.one_of(st.sampled_from(ADDRESSES), st.text(max_size=20)),
        RELAYED_CALLER_HEADER: st.text(max_size=20),
        RELAYED_AUTHORIZATION_HEADER: st.text(max_size=20),
        "Authorization": st.one_of(st.text(max_size=20), TOKENS.map("Bearer {}".format)),
    },
)
PATHS = st.one_of(st.sampled_from(["/generate", "/pause_generation", "/v1/models", "/fleet/engines/e0/flush_cache"]), st.text(max_size=20))


@given(st.lists(steps, max_size=4), SPECS, PATHS, HEADERS, st.one_of(st.none(), st.text(max_size=20)), st.booleans(), st.booleans())
def test_every_call_is_allowed_or_refused_and_none_ends_with_an_exception(
    history: list[tuple[str, Any]], spec: dict[str, Any], path: str, headers: dict[str, str], peer: str | None, in_cluster: bool, away: bool
) -> None:
    security = Security.model_validate(spec)
    table, _ = _play(history)
    check = CallerCheck(
        name="fleet", namespace="ml", security=lambda: security, pods=table, credentials=Credentials("c").derive, in_cluster=in_cluster,
        keys=ApiServer([make_key("ec")], is_away=away).signing_keys(),
    )  # fmt: skip
    assert isinstance(run(check.check(path, headers, peer)), Caller | Refusal)
