"""Write pushed versions to disk as snapshots: checkpoints that engines, evaluation and a resumed trainer can load.

    with connect(url, snapshots=Snapshots("/ckpt/policy", model="/models/policy", every=10, keep=3)) as fleet:
        fleet.push(model.state_dict(), version=step)        # every tenth push is also written, in the background

The bytes are copied to host memory during the push, so training may change the tensors as soon as ``push`` returns. A
background thread writes the files after the fleet has committed the version. A push that is not committed never becomes
a snapshot.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rollout.checkpoints.folder import CONFIG, INDEX, SINGLE, CancelCheck
from sglang_rollout.checkpoints.format import DTYPE_OF_TORCH, build_header
from sglang_rollout.checkpoints.publish import (
    DirectoryInUseError,
    check_free_space,
    copy_model_files,
    describe_os_error,
    folder_name,
    lock_directory,
    publish,
    remove_leftovers,
    utc_now,
    write_file,
)
from sglang_rollout.checkpoints.snapshots import FileEntry, Manifest, Snapshot
from sglang_rollout.trainer.arguments import require
from sglang_rollout.trainer.calls import Deadline, run_in_background
from sglang_rollout.trainer.errors import SnapshotFailed
from sglang_rollout.trainer.forks import renew_after_fork
from sglang_rollout.trainer.tensors import TensorSpec
from sglang_rollout.wire.arguments import find_count_problem, find_seconds_problem
from sglang_rollout.wire.states import Version

log = logging.getLogger(__name__)


HostBytes = Callable[[Any], memoryview]
"""Copies a tensor's bytes to host memory."""


class Snapshots:
    """When and where snapshots are written, and how many are kept.

    A snapshot that fails is logged, and ``wait`` raises its error. It never fails a push.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        model: str | Path,
        every: int = 1,
        keep: int = 2,
        shard_bytes: int = 5 * 10**9,
        deadline: float = 1800.0,
    ) -> None:
        """Check the settings.

        Args:
            directory: Where snapshots are written. For engines that load them, a volume that they mount at the same path.
            model: Folder from which config and tokenizer are copied.
            every: Write every n-th push.
            keep: Number of the newest snapshots to keep. An old snapshot is removed after the new one is complete, so the
                volume needs room for ``keep + 1``.
            shard_bytes: Maximum size of a file.
            deadline: Seconds for writing one snapshot.

        Raises:
            ValueError: A number is wrong, or ``model`` is not a folder of a model.
        """
        numbers = {"every": every, "keep": keep, "shard_bytes": shard_bytes}
        require(*(find_count_problem(value, name) for name, value in numbers.items()), find_seconds_problem(deadline, "deadline"))
        if not (Path(model) / CONFIG).is_file():
            raise ValueError(
                f"{model} is not a folder with a {CONFIG}. Pass the folder of the model; "
                "for a model on the Hugging Face hub pass the result of huggingface_hub.snapshot_download(name)."
            )
        self.directory = Path(directory)
        self.model = Path(model)
        self.every = every
        self.keep = keep
        self.shard_bytes = shard_bytes
        self.deadline = deadline
        self._pushes = 0
        self._running: Future[Snapshot] | None = None
        renew_after_fork(self)

    def renew(self) -> None:
        """Forget the snapshot that the parent process writes, because its thread does not exist in this forked child."""
        self._running = None

    def wait(self, timeout: float | None = None) -> Snapshot | None:
        """Wait for the newest snapshot to be written, and return it; None if no snapshot was begun.

        Raises:
            SnapshotFailed: The snapshot could not be written, or is not written within ``timeout`` seconds.
        """
        if timeout is not None:
            require(find_seconds_problem(timeout, "timeout"))
        if self._running is None:
            return None
        seconds = self.deadline if timeout is None else timeout
        try:
            return self._running.result(seconds)
        except FutureTimeoutError:
            raise SnapshotFailed(
                f"The snapshot in {self.directory} is not written after {seconds:.0f} s. Does its volume answer?"
            ) from None

    def begin(self, *, wanted: bool | None = None, again: bool = False) -> Staging | None:
        """Return a staging area if this push becomes a snapshot, else None.

        Called by ``Fleet.push``.

        Args:
            wanted: True or False: overrides ``every``.
            again: True for a further attempt of a push, which counts once.
        """
        self._pushes += not again
        is_due = self._pushes % self.every == 0 if wanted is None else wanted
        if not is_due:
            return None
        if self._running is not None and not self._running.done():
            if wanted is None:
                log.warning(
                    "No snapshot of this push: the previous one is still being written to %s. Increase every=%d.",
                    self.directory,
                    self.every,
                )
                return None
            self.close()
        return Staging(self)

    def close(self) -> None:
        """Wait for the snapshot that is being written. Its failure has been logged."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - _write has logged the error
            log.debug("the last snapshot failed: %s", error)

    def start_writing(self, tensors: list[StagedTensor], version: Version, epoch: int, fleet_id: str) -> Future[Snapshot]:
        """Write a snapshot in the background."""
        job = Job(self.directory, self.model, self.keep, self.shard_bytes, version, epoch, fleet_id, tensors)
        self._running = run_in_background(self._write, job, Deadline(self.deadline))
        return self._running

    def _write(self, job: Job, deadline: Deadline) -> Snapshot:
        def check_cancelled() -> None:
            if deadline.has_passed:
                raise SnapshotFailed(
                    f"The snapshot of {job.version.label} was not written within {deadline.seconds:.0f} s; it was removed."
                )

        try:
            snapshot = write_snapshot(job, check_cancelled=check_cancelled)
        except Exception as error:
            log.error("%s", error if isinstance(error, SnapshotFailed) else f"The snapshot of {job.version.label} failed: {error!r}")  # noqa: TRY400
            raise
        log.info("Wrote version %s to %s (%d MiB).", job.version.label, snapshot.path, job.bytes >> 20)
        return snapshot


