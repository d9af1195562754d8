"""Handles of tensors that torch and SGLang themselves write."""

from __future__ import annotations

import base64
import json
import os
import pickletools
import subprocess
from pathlib import Path

import pytest
from e2e.engine import environment

from sglang_rollout.agent.handles import find_problem

HANDLES = Path(__file__).parents[1] / "support" / "trainers" / "handles.py"


@pytest.mark.engine
def test_handles_of_trainers_are_accepted_and_recorded_for_the_unit_tests(engine_environment: None) -> None:
    command, variables = [str(environment.python(make=False)), str(HANDLES)], environment.environment_variables()
    made = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, check=True, text=True, timeout=240)
    payloads: dict[str, str] = json.loads(made.stdout.splitlines()[-1])
    assert {name: find_problem(payload) for name, payload in payloads.items()} == dict.fromkeys(payloads, "")
    recorded: dict[str, str] = json.loads((Path(__file__).parents[2] / "unit" / "agent" / "handles.json").read_text())
    assert {name: operations(payload) for name, payload in payloads.items()} == {name: operations(old) for name, old in recorded.items()}


def operations(payload: str) -> list[str]:
    return [operation.name for operation, _, _ in pickletools.genops(base64.b64decode(payload))]
