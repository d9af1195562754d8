"""Tokens of ServiceAccounts, signed by a real API server and verified with the rights that every ServiceAccount has."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from e2e.cluster.controlplane import ControlPlane

from sglang_rollout.coordinator.callers.keys import SigningKeys, load_keys
from sglang_rollout.coordinator.callers.policy import AccountToken, BadToken
from sglang_rollout.coordinator.callers.tokens import check_token
from sglang_rollout.kube.client import Kube
from tests.integration.controller.support.chart import kubeconfig_of

pytestmark = [pytest.mark.controlplane]

AUDIENCE = "rollout.sglang.io/ml/fleet"
IMAGE = "example.org/trainer:1"


def make_token(api: ControlPlane, namespace: str, *words: str) -> str:
    return str(api.kubectl("create", "token", "trainer", "-n", namespace, *words).stdout.strip())


async def test_the_keys_of_the_api_server_verify_its_tokens(api: ControlPlane, namespace: str, tmp_path: Path) -> None:
    for account in ("trainer", "fleet-router"):
        api.kubectl("create", "serviceaccount", account, "-n", namespace)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "train-0", "namespace": namespace},
        "spec": {"serviceAccountName": "trainer", "containers": [{"name": "trainer", "image": IMAGE}]},
    }
    api.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    uid = api.get("pod", "train-0", "-n", namespace)["metadata"]["uid"]
    bound = ("--bound-object-kind=Pod", "--bound-object-name=train-0", f"--bound-object-uid={uid}")
    kubeconfig = kubeconfig_of(api, namespace, "fleet-router", tmp_path / "coordinator")
    async with await Kube.connect(field_manager="the-test", kubeconfig=str(kubeconfig)) as kube:
        keys = SigningKeys(partial(load_keys, kube))

        async def read(*words: str) -> object:
            return await check_token(f"Bearer {make_token(api, namespace, *words)}", b"", keys=keys, audience=AUDIENCE)

        assert await read(f"--audience={AUDIENCE}", *bound) == AccountToken(namespace, "trainer", uid)
        assert await read(f"--audience={AUDIENCE}") == AccountToken(namespace, "trainer")
        assert await read(*bound) == BadToken(f"its audience is not {AUDIENCE}")
        assert keys.problem == ""
