"""Attempts to load a staged version: the verdicts of all ranks, in all pods of the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sglang_rollout.agent.staged.member_pods import MemberPods
from sglang_rollout.agent.staged.verdicts import VerdictFolder, Verdicts, join_pods
from sglang_rollout.wire.staged import ActivateRequest


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
