"""Load the committed version from the pod's own copy, without a coordinator: after a restart of the engine, and after a failed load."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from sglang_rollout.agent import state as s
from sglang_rollout.agent.agent import Agent
from sglang_rollout.agent.engine import request_restart
from sglang_rollout.agent.record import RecordError
from sglang_rollout.agent.staged.activate import Activator, LeftTensorsError
from sglang_rollout.agent.staged.load import ActivationError
from sglang_rollout.agent.staged.saved import SavedVersions
from sglang_rollout.sglang.client import EngineError
from sglang_rollout.wire.agent import AckRequest
from sglang_rollout.wire.staged import ActivateRequest
from sglang_rollout.wire.states import EngineState, Version

log = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 2.0
_MAX_DELAY_SECONDS = 60.0
_COORDINATOR_FIRST_SECONDS = 5.0
"""Time that a coordinator has to repeat a load that failed."""


class OwnCopyWatch:
    """Loads the committed version when the engine does not hold it. The delay between failed loads doubles.

    Args:
        agent: The agent.
        activator: Loads versions.
        saved: What is remembered of each version.
        kill_file: File with which the engine's container is restarted; None if it cannot be.
    """

    def __init__(self, agent: Agent, activator: Activator, saved: SavedVersions, kill_file: Path | None = None) -> None:
        self._kill_file = kill_file
        self._agent = agent
        self._activator = activator
        self._saved = saved
        self._delay = _FIRST_DELAY_SECONDS
        self._not_before = 0.0

    async def watch(self) -> None:
        """Check the engine once, and load the committed version if that is needed."""
        agent, now = self._agent, time.monotonic()
        if self._activator.is_running or agent.giving_up_since is not None or not agent.state.up or agent.state.record.pending:
            return
        if agent.state.record.state is not EngineState.CLEAN and await self._undo_interrupted():
            return
        failed_at = self._activator.failed_at
        if now < self._not_before or (failed_at is not None and now - failed_at < _COORDINATOR_FIRST_SECONDS):
            return
        request = self._find_version() if s.needs_own_copy(agent.state) else None
        if request is not None:
            await self._load(request)

    async def _undo_interrupted(self) -> bool:
        try:
            return await self._activator.undo_interrupted()
        except (EngineError, RecordError) as error:
            log.warning("A load that the agent's restart interrupted cannot be undone: %s", error)
            return False

    def _find_version(self) -> ActivateRequest | None:
        """Return the request to load the committed version; None if a pod lacks the complete copy."""
        agent = self._agent
        committed, staged, boot_id = agent.state.record.committed, agent.state.record.staged, agent.state.record.boot_id
        if committed is None or staged is None or boot_id is None:
            return None
        if not any(copy.update == staged.update and copy.digest == staged.digest for copy in agent.list_copies()):
            return None
        known = self._saved.load(staged.update)
        ack = known.ack if known is not None and known.digest == staged.digest and known.ack is not None else None
        if ack is None or not _is_same(ack.version, committed):
            ack = AckRequest(version=committed, boot_id=boot_id, cohort=[agent.name])
        own = ack.model_copy(update={"boot_id": boot_id, "verified": False})
        return ActivateRequest(update=staged.update, digest=staged.digest, ack=own, mode=agent.limits.pause_mode)

    async def _load(self, request: ActivateRequest) -> None:
        agent = self._agent
        log.info("Loading version %s from the pod's own copy.", request.ack.version)
        agent.own_load_until = time.monotonic() + agent.limits.load
        try:
            await self._activator.load_own(request)
        except ActivationError as error:
            if isinstance(error, LeftTensorsError):
                await self._request_restart()
            self._not_before = time.monotonic() + self._delay
            log.warning("Version %s is not loaded from the pod's own copy; the next attempt is in %g s.", request.ack.version, self._delay)
            self._delay = min(2 * self._delay, _MAX_DELAY_SECONDS)
        else:
            self._delay = _FIRST_DELAY_SECONDS
        finally:
            agent.own_load_until = 0.0

    async def _request_restart(self) -> None:
        """Restart an engine that cannot load the committed version over what it holds."""
        if self._kill_file is None:
            log.error("The engine holds tensors that the committed version does not have: restart it. Its gate stays closed until then.")
            return
        log.warning("The engine holds tensors that the committed version does not have: requesting its restart.")
        await request_restart(self._agent.engine, self._kill_file)


def _is_same(version: Version, committed: Version) -> bool:
    return s.version_identity(version) == s.version_identity(committed) and version.label == committed.label
