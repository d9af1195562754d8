"""A foreign object has the name of a child: the operator leaves it unchanged, and status names what to do."""

from __future__ import annotations

from typing import Any

import pytest

from e2e import stand_in
from e2e.cases.conftest import remove
from e2e.kube import Kubectl, condition, eventually

SERVICE = {"apiVersion": "v1", "kind": "Service", "spec": {"selector": {"app": "foreign"}, "ports": [{"port": 80}]}}
STATEFUL_SET = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "spec": {
        "replicas": 0,
        "serviceName": "foreign",
        "selector": {"matchLabels": {"app": "foreign"}},
        "template": {"metadata": {"labels": {"app": "foreign"}}, "spec": {"containers": [{"name": "a", "image": "none"}]}},
    },
}


@pytest.mark.parametrize(
    ("document", "name"), [(SERVICE, "taken-router"), (STATEFUL_SET, "taken-engine-0")], ids=["Service", "StatefulSet"]
)
def test_foreign_object_with_the_name_of_a_child_is_not_changed(
    kubectl: Kubectl, operator: Kubectl, document: dict[str, Any], name: str
) -> None:
    kind = document["kind"]
    kubectl.apply({**document, "metadata": {"name": name}})
    before = kubectl.get(kind, name)
    kubectl.apply(stand_in.code())
    try:
        kubectl.apply(stand_in.rollout("taken", replicas=1))
        eventually("Ready has reason NameTaken", lambda: condition(kubectl.get("sglr", "taken"), "Ready")["reason"] == "NameTaken")
        message = condition(kubectl.get("sglr", "taken"), "Ready")["message"]
        assert f"{kind} {name}" in message, message
        assert "delete" in message.lower(), "the message names what to do"
        after = kubectl.get(kind, name)
        assert (after["spec"], after["metadata"]["uid"]) == (before["spec"], before["metadata"]["uid"])
        assert "rollout.sglang.io" not in str(after["metadata"])
        kubectl("delete", kind, name)
        eventually(
            "the child is created when the name is free",
            lambda: "rollout.sglang.io" in str(kubectl.get(kind, name)["metadata"]),
        )
    finally:
        kubectl("delete", kind, name, "--ignore-not-found")
        remove(kubectl, "taken")
