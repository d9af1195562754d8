"""Executing a plan: order, refusals, and objects that no longer exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.api.status import Reason
from sglang_rollout.controller.apply import Outcome, execute_plan
from sglang_rollout.controller.decide.contest import Memory
from sglang_rollout.controller.decide.plan import Apply, Delete, Failure, Plan
from sglang_rollout.controller.render.names import LABEL_ROLLOUT, LISTED_KINDS
from sglang_rollout.kube.errors import ApiUnavailable, Conflict, KubeError, NotFound, Refused
from sglang_rollout.kube.resources import SECRETS

NOW = "2026-11-21T03:00:00Z"


class Recorder:
    """Records the calls. Answers with the live objects and errors that it has by name."""

    def __init__(self, live: dict[str, dict[str, Any]] | None = None, **errors: KubeError) -> None:
        self.live = live or {}
        self.errors = errors
        self.calls: list[tuple[str, str]] = []
        self.objects: list[dict[str, Any]] = []

    def _call(self, verb: str, name: str) -> None:
        self.calls.append((verb, name))
        if name in self.errors:
            raise self.errors[name]

    async def apply(self, obj: dict[str, Any], *, force: bool = True) -> dict[str, Any]:
        self.objects.append(obj)
        self._call("apply" if force else "apply without force", obj["metadata"]["name"])
        return obj

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.objects.append(obj)
        self._call("create", obj["metadata"]["name"])
        return obj

    async def get(self, _resource: Any, namespace: str, name: str) -> dict[str, Any]:
        assert namespace == "n"
        if name not in self.live:
            raise NotFound("not there")
        return self.live[name]

    async def delete(self, resource: Any, namespace: str, name: str, *, uid: str) -> None:
        assert (resource.plural, namespace, uid) == ("pods", "n", f"uid-{name}")
        self._call("delete", name)


OWNER = {"controller": True, "uid": "u"}
LABELS = {LABEL_ROLLOUT: "demo"}


VERSIONS = {resource.kind: resource.api_version for resource in (*LISTED_KINDS, SECRETS)}


def apply(name: str, kind: str = "ConfigMap", **more: Any) -> Apply:
    return Apply(
        {"apiVersion": VERSIONS[kind], "kind": kind, "metadata": {"name": name, "labels": LABELS, "ownerReferences": [OWNER]}},
        "because",
        **more,
    )


def delete(name: str, **more: Any) -> Delete:
    return Delete("v1", "Pod", name, f"uid-{name}", "because", **more)


async def run(kube: Recorder, *actions: Apply | Delete) -> Outcome:
    return await execute_plan(kube, "n", Plan(actions), Memory(), NOW)  # type: ignore[arg-type]


async def test_actions_run_in_order_and_writes_are_counted() -> None:
    kube = Recorder()
    assert await run(kube, apply("a"), apply("b"), delete("c")) == Outcome(3)
    assert kube.calls == [("apply", "a"), ("apply", "b"), ("delete", "c")]


async def test_an_empty_plan_does_nothing() -> None:
    kube = Recorder()
    assert await run(kube) == Outcome(0)
    assert not kube.calls


async def test_refused_apply_stops_all_deletes_but_no_other_apply() -> None:
    kube = Recorder(a=Refused("a is nonsense", code=422), b=Refused("b too", code=422))
    assert await run(kube, apply("a"), apply("b"), apply("c"), delete("d")) == Outcome(1, Failure(Reason.APPLY_FAILED, "a is nonsense"))
    assert ("apply", "c") in kube.calls
    assert ("delete", "d") not in kube.calls


async def test_refused_delete_is_reported_and_does_not_stop_other_deletes() -> None:
    kube = Recorder(b=Refused("denied by policy", code=403))
    assert await run(kube, apply("a"), delete("b"), delete("c")) == Outcome(2, Failure(Reason.APPLY_FAILED, "denied by policy"))
    assert ("delete", "c") in kube.calls


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("another uid")])
async def test_delete_of_a_missing_object_is_not_counted(error: KubeError) -> None:
    kube = Recorder(a=error)
    assert await run(kube, delete("a"), delete("b")) == Outcome(1)


@pytest.mark.parametrize("error", [ApiUnavailable("away"), Conflict("changed"), NotFound("namespace is gone")])
async def test_outage_and_conflict_are_raised_to_the_caller(error: KubeError) -> None:
    with pytest.raises(type(error)):
        await run(Recorder(a=error), apply("a"))


NEW = {"data": {"token": "bmV3"}}


def apply_key(**more: Any) -> Apply:
    action = apply("s", "Secret", is_new_key=True, **more)
    return replace(action, object=action.object | NEW)


async def test_a_new_key_is_created_and_replaces_none() -> None:
    kube = Recorder()
    assert await run(kube, apply_key(unseen=True), apply("credentials", "Secret")) == Outcome(2)
    assert kube.calls == [("create", "s"), ("apply", "s"), ("apply", "credentials")]
    assert [obj.get("data") for obj in kube.objects] == [NEW["data"], NEW["data"], None]


@pytest.mark.parametrize("unseen", [True, False])
async def test_existing_key_is_kept_and_the_plan_is_made_again(unseen: bool) -> None:
    kube = Recorder({"s": {"metadata": {"labels": LABELS}, "data": {"token": "Zmlyc3Q="}}})
    with pytest.raises(Conflict):
        await run(kube, apply_key(unseen=unseen), apply("credentials", "Secret"))
    assert kube.calls == [("apply", "s")], "credentials of another key are not written"
    assert kube.objects[0]["data"] == {"token": "Zmlyc3Q="}


async def test_secret_without_key_gets_a_new_one() -> None:
    kube = Recorder({"s": {"metadata": {"labels": LABELS}}})
    await run(kube, apply_key())
    assert kube.calls == [("apply", "s")]
    assert kube.objects[0]["data"] == NEW["data"]


async def test_two_operators_create_one_key() -> None:
    with pytest.raises(Conflict):
        await run(Recorder(s=Conflict("exists")), apply_key(unseen=True))


async def test_without_the_key_no_credentials_are_written() -> None:
    kube = Recorder(s=Refused("denied by policy", code=403))
    outcome = await run(kube, apply_key(unseen=True), apply("credentials", "Secret"), apply("b"))
    assert outcome == Outcome(1, Failure(Reason.APPLY_FAILED, "denied by policy"))
    assert kube.calls == [("create", "s"), ("apply", "b")]


async def test_new_objects_are_applied_without_force() -> None:
    kube = Recorder()
    assert await run(kube, apply("a", unseen=True), apply("b")) == Outcome(2)
    assert kube.calls == [("apply without force", "a"), ("apply", "b")]


@pytest.mark.parametrize(
    "metadata",
    [{"labels": LABELS}, {"labels": {}, "ownerReferences": [OWNER]}],
    ids=["left by an earlier rollout", "a child that lost its label"],
)
async def test_objects_with_our_label_or_owner_are_applied_over(metadata: dict[str, Any]) -> None:
    kube = Recorder({"a": {"metadata": metadata}})
    assert await run(kube, apply("a", unseen=True)) == Outcome(1)
    assert kube.calls == [("apply", "a")]


@pytest.mark.parametrize(
    "metadata",
    [{}, {"labels": {LABEL_ROLLOUT: "other"}}, {"ownerReferences": [{"controller": True, "uid": "other"}]}],
    ids=["a user's", "another rollout's", "another controller's"],
)
@pytest.mark.parametrize("kind", ["ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "Service", "NetworkPolicy", "Deployment"])
async def test_a_taken_name_stops_the_whole_plan(metadata: dict[str, Any], kind: str) -> None:
    kube = Recorder({"taken": {"metadata": metadata}})
    # The taken name comes last, and an object that exists is among the others: nothing at all is written.
    others = (apply("a"), apply("b", unseen=True), apply("w", "StatefulSet"), apply("v", "Deployment", unseen=True), delete("c"))
    outcome = await run(kube, *others, taken(kind), taken("PodDisruptionBudget", name="free"))
    assert not kube.calls
    assert (outcome.writes, outcome.failure and outcome.failure.reason) == (0, Reason.NAME_TAKEN)
    message = outcome.failure.message if outcome.failure else ""
    assert message.startswith(f"{kind} taken exists and does not belong to this rollout")
    assert "Delete it" in message
    assert f"{LABEL_ROLLOUT}=demo" in message
    assert "free" not in message


def taken(kind: str, *, name: str = "taken") -> Apply:
    return apply(name, kind, unseen=True, is_new_key=kind == "Secret")


async def test_all_taken_names_are_listed() -> None:
    kube = Recorder({"a": {"metadata": {}}, "b": {"metadata": {}}})
    outcome = await run(kube, apply("a", "ServiceAccount", unseen=True), apply("b", "Secret", unseen=True))
    assert outcome.failure
    assert "ServiceAccount a exists" in outcome.failure.message
    assert "The same is true of Secret b." in outcome.failure.message


async def test_an_account_is_created_and_never_merged_into_another() -> None:
    account = apply("a", "ServiceAccount", unseen=True)
    account.object["metadata"]["annotations"] = {"role": "x"}
    kube = Recorder()
    assert await run(kube, account) == Outcome(1)
    assert kube.calls == [("create", "a"), ("apply", "a")]
    assert ["annotations" in obj["metadata"] for obj in kube.objects] == [False, True], "an apply without them removes them"
    with pytest.raises(Conflict):
        await run(Recorder(a=Conflict("created meanwhile")), account, apply("w", "StatefulSet"))


@pytest.mark.parametrize("workload", ["StatefulSet", "Deployment"])
@pytest.mark.parametrize("kind", ["ServiceAccount", "Secret", "ConfigMap", "NetworkPolicy"])
async def test_no_workload_uses_an_object_that_was_refused(kind: str, workload: str) -> None:
    kube = Recorder(a=Refused("denied by a webhook", code=403))
    assert (await run(kube, apply("a", kind), apply("w", workload), apply("b"))).writes == 1
    assert kube.calls == [("apply", "a"), ("apply", "b")]


async def test_a_refused_workload_stops_no_other() -> None:
    kube = Recorder(v=Refused("no such field", code=422))
    assert (await run(kube, apply("v", "StatefulSet"), apply("w", "StatefulSet"))).writes == 1
