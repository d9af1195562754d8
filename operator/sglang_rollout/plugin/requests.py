"""Hooks in the process that answers requests: they check each request as SGLang has parsed it, and report that they do.

A refusal is a ``ValueError``, which SGLang answers with 400 and its sentence, on a stream with an error event. A hook that fails refuses
the request that it could not check; any other exception would end the engine at its warm-up.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import bodies
from .process import Hook, identify_process, report, run, settings
from .refusal import CHECK_FAILED
from .reports import REQUESTS_FILE, RequestsReport
from .request import Facts
from .rules import AFTER_TOKENS, RULES, Rule, check
from .runs import delete_replaced_runs
from .sampling import INTERNAL_PARAMS

log = logging.getLogger(__name__)


class _Process:
    """State of the hooks in this process. SGLang may fork a process that has none yet."""

    reported_by = 0
    """Process that wrote the report."""


def check_request(manager: Any, obj: Any, request: Any = None) -> None:
    """Check a request before it is tokenised (before ``TokenizerManager.generate_request``)."""
    if _Process.reported_by != os.getpid():
        _Process.reported_by = os.getpid()
        _report_process(manager, request)
    _check(RULES, manager, obj, obj, request)


def check_tokens(manager: Any, obj: Any, _: Any, input_ids: Any, input_embeds: Any = None, mm_inputs: Any = None, *__: Any) -> None:
    """Check the tokens of one prompt whose text was tokenised (before ``TokenizerManager._create_tokenized_object``)."""
    if input_ids is None or mm_inputs is not None or (input_ids is obj.input_ids and len(input_ids)):
        return  # tokens of the request itself are checked already, and those of images are SGLang's own
    session = getattr(obj, "session_params", None)
    prompt = SimpleNamespace(input_ids=input_ids, session_params=session, has_embeddings=input_embeds is not None)
    _check(AFTER_TOKENS, manager, obj, prompt, None)


def _check(rules: tuple[Rule, ...], manager: Any, obj: Any, seen: Any, request: Any) -> None:
    """Raise ValueError with the first refusal of a rule, or if the rules fail."""
    try:
        refusal = check(rules, seen, _find_facts(manager, obj, request), settings())
    except Exception:
        log.exception("The plug-in failed to check a request, and refused it.")
        raise ValueError(str(CHECK_FAILED)) from None
    if refusal is not None:
        raise ValueError(str(refusal))


def _find_facts(manager: Any, obj: Any, request: Any) -> Facts:
    from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415 - present in engines only

    model = manager.model_config
    return Facts(
        vocabulary=model.vocab_size,
        is_generation=manager.is_generation,
        generates=isinstance(obj, GenerateReqInput),
        context=manager.context_len,
        hidden=getattr(model, "hidden_size", 0),
        adapters=None if getattr(obj, "lora_path", None) is None else _find_adapters(manager),
        path=str(getattr(getattr(request, "url", None), "path", "")),
    )


def _find_adapters(manager: Any) -> frozenset[str] | None:
    """Return the names of the loaded adapters; None if the engine loads none, which SGLang says itself."""
    from sglang.srt.runtime_context import get_lora  # noqa: PLC0415 - present in engines only

    return frozenset(manager.lora_registry.get_all_adapters()) if get_lora().enable_lora else None


def list_sampling_params(manager: Any) -> tuple[str, ...]:
    """Return the names that a request may set in ``sampling_params``, as this release of SGLang has them; none if they cannot be listed."""
    kind = getattr(manager, "sampling_params_class", None)
    try:
        found = inspect.signature(kind).parameters.values() if kind is not None else ()
    except (TypeError, ValueError):
        found = ()
    if not found or any(one.kind is one.VAR_KEYWORD for one in found):
        log.warning("The sampling parameters of this SGLang cannot be listed, so clients do not refuse unknown names.")
        return ()
    return tuple(one.name for one in found if one.name not in INTERNAL_PARAMS)


def _report_process(manager: Any, request: Any) -> None:
    if not bodies.is_active(request):
        log.error("The plug-in does not check bodies before SGLang validates them, so it proves nothing.")
        return
    try:
        own = {**identify_process(manager.server_args), "host": socket.gethostname(), "sampling_params": list_sampling_params(manager)}
        if report(REQUESTS_FILE, own):
            delete_replaced_runs(Path(settings().reports), run(), RequestsReport(**own))
    except Exception:
        log.exception("The report on requests cannot be written, so the plug-in proves nothing.")


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    Hook(f"{_MANAGER}.generate_request", "BEFORE", check_request),
    Hook(f"{_MANAGER}._create_tokenized_object", "BEFORE", check_tokens),
)
