"""A trainer proves itself with the token of its ServiceAccount, which the kubelet mounts into its pod."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from e2e import stand_in
from e2e.cases.security.callers import change_security
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.kube import Kubectl, eventually
from sglang_rollout.wire.ports import FRONT_PORT

FOLDER = "/var/run/secrets/rollout"
POD = "account-trainer"
READ_FLEET = """
import sys
from sglang_rollout.trainer import FleetError, connect
try:
    print(connect(sys.argv[1], timeout=10, token_file=sys.argv[2] if len(sys.argv) > 2 else None).document().name)
except FleetError as error:
    print(error)
"""


@pytest.fixture
def trainer(kubectl: Kubectl, stand: StandInRollout) -> Iterator[str]:
    """Create a trainer's pod with one token for this rollout and one for another rollout. The fleet accepts tokens only."""
    pod = stand_in.trainer_pod(POD)
    tokens = [
        {"serviceAccountToken": {"audience": f"rollout.sglang.io/{kubectl.namespace}/{name}", "expirationSeconds": 600, "path": name}}
        for name in (stand.name, "other")
    ]
    pod["spec"]["volumes"].append({"name": "tokens", "projected": {"sources": tokens}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "tokens", "mountPath": FOLDER, "readOnly": True})
    kubectl("delete", "pod", POD, "--ignore-not-found", timeout=90)
    kubectl.apply(pod)
    kubectl("wait", f"pod/{POD}", "--for=condition=Ready", "--timeout=90s", timeout=120)
    change_security(kubectl, stand.name, control="Token")
    yield POD
    change_security(kubectl, stand.name)
    kubectl("delete", "pod", POD, "--ignore-not-found", "--wait=false")


def test_a_projected_token_identifies_a_trainer_while_its_pod_lives(kubectl: Kubectl, stand: StandInRollout, trainer: str) -> None:
    def read_fleet(*words: str) -> str:
        url = f"http://{stand.name}-router:{FRONT_PORT}"
        return kubectl.exec(trainer, "python3", "-", url, *words, stdin=READ_FLEET)

    eventually("the address alone is refused", lambda: "callers with a token" in read_fleet(), within=60, every=2)
    assert read_fleet(f"{FOLDER}/{stand.name}").strip() == stand.name
    assert f"its audience is not rollout.sglang.io/{kubectl.namespace}/{stand.name}" in read_fleet(f"{FOLDER}/other")

    headers = {"Authorization": f"Bearer {kubectl.exec(trainer, 'cat', f'{FOLDER}/{stand.name}').strip()}"}
    assert requests.get(f"{stand.url}/fleet", headers=headers, timeout=10).status_code == 200
    kubectl("delete", "pod", trainer, timeout=90)

    def refusal() -> str:
        return requests.get(f"{stand.url}/fleet", headers=headers, timeout=10).text

    eventually("the token of the deleted pod is refused", lambda: "its pod is not known or has ended" in refusal(), within=30, every=1)
