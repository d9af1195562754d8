"""The driver carries out the effects of the state machine in order, and stops cleanly."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.driver import Driver
from sglang_rollout.coordinator.leadership import DeposedError
from sglang_rollout.coordinator.metrics import Metrics
from sglang_rollout.coordinator.update import Machine
from sglang_rollout.coordinator.update.events import Answered, Cut, Effect, Event, Result, Send, Tick
from sglang_rollout.coordinator.update.phases import Phase
from sglang_rollout.coordinator.update.requests import Continue
from sglang_rollout.credentials import Credentials
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.record import Record
from sglang_rollout.wire.states import FleetState, Version


class Scripted:
    """A state machine that returns these effects at the first event and stores the answer to its call."""

    phase = Phase.IDLE

    def __init__(self, *effects: Effect) -> None:
        self.fleet = SimpleNamespace(
            last_update=None,
            transaction=SimpleNamespace(outcomes=Counter()),
            membership=SimpleNamespace(group_failure=None),
            applied_state=FleetState.ACTIVE,
        )
        self.effects = list(effects)
        self.answered: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()

    def handle(self, event: Event) -> list[Effect]:
        if isinstance(event, Answered):
            self.answered.set_result(event)
        wanted, self.effects = self.effects, []
        return wanted


async def test_a_call_that_is_cancelled_at_its_start_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the engines of a lost trainer would block the fleet until the deadline of the update."""
    agents = Agents(address=lambda _: None, credentials=Credentials("t").derive, term=lambda: 1)

    async def call(*_: object) -> Result:
        await asyncio.sleep(60)
        return Result(ok=True)

    monkeypatch.setattr(agents, "call", call)
    parts: dict[str, Any] = {"wanted_engines": None, "store": None, "leadership": None}
    driver = Driver(name="demo", agents=agents, metrics=Metrics(), **parts)
    machine: Any = Scripted(Send(ControlCall.UPDATE_DISTRIBUTED.path, {"e0": {}, "e1": {}}, 60, id=7), Cut(7, "the trainer is gone."))
    driver._machine = machine
    driver.feed(Tick(0.0))
    async with asyncio.timeout(10):
        event = await machine.answered
    assert (event.effect, [result.message for result in event.results.values()]) == (7, ["the trainer is gone."] * 2)


async def test_the_last_record_is_written_before_another_coordinator_may_lead() -> None:
    done: list[str] = []

    class Store:
        async def write(self, record: Record, *, over: Record | None = None) -> None:
            done.append(f"written {record.committed}")

    class Lock:
        async def acquire(self) -> int:
            await asyncio.sleep(60)
            return 1

        async def release(self) -> None:
            done.append("released")

    agents = Agents(address=lambda _: None, credentials=Credentials("t").derive, term=lambda: 1)
    parts: dict[str, Any] = {"wanted_engines": None, "store": Store(), "leadership": Lock()}
    driver = Driver(name="demo", agents=agents, metrics=Metrics(), **parts)
    task = asyncio.create_task(driver.run())
    await asyncio.sleep(0.01)
    driver.record_writer.save(Record(term=1, epoch=1, committed=Version(run=1, step=7, label="7")))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert done == ["written 1/7", "released"]


async def test_a_coordinator_raises_its_term_only_after_the_lease_has_it() -> None:
    """Otherwise two coordinators could share a term."""
    announced: list[int] = []
    is_announced = asyncio.Event()

    class Lease:
        async def announce(self, term: int) -> None:
            await is_announced.wait()
            announced.append(term)

    agents = Agents(address=lambda _: None, credentials=Credentials("t").derive, term=lambda: 1)
    parts: dict[str, Any] = {"wanted_engines": None, "store": None, "leadership": Lease()}
    driver = Driver(name="demo", agents=agents, metrics=Metrics(), **parts)
    driver._machine = machine = Machine(name="demo", term=1, record=None, at=0.0)
    for _ in range(3):
        driver._handle_outranked(7)
    await asyncio.sleep(0)
    assert machine.fleet.term == 1, "not before the Lease has the term"
    is_announced.set()
    await asyncio.sleep(0.01)
    assert (announced, machine.fleet.term) == ([8], 8)


async def test_calls_to_agents_return_values_when_the_coordinator_ends() -> None:
    """aiohttp raises RuntimeError on a closed session, which must not end a fan-out."""
    agents = Agents(address=lambda _: "http://127.0.0.1:9", credentials=Credentials("t").derive, term=lambda: 1)
    await agents.start()
    await agents.close()
    results = await agents.fan_out(Send(ControlCall.PAUSE.path, {"e0": {}, "e1": {}}, 5))
    assert [(result.ok, result.message) for result in results.values()] == [(False, "the coordinator ends.")] * 2


async def test_a_deposed_coordinator_calls_no_agent_and_leaves_no_error_behind() -> None:
    """Broken connections of trainers must start no call: it would fail in a task that nothing awaits."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))

    class Lease:
        async def acquire(self) -> int:
            return 1

        async def announce(self, term: int) -> None:
            """Store no term."""

        async def hold(self) -> None:
            driver._fail(DeposedError("an agent follows a coordinator of term 9"))
            raise DeposedError("pod-b has taken the Lease")

        async def release(self) -> None:
            """Release nothing."""

    class Store:
        async def read(self) -> Record | None:
            return Record(term=1, epoch=1, committed=Version(run=1, step=7, label="7"))

        async def write(self, record: Record, *, over: Record | None = None) -> None:
            """Store nothing."""

    class NoWantedEngines:
        async def run(self) -> None:
            await asyncio.sleep(60)

    agents = Agents(address=lambda _: "http://127.0.0.1:9", credentials=Credentials("t").derive, term=lambda: 1)
    parts: dict[str, Any] = {"wanted_engines": NoWantedEngines(), "store": Store(), "leadership": Lease()}
    driver = Driver(name="demo", agents=agents, metrics=Metrics(), **parts)
    with pytest.raises(ExceptionGroup) as ended:
        await driver.run()
    assert ended.group_contains(DeposedError)
    machine: Any = Scripted(Send(ControlCall.PAUSE.path, {"e0": {}, "e1": {}}, 5))
    driver._machine = machine
    driver.feed(Tick(0.0))
    assert (await driver.ask(Continue())).status == 503
    assert machine.effects, "no event reached the state machine"
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
