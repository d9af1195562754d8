"""Which events wake which rollout, and how kopf is set up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from typing import Any

import kopf
import pytest

from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.render.names import LABEL_ROLLOUT
from sglang_rollout.controller.triggers import (
    Connection,
    OutageFilter,
    RetryDelays,
    build_registry,
    configure_kopf,
    find_rollout_key,
    list_watched_kinds,
    relist_periodically,
)
from sglang_rollout.controller.workqueue import WorkQueue
from sglang_rollout.kube.client import Listing
from sglang_rollout.kube.credentials import Credentials
from sglang_rollout.kube.errors import ApiUnavailable
from tests.support.virtual_time import run

OWNER = {"kind": "SGLangRollout", "name": "owner", "uid": "u"}


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({"namespace": "n", "labels": {LABEL_ROLLOUT: "demo"}}, ("n", "demo")),
        ({"namespace": "n", "labels": {LABEL_ROLLOUT: "demo"}, "ownerReferences": [OWNER]}, ("n", "demo")),
        ({"namespace": "n", "ownerReferences": [{"kind": "ReplicaSet", "name": "x"}, OWNER]}, ("n", "owner")),
        ({"namespace": "n", "labels": None}, None),
        ({"labels": {LABEL_ROLLOUT: "demo"}}, None),
        ({}, None),
    ],
)
def test_a_child_wakes_its_rollout(metadata: dict[str, object], key: tuple[str, str] | None) -> None:
    assert find_rollout_key({"metadata": metadata}) == key


def test_only_handlers_that_keep_no_state_are_registered() -> None:
    async def login() -> Credentials:
        raise NotImplementedError

    registry = build_registry(lambda key: None, login)
    assert len(registry._watching.get_all_handlers()) == 1 + len(list_watched_kinds())
    assert not registry._changing.get_all_handlers()
    assert not registry._spawning.get_all_handlers()
    assert not registry._indexing.get_all_handlers()


def test_kopf_accepts_certificates_without_the_extensions_that_python_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ssl.create_default_context

    def strict(*args: Any, **options: Any) -> ssl.SSLContext:
        context = made(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of Python 3.13
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    context = Connection(server="https://cluster").as_ssl_context()
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT


def test_kopf_selects_on_the_server_and_retries_forever() -> None:
    settings = kopf.OperatorSettings()
    configure_kopf(settings)
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    for key in list_watched_kinds():
        assert isinstance(key, tuple)
        assert settings.watching.label_selectors[key] == LABEL_ROLLOUT
    delays = list(itertools.islice(RetryDelays(), 100))
    assert delays[0] < 0.5
    assert delays[-1] == 3.0


def record(name: str, message: str, created: float) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, "", 0, message, (), None)
    made.created = created
    return made


def test_outage_is_one_warning_per_minute() -> None:
    name, message = (
        "kopf._cogs.clients.watching",
        "Request attempt #3 failed; will retry: GET x -> ClientConnectorError()",
    )
    outages = OutageFilter()
    first = record(name, message, 1000.0)
    assert outages.filter(first)
    assert first.levelname == "WARNING"
    assert not any(outages.filter(record(name, message, 1000.0 + second)) for second in range(60))
    assert outages.filter(record(name, message, 1061.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kopf._cogs.clients.watching", "Request attempt #3 failed; will retry: GET x -> APIForbiddenError()"),
        ("kopf.objects", "something else"),
        ("sglang_rollout.controller", "it failed; will retry"),
    ],
)
def test_other_lines_are_not_filtered(name: str, message: str) -> None:
    outages = OutageFilter()
    for _ in range(3):
        one = record(name, message, 1000.0)
        assert outages.filter(one)
        assert one.levelname == "ERROR"


def test_relist_queues_all_rollouts_and_survives_an_outage() -> None:
    class Lists:
        replies: list[object] = [["a", "b"], ApiUnavailable("away"), ["c"]]  # noqa: RUF012

        async def list(self, _resource: object, namespace: str | None) -> object:
            assert namespace is None
            reply = self.replies.pop(0) if self.replies else []
            if isinstance(reply, Exception):
                raise reply
            assert isinstance(reply, list)
            return Listing([{"metadata": {"namespace": "n", "name": name}} for name in reply], "1")

    async def main() -> None:
        queue: WorkQueue[Key] = WorkQueue()
        task = asyncio.create_task(relist_periodically(Lists(), queue.add, (), seconds=300, metrics=Metrics()))  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        seen = [(await queue.get(), loop.time()) for _ in range(3)]
        assert seen == [(("n", "a"), 0.0), (("n", "b"), 0.0), (("n", "c"), 305.0)]
        task.cancel()

    run(main())
