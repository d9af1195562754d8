"""The heartbeat of a trainer that holds a group: the fleet then knows that a long step is not a dead trainer."""

from __future__ import annotations

import logging
import threading

from sglang_rollout.trainer.client import Http
from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.wire.ports import FLEET_LEASE

log = logging.getLogger(__name__)

TIMEOUT = 5.0


class Heartbeat:
    """Tells the fleet, three times in each lease, that this process lives. A daemon thread, until ``stop``."""

    def __init__(self, http: Http, group: str, *, lease: float) -> None:
        self._http = http
        self._group = group
        self._every = lease / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {group}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more; returns at once."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._http.post(FLEET_LEASE, {"group_name": self._group}, timeout=TIMEOUT)
            except FleetError as error:  # the next one may get through; calls that matter say it aloud
                log.debug("heartbeat: %s", error)
