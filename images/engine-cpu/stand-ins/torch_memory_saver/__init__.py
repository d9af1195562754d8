"""STAND-IN for torch_memory_saver on machines without a GPU: released memory is not given back to the machine, but what was in it is lost.

Whatever torch allocates inside ``region(tag)`` is overwritten by ``pause(tag)`` and, with a CPU backup, restored by ``resume(tag)``: an
engine that serves from memory which nobody filled again answers rubbish, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_RUBBISH = 0x7F
"""As float32 3.4e38, as bfloat16 3.4e38: never a plausible weight."""


class _Watch(TorchDispatchMode):
    """Keeps every tensor that torch makes from nothing while it is entered."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given and made.numel():
            self._kept.append(made)
        return made


class _Region:
    def __init__(self, backup: bool) -> None:
        self.backup = backup
        self.tensors: list[torch.Tensor] = []
        self.saved: list[torch.Tensor] = []


class TorchMemorySaver:
    """The calls that SGLang makes of the real one."""

    enabled = True
    hook_mode = "none"

    def __init__(self) -> None:
        self._regions: dict[str, list[_Region]] = {}
        self._paused: set[str] = set()

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """What is allocated inside belongs to ``tag``."""
        made = _Region(enable_cpu_backup)
        self._regions.setdefault(tag, []).append(made)
        with _Watch(made.tensors):
            yield

    @contextmanager
    def cuda_graph(self, **_: Any) -> Iterator[None]:
        """There are no CUDA graphs."""
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """What is allocated inside belongs to nobody."""
        yield

    def pause(self, tag: str) -> None:
        """What ``tag`` holds is lost."""
        if tag in self._paused:
            raise RuntimeError(f"{tag} is paused already")
        self._paused.add(tag)
        for region in self._regions.get(tag, []):
            bytes_ = [_bytes(tensor) for tensor in region.tensors]
            region.saved = [content.clone() for content in bytes_] if region.backup else []
            for content in bytes_:
                content.fill_(_RUBBISH)

    def resume(self, tag: str) -> None:
        """What ``tag`` held is there again, if it has a backup."""
        if tag not in self._paused:
            raise RuntimeError(f"{tag} is not paused")
        self._paused.remove(tag)
        for region in self._regions.get(tag, []):
            for tensor, saved in zip(region.tensors, region.saved, strict=False):
                _bytes(tensor).copy_(saved)
            region.saved = []


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


torch_memory_saver = TorchMemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Nothing to preload."""
    yield
