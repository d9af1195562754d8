"""Attempts to load a staged version: the verdicts of all ranks, in all pods of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from sglang_rollout.agent.staged.member_pods import MemberPods
from sglang_rollout.agent.staged.verdicts import VerdictFolder, Verdicts, join_pods
from sglang_rollout.wire.staged import ActivateRequest

_STEP_SECONDS = 0.05


class Attempts:
    """Opens attempts, and reads their verdicts.

    Args:
        folder: Folder of the verdicts of this pod.
        members: The other pods of the engine; None for an engine of one pod.
    """

    def __init__(self, folder: VerdictFolder, members: MemberPods | None = None) -> None:
        self._folder = folder
        self._members = members

    async def open(self, request: ActivateRequest) -> str:
        """Prepare a load in all pods, and return the attempt.

        Raises:
            OSError: The folder of verdicts cannot be written.
            RefusedError: Another pod does not have the complete copy.
        """
        attempt = await asyncio.to_thread(self._folder.open_attempt)
        if self._members is not None:
            await self._members.open_attempt(attempt, request.update, request.digest)
        return attempt

    async def read_ended(self, attempt: str, ranks: int, seconds: float, is_up: Callable[[], bool]) -> Verdicts:
        """Return the verdicts of an attempt when every rank has ended its load, the engine has ended, or the time is over.

        SGLang answers when the first pipeline stage has loaded, and only then passes the call to the next stage.
        """
        deadline = time.monotonic() + seconds
        while True:
            verdicts = await self.read(attempt, ranks)
            if verdicts.is_ended or not is_up() or time.monotonic() >= deadline:
                return verdicts
            await asyncio.sleep(_STEP_SECONDS)

    async def check(self, attempt: str) -> None:
        """Raise RefusedError unless the other pods still have the copies with which an attempt began."""
        if self._members is not None:
            await self._members.check_attempt(attempt)

    def path(self, attempt: str) -> Path:
        """Return the folder of an attempt, which has the same path in every pod."""
        return self._folder.path(attempt)

    async def read(self, attempt: str, ranks: int) -> Verdicts:
        """Return the verdicts of an attempt by all ranks of the engine. Every pod has the same number of ranks."""
        if self._members is None:
            return await asyncio.to_thread(self._folder.read, attempt, ranks)
        share = ranks // self._members.pods
        others = await self._members.read_verdicts(attempt, share)
        own = await asyncio.to_thread(self._folder.read, attempt, share)
        return join_pods([own, *others])
