"""On a GPU: the order between the copies into a staging buffer and the broadcast that reads it. With a fake torch that records calls."""

from __future__ import annotations

import importlib
import sys
import threading
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_rollout.trainer.tensors import Bucket, TensorSpec


class Buffer:
    """A tensor; notes what is written into it."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name

    def numel(self) -> int:
        return 8

    def __getitem__(self, _: slice) -> Buffer:
        return self

    def copy_(self, source: Buffer) -> None:
        self.notes.append(f"copy {source.name} on {stream().name}")

    def detach(self) -> Buffer:
        return self

    contiguous = detach

    def reshape(self, _: int) -> Buffer:
        return self

    def view(self, _: Any) -> Buffer:
        return self


class Stream:
    """A CUDA stream."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name

    def wait_event(self, event: Event) -> None:
        self.notes.append(f"{self.name} waits for the event on {event.on}")

    def synchronize(self) -> None:
        self.notes.append(f"wait for {self.name}")


class Event:
    """A CUDA event."""

    on = "nothing"

    def record(self, stream: Stream) -> None:
        self.on = stream.name
        stream.notes.append(f"event on {stream.name}")


local = threading.local()


def stream() -> Stream:
    """The current stream of this thread, as torch keeps it."""
    current: Stream = local.stream
    return current


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def group(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    torch: Any = ModuleType("torch")
    torch.distributed = ModuleType("torch.distributed")
    torch.uint8, torch.no_grad = "uint8", nullcontext
    torch.device = lambda name, index=None: SimpleNamespace(type=name, index=index)
    torch.empty = lambda *_, **__: Buffer(notes, "staging")
    torch.cuda = SimpleNamespace(device=lambda _: nullcontext(), Event=Event, current_stream=stream)

    def broadcast(*_: Any, **__: Any) -> Any:
        notes.append(f"broadcast on {stream().name}")
        return SimpleNamespace(wait=lambda: None)

    torch.distributed.broadcast = broadcast
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    monkeypatch.delitem(sys.modules, "sglang_rollout.trainer.process_group", raising=False)
    module = importlib.import_module("sglang_rollout.trainer.process_group")
    meeting = SimpleNamespace(name="g", world_size=2, backend="nccl", device=torch.device("cuda", 0), abort=lambda: None)
    yield module.ProcessGroup(meeting, "process group", epoch=1, members=["e"])
    sys.modules.pop("sglang_rollout.trainer.process_group", None)


def test_a_broadcast_reads_after_the_copies_and_returns_when_the_buffer_is_free(group: Any, notes: list[str]) -> None:
    local.stream = Stream(notes, "caller")
    specs = [TensorSpec(name, "float32", (1,), 4) for name in "ab"]
    bucket = Bucket(tuple((spec, Buffer(notes, spec.name)) for spec in specs), 8, last=True)
    filled = group.flatten(bucket, 0)

    def send() -> None:
        local.stream = Stream(notes, "sender")
        group.broadcast(filled, timeout=5)
        notes.append("returned")

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(10)
    assert notes == [
        "copy a on caller",
        "copy b on caller",
        "event on caller",
        "sender waits for the event on caller",
        "broadcast on sender",
        "wait for sender",
        "returned",
    ]


def test_a_failed_copy_is_raised_after_every_tensor_was_gathered(group: Any, notes: list[str]) -> None:
    """Gathering is a collective: the trainer's other ranks wait in it."""
    local.stream = Stream(notes, "caller")
    bucket = Bucket(tuple((TensorSpec(name, "float32", (1,), 4), name) for name in "ab"), 8, last=True)
    gathered: list[str] = []

    def gather(spec: TensorSpec, tensor: Any) -> Any:
        gathered.append(spec.name)
        return tensor  # a string has no bytes to copy

    with pytest.raises(AttributeError):
        group.flatten(bucket, 0, gather)
    assert gathered == ["a", "b"]
