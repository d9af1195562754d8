"""Which bytes an engine with public keys loads: only a copy whose digest a trainer has signed, also if coordinator and store are hostile.

All calls here are what code in the router's pod can make: it has the credential of every engine. The store is one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.held_tensors import changed_state

from sglang_rollout.agent.launch.head_pod import HeadPod
from sglang_rollout.staging.payload import LOADER
from sglang_rollout.testing import StandIn, expected_tokens
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.ports import AGENT_ACK, MEMBER_STAGE, MEMBER_VERDICTS
from sglang_rollout.wire.reasons import RefusalCode
from sglang_rollout.wire.signed import SignedVersion
from sglang_rollout.wire.staged import MemberStageReply, StageRequest
from sglang_rollout.wire.states import BASE, EngineState, Version
from tests.contract.support.agent_here import PodHere, run_agent
from tests.contract.support.agent_pod import TOKEN, Answer, until
from tests.contract.support.staged_pair import PairHere, run_pair
from tests.contract.support.staged_versions import Source, StagedVersion, activate, commit, fill_with, run_source, stage
from tests.support.signing import UID, make_pem, sign, write_public_keys
from tests.support.staged import LIMIT, TICKET

SECONDS = 40.0
PROMPT = [4, 5, 6]
PEM = make_pem()


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with StandIn(weight_version="base", loaders=[LOADER], memory_saver=True) as made:
        yield made


@pytest.fixture
async def pod(engine: StandIn, tmp_path: Path) -> AsyncIterator[PodHere]:
    async with run_agent(tmp_path, engine.url, uid=UID) as made:
        write_public_keys(made.public_keys, PEM)
        await made.open_with_base()
        yield made


def signature(made: StagedVersion, digest: str | None = None) -> SignedVersion:
    """Return a version as its trainer signs it, which knows the digest."""
    return sign(PEM, made.version, digest=made.digest if digest is None else digest)


async def serve_signed(pod: PodHere, source: Source, made: StagedVersion) -> None:
    """Stage, load and commit a signed version."""
    assert (await stage(pod, source, made)).status == 200
    loaded = await activate(pod, made, signed=signature(made))
    assert loaded.status == 200, loaded.body
    assert (await commit(pod, made)).gate_open


async def tokens(pod: PodHere) -> list[int]:
    """Return tokens that the engine generates."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}}
    async with pod.http.post(f"{pod.engine_url}/generate", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return list((await reply.json())["output_ids"])


async def is_serving(pod: PodHere, made: StagedVersion) -> bool:
    status = await pod.status(**made.committed)
    return status.gate_open and not status.paused and await tokens(pod) == expected_tokens(made.tensors, PROMPT, 6)


def check_refused(answer: Answer, message: str) -> None:
    """Assert that an engine has refused a version before its first write."""
    assert (answer.status, answer.body["code"], answer.body["wrote"]) == (409, RefusalCode.FORBIDDEN, False), answer.body
    assert message in answer.body["message"]


async def test_a_version_with_the_signed_digest_is_served_and_loaded_again_without_a_coordinator(
    pod: PodHere, source: Source, engine: StandIn
) -> None:
    made = source.make(1)
    await serve_signed(pod, source, made)
    assert (await activate(pod, made, signed=signature(made))).status == 200, "a repeated call"
    assert (await commit(pod, made)).gate_open
    engine.restart()
    await until(lambda: is_serving(pod, made), SECONDS, "the engine serves the signed version again")


async def test_a_store_that_serves_other_bytes_with_a_matching_index_is_refused(pod: PodHere, source: Source) -> None:
    wanted, other = source.make(1), source.make(2)
    before = await tokens(pod)
    replaced = StagedVersion(wanted.version, other.update, other.digest, other.tensors)
    assert (await stage(pod, source, replaced)).status == 200, "the bytes have the digests of their index"
    check_refused(await activate(pod, replaced, signed=signature(wanted)), f"digest {other.digest[:12]}…")
    status = await pod.status()
    assert (status.state, status.version, await tokens(pod)) == (EngineState.CLEAN, BASE, before)


async def test_a_digest_of_the_coordinator_does_not_replace_that_of_the_copy(pod: PodHere, source: Source) -> None:
    wanted, other = source.make(1), source.make(2)
    assert (await stage(pod, source, other)).status == 200
    replaced = StagedVersion(wanted.version, other.update, wanted.digest, other.tensors)
    answer = await activate(pod, replaced, signed=signature(wanted))
    assert (answer.status, answer.body["wrote"]) == (409, False)
    assert f"has the digest {other.digest[:12]}…" in answer.body["message"]


CHANGES: dict[str, tuple[Callable[[StagedVersion], SignedVersion], str]] = {
    "another rollout": (lambda made: sign(PEM, made.version, uid="another", digest=made.digest), "for another rollout"),
    "another key": (lambda made: sign(make_pem(), made.version, digest=made.digest), "is not known"),
    "another version": (
        lambda made: sign(PEM, Version(run=1, step=9, label="step-9"), digest=made.digest),
        "The signature is for version 1/9",
    ),
    "no digest": (lambda made: signature(made).model_copy(update={"digest": ""}), "is not valid"),
    "a replaced digest": (lambda made: signature(made, "0" * 64).model_copy(update={"digest": made.digest}), "is not valid"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_signature_is_refused(pod: PodHere, source: Source, change: str) -> None:
    made, (changed, message) = source.make(1), CHANGES[change]
    assert (await stage(pod, source, made)).status == 200
    check_refused(await activate(pod, made, signed=changed(made)), message)
    assert (await pod.status()).version == BASE


async def test_an_engine_that_wakes_loads_no_copy_as_the_weights_of_model_path(pod: PodHere, source: Source) -> None:
    made = source.make(1)
    assert (await stage(pod, source, made)).status == 200
    for path in ("/pause_generation", "/release_memory_occupation", "/resume_memory_occupation"):
        assert (await pod.control(path)).status == 200
    assert (await pod.status()).state is EngineState.UNKNOWN
    check_refused(await activate(pod, StagedVersion(BASE, made.update, made.digest, made.tensors)), "no signature")


async def test_an_older_signed_version_is_refused_after_a_newer_one_was_served(pod: PodHere, source: Source) -> None:
    one, two = source.make(1), source.make(2)
    await serve_signed(pod, source, one)
    await serve_signed(pod, source, two)
    assert (await stage(pod, source, one, keep=(two,))).status == 200
    check_refused(await activate(pod, one, signed=signature(one)), "is older than version 1/2")


async def test_other_weights_from_a_folder_are_not_acknowledged_as_the_signed_version(pod: PodHere, source: Source) -> None:
    wanted, other = source.make(1), source.make(2)
    assert (await stage(pod, source, other)).status == 200
    boot, folder = str((await pod.status()).boot_id), str(pod.volume / other.update)
    for path, body in (
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": folder, "weight_version": wanted.version.label}),
    ):
        assert (await pod.control(path, body)).status == 200
    ack = AckRequest(version=wanted.version, boot_id=boot, cohort=["e0"], signed=signature(wanted))
    answer = await pod.control(AGENT_ACK, ack.model_dump(mode="json"))
    assert (answer.status, "has not loaded a copy with this digest" in answer.body["message"]) == (403, True), answer.body
    status = await pod.status(**wanted.committed)
    assert (status.state, status.gate_open) == (EngineState.DIRTY, False)


async def test_after_a_refusal_the_engine_stays_closed_until_the_next_signed_version(pod: PodHere, source: Source, engine: StandIn) -> None:
    one, two, other = source.make(1), source.make(2), source.make(3)
    await serve_signed(pod, source, one)
    replaced = StagedVersion(one.version, other.update, other.digest, other.tensors)
    assert (await stage(pod, source, replaced)).status == 200
    boot = (await pod.status(**replaced.committed)).boot_id
    engine.restart()

    async def has_restarted() -> bool:
        return (await pod.status(**replaced.committed)).boot_id not in (None, boot)

    await until(has_restarted, SECONDS, "the agent sees the new engine")
    check_refused(await activate(pod, replaced, signed=signature(one)), f"digest {other.digest[:12]}…")
    unsigned = await activate(pod, replaced)
    check_refused(unsigned, "is not signed")
    assert not (await pod.status(**replaced.committed)).gate_open
    await serve_signed(pod, source, two)
    assert await is_serving(pod, two)


# --- engines of two pods -----------------------------------------------------------------------------------------------


async def copy_in_member_pod(pair: PairHere, source: Source, made: StagedVersion, digest: str) -> None:
    """Let the member pod alone copy a version, as code in the router's pod can: it has the credential of the engine."""
    request = StageRequest(update=made.update, parents=[source.url], ticket=TICKET, size_limit=LIMIT, digest=digest, deadline=SECONDS)
    url, headers = pair.member.address.url + MEMBER_STAGE, {"Authorization": f"Bearer {TOKEN}"}
    async with pair.head.http.post(url, json=request.model_dump(mode="json"), headers=headers) as reply:
        found = MemberStageReply.model_validate(await reply.json())
    assert [copy.digest for copy in found.copies if copy.update == made.update] == [digest], found.refusal


def make_other(source: Source, made: StagedVersion) -> str:
    """Create another version of the same update, and return its digest."""
    copy = source.copies.open(made.update, TICKET, LIMIT)
    fill_with(copy, changed_state(9))
    return copy.seal(made.version).digest


@pytest.mark.parametrize("replicas", [1, 2])
async def test_the_copy_of_a_member_pod_cannot_be_replaced_before_or_in_a_load(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    made, really, replaced = source.make(1), HeadPod.ask_members, asyncio.Event()
    (tmp_path / "hostile").mkdir()
    async with run_source(tmp_path / "hostile") as hostile, run_pair(tmp_path, monkeypatch, replicas=replicas, uid=UID) as pair:
        head, other = pair.head, make_other(hostile, made)
        write_public_keys(head.public_keys, PEM)
        await head.open_with_base()
        assert (await stage(head, source, made)).status == 200
        await copy_in_member_pod(pair, hostile, made, other)
        before = await activate(head, made, signed=signature(made))
        assert (before.status, before.body["wrote"], "from pod e0-1: " in before.body["message"]) == (409, False, True)

        async def replace_first(self: HeadPod, path: str, *more: Any) -> Any:
            if path == MEMBER_VERDICTS and not replaced.is_set():
                replaced.set()
                await copy_in_member_pod(pair, hostile, made, other)
                await copy_in_member_pod(pair, source, made, made.digest)
            return await really(self, path, *more)

        monkeypatch.setattr(HeadPod, "ask_members", replace_first)
        await copy_in_member_pod(pair, source, made, made.digest)
        answer = await activate(head, made, signed=signature(made))
        assert replaced.is_set()
        assert (answer.status, answer.body["wrote"], "deleted or replaced" in answer.body["message"]) == (409, True, True), answer.body
        status = await head.status(**made.committed)
        assert (status.state, status.gate_open) == (EngineState.DIRTY, False)
        assert (await activate(head, made, signed=signature(made))).status == 200
        assert (await commit(head, made)).gate_open
