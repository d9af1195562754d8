"""The pinned SGLang reads the environment variables that the spec's fields set."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
import yaml
from e2e.cluster.say import LabError
from e2e.engine import environment

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.engine_arguments import engine_variables
from tests.support.paths import GOLDEN_INPUTS

pytestmark = pytest.mark.engine
GOLDEN = GOLDEN_INPUTS / "files-and-devices.yaml"
# Load only this file, because its package imports modules that need GPUs.
READ = """
import importlib.util, json, os, sys
package = importlib.util.find_spec("sglang").submodule_search_locations[0]
spec = importlib.util.spec_from_file_location("sglang_environ", package + "/srt/environ.py")
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
envs = module.envs
print("\\n" + json.dumps({
    "defaults": module.third_party_cache_defaults(),
    "memory": envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get(),
    "below": [envs.SGLANG_DG_CACHE_DIR.get(), envs.SGLANG_CUTE_AOT_CACHE_DIR.get(), envs.SGLANG_JIT_CACHE_DIR.get()],
}))
"""


def read(set_: dict[str, str]) -> dict[str, Any]:
    try:
        python = str(environment.python(make=False))
    except LabError as error:
        pytest.skip(str(error))
    command = [python, "-c", READ]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"], **set_}, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def test_pinned_sglang_reads_the_variables_that_are_set() -> None:
    rollout = SGLangRollout.model_validate(yaml.safe_load(GOLDEN.read_text()))
    ours = {one["name"]: one["value"] for one in engine_variables(rollout)}
    cache = ours["SGLANG_CACHE_DIR"]

    # The single variables equal those that SGLang derives from its cache folder. Older releases do not derive them.
    seen = read({"SGLANG_CACHE_DIR": cache, "SGLANG_JIT_CACHE_DIR": ours["SGLANG_JIT_CACHE_DIR"]})
    assert {name: ours.get(name) for name in seen["defaults"]} == seen["defaults"]
    assert all(path.startswith(f"{cache}/") for path in seen["below"]), seen["below"]

    assert seen["memory"] is True
    assert read(ours)["memory"] is False
