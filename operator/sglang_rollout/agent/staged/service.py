"""The parts of transport Staged in one agent, and the handlers of the coordinator's calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.launch.head_pod import HeadPod
from sglang_rollout.agent.own_model import OwnModel
from sglang_rollout.agent.staged.activate import Activator
from sglang_rollout.agent.staged.attempts import Attempts
from sglang_rollout.agent.staged.load import ActivationError
from sglang_rollout.agent.staged.member_pods import MemberPods
from sglang_rollout.agent.staged.own_copy import OwnCopyWatch
from sglang_rollout.agent.staged.saved import SavedVersions
from sglang_rollout.agent.staged.stage import Stager, open_session
from sglang_rollout.agent.staged.verdicts import VerdictFolder
from sglang_rollout.agent.staged.ways import choose_way
from sglang_rollout.agent.staged.written import WrittenTensors
from sglang_rollout.internal.requests import deadline_of, read_message
from sglang_rollout.proxy.address import Address
from sglang_rollout.staging.copies import Copies
from sglang_rollout.staging.serve import staging_routes
from sglang_rollout.wire.agent import SyncRequest
from sglang_rollout.wire.reasons import RefusedError, reason_phrase
from sglang_rollout.wire.staged import ActivateRequest, DropRequest, StageRequest
from sglang_rollout.wire.trainer import ControlReply

_ACTIVATE_SECONDS = 300.0


class StagedService:
    """Copies of versions, and their load into the engine. Create it with :func:`run_staged_service`."""

    def __init__(
        self,
        copies: Copies,
        stager: Stager,
        activator: Activator,
        own_copy: OwnCopyWatch,
        *,
        members: MemberPods | None,
    ) -> None:
        self._copies = copies
        self._stager = stager
        self._activator = activator
        self.own_copy = own_copy
        self.members = members
        """The other pods of the engine; None for an engine of one pod."""

    def data_app(self) -> web.Application:
        """Return the application of the data port, which needs the tickets of the versions."""
        app = web.Application()
        app.add_routes(staging_routes(self._copies))
        return app

    async def stage(self, request: web.Request, answer: Callable[[], Awaitable[web.Response]]) -> web.StreamResponse:
        """Copy a version into the pod, and answer with the status."""
        wanted = await read_message(request, StageRequest)
        try:
            await self._stage(wanted, min(wanted.deadline, deadline_of(request, wanted.deadline)))
        except RefusedError as error:
            return _refuse(error)
        return await answer()

    async def _stage(self, wanted: StageRequest, seconds: float) -> None:
        """Copy a version into all pods of the engine. Raises RefusedError."""
        in_use = self._activator.updates_in_use
        if self.members is None or wanted.update in in_use:
            await self._stager.stage(wanted, seconds)
            return
        relayed = wanted.model_copy(update={"keep": [*wanted.keep, *in_use]})
        await asyncio.gather(self._stager.stage(self.members.add_parents(wanted), seconds), self.members.stage(relayed, seconds))

    async def drop(self, wanted: DropRequest) -> None:
        """Delete the copy of an update in all pods of the engine, unless the engine loads it now."""
        if wanted.update in self._activator.updates_in_use:
            return
        await self._stager.drop(wanted.update)
        if self.members is not None:
            await self.members.drop(wanted)

    async def activate(self, request: web.Request, apply_sync: Callable[[SyncRequest], None]) -> web.StreamResponse:
        """Load a version into the engine. ``apply_sync`` applies a sync of this request."""
        wanted = await read_message(request, ActivateRequest)
        if wanted.sync is not None:
            apply_sync(wanted.sync)
        try:
            reply = await self._activator.activate(wanted, deadline_of(request, _ACTIVATE_SECONDS))
        except ActivationError as error:
            return _refuse(error, wrote=error.wrote)
        return web.json_response(reply.model_dump(mode="json"))


@asynccontextmanager
async def run_staged_service(
    agent: Agent,
    *,
    volume: Path,
    verdicts: Path,
    state: Path,
    model: OwnModel,
    pipeline_size: int = 1,
    data_size: int = 1,
    head_pod: HeadPod | None = None,
    data_address: Address | None = None,
    kill_file: Path | None = None,
) -> AsyncIterator[StagedService]:
    """Offer transport Staged for the length of the block.

    Args:
        agent: The agent.
        volume: Folder of the copies, which the engine's container reads.
        verdicts: Folder that the engine's container writes.
        state: Folder of the agent's records.
        pipeline_size: Pipeline stages of the engine.
        data_size: Replicas of the model in the engine.
        model: The tensors of the engine's model.
        head_pod: The agent's role in an engine with several pods; None for an engine of one pod.
        data_address: With ``head_pod``: where the other pods of the engine find the copies of this pod.
        kill_file: File with which the engine's container is restarted; None if it cannot be.

    Raises:
        StagedError: The volume cannot be written.
    """
    copies, saved = Copies(volume, state / "staged"), SavedVersions(state / "staged" / "versions")
    members = None if head_pod is None or data_address is None else MemberPods(head_pod, copies, data_address)
    agent.takes_copies = True
    agent.list_copies = copies.status if members is None else members.list_copies
    async with open_session() as session:
        folder = VerdictFolder(verdicts)
        way = choose_way(model, folder, data_size=data_size)
        written, attempts = WrittenTensors(state), Attempts(folder, members)
        activator = Activator(agent, copies, saved, written, attempts, model=model, way=way, pipeline_size=pipeline_size)
        stager = Stager(copies, saved, session, lambda: activator.updates_in_use)
        try:
            own_copy = OwnCopyWatch(agent, activator, saved, kill_file)
            yield StagedService(copies, stager, activator, own_copy, members=members)
        finally:
            await activator.close()
            await stager.close()


def _refuse(error: RefusedError, **details: bool) -> web.Response:
    """Return a refusal in SGLang's shape, with its code and these details."""
    body = ControlReply(success=False, message=str(error), code=error.refusal.code).model_dump(exclude_none=True)
    return web.json_response({**body, **details}, status=error.status, reason=reason_phrase(str(error)))
