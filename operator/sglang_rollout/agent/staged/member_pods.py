"""The member pods of an engine, as the head pod sees them: their copies, and the verdicts of their ranks.

The coordinator calls the head pod only. An engine has a version when every pod has a complete copy, because each rank reads the files of
its own pod. A pod copies from the other pods of its engine first, so that the bytes reach the engine once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from sglang_rollout.agent.launch.head_pod import HeadPod
from sglang_rollout.agent.staged.verdicts import Verdict, Verdicts
from sglang_rollout.proxy.address import Address
from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.wire.ports import MEMBER_ATTEMPT, MEMBER_DROP, MEMBER_STAGE, MEMBER_VERDICTS
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import AttemptReply, AttemptRequest, DropRequest, MemberStageReply, StagedCopy, StageRequest
from sglang_rollout.wire.states import StagedVersion

log = logging.getLogger(__name__)

_BEGIN_SECONDS = 2.0
"""Time in which a member pod begins a copy. The trainer waits for it."""
_CALL_SECONDS = 5.0
"""Time in which a member pod prepares a load, and returns its verdicts."""
_COPY_SECONDS = 600.0
"""Time in which a member pod copies the committed version from the head pod."""
_RETRY_SECONDS = 5.0
_NOT_REPORTED = Refusal(RefusalCode.UNAVAILABLE, "its agent has not reported yet")


class MemberPods:
    """Calls the member pods about staged versions.

    Args:
        head: The head pod, which knows the member pods.
        copies: The copies of the head pod.
        data_address: Address at which the member pods find the copies of the head pod.
    """

    def __init__(self, head: HeadPod, copies: Copies, data_address: Address) -> None:
        self._head = head
        self._copies = copies
        self._data_url = data_address.url
        self._calls = 0
        """Calls in progress that copy a version for a coordinator."""
        self._not_before = 0.0

    @property
    def pods(self) -> int:
        """Number of pods of the engine."""
        return self._head.ranks.size

    def list_copies(self) -> list[StagedCopy]:
        """Return the versions of the engine, oldest first. A version has a digest if every pod has the complete copy."""
        return [self._join(copy.status()) for copy in map(self._copies.get, self._updates()) if copy is not None]

    def add_parents(self, request: StageRequest) -> StageRequest:
        """Return the request for the head pod, with the member pods that hold the complete version as first parents."""
        holders = [
            Address.parse(report.data_address).url
            for rank in self._ranks()
            if (report := self._head.recent_report(rank)) is not None and report.data_address and _holds(report.staged, request)
        ]
        return request.model_copy(update={"parents": [*holders, *request.parents]})

    async def stage(self, request: StageRequest, seconds: float) -> None:
        """Start or continue the copy of a version in every member pod, and delete the copies that the request does not keep.

        Without a digest the call does not fail: a pod that cannot begin now does so when the digest is known.

        Args:
            request: The request. With a digest: wait for the complete copies.
            seconds: Seconds to wait.

        Raises:
            RefusedError: A pod has no complete copy.
        """
        sent = request.model_copy(update={"parents": [self._data_url, *request.parents]})
        self._calls += 1
        try:
            await self._stage(sent, seconds if request.digest else _BEGIN_SECONDS)
        except RefusedError as error:
            if request.digest:
                raise
            log.warning("The copy of update %s has not begun in every pod of the engine: %s", request.update, error)
        finally:
            self._calls -= 1

    async def drop(self, request: DropRequest) -> None:
        """Delete the copy of an update in every member pod that answers. The next stage call deletes it in the others."""
        self._note_copies(await self._head.ask_members(MEMBER_DROP, request, MemberStageReply, _CALL_SECONDS))

    async def open_attempt(self, attempt: str, update: str, digest: str) -> None:
        """Prepare a load by the ranks of all member pods. Raises RefusedError if a pod does not have the complete copy."""
        request = AttemptRequest(attempt=attempt, update=update, digest=digest)
        replies = await self._head.ask_members(MEMBER_ATTEMPT, request, AttemptReply, _CALL_SECONDS)
        self._raise_refusal(replies)

    async def read_verdicts(self, attempt: str, ranks: int) -> list[Verdicts]:
        """Return the verdicts of an attempt in each member pod, which has ``ranks`` ranks."""
        request = AttemptRequest(attempt=attempt, ranks=ranks)
        replies = await self._head.ask_members(MEMBER_VERDICTS, request, AttemptReply, _CALL_SECONDS)
        return [Verdicts(tuple(self._verdicts_of(rank, replies.get(rank))), ranks) for rank in self._ranks()]

    async def check_attempt(self, attempt: str) -> None:
        """Raise RefusedError unless every member pod still has the copy with which an attempt began."""
        self._raise_refusal(await self._head.ask_members(MEMBER_VERDICTS, AttemptRequest(attempt=attempt), AttemptReply, _CALL_SECONDS))

    async def watch(self) -> None:
        """Let the member pods copy the committed version from the head pod if one lacks it: a pod that was recreated is empty."""
        wanted, now = self._head.committed_copy, time.monotonic()
        copy = self._copies.get(wanted.update) if wanted is not None else None
        reports = [self._head.recent_report(rank) for rank in self._ranks()]
        if wanted is None or copy is None or copy.status().digest != wanted.digest or self._calls or now < self._not_before:
            return
        if any(report is None for report in reports) or all(_holds(report.staged, wanted) for report in reports if report is not None):
            return
        log.info("A pod of the engine lacks the committed version, so it copies it from this pod.")
        try:
            await self._stage(self._own_request(copy, wanted), _COPY_SECONDS)
        except RefusedError as error:
            self._not_before = time.monotonic() + _RETRY_SECONDS
            log.warning("A pod of the engine still lacks the committed version: %s", error)

    def _own_request(self, copy: Copy, wanted: StagedVersion) -> StageRequest:
        return StageRequest(
            update=copy.update,
            version=copy.version,
            parents=[self._data_url],
            ticket=copy.ticket,
            keep=self._updates(),
            size_limit=max(1, copy.index.bytes),
            digest=wanted.digest,
            deadline=_COPY_SECONDS,
        )

    async def _stage(self, request: StageRequest, seconds: float) -> None:
        replies = await self._head.ask_members(MEMBER_STAGE, request, MemberStageReply, seconds)
        self._note_copies(replies)
        self._raise_refusal(replies)

    def _note_copies(self, replies: dict[int, MemberStageReply]) -> None:
        for rank, reply in replies.items():
            if reply.refusal is None:
                self._head.note_copies(rank, reply.copies)

    def _raise_refusal(self, replies: dict[int, MemberStageReply] | dict[int, AttemptReply]) -> None:
        for rank in self._ranks():
            reply = replies.get(rank)
            refusal = _NOT_REPORTED if reply is None else reply.refusal
            if refusal is not None:
                raise RefusedError(self._head.name_pod(rank, refusal))

    def _verdicts_of(self, rank: int, reply: AttemptReply | None) -> Iterator[Verdict]:
        refusal = _NOT_REPORTED if reply is None else reply.refusal
        if refusal is not None:
            yield Verdict(ok=False, wrote=True, message=self._head.name_pod(rank, refusal).message)
        elif reply is not None:
            yield from (Verdict(found.ok, found.wrote, found.message, found.ended) for found in reply.verdicts)

    def _join(self, own: StagedCopy) -> StagedCopy:
        """Return the copy of the head pod as that of the whole engine."""
        found = [own, *(_find(report.staged, own.update) for report in map(self._head.recent_report, self._ranks()) if report is not None)]
        digests = {copy.digest if copy is not None else "" for copy in found}
        is_everywhere = len(found) == self.pods and len(digests) == 1
        return own.model_copy(
            update={
                "bytes": min(copy.bytes if copy is not None else 0 for copy in found),
                "digest": own.digest if is_everywhere else "",
            }
        )

    def _updates(self) -> list[str]:
        return [copy.update for copy in self._copies.status()]

    def _ranks(self) -> range:
        return range(1, self.pods)


def _find(copies: list[StagedCopy], update: str) -> StagedCopy | None:
    return next((copy for copy in copies if copy.update == update), None)


def _holds(copies: list[StagedCopy], wanted: StagedVersion | StageRequest) -> bool:
    """Return whether the complete version is among these copies."""
    found = _find(copies, wanted.update)
    return found is not None and bool(wanted.digest) and found.digest == wanted.digest
