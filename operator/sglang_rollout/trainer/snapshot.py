"""Snapshots of what is pushed: checkpoints on disk that engines, evaluation and a resumed trainer can load.

    with connect(url, snapshots=Snapshots("/ckpt/policy", model="/models/policy", every=10, keep=3)) as fleet:
        fleet.push(model.state_dict(), version=step)        # every tenth push is also written, in the background

The bytes are copied to host memory while they are pushed, so training may change the tensors as soon as ``push`` returns. The files
are written by a thread, and only when the fleet has committed the version: what was not committed never becomes a snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from sglang_rollout.checkpoints.folder import CONFIG
from sglang_rollout.checkpoints.format import OF_TORCH
from sglang_rollout.checkpoints.snapshots import Snapshot
from sglang_rollout.trainer.buckets import TensorSpec
from sglang_rollout.trainer.errors import SnapshotFailed
from sglang_rollout.trainer.snapshot_files import Job, StagedTensor, write
from sglang_rollout.trainer.waiting import Deadline, background
from sglang_rollout.wire.weights import Version

log = logging.getLogger(__name__)

HostBytes = Callable[[Any], memoryview]
"""A tensor's bytes in host memory, copied."""


class Snapshots:
    """When snapshots are written, where, and how many are kept.

    ``directory``: on a volume that the engines mount too, at the same path, if they are to load them. ``model``: the folder from which
    config and tokenizer are copied. ``every``: each so many-th push. ``keep``: so many of the newest stay; a new one is complete
    before an old one goes, so the volume needs room for ``keep + 1``. ``shard_bytes``: largest size of a file. ``deadline``:
    seconds for one snapshot to be written. A snapshot that fails is logged and raised by ``wait``; it never fails a push.
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
        if every < 1 or keep < 1 or shard_bytes < 1:
            raise ValueError(f"every={every}, keep={keep} and shard_bytes={shard_bytes} must be at least 1.")
        if not (Path(model) / CONFIG).is_file():
            raise ValueError(
                f"{model} is no folder with a {CONFIG}. Name the folder of the model; "
                "for a name on the Hugging Face hub that is what huggingface_hub.snapshot_download(name) returns."
            )
        self.directory = Path(directory)
        self.model = Path(model)
        self.every = every
        self.keep = keep
        self.shard_bytes = shard_bytes
        self.deadline = deadline
        self._pushes = 0
        self._running: Future[Snapshot] | None = None

    def wait(self, timeout: float | None = None) -> Snapshot | None:
        """Wait until the last snapshot that was begun is there; None if none was. Raises SnapshotFailed."""
        if self._running is None:
            return None
        seconds = self.deadline if timeout is None else timeout
        try:
            return self._running.result(seconds)
        except FutureTimeoutError:
            raise SnapshotFailed(
                f"The snapshot in {self.directory} is not written after {seconds:.0f} s: does its volume answer?"
            ) from None

    def begin(self, *, wanted: bool | None = None) -> Staging | None:
        """For ``Fleet.push``: a staging if this push is to become a snapshot. ``wanted`` overrides ``every``."""
        self._pushes += 1
        due = self._pushes % self.every == 0 if wanted is None else wanted
        if not due:
            return None
        if self._running is not None and not self._running.done():
            if wanted is None:
                log.warning(
                    "No snapshot of this push: the one before is still being written to %s. Raise every=%d.", self.directory, self.every
                )
                return None
            self._settle()
        return Staging(self)

    def close(self) -> None:
        """Wait for the snapshot that is being written; a failure has been logged."""
        self._settle()

    def start(self, tensors: list[StagedTensor], version: Version, epoch: int, fleet_id: str) -> Future[Snapshot]:
        """Write in the background."""
        job = Job(self.directory, self.model, self.keep, self.shard_bytes, version, epoch, fleet_id, tensors)
        self._running = background(self._write, job, Deadline(self.deadline))
        return self._running

    def _write(self, job: Job, deadline: Deadline) -> Snapshot:
        def alive() -> None:
            if deadline.passed:
                raise SnapshotFailed(
                    f"The snapshot of {job.version.label} was not written within {deadline.seconds:.0f} s; it was removed."
                )

        try:
            made = write(job, alive=alive)
        except Exception as error:
            log.error("%s", error if isinstance(error, SnapshotFailed) else f"The snapshot of {job.version.label} failed: {error!r}")  # noqa: TRY400
            raise
        log.info("Version %s is in %s (%d MiB).", job.version.label, made.path, job.bytes >> 20)
        return made

    def _settle(self) -> None:
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - it has been logged where it happened; nobody asked for it here
            log.debug("the last snapshot failed: %s", error)


class Staging:
    """The bytes of one push on their way into a snapshot."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._tensors: list[StagedTensor] | None = []

    def add(self, spec: TensorSpec, tensor: Any, host_bytes: HostBytes) -> None:
        """Copy one full tensor. A copy that fails ends the snapshot, not the push."""
        if self._tensors is None:
            return
        try:
            self._tensors.append(_staged(spec, tensor, host_bytes))
        except Exception as error:  # noqa: BLE001 - out of memory, a type without a name: the push continues
            log.error("No snapshot of this push: tensor %s could not be copied: %s", spec.name, error)  # noqa: TRY400
            self._tensors = None

    def publish(self, version: Version, epoch: int, fleet_id: str) -> Future[Snapshot] | None:
        """The fleet has committed: write. None if the copy had failed."""
        tensors, self._tensors = self._tensors, None
        return self._snapshots.start(tensors, version, epoch, fleet_id) if tensors is not None else None


def _staged(spec: TensorSpec, tensor: Any, host_bytes: HostBytes) -> StagedTensor:
    dtype = OF_TORCH.get(spec.dtype)
    if dtype is None:
        raise SnapshotFailed(f"safetensors knows no type {spec.dtype}")
    return StagedTensor(spec.name, dtype, spec.shape, host_bytes(tensor))
