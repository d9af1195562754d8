"""Proofs of calls and answers: what they cover, and when they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proofs import CHALLENGE_SECONDS, Call, CallProof, Challenges, digest
from sglang_rollout.wire.ports import DEADLINE_HEADER, TERM_HEADER

KEY = Credentials("secret")
CALL = Call("POST", "/agent/sync?a=b", {TERM_HEADER: "3", DEADLINE_HEADER: "2.000"}, digest(b"{}"))


def proof_of(call: Call = CALL, challenge: str = "c") -> CallProof:
    sent = CallProof.parse(call.prove(KEY, challenge).header)
    assert sent is not None
    return sent


def test_a_proof_is_accepted_with_each_credential_and_does_not_contain_it() -> None:
    assert CALL.check(proof_of(), KEY)
    assert CALL.check(proof_of(), Credentials("new", "secret")), "during a rotation"
    assert not CALL.check(proof_of(), Credentials("other"))
    assert "secret" not in CALL.prove(KEY, "c").header


@pytest.mark.parametrize(
    "call",
    [
        replace(CALL, method="GET"),
        replace(CALL, path="/agent/sync"),
        replace(CALL, path="/agent/run?a=b"),
        replace(CALL, headers={**CALL.headers, TERM_HEADER: "4"}),
        replace(CALL, headers={**CALL.headers, DEADLINE_HEADER: "9"}),
        replace(CALL, headers={}),
        replace(CALL, body_digest=digest(b"[]")),
    ],
)
def test_a_proof_is_of_one_call_only(call: Call) -> None:
    assert not call.check(proof_of(), KEY)


@pytest.mark.parametrize("change", [{"challenge": "d"}, {"nonce": "0"}, {"mac": "0" * 64}])
def test_no_part_of_a_proof_can_be_replaced(change: dict[str, str]) -> None:
    assert not CALL.check(replace(proof_of(), **change), KEY)


def test_two_proofs_of_one_call_differ() -> None:
    assert proof_of().mac != proof_of().mac


@pytest.mark.parametrize("text", ["", "a", "a.b.c", "a.b.c.d.e", "ä.b.c.d"])
def test_a_malformed_header_is_no_proof(text: str) -> None:
    assert CallProof.parse(text) is None


def test_the_proof_of_an_answer_covers_the_call_and_the_answer() -> None:
    mine, other = (found for call in (CALL, CALL) if (found := call.check(proof_of(call), KEY)))
    answer = mine.prove_answer(200, "3", digest(b"ok"))
    assert mine.check_answer(answer, 200, "3") == digest(b"ok")
    assert other.check_answer(answer, 200, "3") is None, "the answer to another call"
    assert mine.check_answer(answer, 409, "3") is None
    assert mine.check_answer(answer, 200, "4") is None
    assert mine.check_answer(answer.replace(digest(b"ok"), digest(b"no")), 200, "3") is None
    assert mine.check_answer(mine.header, 200, "3") is None, "a call is no answer"
    assert mine.check_answer("", 200, "3") is None


def test_a_challenge_takes_each_proof_once_and_ends() -> None:
    challenges = Challenges()
    first = challenges.current(0.0)
    proof = proof_of(challenge=first)
    assert challenges.take(proof)
    assert not challenges.take(proof)
    assert challenges.take(proof_of(challenge=first))
    assert challenges.current(CHALLENGE_SECONDS - 1) == first
    second = challenges.current(CHALLENGE_SECONDS)
    assert second != first
    assert challenges.is_known(first, CHALLENGE_SECONDS + 1), "calls with it are under way"
    assert not challenges.take(proof), "also after the next challenge"
    assert not challenges.is_known(first, 2 * CHALLENGE_SECONDS)
    assert challenges.is_known(second, 2 * CHALLENGE_SECONDS)
    assert not challenges.take(proof)


def test_old_challenges_end_without_calls() -> None:
    challenges = Challenges()
    first = challenges.current(0.0)
    assert not challenges.is_known(first, 10 * CHALLENGE_SECONDS)
    assert not challenges.is_known("", 0.0)
