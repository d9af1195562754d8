"""The two ways in which SGLang loads a staged version: through our loader, or as a folder of safetensors files.

:mod:`.activate` makes the calls. A way has the body of the call that writes, and the checks before it. SGLang takes tensors for one replica
of the model only, so an engine with data-parallel replicas loads a folder.

In a folder SGLang reads ``*.safetensors`` only, and all of them, so a copy needs no other file. A failed load of a folder has no verdict:
SGLang may have written before, and what it calls a rollback reads the same folder again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from sglang_rollout.agent.own_model import OwnModel, Shapes
from sglang_rollout.agent.staged.verdicts import VerdictFolder
from sglang_rollout.checkpoints.folder import shorten_problems
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.sglang.api import ControlCall, has_external_draft
from sglang_rollout.sglang.sizes import loads_folders, read_replicas
from sglang_rollout.staging.copies import Copy
from sglang_rollout.staging.index import shard_header
from sglang_rollout.staging.payload import loader_payload, loader_request
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError, quote_value
from sglang_rollout.wire.staged import Shard


class LoadWay(Protocol):
    """One way to load a version."""

    @property
    def call(self) -> ControlCall:
        """The call that writes the weights."""

    @property
    def has_verdicts(self) -> bool:
        """True if SGLang's answer does not say whether the version is loaded, and each rank writes a verdict.

        Such a call also belongs into a session of SGLang, between begin and end.
        """

    def engine_refusal(self, info: Mapping[str, Any]) -> Refusal | None:
        """Return why an engine with this ``/server_info`` cannot load this way; None if it can."""

    async def check_copy(self, copy: Copy) -> None:
        """Raise RefusedError if the engine could not load the complete copy."""

    def body(self, copy: Copy, attempt: str, tensor_size: int) -> dict[str, object]:
        """Return the body of the call, without label and cache."""


class LoaderWay:
    """Through our loader, which checks the files and leaves a verdict for each rank."""

    call = ControlCall.UPDATE_TENSOR
    has_verdicts = True

    def __init__(self, verdicts: VerdictFolder) -> None:
        self._verdicts = verdicts

    def engine_refusal(self, info: Mapping[str, Any]) -> Refusal | None:
        """See :meth:`LoadWay.engine_refusal`."""
        refused = _size_refusal(info, 1)
        loaders = info.get("custom_weight_loader")
        if refused is None and LOADER not in (loaders if isinstance(loaders, list) else ()):
            advice = f"start it with --custom-weight-loader {LOADER}"
            refused = Refusal(RefusalCode.NOT_OFFERED, f"The engine was not started with the loader of staged versions: {advice}.")
        return refused

    async def check_copy(self, copy: Copy) -> None:
        """Check nothing: the loader does."""

    def body(self, copy: Copy, attempt: str, tensor_size: int) -> dict[str, object]:
        """See :meth:`LoadWay.body`."""
        payload = loader_payload(loader_request(copy, self._verdicts.path(attempt), attempt))
        return {"serialized_named_tensors": [payload] * tensor_size, "load_format": LOADER}


class FolderWay:
    """As a folder. Files with other bytes or shapes than expected end the engine's process, so they are checked before."""

    call = ControlCall.UPDATE_DISK
    has_verdicts = False

    def __init__(self, model: OwnModel, data_size: int) -> None:
        self._data_size = data_size
        self._model = model

    def engine_refusal(self, info: Mapping[str, Any]) -> Refusal | None:
        """See :meth:`LoadWay.engine_refusal`."""
        if has_external_draft(info):
            advice = "start it without --speculative-draft-model-path, or with --dp-size 1"
            return Refusal(RefusalCode.NOT_OFFERED, f"The engine would load the version into its draft model, too: {advice}.")
        return _size_refusal(info, self._data_size)

    async def check_copy(self, copy: Copy) -> None:
        """See :meth:`LoadWay.check_copy`."""
        problem = await asyncio.to_thread(find_file_problem, copy)
        if problem:
            raise RefusedError(Refusal(RefusalCode.CONFLICT, f"Nothing was loaded: {problem}"), status=409)
        problems = find_other_shapes(copy.index.shards, await self._model.read_shapes() or {})
        if problems:
            message = f"Nothing was loaded, because the version does not fit the engine's model: {' '.join(shorten_problems(problems))}"
            raise RefusedError(Refusal(RefusalCode.INVALID_REQUEST, message), status=409)

    def body(self, copy: Copy, attempt: str, tensor_size: int) -> dict[str, object]:
        """See :meth:`LoadWay.body`."""
        return {"model_path": str(copy.folder), "load_format": "safetensors", "abort_all_requests": False, "is_async": False}


def choose_way(model: OwnModel, verdicts: VerdictFolder, *, data_size: int) -> LoadWay:
    """Return how an engine loads staged versions.

    Args:
        model: The model that the engine was started with.
        verdicts: Folder of the loader's verdicts.
        data_size: Replicas of the model in the engine.
    """
    return FolderWay(model, data_size) if loads_folders(data_size) else LoaderWay(verdicts)


def find_file_problem(copy: Copy) -> str:
    """Return why the folder is not what the copy's index describes, as a sentence; empty if it is. Blocks."""
    names = copy.files
    try:
        for number, (name, size) in enumerate(zip(names, copy.file_sizes, strict=True)):
            path = copy.folder / name
            with path.open("rb") as file:
                header, found = file.read(copy.data_start(number)), os.fstat(file.fileno()).st_size
            if found != size:
                return f"{path} has {found} bytes, not {size}."
            if header != shard_header(copy.index.shards[number]):
                return f"{path} has another header than the index of the version."
        other = next((path for path in sorted(copy.folder.iterdir()) if _changes_what_is_read(path) and path.name not in names), None)
    except OSError as error:
        return f"The files in {copy.folder} cannot be read: {error.strerror or error}."
    return "" if other is None else f"{other} is no file of the version."


def _changes_what_is_read(path: Path) -> bool:
    return path.name.endswith((".safetensors", ".safetensors.index.json"))


def find_other_shapes(shards: list[Shard], shapes: Shapes) -> list[str]:
    """Return the tensors that have another shape than those of the model, as sentences. A tensor of one element may have any shape."""
    problems = []
    for tensor in (tensor for shard in shards for tensor in shard.tensors):
        expected = shapes.get(tensor.name)
        if expected is not None and expected != tensor.shape and not {*expected, *tensor.shape} <= {1}:
            problems.append(f"Tensor {tensor.name} has shape {tensor.shape}, expected {quote_value(expected)}.")
    return problems


def _size_refusal(info: Mapping[str, Any], data_size: int) -> Refusal | None:
    found = read_replicas(info)
    if found == data_size:
        return None
    advice = f"start the engine with --dp-size {data_size}, or the agent with --data-size {found} (sglang-rollout local: dp={found})"
    return Refusal(
        RefusalCode.NOT_OFFERED, f"The engine runs with data parallel size {found}, and its agent expects {data_size}: {advice}."
    )
