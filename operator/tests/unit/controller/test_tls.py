"""``security.tls``: which pods get what of the Secret, and a Secret that cannot be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.api.status import ConditionType, Reason, find
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.certificate import describe_defect
from sglang_rollout.controller.decide.plan import Apply, make_plan
from sglang_rollout.controller.decide.status import build_status
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.observe import observe
from sglang_rollout.controller.render import render_all
from sglang_rollout.controller.render.hashing import revision
from sglang_rollout.kube.client import Listing
from sglang_rollout.kube.errors import NotFound
from sglang_rollout.kube.resources import DEPLOYMENTS, ROLLOUTS, SECRETS, Object, Resource
from tests.support.certificates import Authority
from tests.unit.controller.support.worlds import NOW, SETTINGS, cr

TLS: dict[str, Any] = {"security": {"tls": {"secretName": "demo-tls"}}}
COLOCATED: dict[str, Any] = {"mode": "Colocated", "sharing": {"resourceClaimName": "gpus-{engine}"}}
PAIR = Authority().issue("demo-router.default.svc")
SECRET = PAIR.secret("demo-tls")


def rollout(**spec: Any) -> SGLangRollout:
    return SGLangRollout.model_validate(cr(**spec))


def rendered(**spec: Any) -> list[Object]:
    return render_all(rollout(**spec), SETTINGS, "t0ken")


def router(**spec: Any) -> Object:
    return next(child for child in rendered(**spec) if child["kind"] == "Deployment")


class Server:
    """Has a rollout, perhaps a Secret, and perhaps the router of a spec."""

    def __init__(self, secret: Object | None, live: Object | None) -> None:
        self.secret, self.live = secret, live

    async def get(self, resource: Resource, _namespace: str, name: str) -> Object:
        if resource is ROLLOUTS:
            return cr(**TLS)
        if resource is SECRETS and name == "demo-tls" and self.secret is not None:
            return self.secret
        raise NotFound("not found")

    async def list(self, resource: Resource, *_: Any, **__: Any) -> Listing:
        return Listing([self.live] if resource is DEPLOYMENTS and self.live else [], "1")


async def view(secret: Object | None, live: Object | None = None) -> FleetView:
    fleet = await observe(Server(secret, live), "default", "demo")  # type: ignore[arg-type]
    assert fleet is not None
    return fleet


def mounts(pod: Object) -> set[tuple[str, str]]:
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    wanted = ("rollout-tls", "rollout-authority")
    return {
        (container["name"], mount["name"]) for container in containers for mount in container["volumeMounts"] if mount["name"] in wanted
    }


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({}, set(), id="plain"),
        pytest.param(TLS, {("front", "rollout-tls")}, id="standalone"),
        pytest.param(TLS | COLOCATED, {("front", "rollout-tls"), ("agent", "rollout-authority")}, id="colocated"),
    ],
)
def test_only_the_front_sees_the_key_and_only_agents_that_call_it_the_authority(spec: Any, expected: set[tuple[str, str]]) -> None:
    pods = [child["spec"]["template"]["spec"] for child in rendered(**spec) if "template" in child.get("spec", {})]
    assert set().union(*map(mounts, pods)) == expected


def test_the_authority_is_optional_and_the_certificate_is_not() -> None:
    volumes = {volume["name"]: volume for volume in router(**TLS)["spec"]["template"]["spec"]["volumes"]}
    assert "optional" not in volumes["rollout-tls"]["secret"]
    engine = next(child for child in rendered(**TLS, **COLOCATED) if child["kind"] == "StatefulSet")
    volumes = {volume["name"]: volume for volume in engine["spec"]["template"]["spec"]["volumes"]}
    assert volumes["rollout-authority"]["secret"]["optional"] is True
    assert [item["key"] for item in volumes["rollout-authority"]["secret"]["items"]] == ["ca.crt"]


def test_tls_restarts_only_engines_whose_agents_call_the_url() -> None:
    assert revision(rollout(**TLS)) == revision(rollout())
    assert revision(rollout(**TLS, **COLOCATED)) != revision(rollout(**COLOCATED))


def test_services_of_the_router_say_https() -> None:
    protocols = {
        child["metadata"]["name"]: child["spec"]["ports"][0].get("appProtocol") for child in rendered(**TLS) if child["kind"] == "Service"
    }
    assert protocols == {"demo-engines": None, "demo-router": "https", "demo-generate": "https"}


@pytest.mark.parametrize(
    ("secret", "sentence"),
    [
        pytest.param(None, "has no Secret of that name", id="missing"),
        pytest.param(PAIR.secret("demo-tls", without="tls.crt"), "has no key tls.crt.", id="without-certificate"),
        pytest.param(PAIR.secret("demo-tls", without="tls.key"), "has no key tls.key.", id="without-key"),
        pytest.param(SECRET | {"data": {"tls.crt": "anVuaw==", "tls.key": "anVuaw=="}}, "does not hold a certificate", id="junk"),
        pytest.param(
            SECRET | {"data": SECRET["data"] | {"tls.key": Authority().issue("x").secret("x")["data"]["tls.key"]}},
            "does not hold a certificate",
            id="other-key",
        ),
    ],
)
async def test_an_unusable_secret_changes_nothing_and_is_reported(secret: Object | None, sentence: str) -> None:
    fleet = await view(secret, router())
    plan = make_plan(fleet, SETTINGS, NOW)
    assert (plan.actions, plan.requeue_after) == ((), 10.0), "no event announces a Secret"
    assert plan.refusal is not None
    status = build_status(fleet, NOW, failure=plan.refusal)
    ready = find(status, ConditionType.READY)
    assert (ready["status"], ready["reason"]) == ("False", Reason.INVALID_CERTIFICATE)
    assert sentence in ready["message"]
    assert status["endpoints"]["url"] == "http://demo-router.default.svc:30000", "the running router serves HTTP"


async def test_a_router_with_a_lost_secret_is_kept_and_everything_else_continues() -> None:
    fleet = await view(None, router(**TLS))
    plan = make_plan(fleet, replace(SETTINGS, router_image="example.org/router:2"), NOW)
    assert plan.refusal is None
    assert {action.object["kind"] for action in plan.actions if isinstance(action, Apply)} >= {"StatefulSet", "Service"}
    assert not any(isinstance(action, Apply) and action.object["kind"] == "Deployment" for action in plan.actions), "its pod would end"
    assert plan.requeue_after is not None
    degraded = find(build_status(fleet, NOW), ConditionType.DEGRADED)
    assert (degraded["status"], degraded["reason"]) == ("True", Reason.INVALID_CERTIFICATE)
    assert "running router keeps its certificate" in degraded["message"]


@pytest.mark.parametrize("secret", [SECRET, PAIR.secret("demo-tls", without="ca.crt")], ids=["with-authority", "without-authority"])
async def test_a_usable_secret_makes_the_urls_https(secret: Object) -> None:
    assert describe_defect(secret) == ""
    fleet = await view(secret)
    assert make_plan(fleet, SETTINGS, NOW).refusal is None
    endpoints = build_status(fleet, NOW)["endpoints"]
    assert endpoints == {
        "url": "https://demo-router.default.svc:30000",
        "generate": "https://demo-generate.default.svc:30005",
        "discovery": "https://demo-router.default.svc:30000/fleet",
    }
