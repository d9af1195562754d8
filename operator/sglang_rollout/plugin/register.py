"""Entry point of the plug-in: SGLang calls ``register`` at the start of each of its processes.

SGLang only logs a plug-in that fails, and serves without it. So what runs here proves nothing; the hooks themselves write the reports.
"""

from __future__ import annotations

import logging
import os
import uuid

from . import bodies, cache_key, names, requests
from .settings import RUN_VARIABLE, read_run, read_settings

log = logging.getLogger(__name__)

HOOKS = (*bodies.HOOKS, *requests.HOOKS, *cache_key.HOOKS, *names.HOOKS)
"""All hooks: the target in SGLang, the kind, and the function."""


def register() -> None:
    """Register all hooks. The first process of an engine sets the ID of the run, unless the start script of the engine has."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - present in engines only

    if not read_run(os.environ):
        os.environ[RUN_VARIABLE] = uuid.uuid4().hex
    _, problem = read_settings(os.environ)
    if problem:
        log.error("%s The plug-in uses its defaults and proves nothing.", problem)
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
