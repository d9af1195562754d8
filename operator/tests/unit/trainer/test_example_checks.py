"""The check of the example trainer names every engine that holds another policy, and why. Stand-ins replace engines and the policy."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_rollout.testing import StandIn, StandInFleet, expected_tokens
from sglang_rollout.testing.policy import advance, next_token, policy_digest, start
from tests.support.paths import REPOSITORY

OTHER = {"a": np.ones(3, dtype=np.float32)}


class FakePolicy:
    """The policy of a stand-in. ``lead``: by how much its log-probability of the right token exceeds that of any other token."""

    def __init__(self, engine: StandIn, lead: float = 1.0) -> None:
        self._tensors, self._lead = engine.tensors(), lead

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return [expected_tokens(self._tensors, prompt, tokens) for prompt in prompts]

    def best_tokens(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[tuple[int, float]]]:
        digest, rows = policy_digest(self._tensors), []
        for prompt, output in zip(prompts, outputs, strict=True):
            context, row = start(prompt), []
            for token in output:
                best = next_token(digest, context)
                row.append((best, 0.0 if best == token else self._lead))
                context = advance(context, token)
            rows.append(row)
        return rows


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the example, without torch."""
    policy = ModuleType("policy")
    policy.PROMPT_TOKENS, policy.Policy = 6, FakePolicy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "policy", policy)
    spec = importlib.util.spec_from_file_location("example_checks", REPOSITORY / "examples" / "trainer" / "checks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 2.0)
    return module


def fleet_of(*engines: StandIn) -> Any:
    members = [SimpleNamespace(name=f"engine-{number}", url=engine.url) for number, engine in enumerate(engines)]
    return SimpleNamespace(document=lambda: SimpleNamespace(members=members))


def test_equal_engines_pass(checks: Any) -> None:
    with StandInFleet(engines=2, weight_version="1") as engines:
        policy = FakePolicy(engines[0])
        check = checks.EngineChecks(fleet_of(*engines), policy)
        check.after_push(policy, 1)
        assert (check.pushes, check.changed) == (1, 0)


def test_every_engine_with_other_tokens_is_named(checks: Any) -> None:
    with StandIn(weight_version="1") as right, StandIn(weight_version="1", state=OTHER) as old, StandIn(weight_version="0") as late:
        check = checks.EngineChecks(fleet_of(right, old, late, StandIn(port=1)), FakePolicy(old))
        policy = FakePolicy(right)
        with pytest.raises(checks.CheckFailed) as raised:
            check.after_push(policy, 1)
        found, wanted = (FakePolicy(engine).greedy(checks.PROBES, 1)[0][0] for engine in (old, right))
    message = str(raised.value)
    assert "engine-0" not in message
    assert f"Engine engine-1 at {old.url} generates other tokens than the policy at version 1: 192 of 192;" in message
    assert "all are those of the previous version" in message
    assert f"the first is token 0 of probe 0: {found} and not {wanted}, whose log-probability is 1 higher; 0 tokens of the" in message
    assert f"Engine engine-2 at {late.url} answers with version ['0'], not 1" in message
    assert "Engine engine-3 at http://127.0.0.1:1 does not answer after the push of version 1" in message
    assert check.pushes == 0


def test_a_near_tie_is_no_difference(checks: Any) -> None:
    with StandIn(weight_version="1") as right, StandIn(weight_version="1", state=OTHER) as other:
        check = checks.EngineChecks(fleet_of(other), FakePolicy(right))
        check.after_push(FakePolicy(right, lead=checks.TIE / 2), 1)
        with pytest.raises(checks.CheckFailed, match="they are of neither version"):
            check.after_push(FakePolicy(right, lead=checks.TIE * 2), 1)
