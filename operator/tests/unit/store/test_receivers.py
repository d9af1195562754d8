"""The weight store's children that receive tensors, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from sglang_rollout.store.receivers import Receiver, ReceiverError, Receivers
from sglang_rollout.wire.staged import StoreGroupRequest


class Child:
    """A child that joins at once."""

    is_alive = True

    async def join(self, request: StoreGroupRequest) -> None:
        """Join."""

    async def kill(self) -> None:
        """End."""
        self.is_alive = False


REQUEST = StoreGroupRequest(group_name="g", master_address="127.0.0.1", master_port=1)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The children that were started, each after a moment."""
    made: list[Child] = []

    async def start() -> Child:
        await asyncio.sleep(0.01)
        made.append(Child())
        return made[-1]

    monkeypatch.setattr(Receiver, "start", start)
    return made


async def test_of_two_calls_that_join_one_process_group_at_a_time_the_later_one_stays(children: list[Child]) -> None:
    receivers = Receivers()
    first, second = await asyncio.gather(receivers.join(REQUEST), receivers.join(REQUEST), return_exceptions=True)
    assert (type(first), second) == (ReceiverError, None)
    assert [child.is_alive for child in children[:2]] == [False, True]
    await receivers.close()
    assert not children[1].is_alive


async def test_a_call_to_leave_ends_a_join_that_waits_for_its_child(children: list[Child]) -> None:
    receivers = Receivers()
    join = asyncio.create_task(receivers.join(REQUEST))
    await asyncio.sleep(0)
    await receivers.leave("g")
    with pytest.raises(ReceiverError):
        await join
    assert (receivers.names, children[0].is_alive) == ([], False)
    await receivers.close()


async def test_a_spare_child_that_could_not_start_fails_no_later_join(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: Iterator[ReceiverError | Child] = iter([ReceiverError("it did not start"), Child(), Child(), Child()])

    async def start() -> Child:
        made = next(starts)
        if isinstance(made, ReceiverError):
            raise made
        return made

    monkeypatch.setattr(Receiver, "start", start)
    receivers = Receivers()
    receivers.prepare()
    await asyncio.sleep(0.01)  # the spare child has failed, and no trainer waits for it
    await receivers.join(REQUEST)
    assert receivers.names == ["g"]
    await receivers.close()
