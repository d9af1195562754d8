"""A model that the engine downloads itself: where the files are kept, how long the start may take, and what the status says."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.engines import engine_statefulsets
from tests.unit.controller.support.worlds import SETTINGS, Object, condition, cr, crashed, pod, status_of, world

HUB = {"path": "Qwen/Qwen3-8B"}


def pod_spec(*, model: Object | None = None, engine: Object | None = None, **spec: Any) -> Object:
    """Return the rendered pod of an engine."""
    custom = cr(1, **spec)
    custom["spec"] |= {"model": model or HUB, "engine": {"image": "e:1", **(engine or {})}}
    found: Object = engine_statefulsets(SGLangRollout.model_validate(custom), SETTINGS)[0]["spec"]["template"]["spec"]
    return found


def container(made: Object, name: str) -> Object:
    return next(each for each in (*made["initContainers"], *made["containers"]) if each["name"] == name)


def cache_of(made: Object) -> tuple[Object, Object, str] | None:
    """Return volume, mount and variable of the engine's Hugging Face cache; None if it has none."""
    engine = container(made, "engine")
    variable = next((each["value"] for each in engine["env"] if each["name"] == "HF_HUB_CACHE"), None)
    mount = next((each for each in engine["volumeMounts"] if each["name"] == "rollout-model"), None)
    if variable is None or mount is None:
        return None
    return next(each for each in made["volumes"] if each["name"] == mount["name"]), mount, variable


def test_download_of_the_engine_outlives_its_container() -> None:
    made = pod_spec()
    found = cache_of(made)
    assert found is not None
    volume, mount, folder = found
    assert volume["emptyDir"] == {"sizeLimit": "500Gi"}
    assert mount["mountPath"] == folder
    assert not mount.get("readOnly")


def test_no_other_container_reads_what_model_code_can_write() -> None:
    made = pod_spec()
    others = [each for each in (*made["initContainers"], *made["containers"]) if each["name"] != "engine"]
    assert [each["name"] for each in others for mount in each["volumeMounts"] if mount["name"] == "rollout-model"] == []


@pytest.mark.parametrize("path", ["gpt2", "deepseek-ai/DeepSeek-V3", "org/name.with-dots_1"])
def test_every_name_of_the_hub_has_a_cache(path: str) -> None:
    assert cache_of(pod_spec(model={"path": path})) is not None


@pytest.mark.parametrize("path", ["/models/tiny", "./models/tiny", "s3://models/tiny", "a/b/c", "~/tiny"])
def test_other_paths_have_no_cache(path: str) -> None:
    assert cache_of(pod_spec(model={"path": path, "servedName": "policy"})) is None


USERS_OWN: dict[str, Object] = {
    "offline": {"model": {**HUB, "offline": True}},
    "a variable": {"engine": {"env": [{"name": "HF_HOME", "value": "/cache"}]}},
    "a flag": {"engine": {"args": ["--download-dir", "/cache"]}},
    "a flag with its value": {"engine": {"args": ["--download-dir=/cache"]}},
    "a variable of podTemplate": {
        "podTemplate": {"spec": {"containers": [{"name": "engine", "env": [{"name": "HUGGINGFACE_HUB_CACHE", "value": "/cache"}]}]}}
    },
    "a mount over the cache of the image": {
        "podTemplate": {
            "spec": {
                "volumes": [{"name": "hub", "hostPath": {"path": "/data"}}],
                "containers": [{"name": "engine", "volumeMounts": [{"name": "hub", "mountPath": "/root/.cache/huggingface"}]}],
            }
        }
    },
}


@pytest.mark.parametrize("spec", USERS_OWN.values(), ids=list(USERS_OWN))
def test_cache_that_the_user_chose_stays(spec: Object) -> None:
    """The operator's variable would hide a cache that is shared, or is in the image."""
    made = pod_spec(**spec)
    assert [each["name"] for each in made["volumes"] if each["name"] == "rollout-model"] == []
    assert [each for each in container(made, "engine")["env"] if each["name"] == "HF_HUB_CACHE"] == []


