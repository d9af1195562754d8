"""A forked child of the trainer has its own connections, and neither uses nor ends what belongs to its parent."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.checkpoints.publish import lock_directory
from sglang_rollout.trainer import Fleet, Snapshots, connect
from sglang_rollout.trainer.group_control import Heartbeat
from tests.unit.trainer.support.scripted_fleet import FakeFleet, Reply
from tests.unit.trainer.test_group_control import DESTROY, ScriptedControl

FORK = multiprocessing.get_context("fork")
LIMIT = 20.0
"""Seconds in which a child must end. Each one needs a fraction of a second."""


def echo(body: dict[str, Any]) -> Reply:
    time.sleep(0.01)
    return 200, {"text": body["text"], "output_ids": [1], "meta_info": {}}


@pytest.fixture
def fleet(fake: FakeFleet) -> Iterator[Fleet]:
    fake.replies["/generate"] = echo
    with connect(fake.url, timeout=5) as made:
        yield made


def start_child(work: Callable[[], Any]) -> Callable[[], Any]:
    """Fork a child that runs ``work``. The result waits for the child and returns what ``work`` has returned."""
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=lambda: sender.send(work()))
    child.start()

    def result() -> Any:
        child.join(LIMIT)
        try:
            assert child.exitcode == 0, f"the child did not end well: {child.exitcode}"
            return receiver.recv()
        finally:
            child.kill()

    return result


def sample(fleet: Fleet, name: str) -> Callable[[], object]:
    """Return a function that generates for many prompts of its own, and returns the samples that are not its own."""

    def run() -> object:
        prompts = [f"{name} {number}" for number in range(60)]
        samples = fleet.generate(prompts, concurrency=2, timeout=LIMIT)
        return [each.text for each, prompt in zip(samples, prompts, strict=True) if each.text != prompt]

    return run


def test_children_and_their_parent_get_their_own_samples(fleet: Fleet) -> None:
    assert fleet.generate(["warm", "too"], concurrency=2)[0].text == "warm"
    children = [start_child(sample(fleet, name)) for name in ("first", "second")]
    assert sample(fleet, "parent")() == []
    assert [result() for result in children] == [[], []]
    assert sample(fleet, "after")() == []


def test_a_child_works_whatever_lock_another_thread_held(fleet: Fleet) -> None:
    fleet.generate(["warm"])
    with hold_in_another_thread(fleet._http._lock):
        result = start_child(sample(fleet, "child"))
    assert result() == []


def test_the_sockets_of_the_parent_are_closed_in_a_child(fake: FakeFleet, fleet: Fleet) -> None:
    """Else a connection that the parent closes stays open until the last child ends."""

    def count_connections() -> int:
        port = f":{int(fake.url.rsplit(':', 1)[1]):04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(port)}
        return sum(str(each.readlink()) in inodes for each in Path("/proc/self/fd").iterdir() if each.is_symlink())

    fleet.generate(["warm", "too"], concurrency=2)
    assert count_connections() > 0
    assert start_child(count_connections)() == 0


@pytest.mark.parametrize("leave", ["close", "close_group"])
def test_a_child_leaves_the_group_and_the_snapshot_of_its_parent_alone(
    fake: FakeFleet, fleet: Fleet, tmp_path: Path, leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    fleet.snapshots = Snapshots(tmp_path / "snapshots", model=tmp_path)
    fleet.snapshots._running = Future()
    control = ScriptedControl(fake)
    fleet._groups = control
    opened: Any = control.open()
    monkeypatch.setattr(control, "_heartbeat", Heartbeat(fleet._http, opened.name, lease=600.0))

    def work() -> object:
        started = time.monotonic()
        getattr(fleet, leave)()
        return time.monotonic() - started, opened.is_closed, control.group is None

    seconds, is_closed, has_none = start_child(work)()
    assert (seconds < 1.0, is_closed, has_none) == (True, False, True)
    assert fake.counts[DESTROY] == 0, "a child must not end the process group of its parent"
    assert (control.group, opened.is_closed) == (opened, False)
    fleet.snapshots._running = None


def test_a_child_opens_a_process_group_of_its_own(fake: FakeFleet) -> None:
    control = ScriptedControl(fake)
    fake.replies[DESTROY] = (200, {"success": True})
    control.open()
    control.list_open_group(1)

    def work() -> object:
        return control.current().name

    assert start_child(work)() == "g1", "not g0, the group of the parent"
    assert control.current().name == "g0"
    control.close()


def test_a_child_does_not_keep_a_directory_of_snapshots_locked(tmp_path: Path) -> None:
    end = FORK.Event()
    with lock_directory(tmp_path):
        result = start_child(lambda: end.wait(LIMIT))
    with lock_directory(tmp_path):
        end.set()
    assert result() is True


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_handle_cannot_be_sent_to_another_process(fleet: Fleet, send: Callable[[Fleet], object]) -> None:
    with pytest.raises(TypeError, match=r"^A Fleet belongs to one process and cannot be copied\. Call connect\(\) in the other process\.$"):
        send(fleet)


@contextmanager
def hold_in_another_thread(lock: threading.Lock) -> Iterator[None]:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait(LIMIT)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(LIMIT)
    yield
    release.set()
    thread.join()
