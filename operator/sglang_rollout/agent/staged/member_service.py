"""Transport Staged in a member pod of an engine of several pods: its copies, and the verdicts of its ranks.

Only the agent of the head pod calls it. That agent decides when the ranks load a version, and records which version the engine holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from sglang_rollout.agent.staged.saved import SavedVersions
from sglang_rollout.agent.staged.stage import Stager, open_session
from sglang_rollout.agent.staged.verdicts import VerdictFolder
from sglang_rollout.internal.proven_calls import requires_proof
from sglang_rollout.internal.requests import read_message
from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.index import Index
from sglang_rollout.staging.serve import staging_routes
from sglang_rollout.wire.ports import MEMBER_ATTEMPT, MEMBER_DROP, MEMBER_STAGE, MEMBER_VERDICTS
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import AttemptReply, AttemptRequest, DropRequest, MemberStageReply, RankVerdict, StagedCopy, StageRequest


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt to load a version, and the complete copy that the ranks of this pod read."""

    name: str
    copy: Copy
    index: Index
    """Index of the copy when the attempt began. A copy that starts again has another one."""


class StagedMember:
    """Copies versions into a member pod, and reads the verdicts of its ranks. Create it with :func:`run_staged_member`."""

    def __init__(self, copies: Copies, stager: Stager, verdicts: VerdictFolder) -> None:
        self._copies = copies
        self._stager = stager
        self._verdicts = verdicts
        self._attempt: _Attempt | None = None

    def list_copies(self) -> list[StagedCopy]:
        """Return the versions in the memory of this pod."""
        return self._copies.status()

    def data_app(self) -> web.Application:
        """Return the application of the data port, which needs the tickets of the versions."""
        app = web.Application()
        app.add_routes(staging_routes(self._copies))
        return app

    def routes(self) -> list[web.RouteDef]:
        """Return the calls of the head pod."""
        handlers = {MEMBER_STAGE: self._stage, MEMBER_DROP: self._drop}
        handlers |= {MEMBER_ATTEMPT: self._open_attempt, MEMBER_VERDICTS: self._read_verdicts}
        return [web.post(path, requires_proof(handler)) for path, handler in handlers.items()]

    async def _stage(self, request: web.Request) -> web.StreamResponse:
        """Copy a version into the pod."""
        wanted = await read_message(request, StageRequest)
        refusal = None
        try:
            await self._stager.stage(wanted, wanted.deadline)
        except RefusedError as error:
            refusal = Refusal(error.refusal.code, str(error))
        return web.json_response(MemberStageReply(refusal=refusal, copies=self.list_copies()).model_dump(mode="json"))

    async def _drop(self, request: web.Request) -> web.StreamResponse:
        """Delete the copy of an update. The head pod does not ask for one that is being loaded."""
        await self._stager.drop((await read_message(request, DropRequest)).update)
        return web.json_response(MemberStageReply(refusal=None, copies=self.list_copies()).model_dump(mode="json"))

    async def _open_attempt(self, request: web.Request) -> web.StreamResponse:
        """Prepare a load by the ranks of this pod, which must have the complete copy."""
        wanted = await read_message(request, AttemptRequest)
        copy = self._copies.get(wanted.update)
        refusal = None
        if copy is None or not wanted.digest or copy.status().digest != wanted.digest:
            refusal = Refusal(RefusalCode.CONFLICT, f"The pod has no complete copy of update {wanted.update} with the wanted digest.")
        elif self._attempt is not None and self._attempt.name == wanted.attempt:
            refusal = Refusal(RefusalCode.CONFLICT, "The attempt has begun already.")
        else:
            self._attempt = _Attempt(wanted.attempt, copy, copy.index)
            try:
                await asyncio.to_thread(self._verdicts.open_attempt, wanted.attempt)
            except OSError as error:
                why = f"The folder of verdicts cannot be written: {error.strerror or error}."
                refusal = Refusal(RefusalCode.INTERNAL_ERROR, why)
        return web.json_response(AttemptReply(refusal=refusal).model_dump(mode="json"))

    async def _read_verdicts(self, request: web.Request) -> web.StreamResponse:
        """Return the verdicts of the ranks of this pod.

        Without the copy of the attempt nothing says which bytes the ranks have read: a call may have replaced the copy meanwhile.
        """
        wanted = await read_message(request, AttemptRequest)
        if not self._has_copy_of(wanted.attempt):
            refusal = Refusal(RefusalCode.CONFLICT, "The copy that its ranks load was deleted or replaced after the load began.")
            return web.json_response(AttemptReply(refusal=refusal).model_dump(mode="json"))
        found = (await asyncio.to_thread(self._verdicts.read, wanted.attempt, wanted.ranks)).found
        verdicts = [RankVerdict(ok=verdict.ok, wrote=verdict.wrote, message=verdict.message, ended=verdict.ended) for verdict in found]
        return web.json_response(AttemptReply(refusal=None, verdicts=verdicts).model_dump(mode="json"))

    def _has_copy_of(self, attempt: str) -> bool:
        """Return whether the copy is the same, and complete, since the attempt began. A complete copy only changes by starting again."""
        begun = self._attempt
        if begun is None or begun.name != attempt:
            return False
        return self._copies.get(begun.copy.update) is begun.copy and begun.copy.index is begun.index


@asynccontextmanager
async def run_staged_member(*, volume: Path, verdicts: Path, state: Path) -> AsyncIterator[StagedMember]:
    """Offer transport Staged in a member pod for the length of the block.

    Args:
        volume: Folder of the copies, which the engine's container reads.
        verdicts: Folder that the engine's container writes.
        state: Folder of the agent's records.

    Raises:
        StagedError: The volume cannot be written.
    """
    copies = Copies(volume, state / "staged")
    async with open_session() as session:
        # The head pod names the copies that are being loaded among those to keep.
        saved = SavedVersions(state / "staged" / "versions")
        stager = Stager(copies, saved, session, set)
        try:
            yield StagedMember(copies, stager, VerdictFolder(verdicts))
        finally:
            await stager.close()
