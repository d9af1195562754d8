"""The plug-in as a stand-in imitates it: the reports that it writes when the engine is warm, and its rules on requests."""

from __future__ import annotations

import itertools
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_rollout.plugin.bodies import find_problem
from sglang_rollout.plugin.reports import (
    CACHE_KEY,
    NAMES,
    REQUESTS_FILE,
    RequestsReport,
    names_file,
    process_label,
    scheduler_file,
    write_report,
)
from sglang_rollout.plugin.request import Facts
from sglang_rollout.plugin.rules import AFTER_TOKENS, RULES, Rule, check
from sglang_rollout.plugin.runs import delete_replaced_runs
from sglang_rollout.plugin.settings import read_run, read_settings
from sglang_rollout.testing.boot import Boot
from sglang_rollout.testing.decode import list_sampling_params
from sglang_rollout.testing.replies import BadRequest, RefusedBody


class RequestCheck:
    """The plug-in's check of requests in one boot; it lets everything pass if the engine has no plug-in."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._settings, _ = read_settings(os.environ)

    def check_body(self, path: str, body: Mapping[str, Any]) -> None:
        """Check the JSON of a request. Raises RefusedBody."""
        if not self._boot.setup.plugin:
            return
        refusal = find_problem(path, body, self._settings.limits, self._boot.setup.context_length)
        if refusal is not None:
            raise RefusedBody(str(refusal))

    def check_request(self, path: str, fields: Mapping[str, Any]) -> None:
        """Check the fields of ``/generate``, before texts are tokens. Raises BadRequest."""
        self._check(RULES, SimpleNamespace(**fields), path)

    def check_tokens(self, ids: list[int], session: Any) -> None:
        """Check the tokens of one prompt. Raises BadRequest."""
        self._check(AFTER_TOKENS, SimpleNamespace(input_ids=ids, session_params=session), "")

    def _check(self, rules: tuple[Rule, ...], seen: SimpleNamespace, path: str) -> None:
        setup = self._boot.setup
        if not setup.plugin:
            return
        adapters = frozenset(self._boot.adapters) if setup.lora else None
        hidden = next((held.shape[-1] for name, held in setup.tensors.items() if name.endswith("embed_tokens.weight")), 0)
        facts = Facts(vocabulary=setup.vocabulary, context=setup.context_length, hidden=hidden, adapters=adapters, path=path)
        refusal = check(rules, seen, facts, self._settings)
        if refusal is not None:
            raise BadRequest(str(refusal))


def report_plugin(boot: Boot) -> None:
    """Write the reports of all processes of an engine with the plug-in; none if its environment names no folder. Raises OSError."""
    settings, _ = read_settings(os.environ)
    if not settings.reports or not boot.setup.plugin:
        return
    run = read_run(os.environ) or uuid.uuid4().hex
    folder = os.path.join(settings.reports, run)
    common: dict[str, Any] = {"release": boot.setup.version, "pid": os.getpid(), "port": boot.port, "seed": boot.seed}
    rows = [[name, list(held.shape), held.dtype] for name, held in boot.setup.tensors.items()]
    hooks = [*([CACHE_KEY] if settings.cache_key else []), NAMES]
    sizes = (boot.setup.data_size, boot.setup.pipeline_size, boot.setup.tensor_size)
    for dp, pp, tp in itertools.product(*map(range, sizes)):
        label = process_label(dp, pp, tp)
        names = {"load_format": "auto", "model": "StandIn", "tensors": rows, "complete": True, "tied": False}
        write_report(folder, names_file(label), names)
        place = {"rank": pp * sizes[2] + tp, "dp": dp, "pp": pp, "tp": tp, "hooks": hooks}
        rest = {"names": names_file(label), "unchecked": "", "updates_refused": boot.setup.updates_refused}
        write_report(folder, scheduler_file(label), {**common, **place, **rest})
    own = {**common, "host": socket.gethostname(), "sampling_params": tuple(list_sampling_params(is_old=not boot.setup.sessions))}
    write_report(folder, REQUESTS_FILE, own)
    delete_replaced_runs(Path(settings.reports), run, RequestsReport(**own))
