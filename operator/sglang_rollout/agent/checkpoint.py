"""Check whether the engine can load a folder. The coordinator asks every agent before a disk update begins.

SGLang ends if a file is truncated or a tensor has another shape. It loads another architecture silently if the shapes agree, and missing
tensors keep their old values. So the folder is compared with the model that the engine runs. If this pod cannot read that model, only the
architecture is compared, as the engine reports it. The reply names what was not compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sglang_rollout.agent.engine_model import EngineModel, read_engine_model
from sglang_rollout.checkpoints.allowed import describe_forbidden, is_allowed
from sglang_rollout.checkpoints.folder import CONFIG, CancelCheck, Model, ProblemsError, read_adapter, read_model, shorten_problems
from sglang_rollout.checkpoints.format import DTYPE_OF_TORCH, TensorEntry
from sglang_rollout.checkpoints.snapshots import list_snapshots, lock_snapshot
from sglang_rollout.plugin.reports import NamesReport
from sglang_rollout.wire.agent import ARCHITECTURE, UNCHECKED, CheckpointReply, CheckpointRequest
from sglang_rollout.wire.reasons import Refusal, RefusalCode, quote_value

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that SGLang converts into the type of the engine's tensor."""
_UNPACKED = _FLOATS | {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
"""Types with one weight per element; an integer may hold several."""

_IDENTITY = ("architectures", "model_type")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "hidden_act",
    "tie_word_embeddings",
    "quantization_config",
)
"""Fields that give the tensors their meaning. The engine keeps its own values, whatever the checkpoint's config.json contains."""

_NESTED = ("text_config", "vision_config", "llm_config", "thinker_config")
_TIED = "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"
"""End of the names of tensors that old checkpoints contain, and that every engine computes by itself."""

_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


class _LateError(Exception):
    """The deadline has passed, so no caller waits for the answer."""


class CheckpointCheck:
    """Checks one folder at a time, in a thread. A dead file server may block the thread, but never the agent or its end."""

    def __init__(self) -> None:
        self._running: threading.Thread | None = None
        self._path = ""
        self._held = ExitStack()

    def release(self) -> None:
        """Release the snapshot that the last check found: the engine has loaded it, or never will."""
        self._held.close()

    async def run(self, request: CheckpointRequest, engine_model: EngineModel) -> CheckpointReply:
        """Check a folder, or list the tensors of the engine's model; answer within ``request.deadline`` seconds.

        A snapshot that can be loaded is locked until :meth:`release`, so that the trainer does not remove it while the engine loads it.
        """
        if self._running is not None and self._running.is_alive():
            return _refuse(f"The check of {self._path} still runs: does its volume answer?", RefusalCode.UNAVAILABLE)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[CheckpointReply] = loop.create_future()
        end = time.monotonic() + request.deadline

        def work() -> None:
            reply = _check_or_refuse(request, engine_model, end)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, done, reply)

        self._path = request.path
        # A daemon thread, because the interpreter waits for other threads at its end, and this thread may be stuck in the kernel.
        self._running = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._running.start()
        try:
            async with asyncio.timeout(request.deadline):
                reply = await done
        except TimeoutError:
            return _late_reply(request)
        return self._hold(reply) if reply.refusal is None and request.snapshot is not None else reply

    def _hold(self, reply: CheckpointReply) -> CheckpointReply:
        self.release()
        try:
            self._held.enter_context(lock_snapshot(Path(str(reply.path))))
        except ProblemsError as error:
            return _refuse(str(error))
        return reply


def find_folder(request: CheckpointRequest) -> Path:
    """Return the folder that the request names. Raise ProblemsError if there is no such snapshot."""
    wanted = request.snapshot
    if wanted is None:
        return Path(request.path)
    snapshots = [snapshot for snapshot in list_snapshots(request.path) if snapshot.manifest.fleet_id == request.fleet_id]
    identity = (wanted.run, wanted.step, wanted.label)
    matching = [found for found in snapshots if (found.manifest.run, found.manifest.step, found.manifest.label) == identity]
    if matching:
        return matching[-1].path
    newest = f"the newest is {snapshots[-1].manifest.label!r}" if snapshots else "it holds no snapshot of this fleet"
    raise ProblemsError([f"{request.path} holds no snapshot of version {wanted.label!r}; {newest}."])


