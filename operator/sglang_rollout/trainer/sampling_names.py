"""Names of sampling parameters, compared with those that the fleet's engines know before ``Fleet.generate`` sends anything.

smg, the SGLang router, drops a name that it does not know, so that the engine would sample with a default. The names come from the engines'
own SGLang, by the discovery document.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Mapping

from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.wire.trainer import FleetDocument

log = logging.getLogger(__name__)

UNKNOWN_SECONDS = 30.0
"""Time after which a fleet that did not say its names is asked again."""


class SamplingNames:
    """The names that a fleet takes. Read when a call has a name that is not known yet, so that a call rarely waits for it.

    Args:
        read_document: Reads the discovery document within some seconds. Raises FleetError.
    """

    def __init__(self, read_document: Callable[[float], FleetDocument]) -> None:
        self._read_document = read_document
        self._known: frozenset[str] = frozenset()
        self._ask_again_at = float("-inf")

    def check(self, used: Mapping[str, str], timeout: float) -> None:
        """Refuse names that the fleet does not take. A fleet that does not say its names refuses none here.

        Args:
            used: Each name, and the argument that has it, such as ``sampling_params[2]``.
            timeout: Seconds to wait for the fleet.

        Raises:
            ValueError: The fleet does not take a name.
        """
        if used.keys() <= self._known or time.monotonic() < self._ask_again_at:
            return
        self._known = self._read(timeout)
        if not self._known:
            self._ask_again_at = time.monotonic() + UNKNOWN_SECONDS
            return
        unknown = next((name for name in used if name not in self._known), None)
        if unknown is not None:
            nearest = difflib.get_close_matches(unknown, sorted(self._known), n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{used[unknown]} has {unknown!r}, which the engines of this fleet do not take. The nearest name is {nearest!r};"
                " sampling_params in GET /fleet lists all. Nothing was sent."
            )

    def _read(self, timeout: float) -> frozenset[str]:
        try:
            return frozenset(self._read_document(timeout).sampling_params)
        except FleetError as error:  # engines also serve while the coordinator is away, and to callers that may not read the document
            log.info("The names of sampling parameters are not checked: %s", error)
            return frozenset()
