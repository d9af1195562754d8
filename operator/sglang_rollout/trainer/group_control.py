"""The process group of one trainer: opened, reused and closed together with the engines, with a heartbeat in between.

Called by ``Fleet``. The trainer's side of a process group, which needs torch, is ``process_group``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.trainer.calls import Deadline, Http, run_in_background
from sglang_rollout.trainer.errors import FleetError, FleetRefused, FleetUnreachable, GroupFailed
from sglang_rollout.trainer.forks import keep_forever, renew_after_fork
from sglang_rollout.trainer.push import OTHER_SIDE_SECONDS
from sglang_rollout.wire.ports import FLEET_LEASE
from sglang_rollout.wire.trainer import FleetDocument

if TYPE_CHECKING:
    from sglang_rollout.trainer.process_group import ProcessGroup, Rendezvous

log = logging.getLogger(__name__)

OPEN_SECONDS = 180.0
"""Default timeout of opening a process group."""
REOPEN_INTERVAL_SECONDS = 2.0
"""Pause between two attempts to open a process group."""
LEAVE_SECONDS = 2.0
"""How long a failed push waits for the engines to leave its process group. Healthy engines leave at once."""
DESTROY_SECONDS = 30.0
"""Healthy engines leave a process group within milliseconds; the trainer does not wait longer for the others."""
HEARTBEAT_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How to open a process group."""

    backend: str | None = None
    """torch's backend. None: the fleet's."""
    host: str | None = None
    """Address at which the engines reach this process. None: that of the interface that routes to the fleet."""
    device: str | None = None
    """Where buckets are assembled. None: ``cpu`` for gloo, the current GPU for other backends."""
    timeout: float = OPEN_SECONDS
    """Seconds for the whole call."""


class GroupControl:
    """Keeps at most one process group open."""

    def __init__(self, http: Http, read_document: Callable[[], FleetDocument]) -> None:
        self._http = http
        self._read_document = read_document
        self._heartbeat: Heartbeat | None = None
        self.options = GroupOptions()
        """Options of the next process group."""
        self.group: ProcessGroup | None = None
        """The open process group."""
        renew_after_fork(self)

    def renew(self) -> None:
        """Forget the process group of the parent process in this forked child. The heartbeat's thread exists in the parent only."""
        keep_forever((self.group, self._heartbeat))
        self.group = self._heartbeat = None

    def current(self) -> ProcessGroup:
        """Return the open process group if it fits the fleet's current epoch, else a new one. Raises GroupFailed."""
        document = self._read_document()
        group = self.group
        if group is not None and group.epoch == document.epoch and any(known.name == group.name for known in document.groups):
            return group
        return self.open()

    def open(self) -> ProcessGroup:
        """Close the open process group, and open a new one. Retry while the fleet cannot open it yet. Raises GroupFailed."""
        self.close()
        deadline = Deadline(self.options.timeout)
        while True:
            document = self._read_document()
            try:
                self.group = self._join(document, deadline)
            except GroupFailed as error:
                if not error.temporary or deadline.remaining < REOPEN_INTERVAL_SECONDS:
                    raise
                log.info("The fleet cannot open a process group yet: %s", error)
                time.sleep(REOPEN_INTERVAL_SECONDS)
            else:
                self._heartbeat = Heartbeat(self._http, self.group.name, lease=document.lease)
                return self.group

    def close(self) -> None:
        """Close the open process group, if there is one, on the engines and here. This ends a broadcast that waits for engines."""
        group = self._detach()
        if group is not None:
            destroy_process_group(self._http, group.name)
            group.close()

    def abandon(self) -> None:
        """Leave the open process group without waiting for engines that may be stuck in it. The next one has another name."""
        group = self._detach()
        if group is not None:
            group.close()
            wait([run_in_background(destroy_process_group, self._http, group.name)], timeout=LEAVE_SECONDS)

    def _join(self, document: FleetDocument, deadline: Deadline) -> ProcessGroup:
        """Try once to open a process group with the members that the document names."""
        from sglang_rollout.trainer.process_group import ProcessGroup, Rendezvous  # noqa: PLC0415 - imports torch

        rendezvous = Rendezvous(
            host=self.options.host or address_toward_fleet(self._http.host, self._http.port),
            world_size=document.world_size,
            backend=self.options.backend or document.backend,
            device=self.options.device,
            deadline=deadline,
        )
        torch_group = open_process_group(self._http, rendezvous, deadline)
        members = [member.name for member in document.members if member.rank_offset is not None]
        return ProcessGroup(rendezvous, torch_group, epoch=document.epoch, members=members)

    def _detach(self) -> ProcessGroup | None:
        """Stop the heartbeat, forget the open process group, and return it."""
        group, self.group = self.group, None
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        return group


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
        is_refused = False
        while not self._stop.wait(self._interval):
            try:
                self._http.post(FLEET_LEASE, {"group_name": self._group_name}, timeout=HEARTBEAT_TIMEOUT_SECONDS)
                is_refused = False
            except FleetError as error:  # the next heartbeat may get through; a push reports a fleet that stays unreachable
                is_lost = isinstance(error, FleetRefused) and error.status == HTTPStatus.FORBIDDEN
                log.log(logging.WARNING if is_lost and not is_refused else logging.DEBUG, "heartbeat: %s", error)
                is_refused = is_lost
