"""Carrying out a plan: order, refusals, and objects that are gone already."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_rollout.core.plan import Apply, Delete, Plan
from sglang_rollout.runtime.apply import Outcome, execute
from sglang_rollout.runtime.errors import ApiUnavailable, Conflict, KubeError, NotFound, Refused


class Recorder:
    """Notes the calls; answers with the errors it was given by name."""

    def __init__(self, **errors: KubeError) -> None:
        self.errors = errors
        self.calls: list[tuple[str, str]] = []
        self.objects: list[dict[str, Any]] = []
        self.live: dict[str, Any] = {}

    def _call(self, verb: str, name: str) -> None:
        self.calls.append((verb, name))
        if name in self.errors:
            raise self.errors[name]

    async def apply(self, obj: dict[str, Any]) -> None:
        self.objects.append(obj)
        self._call("apply", obj["metadata"]["name"])

    async def create(self, obj: dict[str, Any]) -> None:
        self.objects.append(obj)
        self._call("create", obj["metadata"]["name"])

    async def get(self, _resource: Any, _namespace: str, _name: str) -> dict[str, Any]:
        return self.live

    async def delete(self, resource: Any, namespace: str, name: str, *, uid: str) -> None:
        assert (resource.plural, namespace, uid) == ("pods", "n", f"uid-{name}")
        self._call("delete", name)


def apply(name: str, kind: str = "ConfigMap", **more: Any) -> Apply:
    return Apply({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}, "because", **more)


def delete(name: str) -> Delete:
    return Delete("v1", "Pod", name, f"uid-{name}", "because")


async def run(kube: Recorder, *actions: Apply | Delete) -> Outcome:
    return await execute(kube, "n", Plan(actions))  # type: ignore[arg-type]


async def test_actions_run_in_order_and_writes_are_counted() -> None:
    kube = Recorder()
    assert await run(kube, apply("a"), apply("b"), delete("c")) == Outcome(3)
    assert kube.calls == [("apply", "a"), ("apply", "b"), ("delete", "c")]


async def test_an_empty_plan_does_nothing() -> None:
    kube = Recorder()
    assert await run(kube) == Outcome(0)
    assert not kube.calls


async def test_a_refusal_does_not_stop_other_applies_but_every_delete() -> None:
    kube = Recorder(a=Refused("a is nonsense", code=422), b=Refused("b too", code=422))
    assert await run(kube, apply("a"), apply("b"), apply("c"), delete("d")) == Outcome(1, "a is nonsense")
    assert ("apply", "c") in kube.calls
    assert ("delete", "d") not in kube.calls


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("another uid")])
async def test_what_is_gone_already_needs_no_delete(error: KubeError) -> None:
    kube = Recorder(a=error)
    assert await run(kube, delete("a"), delete("b")) == Outcome(1)


@pytest.mark.parametrize("error", [ApiUnavailable("away"), Conflict("changed"), NotFound("namespace is gone")])
async def test_what_may_work_later_is_for_the_caller(error: KubeError) -> None:
    with pytest.raises(type(error)):
        await run(Recorder(a=error), apply("a"))


async def test_the_token_is_random_and_only_where_the_plan_asks_for_one() -> None:
    kube = Recorder()
    await run(kube, apply("s", "Secret", needs_token=True), apply("s", "Secret", needs_token=True), apply("s", "Secret"))
    first, second, third = (obj.get("data") or obj.get("stringData") for obj in kube.objects)
    assert first
    assert first != second
    assert not third


class Existing(Recorder):
    """The Secret is there already."""

    async def create(self, obj: dict[str, Any]) -> None:
        raise Conflict("exists", reason="AlreadyExists")


async def test_a_token_that_is_there_stays_also_when_the_plan_did_not_see_it() -> None:
    kube = Existing()
    kube.live = {"data": {"token": "Zmlyc3Q="}}
    assert await run(kube, apply("s", "Secret", needs_token=True)) == Outcome(1)
    assert kube.calls == [("apply", "s")]
    assert kube.objects[0]["data"] == {"token": "Zmlyc3Q="}


async def test_a_secret_that_lost_its_token_gets_a_new_one() -> None:
    kube = Existing()
    await run(kube, apply("s", "Secret", needs_token=True))
    assert kube.calls == [("apply", "s")]
    assert kube.objects[0]["data"]["token"]
