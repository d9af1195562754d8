"""Routes of versions in the weight store (transport Staged): uploads and reads.

The pieces go to the weight store and come from there, never through the coordinator.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from aiohttp import web

from sglang_rollout.coordinator.http import dialects
from sglang_rollout.coordinator.http.app import CALLER, PARTS, Parts
from sglang_rollout.coordinator.http.control import answer_to, reply_to
from sglang_rollout.coordinator.update.requests import Body, WithdrawUpload
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.wire.ports import FLEET, FLEET_UPDATES, STAGED, STORE_READ, STORE_VERIFY
from sglang_rollout.wire.reasons import RefusedError, quote_value
from sglang_rollout.wire.staged import UPDATE_PATTERN, StoreReadReply, StoreReadRequest, StoreVerifyReply, StoreVerifyRequest
from sglang_rollout.wire.trainer import ControlReply

AT_STORE = (
    "{path}: the weight store takes and gives the pieces of versions and reports their state. The fleet's URL sends these calls there; the"
    " coordinator itself does not."
)
READ_SECONDS = 30.0
"""Deadline of the call that describes a version: a snapshot's index is read from its volume."""
VERIFY_SECONDS = 600.0
"""Deadline of the check of one snapshot."""
MARGIN_SECONDS = 5.0
"""How much later than the store itself the coordinator gives up."""


async def open_upload(request: web.Request) -> web.Response:
    """``POST /fleet/updates``. The answer has the ticket that the weight store demands of the uploader."""
    parts, asked = request.app[PARTS], dialects.upload(dialects.parse(await request.read()))
    answer = await parts.ask(asked, str(request[CALLER]))
    if answer.success:
        ticket = parts.agents.upload_ticket(str(answer.fleet["update"]))
        answer = replace(answer, fleet={**answer.fleet, "ticket": ticket})
    return answer_to(request, asked, answer)


async def commit_upload(request: web.Request) -> web.Response:
    """``POST /fleet/updates/{update}/commit``."""
    return await reply_to(request, dialects.commit_upload(_update(request), dialects.parse(await request.read())))


async def withdraw_upload(request: web.Request) -> web.Response:
    """``DELETE /fleet/updates/{update}``."""
    await request.read()
    return await reply_to(request, WithdrawUpload(_update(request)))


async def read_version(request: web.Request) -> web.Response:
    """``POST /fleet/updates/{update}/read``: a ticket for the index and the pieces of a complete version."""
    await request.read()
    parts, update = request.app[PARTS], _update(request)
    ticket = parts.agents.read_ticket(update)
    body = StoreReadRequest(update=update, ticket=ticket).model_dump(mode="json")
    found = StoreReadReply.model_validate(await _call_store(parts, STORE_READ, body, READ_SECONDS))
    version = found.version.model_dump(mode="json") if found.version is not None else None
    details = {"update": update, "ticket": ticket, "digest": found.digest, "bytes": found.bytes, "version": version}
    reply = ControlReply(success=True, message=f"Read the index and the pieces below {STAGED}/{update}.", fleet=details)
    return web.json_response(reply.model_dump(mode="json", exclude_none=True))


async def verify_snapshot(request: web.Request) -> web.Response:
    """``POST /fleet/updates/{update}/verify``: the weight store reads all files of a snapshot and compares them with their digests."""
    await request.read()
    body = StoreVerifyRequest(update=_update(request), deadline=VERIFY_SECONDS).model_dump(mode="json")
    found = StoreVerifyReply.model_validate(await _call_store(request.app[PARTS], STORE_VERIFY, body, VERIFY_SECONDS + MARGIN_SECONDS))
    message = " ".join(found.problems) or "All files have their digests."
    reply = ControlReply(success=not found.problems, message=message, fleet={"problems": found.problems})
    return web.json_response(reply.model_dump(mode="json", exclude_none=True))


async def _call_store(parts: Parts, path: str, body: Body, seconds: float) -> Any:
    """Return the answer of the weight store to a read. Raises RefusedError with its refusal."""
    store = parts.machine.fleet.store
    if store is None:
        raise RefusedError("This fleet has no weight store (weights.transport: Staged).", status=404)
    if not store.is_up:
        raise RefusedError(
            f"The weight store {store.wanted.name} does not answer. Try again when GET {FLEET} shows that it is up.", status=503
        )
    status, answer = await parts.agents.ask(STORE, path, body, seconds)
    if status == 200:
        return answer
    message = answer.get("message") if isinstance(answer, dict) else answer
    raise RefusedError(f"The weight store: {message}", status=status if status in (404, 409, 503) else 502)


async def refuse_at_store(request: web.Request) -> web.Response:
    """Refuse a call that only the weight store answers."""
    raise RefusedError(AT_STORE.format(path=request.path), status=404)


def _update(request: web.Request) -> str:
    update = request.match_info["update"]
    if re.fullmatch(UPDATE_PATTERN, update) is None:
        raise RefusedError(
            f"{quote_value(update)} is no ID of an update: use the field update of the answer to POST {FLEET_UPDATES}.", status=404
        )
    return update


routes = [
    web.post(FLEET_UPDATES, open_upload),
    web.post(f"{FLEET_UPDATES}/{{update}}/commit", commit_upload),
    web.post(f"{FLEET_UPDATES}/{{update}}/read", read_version),
    web.post(f"{FLEET_UPDATES}/{{update}}/verify", verify_snapshot),
    web.delete(f"{FLEET_UPDATES}/{{update}}", withdraw_upload),
    web.get(f"{FLEET_UPDATES}/{{update}}", refuse_at_store),
    web.put(f"{FLEET_UPDATES}/{{update}}/pieces/{{shard}}/{{piece}}", refuse_at_store),
    web.get(f"{STAGED}/{{update}}/index", refuse_at_store),
    web.get(f"{STAGED}/{{update}}/pieces/{{shard}}/{{piece}}", refuse_at_store),
]
