"""Asks the coordinator whether the caller of a data request is allowed. Only fleets with restricted data paths need it.

The batch server has no credentials and knows no pods, so it keeps no answer: a right that ends has ended for the next request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Self

import aiohttp
from aiohttp import web

from sglang_rollout.bounded import ERROR_BYTES, open_connector, open_session, read_answer
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import FLEET_CALLER

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 10.0
"""The coordinator waits up to 3 s for the pod of a new address."""
_CONNECTIONS = 256
"""More than the calls that may wait for a pod at the coordinator, so that they delay no other caller."""
_ANSWER_HEADERS = ("Content-Type", "Retry-After", "WWW-Authenticate")
_NO_ANSWER = "The coordinator does not answer, so the caller cannot be checked (security.generate). Try again."


class CallerCheck:
    """Reads ``GET /fleet/caller`` for each request. Use as an async context manager."""

    def __init__(self, coordinator: str) -> None:
        self._url = coordinator.rstrip("/") + FLEET_CALLER
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = open_connector(limit=_CONNECTIONS)
        self._session = open_session(connector=connector, timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def find_refusal(self, path: str, headers: Mapping[str, str]) -> web.Response | None:
        """Return the coordinator's refusal of a request; None if the caller is allowed.

        Args:
            path: Path of the request.
            headers: Headers of the request. The front has set the address of the caller.
        """
        if self._session is None:
            raise RuntimeError("CallerCheck is used outside its 'async with' block")
        sent = {RELAYED_CALLER_HEADER: headers.get(CALLER_HEADER, "")}
        if "Authorization" in headers:
            sent["Authorization"] = headers["Authorization"]
        try:
            async with self._session.get(self._url, params={"path": path}, headers=sent) as reply:
                if reply.status == 204:
                    return None
                kept = {name: reply.headers[name] for name in _ANSWER_HEADERS if name in reply.headers}
                refusal = web.Response(status=reply.status, reason=reply.reason, body=await read_answer(reply, ERROR_BYTES), headers=kept)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.warning("the coordinator does not answer: %s", str(error) or type(error).__name__)
            body = {"error": {"type": "service_unavailable", "message": _NO_ANSWER}}
            refusal = web.json_response(body, status=503, headers={"Retry-After": "1"})
        refusal.force_close()  # the body is not read
        return refusal