def check(path: str, engine_model: EngineModel, *, end: float = float("inf"), names: bool = False) -> CheckpointReply:
    """Compare a folder with the model of the engine. Blocks.

    Args:
        path: Folder to check.
        engine_model: What is known about the engine's model.
        end: Time of the monotonic clock at which the check ends without an answer.
        names: True to return the names of the tensors that a complete checkpoint must have.
    """
    check_cancelled = _cancel_at(end)
    if not os.path.isabs(path):
        return _refuse(f"{path!r} is no absolute path: name the folder as the engines' pods see it.")
    try:
        found = read_model(Path(path), check_cancelled=check_cancelled)
        own, why = read_engine_model(engine_model, check_cancelled)
        problems = _find_identity_differences(found, engine_model) if own is None else find_differences(found, own)
        if problems:
            raise ProblemsError(shorten_problems(problems))
        digest = _digest(found, check_cancelled)
    except ProblemsError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{path} cannot be read here: {error.strerror or error}.")
    unchecked: list[str] = []
    if own is None:
        unchecked = [*UNCHECKED] if engine_model.architectures else [ARCHITECTURE, *UNCHECKED]
    return CheckpointReply(
        refusal=None, tensors=len(found.tensors), bytes=found.bytes, digest=digest, names=_required_tensors(found) if names else None,
        compared=own is not None, unchecked=unchecked, why_unchecked=why,
    )  # fmt: skip


def check_adapter(path: str, *, end: float = float("inf")) -> CheckpointReply:
    """Check the files of a LoRA adapter. Blocks. Raises ProblemsError, or OSError if a file cannot be read."""
    found = read_adapter(Path(path))
    return CheckpointReply(
        refusal=None, path=path, tensors=len(found.tensors), bytes=found.bytes, digest=_digest(found, _cancel_at(end)), compared=True
    )


def own_tensors(engine_model: EngineModel, *, end: float = float("inf")) -> CheckpointReply:
    """Return the tensors of the model that the engine runs; without ``names`` if this pod cannot read the model."""
    own, why = read_engine_model(engine_model, _cancel_at(end))
    if own is None:
        return CheckpointReply(refusal=None, why_unchecked=why)
    shapes = {name: list(entry.shape) if entry.dtype in _UNPACKED else None for name, (_, entry) in own.tensors.items()}
    return CheckpointReply(refusal=None, tensors=len(shapes), bytes=own.bytes, names=_required_tensors(own), shapes=shapes, compared=True)


def listed_tensors(found: NamesReport) -> CheckpointReply:
    """Return the tensors that the engine read at its start; without ``names`` if the plug-in has no list."""
    if not found.tensors:
        return CheckpointReply(refusal=None, why_unchecked=found.unchecked)
    shapes = {each.name: list(each.shape) if DTYPE_OF_TORCH.get(each.dtype) in _UNPACKED else None for each in found.tensors}
    names = [name for name in shapes if not _is_optional(name, tied=found.tied)]
    return CheckpointReply(refusal=None, tensors=len(shapes), names=names, shapes=shapes, compared=True)


def _cancel_at(end: float) -> CancelCheck:
    """Return a check that raises _LateError after the time ``end``."""

    def check_cancelled() -> None:
        if time.monotonic() > end:
            raise _LateError

    return check_cancelled


def _required_tensors(model: Model) -> list[str]:
    """Return the names of the tensors that a complete checkpoint must have."""
    tied = bool(model.config.get("tie_word_embeddings"))
    return [name for name in model.tensors if not _is_optional(name, tied=tied)]


def find_differences(found: Model, own: Model) -> list[str]:
    """Return the differences between a checkpoint and the engine's model, as sentences."""
    problems = _find_config_differences(found.config, own.config, f"{found.path / CONFIG}: ", own.path)
    tied = bool(own.config.get("tie_word_embeddings"))
    found_tensors, expected = found.tensors, own.tensors
    for name, (file, entry) in found_tensors.items():
        if name in expected:
            problems += _find_tensor_differences(f"{found.path / file}: tensor {name}", entry, expected[name][1])
        elif not _is_optional(name, tied=tied):
            problems.append(f"{found.path / file}: tensor {name} is not in the engine's model {own.path}.")
    missing = (name for name in expected if name not in found_tensors and not _is_optional(name, tied=tied))
    problems += [f"{found.path}: tensor {name} is missing; the engine would keep its old values." for name in missing]
    return problems


