"""What the hooks of one process share: the settings, the process's place in the engine, and the way to its reports."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .reports import process_label, write_report
from .settings import Settings, read_run, read_settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hook:
    """One hook: its target in SGLang, its kind (a name of SGLang's ``HookType``), and the function."""

    target: str
    kind: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Place:
    """Ranks of a scheduler in its engine."""

    dp: int
    pp: int
    tp: int

    @property
    def label(self) -> str:
        """Part of the names of this scheduler's reports."""
        return process_label(self.dp, self.pp, self.tp)


@functools.cache
def settings() -> Settings:
    """Return the settings of this engine."""
    return read_settings(os.environ)[0]


@functools.cache
def run() -> str:
    """Return the ID of this run of the engine."""
    return read_run(os.environ)


def find_place(owner: Any) -> Place:
    """Return the ranks of the scheduler or model runner ``owner``. SGLang 0.5.20 keeps them in ``ps``."""
    ranks = getattr(owner, "ps", None)
    if ranks is None:
        from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - present in engines only

        ranks = get_parallel()
    return Place(*(int(getattr(ranks, name, None) or 0) for name in ("dp_rank", "pp_rank", "tp_rank")))


def identify_process(server_args: Any) -> dict[str, Any]:
    """Return what every report says about the process that wrote it."""
    from sglang.srt.runtime_context import get_device  # noqa: PLC0415 - present in engines only
    from sglang.version import __version__  # noqa: PLC0415

    return {"release": str(__version__), "pid": os.getpid(), "port": int(server_args.port), "seed": int(get_device().random_seed)}


def report(name: str, content: Mapping[str, Any]) -> bool:
    """Write a report of this process, and return whether it is there. A failure is logged: the gate then stays closed."""
    if not settings().reports or not run():
        return False
    try:
        write_report(os.path.join(settings().reports, run()), name, content)
    except OSError:
        log.exception("The report %s cannot be written, so the plug-in proves nothing.", name)
        return False
    return True
