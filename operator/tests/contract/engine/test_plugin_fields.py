"""Every field of the request class of the installed SGLang: extreme values are judged by the rules, in SGLang's own object."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from e2e.engine import environment

from sglang_rollout.plugin.install import PLUGIN, install_plugin

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

JUDGE = f"""
import dataclasses, itertools, json, sys, time
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from {PLUGIN}.refusal import Refusal
from {PLUGIN}.request import Facts
from {PLUGIN}.rules import RULES, check
from {PLUGIN}.settings import Settings

MANY = 20_000
VALUES = [
    None, True, False, 0, -1, 2**31, 2**70, 10**400, 0.5, 1e39, float("nan"), float("inf"), "", "a", "/etc/passwd", b"a", [], [[]], [[[]]],
    {{}}, [None], [True], [-1], [[-1]], [2**70], ["a"], [["a"]], ["a", 5], [[5], 5], [5, [5]], {{"n": "x"}}, [{{"n": 10**400}}],
    {{"a": [{{}}]}}, object(), "x" * MANY, [5] * MANY, [[5]] * MANY, ["a"] * MANY, {{str(n): 1 for n in range(MANY)}},
]
seen, slowest = 0, 0.0
for kind in (GenerateReqInput, EmbeddingReqInput):
    facts = Facts(vocabulary=2048, hidden=128, adapters=frozenset(), generates=kind is GenerateReqInput)
    fields = [one.name for one in dataclasses.fields(kind)]
    for name, value in itertools.product(fields, VALUES):
        for more in ({{"text": "a"}}, {{"input_ids": [[5], [6]]}}, {{}}):
            obj = kind(**{{**more, name: value}})
            began = time.perf_counter()
            found = check(RULES, obj, facts, Settings())
            slowest = max(slowest, time.perf_counter() - began)
            assert found is None or isinstance(found, Refusal), (name, value)
            if value is None:
                assert found is None, (name, found)
            seen += 1
print(json.dumps([seen, slowest]))
"""


@pytest.mark.parametrize("old", [False, pytest.param(True, marks=pytest.mark.long)], ids=["newest", "oldest"])
def test_extreme_values_of_every_field_are_judged(engine_environment: None, tmp_path: Path, old: bool) -> None:
    variables = environment.environment_variables(old=old)
    variables["PYTHONPATH"] = f"{install_plugin(tmp_path)}:{variables['PYTHONPATH']}"
    command = [str(environment.python(make=False)), "-c", JUDGE]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen, slowest = json.loads(done.stdout.splitlines()[-1])
    assert seen > 8000
    assert slowest < 2
