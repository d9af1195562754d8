"""Where trainer and engines meet: how a weight-update group comes about, and how the engines leave it."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_rollout.trainer.client import Http
from sglang_rollout.trainer.errors import FleetRefused, FleetUnreachable, GroupFailed
from sglang_rollout.trainer.push import BLAME_SECONDS
from sglang_rollout.trainer.waiting import Deadline, background

if TYPE_CHECKING:
    from sglang_rollout.trainer.group import Rendezvous

log = logging.getLogger(__name__)

DESTROY_SECONDS = 30.0
"""Engines that are well leave a group within milliseconds; nobody should wait longer for the others."""


def meet(http: Http, meeting: Rendezvous, deadline: Deadline) -> Any:
    """Tell the fleet to join while this process joins. The first of both that fails ends the other."""
    body = {
        "master_address": meeting.host,
        "master_port": meeting.port,
        "rank_offset": 1,
        "world_size": meeting.world_size,
        "group_name": meeting.name,
        "backend": meeting.backend,
        **meeting.facts(),
    }
    told = background(http.post, "/init_weights_update_group", body, timeout=deadline.seconds)
    joined = background(meeting.join)
    both: list[Future[Any]] = [told, joined]
    done, pending = wait(both, timeout=deadline.remaining, return_when=FIRST_EXCEPTION)
    if not pending and not any(future.exception() for future in both):
        return joined.result()
    meeting.abort()
    if told not in done and done:  # our own end failed first; the fleet may know why
        wait([told], timeout=BLAME_SECONDS)
    # Engines that joined although the group failed (a reply that got lost) must not keep it.
    destroy(http, meeting.name)
    # Our own thread ends now that the store is closed. If the interpreter ended before it, torch would abort the process.
    wait([joined], timeout=BLAME_SECONDS)
    raise _no_group(told, joined, meeting, deadline)


def destroy(http: Http, name: str) -> None:
    """Tell the engines to leave a group. A fleet that cannot be told ends it by itself."""
    try:
        http.post("/destroy_weights_update_group", {"group_name": name}, timeout=DESTROY_SECONDS)
    except FleetRefused as error:  # the fleet dropped it first, with its engines or after a deadline
        log.debug("group %s was gone already: %s", name, error)
    except FleetUnreachable as error:
        log.warning("could not tell the fleet to leave group %s; it will by itself when we are gone: %s", name, error)


def own_address(host: str, port: int) -> str:
    """Our address on the interface that routes to the fleet: what its engines can most likely reach."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # UDP: chooses a route and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupFailed(
            f"No route from here to the fleet's host {host}: {error}. Pass host= with an address the engines reach."
        ) from error


def _no_group(told: Future[Any], joined: Future[Any], meeting: Rendezvous, deadline: Deadline) -> GroupFailed:
    store = f"{meeting.host}:{meeting.port}"
    where = f"group {meeting.name} (world size {meeting.world_size}, {meeting.backend}, store at {store})"
    error = told.exception() if told.done() else None
    if isinstance(error, FleetRefused):
        return GroupFailed(f"The fleet did not open {where}: {error.reason}", temporary=error.status == HTTPStatus.SERVICE_UNAVAILABLE)
    error = error or (joined.exception() if joined.done() else None)
    if error is not None:
        return GroupFailed(f"Opening {where} failed: {error}")
    late = f"Not all engines joined {where} within {deadline.seconds:.0f} s."
    return GroupFailed(f"{late} Can their pods reach this address? Pass host= if not.")
