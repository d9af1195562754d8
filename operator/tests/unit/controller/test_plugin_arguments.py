"""What the agent must require of the plug-in is what the engine is started with."""

from __future__ import annotations

import json

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.plugin import agent_arguments, engine_variable


@pytest.mark.parametrize(("prefix_cache", "keyed"), [(None, True), ("PerVersion", True), ("Shared", False)])
def test_engine_and_agent_agree_on_the_cache_key(prefix_cache: str | None, keyed: bool) -> None:
    engine = {"image": "sglang", "resources": {"limits": {"cpu": "1"}}} | ({"prefixCache": prefix_cache} if prefix_cache else {})
    rollout = SGLangRollout.model_validate({
        "metadata": {"name": "demo", "namespace": "default", "uid": "u", "generation": 1},
        "spec": {"replicas": 1, "model": {"path": "/models/m"}, "engine": engine},
    })  # fmt: skip
    assert json.loads(engine_variable(rollout)["value"])["cacheKey"] is keyed
    assert ("--shared-prefix-cache" not in agent_arguments(rollout)) is keyed
