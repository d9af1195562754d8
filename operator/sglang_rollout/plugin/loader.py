"""Load a staged version inside SGLang: every rank calls ``load`` (``--custom-weight-loader sglang_rollout_plugin.loader.load``).

It never hashes the files, because the agent has.

SGLang answers with success if the loader returns, and the engine ends if the loader raises. So the loader refuses by a *verdict*: a small
file for the agent. It raises only after its first write to the weights, because no part of a mixture may serve.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Load all shards of a version into the model of this rank.

    Args:
        model: SGLang's model. Its ``load_weights`` takes names and tensors as checkpoints have them, and keeps this rank's part.
        named_tensors: One tensor without meaning. Its name is the request as JSON: ``folder``, ``shards`` (names of files), ``sizes``
            (bytes of each file), ``verdicts`` (folder for the verdicts), and ``id`` (any text; the verdict repeats it).
    """
    request: dict[str, Any] = {}
    try:
        request = json.loads(named_tensors[0][0])
        shards = _open_shards(request)
        # From here on, a process that is killed leaves this verdict.
        _write_verdict(request, ok=False, wrote=True, message="The load has begun and has not ended.", ended=False)
    except Exception as error:  # noqa: BLE001 - raising would end the engine, which is unchanged
        _refuse(request, error)
        return
    try:
        model.load_weights(_read_tensors(shards))
        _synchronize()
    except BaseException as error:
        _write_verdict(request, ok=False, wrote=True, message=f"The load broke off: {_describe(error)}")
        raise
    try:
        _write_verdict(request, ok=True, wrote=True, message="")
    except OSError as error:  # the folder is gone if the agent was restarted meanwhile; without the verdict it loads the version again
        print(f"sglang_rollout_plugin: loaded, but cannot write the verdict: {_describe(error)}", flush=True)


def _open_shards(request: dict[str, Any]) -> list[Any]:
    """Open all files before the first write. Raises an exception for a missing file, another size, and a bad header."""
    from safetensors import safe_open  # noqa: PLC0415 - present in every engine, not where this file is tested

    opened = []
    for name, size in zip(request["shards"], request["sizes"], strict=True):
        path = os.path.join(request["folder"], name)
        found = os.stat(path).st_size
        if found != size:
            raise ValueError(f"{path} has {found} bytes, not {size}")
        try:
            opened.append(safe_open(path, framework="pt", device="cpu"))
        except Exception as error:
            raise ValueError(f"{path} cannot be opened: {_describe(error)}") from error
    return opened


def _read_tensors(shards: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors. A tensor is a map of the file: its bytes are read when the model copies them."""
    for shard in shards:
        for name in shard.keys():  # noqa: SIM118 - not a dictionary
            yield name, shard.get_tensor(name)


def _synchronize() -> None:
    """Wait for copies to the device, so that an error of one of them belongs to this load."""
    import torch  # noqa: PLC0415 - present in every engine, not where this file is tested

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _refuse(request: dict[str, Any], error: Exception) -> None:
    """Write the verdict that nothing was written. Without a folder for it, the agent misses the verdict and decides."""
    try:
        _write_verdict(request, ok=False, wrote=False, message=f"Nothing was loaded: {_describe(error)}")
    except Exception as second:  # noqa: BLE001 - raising would end the engine, which is unchanged
        print(f"sglang_rollout_plugin: refused ({_describe(error)}), but cannot write the verdict: {_describe(second)}", flush=True)


def _write_verdict(request: dict[str, Any], *, ok: bool, wrote: bool, message: str, ended: bool = True) -> None:
    """Replace the verdict of this rank."""
    rank = _rank()
    path = os.path.join(request["verdicts"], f"rank-{rank}.json")
    new = f"{path}.{os.getpid()}.new"
    verdict = {"ok": ok, "wrote": wrote, "message": message, "rank": rank, "id": request.get("id", ""), "ended": ended}
    with open(new, "w", encoding="utf-8") as file:
        json.dump(verdict, file)
    os.replace(new, path)


def _rank() -> str:
    """Return the rank of this process among all tensor and pipeline ranks of the engine, or the process ID."""
    import torch  # noqa: PLC0415 - present in every engine, not where this file is tested

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return f"pid-{os.getpid()}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
