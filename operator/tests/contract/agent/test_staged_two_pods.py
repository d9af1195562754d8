"""Transport Staged in an engine of two pods: two agents, a stand-in engine, and the data port of a store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from e2e.held_tensors import changed_state

from sglang_rollout.agent.launch.head_pod import HeadPod
from sglang_rollout.agent.staged.member_pods import MemberPods
from sglang_rollout.wire.ports import AGENT_DROP, MEMBER_ATTEMPT, MEMBER_DROP, MEMBER_STAGE, MEMBER_VERDICTS, STAGED, TICKET_HEADER
from sglang_rollout.wire.reasons import GateReason, RefusalCode
from sglang_rollout.wire.staged import MemberStageReply, StageRequest
from sglang_rollout.wire.states import BASE, EngineState
from tests.contract.support.agent_here import PodHere
from tests.contract.support.agent_pod import TOKEN, until
from tests.contract.support.staged_pair import PairHere, run_pair
from tests.contract.support.staged_versions import Source, StagedVersion, activate, commit, fill_with, run_source, serve_version, stage
from tests.support.proven import prove
from tests.support.staged import LIMIT, TICKET

pytestmark = pytest.mark.timeout(120)

SECONDS = 40.0


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PairHere]:
    async with run_pair(tmp_path, monkeypatch) as made:
        await made.head.open_with_base()
        yield made


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


async def is_serving(pod: PodHere, made: StagedVersion) -> bool:
    status = await pod.status(**made.committed)
    return status.gate_open and not status.paused and status.version == made.version


async def serves_after(pair: PairHere, boot: str | None, made: StagedVersion) -> bool:
    """Return whether another run of the engine than ``boot`` serves a version."""
    return (await pair.head.status()).boot_id not in (None, boot) and await is_serving(pair.head, made)


# --- copies ------------------------------------------------------------------------------------------------------------


async def test_a_version_is_complete_when_both_pods_have_it(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    answer = await stage(pair.head, source, made)
    assert answer.status == 200, answer.body
    assert [copy["digest"] for copy in answer.body["staged"]] == [made.digest]
    files = files_of(pair.head.volume / made.update)
    assert files
    assert files_of(pair.member.volume / made.update) == files
    await serve_version(pair.head, source, made)


async def test_a_version_that_still_arrives_reaches_both_pods(pair: PairHere, source: Source) -> None:
    made = source.make(1, sealed=False)
    copy = source.copies.get(made.update)
    assert copy is not None
    assert (await stage(pair.head, source, made)).status == 200, "the answer does not wait for the copies"

    async def has_bytes() -> bool:
        found = await pair.staged()
        return bool(found) and found[0].bytes == copy.index.bytes_arrived and not found[0].digest

    await until(has_bytes, SECONDS, "the pieces arrive in both pods before the end is known")
    made.digest = copy.seal(made.version).digest
    answer = await stage(pair.head, source, made)
    assert (answer.status, answer.body["staged"][0]["digest"]) == (200, made.digest)


def close_store(source: Source, made: StagedVersion) -> None:
    """Let the store refuse everyone who asks for a version."""
    copy = source.copies.get(made.update)
    assert copy is not None
    copy.ticket = "another"


async def test_the_member_pod_copies_from_the_head_pod(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    await pair.member.end()
    assert (await stage(pair.head, source, made)).status == 502

    async def is_complete() -> bool:
        return pair.head.copies is not None and any(copy.digest == made.digest for copy in pair.head.copies.status())

    await until(is_complete, SECONDS, "the head pod has the version")
    close_store(source, made)
    await pair.member.start()
    assert (await stage(pair.head, source, made)).status == 200
    assert files_of(pair.member.volume / made.update) == files_of(pair.head.volume / made.update)


async def test_the_head_pod_copies_from_a_member_pod_that_holds_the_version(pair: PairHere, source: Source) -> None:
    made, copies = source.make(1), pair.head.copies
    assert copies is not None
    assert (await stage(pair.head, source, made)).status == 200
    await copies.keep(set())
    assert not files_of(pair.head.volume / made.update)
    close_store(source, made)
    assert (await stage(pair.head, source, made)).status == 200
    assert files_of(pair.head.volume / made.update) == files_of(pair.member.volume / made.update)


async def test_copies_that_are_not_kept_are_deleted_in_both_pods(pair: PairHere, source: Source) -> None:
    one, two, three = source.make(1), source.make(2), source.make(3)
    await stage(pair.head, source, one)
    await stage(pair.head, source, two, keep=(one,))
    answer = await stage(pair.head, source, three, keep=(two,))
    assert [copy["update"] for copy in answer.body["staged"]] == [two.update, three.update]
    for volume in (pair.head.volume, pair.member.volume):
        assert {path.name for path in volume.iterdir()} == {two.update, three.update}


async def test_a_copy_that_is_dropped_is_deleted_in_both_pods_and_others_stay(pair: PairHere, source: Source) -> None:
    one, two = source.make(1), source.make(2, sealed=False)
    await serve_version(pair.head, source, one)
    assert (await stage(pair.head, source, two, keep=(one,))).status == 200
    assert {copy.update for copy in await pair.staged()} == {one.update, two.update}
    answer = await pair.head.control(AGENT_DROP, {"update": two.update})
    assert (answer.status, [copy["update"] for copy in answer.body["staged"]]) == (200, [one.update])
    for volume in (pair.head.volume, pair.member.volume):
        assert {path.name for path in volume.iterdir()} == {one.update}
    assert (await pair.head.control(AGENT_DROP, {"update": two.update})).status == 200, "it may be repeated"
    assert (await pair.head.control(AGENT_DROP, {"update": "../x"})).status == 400


async def test_a_pod_without_the_version_is_named(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    await pair.member.end()
    begun = await stage(pair.head, source, made, digest="")
    assert begun.status == 200, "the copy in the member pod may begin later"
    answer = await stage(pair.head, source, made)
    assert (answer.status, answer.body["code"]) == (502, RefusalCode.UPSTREAM_FAILED)
    assert answer.body["message"].startswith("from pod e0-1: ")
    assert [copy.digest for copy in await pair.staged()] == [""], "no version is complete in one pod alone"
    await pair.member.start()
    assert (await stage(pair.head, source, made)).status == 200


async def test_calls_and_copies_of_the_member_pod_need_credential_and_ticket(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    await stage(pair.head, source, made)
    for path in (MEMBER_STAGE, MEMBER_DROP, MEMBER_ATTEMPT, MEMBER_VERDICTS):
        for token, status in (("wrong", 403), (None, 401)):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            async with pair.head.http.post(pair.member.address.url + path, json={}, headers=headers) as reply:
                assert reply.status == status, path
    url = f"{pair.member.data_address.url}{STAGED}/{made.update}/index"
    for ticket, status in ((TICKET, 200), ("other", 403)):
        async with pair.head.http.get(url, headers={TICKET_HEADER: ticket}) as reply:
            assert reply.status == status
    body = json.dumps({"attempt": "../../x", "update": made.update, "digest": made.digest}).encode()
    url = pair.member.address.url + MEMBER_ATTEMPT
    async with pair.head.http.post(url, data=body, headers=await prove(pair.head.http, "POST", url, body, token="secret")) as reply:
        assert reply.status == 400


async def test_both_pods_copy_a_version_while_the_engine_boots(pair: PairHere, source: Source) -> None:
    made, boot = source.make(1), (await pair.head.status()).boot_id
    pair.engine.kill()
    await pair.member.end()

    async def is_down() -> bool:
        return (await pair.head.status()).boot_id is None

    await until(is_down, SECONDS, "the agent sees that the engine is down")
    assert (await stage(pair.head, source, made)).status == 502, "the member pod is not there yet"
    await pair.member.start()
    assert (await stage(pair.head, source, made)).status == 200
    assert [copy.digest for copy in await pair.staged()] == [made.digest]
    assert await is_down()
    close_store(source, made)
    await pair.restart_engine()
    await until(lambda: serves_after(pair, boot, made), SECONDS, "the engine loads the copies of its pods")


# --- loads -------------------------------------------------------------------------------------------------------------


async def test_a_rank_of_the_member_pod_that_refuses_leaves_a_mixture(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    await stage(pair.head, source, made)
    pair.engine.faults.add("refuse", "load", value="1")
    answer = await activate(pair.head, made)
    assert (answer.status, answer.body["wrote"]) == (409, True)
    assert "1 of 2 ranks" in answer.body["message"]
    assert (await pair.head.status()).state is EngineState.DIRTY
    assert (await activate(pair.head, made)).status == 200
    assert (await commit(pair.head, made)).gate_open


async def test_a_version_that_all_ranks_refuse_changes_nothing(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    await stage(pair.head, source, made)
    pair.engine.faults.add("refuse", "load")
    answer = await activate(pair.head, made)
    assert (answer.status, answer.body["wrote"]) == (409, False)
    assert pair.engine.weight_version == "base"
    status = await pair.head.status()
    assert (status.state, status.version, status.gate_open) == (EngineState.CLEAN, BASE, True)


async def test_a_load_does_not_begin_without_the_copy_of_the_member_pod(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    await stage(pair.head, source, made)
    await pair.member.end()
    gone = await activate(pair.head, made)
    assert (gone.status, gone.body["wrote"], gone.body["code"]) == (502, False, RefusalCode.UPSTREAM_FAILED)
    pair.member.number += 1
    await pair.member.start()
    empty = await activate(pair.head, made)
    assert (empty.status, empty.body["wrote"], empty.body["code"]) == (409, False, RefusalCode.CONFLICT)
    assert "from pod e0-1: " in empty.body["message"]
    status = await pair.head.status()
    assert (status.version, status.gate_open, status.paused) == (BASE, True, False), "the engine was not even paused"


async def test_verdicts_that_the_member_pod_cannot_give_count_as_a_write(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    await stage(pair.head, source, made)
    pair.engine.faults.add("slow", "write", seconds=2)
    load = asyncio.create_task(activate(pair.head, made))

    async def has_begun() -> bool:
        return (await pair.head.status()).reason is GateReason.UPDATE_IN_PROGRESS

    await until(has_begun, SECONDS, "the load has begun")
    await pair.member.end()
    answer = await load
    assert (answer.status, answer.body["wrote"]) == (409, True)
    assert "from pod e0-1: " in answer.body["message"]
    assert (await pair.head.status()).state is EngineState.DIRTY
    await pair.member.start()
    assert (await activate(pair.head, made)).status == 200
    assert (await commit(pair.head, made)).gate_open


async def copy_in_member_pod(pair: PairHere, source: Source, made: StagedVersion, digest: str) -> None:
    """Let the member pod alone copy a version, as a call with the credential of the engine can."""
    request = StageRequest(update=made.update, parents=[source.url], ticket=TICKET, size_limit=LIMIT, digest=digest, deadline=SECONDS)
    url, data = pair.member.address.url + MEMBER_STAGE, request.model_dump_json().encode()
    async with pair.head.http.post(url, data=data, headers=await prove(pair.head.http, "POST", url, data, token=TOKEN)) as reply:
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
    (tmp_path / "other").mkdir()
    async with run_source(tmp_path / "other") as store, run_pair(tmp_path, monkeypatch, replicas=replicas) as pair:
        head, other = pair.head, make_other(store, made)
        await head.open_with_base()
        assert (await stage(head, source, made)).status == 200
        await copy_in_member_pod(pair, store, made, other)
        before = await activate(head, made)
        assert (before.status, before.body["wrote"], "from pod e0-1: " in before.body["message"]) == (409, False, True)

        async def replace_first(self: HeadPod, path: str, *more: Any) -> Any:
            if path == MEMBER_VERDICTS and not replaced.is_set():
                replaced.set()
                await copy_in_member_pod(pair, store, made, other)
                await copy_in_member_pod(pair, source, made, made.digest)
            return await really(self, path, *more)

        monkeypatch.setattr(HeadPod, "ask_members", replace_first)
        await copy_in_member_pod(pair, source, made, made.digest)
        answer = await activate(head, made)
        assert replaced.is_set()
        assert (answer.status, answer.body["wrote"], "deleted or replaced" in answer.body["message"]) == (409, True, True), answer.body
        status = await head.status(**made.committed)
        assert (status.state, status.gate_open) == (EngineState.DIRTY, False)
        assert (await activate(head, made)).status == 200
        assert (await commit(head, made)).gate_open


# --- without a coordinator ---------------------------------------------------------------------------------------------


async def test_a_restarted_engine_loads_the_copies_of_its_pods(pair: PairHere, source: Source) -> None:
    made = source.make(1)
    await serve_version(pair.head, source, made)
    boot = (await pair.head.status()).boot_id
    await pair.restart_engine()
    await until(lambda: serves_after(pair, boot, made), SECONDS, "the engine serves the committed version again")


async def test_an_empty_member_pod_copies_the_committed_version_before_the_engine_loads_it(
    pair: PairHere, source: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, may_copy, really = source.make(1), asyncio.Event(), MemberPods._stage
    await serve_version(pair.head, source, made)
    close_store(source, made)
    boot = (await pair.head.status()).boot_id

    async def stage_later(members: MemberPods, request: StageRequest, seconds: float) -> None:
        await may_copy.wait()
        await really(members, request, seconds)

    monkeypatch.setattr(MemberPods, "_stage", stage_later)
    await pair.recreate_member()

    async def is_up() -> bool:
        return (await pair.head.status()).boot_id not in (None, boot)

    await until(is_up, SECONDS, "the agent sees the new run of the engine")
    await asyncio.sleep(1)  # several rounds of the watch
    assert await pair.head.is_closed()
    may_copy.set()
    await until(lambda: serves_after(pair, boot, made), SECONDS, "the engine serves the committed version again")
    assert files_of(pair.member.volume / made.update) == files_of(pair.head.volume / made.update)
    assert "is not loaded from the pod's own copy" not in caplog.text, "no load began without the copy"
