"""Aborts of a fleet's requests: those that its engines have, and those that wait in the batch server."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import aiohttp
from pydantic import ValidationError

from sglang_rollout.bounded import MESSAGE_BYTES, open_connector, open_session, read_answer
from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.update.events import Result, Send
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.held import HeldAbort, HeldAbortReply
from sglang_rollout.wire.ports import BATCHES_ABORT

log = logging.getLogger(__name__)

ABORT_DEADLINE_SECONDS = 10.0
"""Longest wait for the engines' answers to an abort."""
ROUNDS = 5
"""Aborts that engines get while prompts that were sent before the first are not answered. Such a prompt may have been on its way."""
ROUND_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
"""Longest wait for the batch server, besides the wait that it is asked for. It may parse a large body."""


class BatchServer:
    """Calls the batch server of this pod. Use as an async context manager.

    Args:
        url: Base URL; None: there is no batch server.
        label: Returns the label of the committed version.
    """

    def __init__(self, url: str | None, label: Callable[[], str]) -> None:
        self._url = url.rstrip("/") + BATCHES_ABORT if url is not None else None
        self._label = label
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> BatchServer:
        # A new connection for each call: if one breaks, the batch server has ended, with all that it held.
        self._session = open_session(connector=open_connector(force_close=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def abort(self, abort: HeldAbort) -> int:
        """End requests that wait, and return how many of the others are not answered. A batch server that does not run holds none.

        Raises:
            ConnectionError: It runs and does not answer as it should.
        """
        if self._url is None or self._session is None:
            return 0
        body = abort.model_copy(update={"weight_version": self._label()}).model_dump_json()
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS + abort.wait_seconds)
        try:
            async with self._session.post(self._url, data=body, headers={"Content-Type": "application/json"}, timeout=limit) as reply:
                reply.raise_for_status()
                return HeldAbortReply.model_validate_json(await read_answer(reply, MESSAGE_BYTES)).sent
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError):
            return 0
        except (TimeoutError, aiohttp.ClientError, OSError, ValidationError) as error:
            raise ConnectionError(f"the batch server does not answer: {str(error) or type(error).__name__}") from error


class Aborts:
    """Ends requests of the whole fleet."""

    def __init__(self, agents: Agents, batch_server: BatchServer) -> None:
        self._agents = agents
        self._batch_server = batch_server

    async def end_waiting(self) -> None:
        """End all requests that no engine has. A failure is logged: the requests that engines have must end all the same."""
        try:
            await self._batch_server.abort(HeldAbort(id=uuid.uuid4().hex, abort_all=True))
        except ConnectionError as error:
            log.warning("requests that wait for an engine are not aborted: %s", error)

    async def abort(self, names: Collection[str], body: Mapping[str, Any]) -> dict[str, Result]:
        """Abort requests of the fleet, and return the results of its engines.

        Afterwards no engine begins a prompt of a batch that was sent before: requests that wait end first, and engines get the abort again
        while prompts that were on their way to them are not answered.

        Args:
            names: Engines that are up.
            body: Body of ``/abort_request``.

        Raises:
            ConnectionError: The batch server does not answer.
        """
        rid = body.get("rid")
        held = HeldAbort(id=uuid.uuid4().hex, rid=rid if isinstance(rid, str) else "", abort_all=bool(body.get("abort_all")))
        await self._batch_server.abort(held)
        results: dict[str, Result] = {}
        for number in range(1, ROUNDS + 1):
            results = await self.abort_at_engines(names, body)
            wait = held.model_copy(update={"wait_seconds": ROUND_SECONDS, "is_last": number == ROUNDS})
            if not all(result.ok for result in results.values()) or not await self._batch_server.abort(wait):
                break
        return results

    async def abort_at_engines(self, names: Collection[str], body: Mapping[str, Any]) -> dict[str, Result]:
        """Send an abort to these engines only."""
        if not names:
            return {}
        return await self._agents.fan_out(Send(ControlCall.ABORT_REQUEST.path, dict.fromkeys(names, body), ABORT_DEADLINE_SECONDS))
