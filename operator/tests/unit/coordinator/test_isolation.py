"""The coordinator tries connections that NetworkPolicies forbid, and its record has the result."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rollout.api.intent import Intent, WantedEngine
from sglang_rollout.coordinator import isolation
from sglang_rollout.coordinator.isolation import Attempt, IsolationCheck, can_connect, judge_attempts, next_delay
from sglang_rollout.coordinator.update import Machine
from sglang_rollout.coordinator.update.events import CallersForbidden, NetworkChecked, Wanted
from sglang_rollout.wire.ports import PROBES_PORT
from sglang_rollout.wire.record import MAX_REACHED, Isolation, Record
from sglang_rollout.wire.states import BASE
from tests.support.ports import free_port

ENFORCED = Isolation(checked=2)
REACHED = Isolation(checked=2, reached=["e1"], reached_count=1)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ({}, None),
        ({"e0": Attempt(gate=False, forbidden=False)}, None),
        ({"e0": Attempt(gate=False, forbidden=True)}, None),
        ({"e0": Attempt(gate=True, forbidden=False), "e1": Attempt(gate=True, forbidden=False)}, ENFORCED),
        ({"e0": Attempt(gate=True, forbidden=False), "e1": Attempt(gate=True, forbidden=True)}, REACHED),
        ({"e0": Attempt(gate=True, forbidden=False), "e1": Attempt(gate=False, forbidden=False)}, Isolation(checked=1)),
    ],
)
def test_only_an_engine_whose_gate_answers_proves_something(attempts: dict[str, Attempt], expected: Isolation | None) -> None:
    assert judge_attempts(attempts) == expected


def test_the_record_names_a_few_of_many_engines() -> None:
    found = judge_attempts({f"e{index}": Attempt(gate=True, forbidden=True) for index in range(500)})
    assert found is not None
    assert (found.checked, found.reached_count, len(found.reached)) == (500, 500, MAX_REACHED)


def test_checks_are_rare_while_the_policies_are_enforced() -> None:
    assert next_delay(None) < next_delay(REACHED) < next_delay(ENFORCED)


def make_machine(record: Record | None = None, *, isolated: bool | None) -> Machine:
    record = record or Record(term=1, epoch=1, committed=BASE)
    made = Machine(name="demo", term=2, record=record, at=0.0)
    intent = Intent(generation=1, name="demo", namespace="default", engines=[WantedEngine(name="e0")], isolated=isolated)
    made.handle(Wanted(intent, frozenset(), 1.0))
    return made


def recorded(made: Machine) -> Isolation | None:
    record = made.fleet.record()
    assert record is not None
    return record.isolation


def test_the_result_is_recorded_until_the_next_one() -> None:
    made = make_machine(isolated=True)
    assert recorded(made) is None
    for result in (ENFORCED, REACHED, None):
        made.handle(NetworkChecked(result, 2.0))
        assert recorded(made) == result


def test_a_missing_right_to_watch_callers_is_recorded_until_it_is_granted() -> None:
    made = make_machine(isolated=True)
    for forbidden in (True, False):
        made.handle(CallersForbidden(forbidden, 2.0))
        record = made.fleet.record()
        assert record is not None
        assert record.callers_forbidden is forbidden


def test_a_restarted_coordinator_keeps_the_result() -> None:
    assert recorded(make_machine(Record(term=1, epoch=1, committed=BASE, isolation=REACHED), isolated=True)) == REACHED


@pytest.mark.parametrize("isolated", [None, False])
def test_a_fleet_without_policies_records_no_result(isolated: bool | None) -> None:
    made = make_machine(Record(term=1, epoch=1, committed=BASE, isolation=REACHED), isolated=isolated)
    assert recorded(made) is None


async def run_once(
    monkeypatch: pytest.MonkeyPatch, *, isolated: bool, accepted: set[tuple[str, int]]
) -> tuple[list[Any], set[tuple[str, int]]]:
    """Run one check of two engines. Return the results, and the addresses that were tried."""
    results: list[Any] = []
    tried: set[tuple[str, int]] = set()
    checked = asyncio.Event()

    async def connect(host: str, port: int) -> bool:
        tried.add((host, port))
        return (host, port) in accepted

    async def sleep(_: float) -> None:
        checked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(isolation, "can_connect", connect)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    engines = {name: SimpleNamespace(status=SimpleNamespace(probes_port=True)) for name in ("e0", "e1", "without address")}
    engines["of an earlier release"] = SimpleNamespace(status=SimpleNamespace(probes_port=False))
    engines["without status"] = SimpleNamespace(status=None)
    machine: Any = SimpleNamespace(fleet=SimpleNamespace(is_isolated=isolated, up=lambda: list(engines), engines=engines))
    urls = {name: "http://10.0.0.3:30000" for name in engines if name != "without address"}
    urls |= {"e0": "http://10.0.0.1:30000", "e1": "http://[fd00::1]:30000"}
    check = IsolationCheck(lambda: machine, urls.get, results.append)
    task = asyncio.create_task(check.run())
    async with asyncio.timeout(10):
        await checked.wait()
    task.cancel()
    return results, tried


GATES = {("10.0.0.1", 30000), ("fd00::1", 30000)}


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [(GATES, Isolation(checked=2)), ({*GATES, ("fd00::1", PROBES_PORT)}, REACHED), (set(), None)],
    ids=["enforced", "not enforced", "no engine answers"],
)
async def test_gate_and_port_of_probes_of_each_engine_are_tried(
    monkeypatch: pytest.MonkeyPatch, accepted: set[tuple[str, int]], expected: Isolation | None
) -> None:
    results, tried = await run_once(monkeypatch, isolated=True, accepted=accepted)
    assert results == [expected]
    assert tried == {*GATES, ("10.0.0.1", PROBES_PORT), ("fd00::1", PROBES_PORT)}


async def test_without_policies_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await run_once(monkeypatch, isolated=False, accepted=set()) == ([], set())


async def test_a_connection_is_accepted_or_not() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await can_connect("127.0.0.1", port)
    assert not await can_connect("127.0.0.1", free_port())


async def test_a_connection_without_an_answer_counts_as_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", silent)
    monkeypatch.setattr(isolation, "CONNECT_SECONDS", 0.01)
    assert not await can_connect("192.0.2.1", 30004)
