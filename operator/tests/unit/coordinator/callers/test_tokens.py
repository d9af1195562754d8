"""Tokens of ServiceAccounts: which are accepted, and whom they identify."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sglang_rollout.api.security_spec import Security
from sglang_rollout.coordinator.callers import keys as module
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.coordinator.callers.keys import RELOAD_SECONDS, KeySet, SigningKeys, parse_keys
from sglang_rollout.coordinator.callers.pods import ROLLOUT_LABEL, Caller, PodTable
from sglang_rollout.coordinator.callers.policy import AccountToken, BadToken, Credential
from sglang_rollout.coordinator.callers.tokens import check_token
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.access import CALLER_HEADER
from sglang_rollout.wire.reasons import Refusal, RefusalCode
from tests.support.account_tokens import AUDIENCE, ApiServer, Key, make_claims, make_key, sign
from tests.support.pods import make_pod, make_table
from tests.support.virtual_time import run

EC, RSA, OTHER = make_key("ec"), make_key("rsa", "RS256"), make_key("ec-2")
TRAINER = AccountToken("ml", "trainer", "ml-train-0")
HOUR = 3600


def read(token: str, *keys: Key, audience: str = AUDIENCE) -> Credential:
    server = ApiServer(list(keys) or [EC, RSA])
    return run(check_token(f"Bearer {token}", b"", keys=server.signing_keys(), audience=audience))


def reason(token: str, *keys: Key, audience: str = AUDIENCE) -> str:
    credential = read(token, *keys, audience=audience)
    assert isinstance(credential, BadToken), f"{credential} was accepted"
    return credential.reason


def unsigned(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


@pytest.mark.parametrize("key", [EC, RSA], ids=["ES256", "RS256"])
def test_a_token_identifies_account_and_pod(key: Key) -> None:
    assert read(sign(key)) == TRAINER
    assert read(sign(key, pod=None)) == AccountToken("ml", "trainer")
    account = {"namespace": "ml", "serviceaccount": {"name": "trainer", "uid": "s"}, "warnafter": 1}
    assert read(sign(key, **{"kubernetes.io": account})) == AccountToken("ml", "trainer")
    pod = {"pod": {"name": "train-0", "uid": "ml-train-0"}, "node": {"name": "n", "uid": "u"}}
    assert read(sign(key, **{"kubernetes.io": account | pod})) == TRAINER, "since Kubernetes 1.30 such a token names its node, too"


@pytest.mark.parametrize("key", [EC, RSA], ids=["ES256", "RS256"])
def test_a_token_for_another_audience_issuer_or_time_is_refused(key: Key) -> None:
    now = int(time.time())
    assert reason(sign(key, audience="rollout.sglang.io/ml/other")) == f"its audience is not {AUDIENCE}"
    assert reason(sign(key, audience="https://kubernetes.default.svc")) == f"its audience is not {AUDIENCE}"
    assert reason(sign(key, exp=now - HOUR)) == "it has expired"
    assert reason(sign(key, nbf=now + HOUR)) == "it is not valid yet"
    assert "issuer" in reason(sign(key, iss="https://elsewhere.example"))
    for claim in ("exp", "nbf", "iss", "aud", "sub"):
        claims = make_claims()
        del claims[claim]
        reason(sign(key, claims))


@pytest.mark.parametrize("text", ["\udcff\udcfe", "a.\udcff.b", "ä"], ids=["bytes", "three parts", "letters"])
def test_a_token_that_is_no_text_is_refused(text: str) -> None:
    """aiohttp decodes bytes of headers that are no UTF-8 as lone surrogates."""
    assert isinstance(run(check_token(f"Bearer {text}", b"secret")), BadToken)
    assert isinstance(read(text), BadToken)


def test_a_token_without_a_signature_is_refused() -> None:
    for algorithm in ("none", "None", "NONE", ""):
        assert "alg" in reason(unsigned({"alg": algorithm, "kid": "ec", "typ": "JWT"}, make_claims()))


@pytest.mark.parametrize("key", [EC, RSA], ids=["ES256", "RS256"])
def test_a_public_key_is_no_secret_of_an_hmac(key: Key) -> None:
    public = key.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    token = unsigned({"alg": "HS256", "kid": key.key_id, "typ": "JWT"}, make_claims()).rpartition(".")[0]
    signature = jwt.get_algorithm_by_name("HS256").sign(token.encode(), public)
    assert "alg" in reason(f"{token}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}")


def test_a_token_of_another_key_or_algorithm_is_refused() -> None:
    forged = Key("ec", "ES256", OTHER.private)
    assert "Signature" in reason(sign(forged))
    as_rsa = jwt.encode(make_claims(), RSA.private, algorithm="RS256", headers={"kid": "ec"})
    assert "alg" in reason(as_rsa)
    as_rs512 = jwt.encode(make_claims(), RSA.private, algorithm="RS512", headers={"kid": "rsa"})
    assert "alg" in reason(as_rs512)


def test_a_changed_claim_breaks_the_signature() -> None:
    head, _, signature = sign(EC).split(".")
    claims = base64.urlsafe_b64encode(json.dumps(make_claims(account="ml:admin")).encode()).rstrip(b"=").decode()
    assert "Signature" in reason(f"{head}.{claims}.{signature}")


@pytest.mark.parametrize(
    "claims",
    [
        {"sub": "system:node:a"},
        {"sub": "system:serviceaccount:ml"},
        {"kubernetes.io": None},
        {"kubernetes.io": {"pod": []}},
        {"kubernetes.io": {"pod": {}}},
        {"kubernetes.io": {"secret": {"name": "s", "uid": "u"}}},
        {"kubernetes.io": {"node": {"name": "n", "uid": "u"}}},
        {"kubernetes.io": {"something-new": {"name": "n", "uid": "u"}}},
    ],
)
def test_a_valid_token_that_identifies_no_live_object_is_refused(claims: dict[str, Any]) -> None:
    reason(sign(EC, **claims))


@pytest.mark.parametrize(
    "header", [{"alg": "ES256"}, {"alg": "ES256", "kid": 7}, {"alg": [], "kid": "ec"}, {"alg": "ES256", "kid": "?"}, []]
)
def test_a_header_without_a_known_key_is_refused(header: Any) -> None:
    reason(unsigned(header, make_claims()))


def test_only_keys_for_signatures_of_the_api_server_are_used() -> None:
    secret = {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "hmac", "alg": "HS256"}
    assert set(parse_keys({"keys": [EC.published, secret, {"kty": "?"}, {}]})) == {"ec"}


def find(keys: SigningKeys, *key_ids: str, pause: float = 0.0) -> list[bool]:
    async def main() -> list[bool]:
        found = []
        for key_id in key_ids:
            found.append(await keys.find(key_id) is not None)
            await asyncio.sleep(pause)
        return found

    return run(main())


def test_keys_are_loaded_once_and_again_at_an_unknown_key() -> None:
    server = ApiServer([EC])
    keys = server.signing_keys()

    async def main() -> None:
        assert await keys.find("ec") is not None
        assert await keys.find("ec") is not None
        assert server.loads == 1
        await asyncio.sleep(RELOAD_SECONDS)
        server.keys = [OTHER]
        assert await keys.find("ec-2") is not None
        assert await keys.find("ec") is None, "a key that is no longer published is forgotten"

    run(main())


def test_unknown_keys_do_not_flood_the_api_server() -> None:
    server = ApiServer([EC])
    assert find(server.signing_keys(), *(f"invented-{i}" for i in range(100)), pause=0.5) == [False] * 100
    assert server.loads <= 50 / RELOAD_SECONDS + 1


def test_concurrent_callers_share_one_load() -> None:
    server = ApiServer([EC])
    keys = server.signing_keys()

    async def main() -> None:
        assert all(await asyncio.gather(*(keys.find("ec") for _ in range(50))))

    run(main())
    assert server.loads == 1


def test_known_keys_stay_valid_while_the_api_server_is_away() -> None:
    server = ApiServer([EC])
    keys = server.signing_keys()

    async def main() -> None:
        assert await keys.find("ec") is not None
        server.is_away = True
        refreshing = asyncio.create_task(keys.run())
        await asyncio.sleep(HOUR)
        assert await keys.find("ec") is not None
        assert await keys.find("ec-2") is None
        assert keys.problem == "the API server is away"
        server.is_away, server.keys = False, [OTHER]
        await asyncio.sleep(RELOAD_SECONDS)
        assert await keys.find("ec-2") is not None
        refreshing.cancel()

    run(main())


def test_an_api_server_that_does_not_answer_delays_a_call_by_seconds_only() -> None:
    async def hang() -> KeySet:
        await asyncio.sleep(HOUR)
        raise AssertionError

    keys = SigningKeys(hang)

    async def main() -> float:
        assert await keys.find("ec") is None
        return asyncio.get_running_loop().time()

    assert run(main()) == module.LOAD_SECONDS


def call(given: str, *pods: dict[str, Any], address: str = "127.0.0.1", **security: Any) -> Caller | Refusal:
    """Return the verdict about a call through ``kubectl port-forward``."""
    check = CallerCheck(
        name="fleet", namespace="ml", security=lambda: Security.model_validate(security), credentials=Credentials("c").derive,
        pods=make_table(*pods), keys=ApiServer([EC]).signing_keys(),
    )  # fmt: skip
    return run(check.check("/pause_generation", {CALLER_HEADER: address, "Authorization": f"Bearer {given}"}, None))


def refused(verdict: Caller | Refusal) -> Refusal:
    assert isinstance(verdict, Refusal), f"{verdict} was allowed"
    return verdict


def test_a_token_counts_as_the_pod_that_it_is_bound_to() -> None:
    assert call(sign(EC), make_pod()) == Caller("ml", "trainer", "Job/train")
    assert call(sign(EC), make_pod(host_network=True), address="192.0.2.7", control="Token") == Caller("ml", "trainer", "Job/train")
    refusal = refused(call(sign(EC), make_pod(), trainers={"podSelector": {"matchLabels": {"app": "train"}}}))
    assert "The token is of pod ml/train-0 (ServiceAccount trainer), which is not selected." in refusal.message
    assert "Allowed: callers with a token" in refusal.message
    assert isinstance(call(sign(EC), make_pod(), trainers={"serviceAccounts": ["trainer"]}), Caller)


def test_a_token_of_a_pod_that_is_gone_or_has_another_account_is_refused() -> None:
    message = "The token is of ServiceAccount ml/trainer, and its pod is not known or has ended."
    assert message in refused(call(sign(EC))).message
    assert message in refused(call(sign(EC), make_pod(phase="Succeeded"))).message
    assert message in refused(call(sign(EC), make_pod(account="default"))).message
    assert message in refused(call(sign(EC), make_pod(uid="a-new-pod-of-this-name"))).message


def test_a_token_of_an_engine_pod_is_refused() -> None:
    engine = make_pod(labels={ROLLOUT_LABEL: "fleet"})
    assert "belongs to the rollout fleet" in refused(call(sign(EC), engine, trainers={"podSelector": {}})).message


def test_a_token_that_is_bound_to_no_pod_needs_the_name_of_its_account() -> None:
    token = sign(EC, pod=None)
    assert call(token, trainers={"serviceAccounts": ["trainer"]}) == Caller(service_account="trainer", owner="ServiceAccount ml/trainer")
    assert isinstance(call(sign(EC, pod=None, account="other:ray"), trainers={"serviceAccounts": ["other/ray"]}), Caller)
    others: list[dict[str, Any]] = [{}, {"podSelector": {}}, {"serviceAccounts": ["trainer"], "podSelector": {}}]
    for trainers in others:
        security: dict[str, Any] = {"trainers": trainers} if trainers else {}
        assert "bound to no pod" in refused(call(token, **security)).message
    refused(call(sign(EC, pod=None, account="other:trainer"), trainers={"serviceAccounts": ["trainer"]}))


def test_a_refused_token_takes_nothing_from_an_allowed_pod() -> None:
    assert isinstance(call(sign(EC, audience="other"), make_pod(), address="10.0.0.1"), Caller)
    assert isinstance(call(sign(EC, pod="gone"), make_pod(), address="10.0.0.1"), Caller)


def test_the_audience_of_the_spec_replaces_the_default() -> None:
    token = sign(EC, audience="https://training.example")
    assert f"its audience is not {AUDIENCE}" in refused(call(token, make_pod())).message
    assert isinstance(call(token, make_pod(), token={"audience": "https://training.example"}), Caller)
    refused(call(sign(EC), make_pod(), token={"audience": "https://training.example"}))


def test_while_pods_cannot_be_watched_a_new_pod_is_asked_to_try_again() -> None:
    pods = PodTable("ml", lambda: 0.0)
    check = CallerCheck(
        name="fleet", namespace="ml", security=Security, pods=pods, credentials=Credentials("c").derive, keys=ApiServer([EC]).signing_keys()
    )
    verdict = run(check.check("/pause_generation", {CALLER_HEADER: "192.0.2.7", "Authorization": f"Bearer {sign(EC)}"}, None))
    assert refused(verdict).code is RefusalCode.UNAVAILABLE
