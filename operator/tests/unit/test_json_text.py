"""JSON that nests deep or has numbers of thousands of digits, at every place that reads JSON of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests
from aiohttp import web

import sglang_rollout
from sglang_rollout.agent.staged.verdicts import parse_verdict
from sglang_rollout.batches.split import BatchError
from sglang_rollout.batches.split import parse as parse_request
from sglang_rollout.batches.streams import ItemError
from sglang_rollout.coordinator.agent_replies import parse_json
from sglang_rollout.coordinator.http.dialects import parse as parse_call
from sglang_rollout.internal.requests import json_body
from sglang_rollout.json_text import load_json
from sglang_rollout.kube.errors import error_from_status
from sglang_rollout.sglang.client import Reply
from sglang_rollout.trainer.refusals import parse_object
from sglang_rollout.wire.reasons import RefusedError

ROOT = Path(sglang_rollout.__file__).parent
ALLOWED = {
    "json_text.py": "the one place",
    "checkpoints/format.py": "a header has shorter numbers",
    "plugin": "SGLang's processes do not have this package",
    "testing": "the stand-in engine",
}
HOSTILE = {
    "nested": b'{"a":' + b"[" * 500_000,
    "nested objects": b'{"a":' * 100_000,
    "digits": b'{"a":' + b"9" * 4_000_000 + b"}",
    "negative digits": b'{"a":-' + b"9" * 5_000 + b"}",
    "exponent": b'{"a":1e' + b"9" * 100_000 + b",",
    "numbers": b'{"a":[' + b",".join([b"9" * 4_299] * 900) + b"],",
}
SECONDS = 2.0


def answered(data: bytes) -> requests.Response:
    """Return an answer of a fleet."""
    response = requests.Response()
    response.status_code, response._content = 200, data
    return response


def read_message(data: bytes) -> Any:
    """Read the body of a call between the fleet's processes."""

    async def read() -> bytes:
        return data

    return asyncio.run(json_body(cast(web.Request, SimpleNamespace(read=read, path="/agent/sync"))))


REFUSE: dict[str, tuple[Callable[[bytes], Any], type[Exception]]] = {
    "load_json": (load_json, ValueError),
    "call of a trainer": (parse_call, RefusedError),
    "request of a client": (parse_request, BatchError),
    "call of a process": (read_message, RefusedError),
}
IGNORE: dict[str, Callable[[bytes], Any]] = {
    "answer of an agent": parse_json,
    "verdict of a rank": lambda data: parse_verdict(data.decode(), "1"),
    "answer of SGLang": lambda data: Reply(200, data, "application/json").document,
    "answer of the fleet": lambda data: parse_object(answered(data)),
    "error of the API server": lambda data: error_from_status("get pods", 500, data),
    "error of an engine": lambda data: ItemError(400, data, {}).message,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("reader", REFUSE)
def test_hostile_json_is_refused_at_once(reader: str, data: bytes) -> None:
    read, error = REFUSE[reader]
    began = time.process_time()
    with pytest.raises(error) as refused:
        read(data)
    assert time.process_time() - began < SECONDS
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("reader", IGNORE)
def test_hostile_answers_raise_nothing(reader: str, data: bytes) -> None:
    began = time.process_time()
    IGNORE[reader](data)
    assert time.process_time() - began < SECONDS


def test_every_module_reads_json_by_one_function() -> None:
    found = []
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name not in ALLOWED and name.split("/", maxsplit=1)[0] not in ALLOWED:
            found += [f"{name}:{line}" for line, text in enumerate(path.read_text().splitlines(), 1) if "json.loads(" in text]
    assert found == [], "use sglang_rollout.json_text"
