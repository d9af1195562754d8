"""``engine.cache.shared``: which engines exchange compiled kernels, and which container has their credential."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.engines import engine_statefulsets
from sglang_rollout.controller.render.fleet_objects import credentials_secret
from tests.unit.controller.support.worlds import SETTINGS, cr


def spec(*, model: str = "/models/tiny", image: str = "e:1", **engine: Any) -> SGLangRollout:
    weights = {"transport": "Staged", "staging": {"sizeLimit": "1Gi"}}
    written = {"gpuResource": "", "cache": {"shared": True}, "image": image, **engine}
    return SGLangRollout.model_validate(cr(2, weights=weights, engine=written, model={"path": model}))


def hashes(rollout: SGLangRollout) -> set[str]:
    """Return the hashes that the agents get."""
    found = set()
    for made in engine_statefulsets(rollout, SETTINGS):
        containers = made["spec"]["template"]["spec"]["initContainers"]
        args = next(container["args"] for container in containers if container["name"] == "agent")
        found.add(args[args.index("--kernels-hash") + 1])
    return found


def test_all_engines_of_a_rollout_share_their_kernels() -> None:
    assert len(hashes(spec())) == 1
    assert hashes(spec(args=["--max-running-requests", "7"])) == hashes(spec())


@pytest.mark.parametrize(
    "other",
    [{"model": "/models/other"}, {"image": "e:2"}, {"parallelism": {"tensor": 2}}, {"parallelism": {"tensor": 2, "expert": 2}}],
    ids=str,
)
def test_engines_with_another_model_image_or_parallelism_share_nothing_with_these(other: dict[str, Any]) -> None:
    assert not hashes(spec(**other)) & hashes(spec())


def test_the_credential_differs_between_rollouts_and_from_the_credentials_that_control_engines() -> None:
    rollout = spec()
    (secret,) = credentials_secret(rollout, "key")
    (other,) = credentials_secret(rollout, "key of another rollout")
    own = secret["data"]["demo-kernels"]
    assert base64.b64decode(own)
    assert list(secret["data"].values()).count(own) == 1
    assert own not in other["data"].values()
