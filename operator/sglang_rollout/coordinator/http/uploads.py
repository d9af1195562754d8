"""Routes of uploads (transport Staged): begin, commit and withdraw. The pieces go to the weight store, never through the coordinator."""

from __future__ import annotations

import re
from dataclasses import replace

from aiohttp import web

from sglang_rollout.coordinator.http import dialects
from sglang_rollout.coordinator.http.app import CALLER, PARTS
from sglang_rollout.coordinator.http.control import answer_to, reply_to
from sglang_rollout.coordinator.update.requests import WithdrawUpload
from sglang_rollout.wire.ports import FLEET_UPDATES
from sglang_rollout.wire.reasons import RefusedError, quote_value
from sglang_rollout.wire.staged import UPDATE_PATTERN

AT_STORE = (
    "{path}: the weight store takes the pieces of an upload and reports its state. The fleet's URL sends these calls there; the"
    " coordinator itself does not."
)


async def open_upload(request: web.Request) -> web.Response:
    """``POST /fleet/updates``. The answer has the ticket that the weight store demands of the uploader."""
    asked = dialects.upload(dialects.parse(await request.read()))
    parts = request.app[PARTS]
    answer = await parts.driver.ask(asked, str(request[CALLER]))
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
    web.delete(f"{FLEET_UPDATES}/{{update}}", withdraw_upload),
    web.get(f"{FLEET_UPDATES}/{{update}}", refuse_at_store),
    web.put(f"{FLEET_UPDATES}/{{update}}/pieces/{{shard}}/{{piece}}", refuse_at_store),
]
