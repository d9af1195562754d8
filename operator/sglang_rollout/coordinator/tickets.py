"""Tickets of staged versions, and the addresses in the calls about them. The state machine knows neither keys nor addresses.

A ticket proves that the coordinator lets its holder read a version, or upload it. It is derived from the rollout's key and the ID of the
update, so nothing has to be stored.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping

from sglang_rollout.coordinator.update.requests import Body
from sglang_rollout.coordinator.update.store import describe_peer
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.ports import AGENT_STAGE, STORE_FETCH, STORE_OPEN

READ = "staged-read:"
UPLOAD = "staged-upload:"

DataUrl = Callable[[str], str | None]
"""Returns the base URL of the data port of an engine's agent, or of the weight store; None if it has no address now."""


def read_ticket(key: Credentials, update: str) -> str:
    """Return the ticket of readers: agents, and a weight store that copies a version from them."""
    return _ticket(key, READ + update)


def upload_ticket(key: Credentials, update: str) -> str:
    """Return the ticket of the trainer that uploads a version."""
    return _ticket(key, UPLOAD + update)


def _ticket(key: Credentials, text: str) -> str:
    return hmac.new(key.sent.encode(), text.encode(), "sha256").hexdigest()


def complete_body(path: str, body: Body, key: Credentials, data_url: DataUrl) -> Body:
    """Return the body of a call with tickets, and with URLs in place of the names of peers. Bodies of other calls stay as they are."""
    if path == STORE_OPEN:
        # Only an upload lists its shards when it begins.
        uploads = {"upload_ticket": upload_ticket(key, body["update"])} if body["shards"] else {}
        return {**body, "ticket": read_ticket(key, body["update"]), **uploads}
    if path in (AGENT_STAGE, STORE_FETCH):
        names = {url: describe_peer(name) for name in body["parents"] if (url := data_url(name)) is not None}
        return {**body, "ticket": read_ticket(key, body["update"]), "parents": list(names), "names": names}
    return body


def complete_bodies(path: str, bodies: Mapping[str, Body], key: Credentials, data_url: DataUrl) -> Mapping[str, Body]:
    """Return the bodies of a call to several peers, completed."""
    if path not in (STORE_OPEN, AGENT_STAGE, STORE_FETCH):
        return bodies
    return {name: complete_body(path, body, key, data_url) for name, body in bodies.items()}
