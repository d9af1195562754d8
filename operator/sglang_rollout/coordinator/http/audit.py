"""The audit log: one line of JSON for each control call and each read of weights, never with a body or a header.

Refused calls get a limited number of lines for each address, so that a flood fills no log. One line then has the number of the others.
"""

from __future__ import annotations

import asyncio
import json
import logging

from aiohttp import web

from sglang_rollout.coordinator.callers.pods import Caller
from sglang_rollout.logs import WINDOW_SECONDS, RefusedCalls
from sglang_rollout.wire.access import CALLER_HEADER, POD_PATHS, PathKind, kind_of_path
from sglang_rollout.wire.ports import FLEET, FLEET_ENGINES, FLEET_LEASE

audit = logging.getLogger("sglang_rollout.audit")

CLIENT_LEFT = 499
"""Status of a call whose client closed its connection. The operation runs to its end."""
MAX_PATH_CHARACTERS = 200
MAX_ADDRESS_CHARACTERS = 64

_NOT_AUDITED = frozenset({FLEET, FLEET_LEASE, *POD_PATHS})
"""Control paths that trainers and the router pod call again and again, and that change nothing. Refused calls get a line."""


def _is_routine(request: web.Request) -> bool:
    """Return True if an allowed call gets no line. An agent's question about a caller (GET) precedes the call itself."""
    return request.path in _NOT_AUDITED or (request.method == "GET" and request.path.startswith(f"{FLEET_ENGINES}/"))


class AuditLog:
    """Writes the lines."""

    def __init__(self) -> None:
        self._refused = RefusedCalls()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, request: web.Request, caller: Caller | None, status: int, seconds: float, version: str | None) -> None:
        """Write a line about a call that has ended.

        Args:
            request: The call.
            caller: Who sent it; None: it was refused, or its client left before it was allowed.
            status: Status of the answer.
            seconds: Duration.
            version: Label of the version that the fleet serves after the call; None: the answer does not say.
        """
        if kind_of_path(request.path) is not PathKind.CONTROL or (caller is not None and _is_routine(request)):
            return
        address = request.headers.get(CALLER_HEADER, request.remote or "")[:MAX_ADDRESS_CHARACTERS]
        if caller is None and not self._count_refused(address):
            return
        line = {
            "method": request.method,
            "path": request.path[:MAX_PATH_CHARACTERS],
            "address": address,
            "caller": str(caller) if caller is not None else None,
            "serviceAccount": caller.service_account if caller is not None else None,
            "status": status,
            "milliseconds": round(seconds * 1000),
            "version": version,
        }
        audit.info("%s", json.dumps(line))

    def _count_refused(self, address: str) -> bool:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_SECONDS, self.write_omitted)
        return self._refused.count(address)

    def write_omitted(self) -> None:
        """Write how many refused calls got no line, by address, and start again from zero."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for address, count in self._refused.take_omitted().items():
            audit.info("%s", json.dumps({"address": address, "caller": None, "omittedRefusals": count}))
