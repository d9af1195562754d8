"""The fleet's half of a process group: the calls that make the engines join and leave, and the heartbeat in between.

Called by ``Fleet``. The trainer's half, which needs torch, is ``process_group``.
"""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.trainer.calls import Deadline, Http, run_in_background
from sglang_rollout.trainer.errors import FleetError, FleetRefused, FleetUnreachable, GroupFailed
from sglang_rollout.trainer.push import OTHER_SIDE_SECONDS
from sglang_rollout.wire.ports import FLEET_LEASE

if TYPE_CHECKING:
    from sglang_rollout.trainer.process_group import Rendezvous

log = logging.getLogger(__name__)

DESTROY_SECONDS = 30.0
"""Healthy engines leave a process group within milliseconds; the trainer does not wait longer for the others."""
HEARTBEAT_TIMEOUT_SECONDS = 5.0


def open_process_group(http: Http, rendezvous: Rendezvous, deadline: Deadline) -> Any:
    """Make the engines join while this process joins, and return torch's process group.

    If one side fails, the other side is ended too.

    Raises:
        GroupFailed: The fleet refused, this process could not join, or the deadline passed.
    """
    body = {
        "master_address": rendezvous.host,
        "master_port": rendezvous.port,
        "rank_offset": 1,
        "world_size": rendezvous.world_size,
        "group_name": rendezvous.name,
        "backend": rendezvous.backend,
        **rendezvous.facts(),
    }
    reply = run_in_background(http.post, ControlCall.INIT_GROUP.path, body, timeout=deadline.seconds)
    joined = run_in_background(rendezvous.join)
    both: list[Future[Any]] = [reply, joined]
    done, pending = wait(both, timeout=deadline.remaining, return_when=FIRST_EXCEPTION)
    if not pending and not any(future.exception() for future in both):
        return joined.result()
    rendezvous.abort()
    if reply not in done and done:  # this process failed first; the fleet's reply may say why
        wait([reply], timeout=OTHER_SIDE_SECONDS)
    # Engines may have joined although the fleet's reply was lost: make them leave.
    destroy_process_group(http, rendezvous.name)
    # The joining thread ends now that the store is closed. If the interpreter ended before the thread, torch would abort the process.
    wait([joined], timeout=OTHER_SIDE_SECONDS)
    raise _open_failure(reply, joined, rendezvous, deadline)


def destroy_process_group(http: Http, name: str) -> None:
    """Make the engines leave a process group. If the fleet cannot be reached, it closes the group by itself later."""
    try:
        http.post(ControlCall.DESTROY_GROUP.path, {"group_name": name}, timeout=DESTROY_SECONDS)
    except FleetRefused as error:  # the fleet closed the group first, when engines left or after a deadline
        log.debug("process group %s was closed already: %s", name, error)
    except FleetUnreachable as error:
        log.warning("Could not reach the fleet to close process group %s. The fleet closes it when this trainer is gone: %s", name, error)


def address_toward_fleet(host: str, port: int) -> str:
    """Return this machine's address on the interface that routes to the fleet, which the engines can most likely reach.

    Raises:
        GroupFailed: There is no route to the fleet.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # UDP: chooses a route and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupFailed(
            f"No route from here to the fleet's host {host}: {error}. Pass host= with an address that the engines reach."
        ) from error


def _open_failure(reply: Future[Any], joined: Future[Any], rendezvous: Rendezvous, deadline: Deadline) -> GroupFailed:
    store = f"{rendezvous.host}:{rendezvous.port}"
    group = f"process group {rendezvous.name} (world size {rendezvous.world_size}, {rendezvous.backend}, store at {store})"
    error = reply.exception() if reply.done() else None
    if isinstance(error, FleetRefused):
        return GroupFailed(f"The fleet did not open {group}: {error.reason}", temporary=error.status == HTTPStatus.SERVICE_UNAVAILABLE)
    error = error or (joined.exception() if joined.done() else None)
    if error is not None:
        return GroupFailed(f"Opening {group} failed: {error}")
    late = f"Not all engines joined {group} within {deadline.seconds:.0f} s."
    return GroupFailed(f"{late} Can their pods reach this address? Pass host= if not.")


class Heartbeat:
    """A daemon thread that renews the trainer's lease three times per lease duration, also during a long training step."""

    def __init__(self, http: Http, group_name: str, *, lease: float) -> None:
        self._http = http
        self._group_name = group_name
        self._interval = lease / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {group_name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no further heartbeat. Return at once."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._http.post(FLEET_LEASE, {"group_name": self._group_name}, timeout=HEARTBEAT_TIMEOUT_SECONDS)
            except FleetError as error:  # the next heartbeat may get through; a push reports a fleet that stays unreachable
                log.debug("heartbeat: %s", error)
