"""Log the calls that an agent or the weight store itself refuses for their credential. The coordinator's audit log has relayed calls."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from sglang_rollout.logs import WINDOW_SECONDS, RefusedCalls
from sglang_rollout.wire.access import CALLER_HEADER

log = logging.getLogger(__name__)

REPEATED = web.RequestKey("repeated", bool)
"""Set for a call of the fleet that its caller repeats at once with a newer challenge."""
_CREDENTIAL_REFUSED = (401, 403)
_MAX_PATH_CHARACTERS = 200
_MAX_ADDRESS_CHARACTERS = 64


class RefusalLog:
    """Writes a limited number of lines for each address."""

    def __init__(self) -> None:
        self._refused = RefusedCalls()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, request: web.Request, status: int) -> None:
        """Write a line about a refused call, without its body, query and headers. Other statuses than 401 and 403 get none."""
        if status not in _CREDENTIAL_REFUSED or request.get(REPEATED):
            return
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._write_omitted)
        # The gate sets this address.
        address = request.headers.get(CALLER_HEADER, request.remote or "this pod")[:_MAX_ADDRESS_CHARACTERS]
        if self._refused.count(address):
            log.warning("%s %s from %s is refused: %d.", request.method, request.path[:_MAX_PATH_CHARACTERS], address, status)

    def _write_omitted(self) -> None:
        """Write how many calls got no line, by address, and start again from zero."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for address, count in self._refused.take_omitted().items():
            log.warning("%d more refused calls from %s have no line.", count, address)

    async def end(self, _: web.Application) -> None:
        """Write what is still to be written."""
        self._write_omitted()


REFUSAL_LOG = web.AppKey("refusal_log", RefusalLog)


def log_refusals(app: web.Application) -> None:
    """Let an application log its refused calls."""
    app[REFUSAL_LOG] = RefusalLog()
    app.on_cleanup.append(app[REFUSAL_LOG].end)
