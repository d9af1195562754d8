"""The agent gets the engine's mounts of user volumes, except those that would hide the agent's own files."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.render.engines import engine_statefulsets

SETTINGS = Settings(coordinator_image="fleet:1", router_image="router:1")


def mounts(*wanted: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What each container of the pod mounts."""
    return {made["name"]: made["volumeMounts"] for made in containers(*wanted)}


def containers(*wanted: dict[str, Any], env: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The pod's containers, where the user's template gives the engine these mounts and variables."""
    container = {"name": "engine", "volumeMounts": list(wanted)} | ({"env": env} if env else {})
    spec = {"model": {"path": "/models/m"}, "engine": {"image": "e:1"}, "podTemplate": {"spec": {"containers": [container]}}}
    metadata = {"name": "demo", "namespace": "default", "uid": "u", "generation": 1}
    rollout = SGLangRollout.model_validate({"metadata": metadata, "spec": spec})
    pod = engine_statefulsets(rollout, SETTINGS)[0]["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def agent_extra(*wanted: dict[str, Any]) -> list[dict[str, Any]]:
    plain = mounts()["agent"]
    found = mounts(*wanted)["agent"]
    assert found[: len(plain)] == plain
    return found[len(plain) :]


def test_user_volume_is_read_only_in_the_agent_and_absent_from_the_gate() -> None:
    models = {"name": "models", "mountPath": "/models", "subPath": "a", "mountPropagation": "HostToContainer"}
    assert agent_extra(models) == [{"name": "models", "mountPath": "/models", "subPath": "a", "readOnly": True}]
    found = mounts(models)
    assert models in found["engine"]
    assert "models" not in {mount["name"] for mount in found["gate"]}


@pytest.mark.parametrize(
    "mount",
    [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "big", "mountPath": "/dev/shm"},
        {"name": "patch", "mountPath": "/usr/local/lib/python3.11/site-packages/sglang"},
        {"name": "conf", "mountPath": "/etc"},
        {"name": "x", "mountPath": "/tmp/"},
        {"name": "x", "mountPath": "/"},
        {"name": "patch", "mountPath": "/models/../usr/lib"},
        {"name": "patch", "mountPath": "/./etc"},
        {"name": "patch", "mountPath": "//opt"},
        {"name": "x", "mountPath": "/models/.."},
        {"name": "x", "mountPath": "/scratch", "subPathExpr": "$(POD_NAME)"},
        {"name": "run", "mountPath": "/models"},
    ],
)
def test_mount_that_would_hide_files_of_the_agent_is_not_shared(mount: dict[str, Any]) -> None:
    assert agent_extra(mount) == []


def test_folder_with_a_similar_name_is_shared() -> None:
    assert [mount["mountPath"] for mount in agent_extra({"name": "x", "mountPath": "/optimizer"})] == ["/optimizer"]


def test_agent_gets_the_location_of_the_hugging_face_cache() -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "tokens", "key": "hf"}}}
    env: list[dict[str, Any]] = [
        {"name": "HF_HOME", "value": "/cache/hf"}, {"name": "HF_TOKEN", **secret}, {"name": "HF_HUB_CACHE", "value": "$(HF_HOME)/hub"},
        {"name": "XDG_CACHE_HOME", **secret},
    ]  # fmt: skip

    def agent_env(*mounted: dict[str, Any]) -> list[dict[str, Any]]:
        (agent,) = (made for made in containers(*mounted, env=env) if made["name"] == "agent")
        return [variable for variable in agent["env"] if variable in env]

    assert agent_env({"name": "cache", "mountPath": "/cache"}) == [{"name": "HF_HOME", "value": "/cache/hf"}]
    assert agent_env() == [], "without a volume the agent reads nothing there"
