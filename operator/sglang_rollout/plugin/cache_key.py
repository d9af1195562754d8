"""Give each version of the weights a prefix cache of its own. The hooks run in each scheduler, and report it.

SGLang compares prefixes under ``extra_key`` of a request. The hooks put a number in front of the caller's own key, which grows with each
write to the weights. SGLang's label of the version does not do: it is the trainer's, who may use it again in another run.
The key is set when a request enters the queue, which all doors share: batches, held and retracted requests, and those that wait for
their grammar. Requests that wait while the weights change are keyed again. Requests that run keep their key, because their prefix is mixed.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from .names import find_names
from .process import Hook, find_place, identify_process, report, run, settings
from .refusal import NOT_ACCEPTED, Refusal
from .reports import CACHE_KEY, NAMES, scheduler_file
from .updates import find_refusal

log = logging.getLogger(__name__)

_KEEPS_PREFIXES = Refusal(
    NOT_ACCEPTED,
    "streaming sessions keep the prefixes of older weights. Open the session without streaming, or let the versions of this engine share"
    " one prefix cache.",
)


class _Scheduler:
    """State of the hooks in this process. SGLang may fork a process that has none yet."""

    writes = 0
    """Writes to the weights since the start. Every rank of an engine counts the same writes."""
    reported_by = 0
    """Process that wrote the report."""


def make_key(run_id: str, writes: int, key: str | None) -> str:
    """Return the key of a request: the run of the engine, the writes to its weights, and the caller's own key.

    Args:
        run_id: ID of the run, because storage of prefixes may outlive the engine.
        writes: Writes to the weights since the engine's start.
        key: The caller's key, or a key of an earlier version.
    """
    known = key or ""
    caller = known.partition("|")[2] if known.startswith(f"{run_id}:") else known
    return f"{run_id}:{writes}|{caller}"


def key_request(scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """Key a request that enters the queue (before ``Scheduler._add_request_to_queue``)."""
    if _Scheduler.reported_by != os.getpid():
        _Scheduler.reported_by = os.getpid()
        report_scheduler(scheduler)
    if settings().cache_key and not _holds_prefix(req):
        req.extra_key = make_key(run(), _Scheduler.writes, req.extra_key)


def key_waiting_requests(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """Count a write to the weights, and key the requests that wait (after ``Scheduler.record_weight_version_change``).

    SGLang calls it after each update, also without a new label.
    """
    _Scheduler.writes += 1
    for req in scheduler.waiting_queue if settings().cache_key else ():
        if not _holds_prefix(req):
            req.extra_key = make_key(run(), _Scheduler.writes, req.extra_key)


def refuse_streaming_session(_: Any, obj: Any, *__: Any, **___: Any) -> None:
    """Refuse a streaming session, which keeps its prefix whatever its key (before ``TokenizerManager.open_session``)."""
    if settings().cache_key and getattr(obj, "streaming", None):
        raise ValueError(str(_KEEPS_PREFIXES))


def _holds_prefix(req: Any) -> bool:
    """Return true if a request has computed a part of its prefix under its present key."""
    return bool(getattr(getattr(req, "kv", None), "holds_kv", False))


def report_scheduler(scheduler: Any) -> None:
    """Write the report of this scheduler. An error is logged: without the report the gate stays closed."""
    try:
        place, found = find_place(scheduler), find_names()
        hooks = [*([CACHE_KEY] if settings().cache_key else []), *([NAMES] if found.seen else [])]
        content = {"rank": _rank(), "dp": place.dp, "pp": place.pp, "tp": place.tp, "hooks": hooks}
        names = {"names": found.file or None, "unchecked": found.unchecked}
        updates = {"updates_refused": find_refusal(scheduler)}
        report(scheduler_file(place.label), {**identify_process(scheduler.server_args), **content, **names, **updates})
    except Exception:
        log.exception("The report of this scheduler cannot be written, so the plug-in proves nothing.")


def _rank() -> int:
    import torch  # noqa: PLC0415 - present in engines only

    return int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0


HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", "BEFORE", key_request),
    Hook("sglang.srt.managers.scheduler.Scheduler.record_weight_version_change", "AFTER", key_waiting_requests),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.open_session", "BEFORE", refuse_streaming_session),
)
