"""The address of the trainer's store: no engine is called before it is allowed and its store has answered every pod."""

from __future__ import annotations

from sglang_rollout.coordinator.update import events as ev
from sglang_rollout.coordinator.update import requests as rq
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.ports import AGENT_PREFLIGHT
from sglang_rollout.wire.reasons import Refusal, RefusalCode
from tests.properties.support.coordinator_world import World, group_body

FORBIDDEN = Refusal(RefusalCode.INVALID_REQUEST, "master_address metadata belongs to no trainer of this fleet.")


def make() -> World:
    world = World([1, 1])
    world.sync_all()
    return world


def paths(world: World) -> set[str]:
    return {send.path for send in world.sent if isinstance(send, ev.Send)}


def test_a_forbidden_address_reaches_no_engine() -> None:
    world = make()
    answer = world.do(rq.OpenGroup(group_body(world, "g"), rq.Master(refusal=FORBIDDEN)))
    assert (answer.status, answer.message) == (400, FORBIDDEN.message)
    assert paths(world).isdisjoint({AGENT_PREFLIGHT, ControlCall.INIT_GROUP.path})


def test_wrong_numbers_are_named_before_a_forbidden_address() -> None:
    world = make()
    answer = world.do(rq.OpenGroup(group_body(world, "g") | {"world_size": 7}, rq.Master(refusal=FORBIDDEN)))
    assert "Use world_size=3" in answer.message


def test_engines_get_the_address_and_never_the_name() -> None:
    world = make()
    body = group_body(world, "g") | {"master_address": "trainer.example.org"}
    assert world.do(rq.OpenGroup(body, rq.Master("10.0.0.7"))).success
    sent = {send.path: send.bodies for send in world.sent}
    assert {body["master_address"] for body in sent[ControlCall.INIT_GROUP.path].values()} == {"10.0.0.7"}
    assert {(body["host"], body["handshake"]) for body in sent[AGENT_PREFLIGHT].values()} == {("10.0.0.7", True)}
    assert world.machine.fleet.groups["g"].master == "10.0.0.7:1"


def test_an_outsider_cannot_tell_a_forbidden_address_from_an_unreachable_one() -> None:
    world = make()
    forbidden = world.do(rq.OpenGroup(group_body(world, "g"), rq.Master(refusal=FORBIDDEN, hides_reasons=True)))
    call = world.ask(rq.OpenGroup(group_body(world, "g"), rq.Master("10.0.0.7", hides_reasons=True)))
    world.drain(failing=AGENT_PREFLIGHT, engines={"e0"})
    assert world.answers[call] == forbidden
    assert "10.0.0.7" not in forbidden.message
