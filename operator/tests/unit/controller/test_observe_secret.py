"""The operator reads its Secrets by their names, and never lists Secrets."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.controller.observe import observe
from sglang_rollout.controller.render import names
from sglang_rollout.kube.client import Listing
from sglang_rollout.kube.errors import NotFound
from sglang_rollout.kube.resources import ROLLOUTS, SECRETS, Object, Resource
from tests.unit.controller.support.worlds import cr


class Server:
    """Has a rollout and a Secret."""

    def __init__(self, secret: Object | None) -> None:
        self.secret = secret
        self.listed: list[Resource] = []

    async def get(self, resource: Resource, _namespace: str, name: str) -> Object:
        if resource is ROLLOUTS:
            return cr(0)
        if resource is SECRETS and self.secret and name == self.secret["metadata"]["name"]:
            return self.secret
        raise NotFound("not found")

    async def list(self, resource: Resource, *_: Any, **__: Any) -> Listing:
        self.listed.append(resource)
        return Listing([], "1")


def secret(**labels: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "demo-control", "labels": labels}}


async def test_the_credentials_are_read() -> None:
    live = secret(**{names.LABEL_ROLLOUT: "demo"})
    live["metadata"]["name"] = "demo-credentials"
    fleet = await observe(Server(live), "default", "demo")  # type: ignore[arg-type]
    assert fleet is not None
    assert fleet.child("Secret", "demo-credentials") == live


@pytest.mark.parametrize(
    ("live", "is_child"),
    [(None, False), (secret(), False), (secret(**{names.LABEL_ROLLOUT: "other"}), False), (secret(**{names.LABEL_ROLLOUT: "demo"}), True)],
    ids=["missing", "without label", "of another rollout", "ours"],
)
async def test_secret_of_the_rollout_is_read(live: Object | None, is_child: bool) -> None:
    server = Server(live)
    fleet = await observe(server, "default", "demo")  # type: ignore[arg-type]
    assert fleet is not None
    assert (fleet.child("Secret", "demo-control") is not None) is is_child
    assert SECRETS not in server.listed