class Staging:
    """The bytes of one push in host memory, before they are written as a snapshot."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._tensors: list[StagedTensor] | None = []

    def add(self, spec: TensorSpec, tensor: Any, host_bytes: HostBytes) -> None:
        """Copy one full tensor to host memory. If the copy fails, this push gets no snapshot, but continues."""
        if self._tensors is None:
            return
        try:
            self._tensors.append(_stage_tensor(spec, tensor, host_bytes))
        except Exception as error:  # noqa: BLE001 - for example out of memory, or an unknown type: the push continues
            log.error("No snapshot of this push: tensor %s could not be copied: %s", spec.name, error)  # noqa: TRY400
            self._tensors = None

    def publish(self, version: Version, epoch: int, fleet_id: str) -> Future[Snapshot] | None:
        """Start to write the committed version. Return None if a copy has failed."""
        tensors, self._tensors = self._tensors, None
        return self._snapshots.start_writing(tensors, version, epoch, fleet_id) if tensors is not None else None


def _stage_tensor(spec: TensorSpec, tensor: Any, host_bytes: HostBytes) -> StagedTensor:
    dtype = DTYPE_OF_TORCH.get(spec.dtype)
    if dtype is None:
        raise SnapshotFailed(f"safetensors does not know the type {spec.dtype}")
    return StagedTensor(spec.name, dtype, spec.shape, host_bytes(tensor))


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor whose bytes are in host memory."""

    name: str
    dtype: str
    """Name of the type in safetensors: ``BF16``."""
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Job:
    """One snapshot to write."""

    directory: Path
    model: Path
    """Folder from which config and tokenizer are copied."""
    keep: int
    shard_bytes: int
    version: Version
    epoch: int
    fleet_id: str
    tensors: Sequence[StagedTensor]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors)


def write_snapshot(job: Job, *, check_cancelled: CancelCheck) -> Snapshot:
    """Write a snapshot completely or not at all, then remove old snapshots.

    Raises:
        SnapshotFailed: The snapshot could not be written. The directory is unchanged.
    """
    try:
        with lock_directory(job.directory):
            remove_leftovers(job.directory)
            check_free_space(job.directory, job.bytes)
            return _publish(job, check_cancelled)
    except DirectoryInUseError as error:
        raise SnapshotFailed(f"{error} Give each trainer its own directory.") from None
    except OSError as error:
        raise SnapshotFailed(describe_os_error(job.directory, job.version.label, job.bytes, error)) from error


def _publish(job: Job, check_cancelled: CancelCheck) -> Snapshot:
    def describe(sequence: int, files: Mapping[str, FileEntry]) -> Manifest:
        version = job.version
        return Manifest(
            sequence=sequence, label=version.label, run=version.run, step=version.step, epoch=job.epoch, fleet_id=job.fleet_id,
            created=utc_now(), tensors=len(job.tensors), bytes=job.bytes, files=dict(files),
        )  # fmt: skip

    name = folder_name(job.version.run, job.version.step, job.version.label)
    return publish(job.directory, name, keep=job.keep, write=lambda folder: _write_model(job, folder, check_cancelled), describe=describe)


def _write_model(job: Job, folder: Path, check_cancelled: CancelCheck) -> dict[str, FileEntry]:
    files = copy_model_files(job.model, folder, check_cancelled)
    shards = list(_split_shards(job.tensors, job.shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        header = build_header((tensor.name, tensor.dtype, tensor.shape) for tensor in shard)
        files[name] = write_file(folder / name, [header, *(tensor.data for tensor in shard)], check_cancelled)
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": job.bytes}, "weight_map": weight_map}
        files[INDEX] = write_file(folder / INDEX, [json.dumps(index, indent=1).encode()], check_cancelled)
    if CONFIG not in files:
        raise SnapshotFailed(f"{job.model / CONFIG} no longer exists: a snapshot without it cannot be loaded.")
    return files


def _split_shards(tensors: Sequence[StagedTensor], max_bytes: int) -> Iterator[list[StagedTensor]]:
    """Yield the tensors of each file, at most ``max_bytes`` per file and in order. A larger tensor gets its own file."""
    held: list[StagedTensor] = []
    size = 0
    for tensor in tensors:
        if held and size + tensor.data.nbytes > max_bytes:
            yield held
            held, size = [], 0
        held.append(tensor)
        size += tensor.data.nbytes
    yield held