def test_sidecar_of_the_user_does_not_take_the_cache_away() -> None:
    mount = {"name": "hub", "mountPath": "/root/.cache"}
    overlay = {
        "spec": {"volumes": [{"name": "hub", "emptyDir": {}}], "containers": [{"name": "beside", "image": "b", "volumeMounts": [mount]}]}
    }
    assert cache_of(pod_spec(podTemplate=overlay)) is not None


@pytest.mark.parametrize(
    "model", [{**HUB, "cacheSize": "2Ti"}, {"path": "/models/m", "download": {"command": ["get"]}, "cacheSize": "2Ti"}]
)  # fmt: skip
def test_size_of_a_volume_of_the_pod_is_the_users(model: Object) -> None:
    assert {"name": "rollout-model", "emptyDir": {"sizeLimit": "2Ti"}} in pod_spec(model=model)["volumes"]


def seconds_to_start(made: Object) -> int:
    probe = container(made, "engine")["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def test_engine_of_one_pod_starts_within_the_time_of_the_spec() -> None:
    assert seconds_to_start(pod_spec()) == 1800
    assert seconds_to_start(pod_spec(engine={"startSeconds": 7202})) == 7205, "no attempt is shorter than 5 s"


def test_engine_of_several_pods_starts_within_the_time_of_the_spec() -> None:
    """Its pods wait for each other first, so the kubelet waits longer, and the agent of the head pod counts."""
    made = pod_spec(engine={"startSeconds": 7200, "gpuResource": "", "nodes": 2, "parallelism": {"tensor": 2}})
    arguments = container(made, "agent")["args"]
    assert arguments[arguments.index("--start-seconds") + 1] == "7200"
    assert seconds_to_start(made) >= 24 * 3600 + 7200


def late(seconds: int, *, code: int = 143, reason: str = "Error") -> Object:
    """Return the status of a pod whose engine ended this long after its start, and runs again."""
    status = crashed(code=code, message="Fetching 17 files:  40%", restarts=1, waiting=False, reason=reason)
    ended = status["containerStatuses"][0]["lastState"]["terminated"]
    ended |= {
        "startedAt": "2026-11-21T01:00:00Z",
        "finishedAt": f"2026-11-21T0{1 + seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}Z",
    }
    return status


def starting(status: Object | None = None, *, model: Object | None = None) -> Object:
    """Return the status of a rollout whose engine is not up."""
    custom = cr(1)
    custom["spec"]["model"] = model or HUB
    made = pod(0, ready=False, status=status)
    made["spec"] |= pod_spec(model=model)
    return status_of(world([made], custom=custom))


@pytest.mark.parametrize(("seconds", "code"), [(1800, 143), (1830, 137), (2100, 137)])
def test_engine_that_starts_too_slowly_is_reported_and_not_only_started_again(seconds: int, code: int) -> None:
    """The kubelet starts it at once again and counts no crash, so that the fleet would start forever."""
    status = starting(late(seconds, code=code))
    row = status["engines"][0]
    assert (row["phase"], row["reason"]) == ("Failed", "EngineCrashed")
    assert "container engine was not up 1800 s after its start, and was restarted: raise engine.startSeconds" in row["message"]
    assert "Fetching 17 files:  40%" in row["message"]
    assert condition(status, "Degraded")["status"] == "True"


@pytest.mark.parametrize(
    ("seconds", "code", "reason"), [(60, 143, "Error"), (1800, 1, "Error"), (1800, 137, "OOMKilled"), (7000, 137, "Error")]
)  # fmt: skip
def test_other_ends_are_no_slow_starts(seconds: int, code: int, reason: str) -> None:
    assert "startSeconds" not in starting(late(seconds, code=code, reason=reason))["engines"][0]["message"]


def test_status_says_that_each_pod_downloads_the_model_to_the_disk_of_its_node() -> None:
    message = starting()["engines"][0]["message"]
    assert message == (
        "it is starting. Its pod downloads Qwen/Qwen3-8B to the disk of its node (ephemeral storage, at most 500Gi), as each new pod does;"
        " model.volume with model.download keeps the files."
    )
    assert starting(model={"path": "/models/tiny"})["engines"][0]["message"] == "it is starting."