def _find_identity_differences(found: Model, engine: EngineModel) -> list[str]:
    """Compare with the architecture that the engine reports, if this pod cannot read its model."""
    architectures = found.config.get("architectures")
    if not engine.architectures or architectures == list(engine.architectures):
        return []
    reported = quote_value(list(engine.architectures))
    return [f"{found.path / CONFIG}: architectures is {quote_value(architectures)}, the engine reports {reported}."]


def _find_config_differences(found: Mapping[str, Any], own: Mapping[str, Any], prefix: str, own_path: Path) -> list[str]:
    problems = []
    for key in (*_IDENTITY, *_SIZES):
        # A size that only one side contains is a default of the other side. The tensors' shapes show a difference.
        both = key in found and key in own
        needed = key in ("quantization_config", "architectures") and (found.get(key) or own.get(key))
        if (both or needed) and found.get(key) != own.get(key):
            wanted = quote_value(own.get(key))
            problems.append(f"{prefix}{key} is {quote_value(found.get(key))}, the engine's model {own_path} has {wanted}.")
    for key in _NESTED:
        inner, expected = found.get(key), own.get(key)
        if isinstance(inner, Mapping) and isinstance(expected, Mapping):
            problems += _find_config_differences(inner, expected, f"{prefix}{key}.", own_path)
    return problems


def _find_tensor_differences(what: str, found: TensorEntry, own: TensorEntry) -> list[str]:
    problems = []
    if found.shape != own.shape:
        problems.append(f"{what} has shape {list(found.shape)}, expected {list(own.shape)}.")
    if found.dtype != own.dtype and not {found.dtype, own.dtype} <= _FLOATS:
        problems.append(f"{what} is {found.dtype}, expected {own.dtype}: the engine would misread its values.")
    return problems


def _is_optional(name: str, *, tied: bool) -> bool:
    return (tied and name == _TIED) or name.endswith(_COMPUTED)


def _digest(model: Model, check_cancelled: CancelCheck) -> str:
    """Return a hash of names, headers and evenly spread samples of the files: equal if two pods see the same files."""
    made = hashlib.sha256()
    for name, header in sorted(model.files.items()):
        made.update(f"{name}\0{header.file_bytes}\0".encode())
        with (model.path / name).open("rb") as file:
            made.update(file.read(header.data_start))
            room = max(0, header.file_bytes - header.data_start - _SAMPLE_BYTES)
            for offset in sorted({header.data_start + room * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                check_cancelled()
                file.seek(offset)
                made.update(file.read(_SAMPLE_BYTES))
    return made.hexdigest()


def _check_folder(request: CheckpointRequest, engine_model: EngineModel, end: float) -> CheckpointReply:
    if not request.path:
        return own_tensors(engine_model, end=end)
    if request.allowed and not is_allowed(request.path, request.allowed):
        return _refuse(describe_forbidden(request.path, request.allowed), RefusalCode.FORBIDDEN)
    if request.adapter:
        return check_adapter(request.path, end=end)
    folder = find_folder(request)
    return check(str(folder), engine_model, end=end, names=request.names).model_copy(update={"path": str(folder)})


def _check_or_refuse(request: CheckpointRequest, engine_model: EngineModel, end: float) -> CheckpointReply:
    try:
        return _check_folder(request, engine_model, end)
    except ProblemsError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{request.path} cannot be read here: {error.strerror or error}.")
    except _LateError:
        return _late_reply(request)
    except Exception as error:  # noqa: BLE001 - a file can contain anything, and the caller needs an answer
        return _refuse(f"{request.path} cannot be checked: {type(error).__name__}: {error}.", RefusalCode.INTERNAL_ERROR)


def _settle(done: asyncio.Future[CheckpointReply], reply: CheckpointReply) -> None:
    if not done.done():
        done.set_result(reply)


def _refuse(message: str, code: RefusalCode = RefusalCode.INVALID_REQUEST) -> CheckpointReply:
    return CheckpointReply(refusal=Refusal(code, message))


def _late_reply(request: CheckpointRequest) -> CheckpointReply:
    message = f"{request.path} was not read within {request.deadline:g} s: is its volume slow, or its file server away?"
    return _refuse(message, RefusalCode.UNAVAILABLE)
