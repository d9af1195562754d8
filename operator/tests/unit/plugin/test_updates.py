"""What the plug-in reports about updates that SGLang refuses: SGLang's own sentences, or nothing."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_rollout.plugin import updates
from sglang_rollout.plugin.updates import find_refusal

DERIVED = "Online weight updates are not supported while weight splits are active. Restart with SPLITS=0."
MODEL = object()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of SGLang that updates weights. It refuses nothing."""
    module = ModuleType(updates._MODULE)
    monkeypatch.setitem(sys.modules, updates._MODULE, module)
    return module


def scheduler(**runner: Any) -> Any:
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=MODEL, **runner)))


def test_sglangs_own_reason_is_reported(sglang: ModuleType) -> None:
    sglang._unsupported_derived_weight_cache_error = lambda model: DERIVED if model is MODEL else None  # type: ignore[attr-defined]
    assert find_refusal(scheduler()) == DERIVED
    sglang._unsupported_derived_weight_cache_error = lambda _: "two\nlines " + 2000 * "x"  # type: ignore[attr-defined]
    assert find_refusal(scheduler()).startswith("two lines xxx"), "a report has one short line"
    assert len(find_refusal(scheduler())) == 1024
    sglang._unsupported_derived_weight_cache_error = lambda _: None  # type: ignore[attr-defined]
    assert find_refusal(scheduler()) == ""


def test_a_release_that_refuses_nothing_is_not_questioned(sglang: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert find_refusal(scheduler()) == ""
    assert caplog.records == []


def test_weights_that_are_shared_with_a_daemon_are_reported(sglang: ModuleType) -> None:
    def refuse(what: str) -> None:
        raise RuntimeError(f"{what} is not supported while the weight cache is active")

    shared = scheduler(weight_updater=SimpleNamespace(_assert_weight_cache_inactive=refuse))
    assert find_refusal(shared) == "An update of the weights is not supported while the weight cache is active"


def test_an_error_is_logged_and_the_report_is_written(sglang: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert find_refusal(SimpleNamespace()) == ""
    assert "the first update tells" in caplog.text
