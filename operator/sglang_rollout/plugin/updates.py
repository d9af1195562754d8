"""Find out at the engine's start whether SGLang will refuse every update of the weights.

SGLang derives data from the weights for some kernels, and does not compute them again after an update. So it refuses updates of all kinds
(process group, tensors, disk, IPC) before it writes, but answers with the reason only when the first one comes.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from .reports import LONGEST_TEXT

log = logging.getLogger(__name__)

_MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"


def find_refusal(scheduler: Any) -> str:
    """Return SGLang's reason why it refuses updates, as sentences; empty if it takes them, or if this release does not know.

    SGLang's own functions decide. They depend on the start only, and are equal in all ranks. An error is logged: the first update tells.
    """
    try:
        runner = scheduler.tp_worker.model_runner
        check = getattr(importlib.import_module(_MODULE), "_unsupported_derived_weight_cache_error", None)
        found = check(runner.model) if check is not None else None
        reason = str(found) if found is not None else _find_shared_weights(runner)
        return " ".join(reason.split())[:LONGEST_TEXT]
    except Exception:
        log.exception("The plug-in cannot find out whether SGLang takes updates of the weights; the first update tells.")
        return ""


def _find_shared_weights(runner: Any) -> str:
    """Return the error with which SGLang ends when weights are updated that it shares with a daemon (``--weight-cache-mode``)."""
    check = getattr(getattr(runner, "weight_updater", None), "_assert_weight_cache_inactive", None)
    try:
        if check is not None:
            check("An update of the weights")
    except RuntimeError as error:
        return str(error)
    return ""
