"""Snapshots of the weight store: which committed versions are written to the volume, what lies there, and what can be read from there.

Nothing here delays an update: a child process writes, and threads list and read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sglang_rollout.checkpoints import snapshots as files
from sglang_rollout.checkpoints.publish import DirectoryInUseError, describe_refusal, lock_directory, remove_leftovers
from sglang_rollout.child_environment import clean_environment
from sglang_rollout.staging.copies import Copy
from sglang_rollout.staging.index import StagedError, StagedFault
from sglang_rollout.staging.snapshots import SnapshotCopy, open_snapshot
from sglang_rollout.staging.volume import Volume
from sglang_rollout.store.snapshot_writer import Job, Result, VerifyJob, WriteJob, describe_dropped
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import StoreCommitRequest
from sglang_rollout.wire.states import Snapshot, SnapshotsState, Version

log = logging.getLogger(__name__)

_MODULE = "sglang_rollout.store.snapshot_writer"
WRITE_SECONDS = 3600.0
"""Deadline of one snapshot: a volume that hangs is given up."""
RETRY_SECONDS = 60.0
"""When a snapshot that failed is written again, unless a newer version is due."""
LIST_SECONDS = 2.0
"""How long a call waits for the list of the snapshots."""


@dataclass(frozen=True)
class Settings:
    """Where snapshots are written, and which."""

    directory: Path
    every: int = 1
    """Versions between two snapshots."""
    keep: int = 3
    """Number of the newest snapshots that stay."""


class Snapshots:
    """The snapshots of one weight store.

    Args:
        settings: Where snapshots are written, and which.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[str, files.Snapshot] = {}
        """Snapshots of weight stores by update, oldest first."""
        self._problems: dict[str, str] = {}
        """Why the snapshots of these updates cannot be used."""
        self._commits: int | None = None
        """Commits since the last snapshot; None: none was written by this process, so the next commit is written."""
        self._counted = ""
        """Update of the newest commit: a repeated call is not counted again."""
        self._writing: tuple[WriteJob, asyncio.Task[None]] | None = None
        self._waiting: WriteJob | None = None
        self._listing: asyncio.Task[None] | None = None
        self._is_closed = False
        self.written = 0
        """Snapshots that this process has written."""
        self.failures = 0
        """Snapshots that this process could not write."""
        self._message = ""
        self._volume = Volume()

    def start(self) -> None:
        """Remove what an earlier process left unfinished, and list what is there, in the background."""
        self._listing = asyncio.create_task(self._open_directory(), name="list the snapshots")

    def status(self) -> SnapshotsState:
        """Return what is on the volume, and how the last snapshot ended."""
        writing = self._writing[0].update if self._writing is not None else ""
        listed = [_describe(each, self._problems.get(update, "")) for update, each in self._found.items()]
        return SnapshotsState(snapshots=listed, writing=writing, failures=self.failures, message=self._message)

    def has(self, update: str) -> bool:
        """Return whether the volume has a usable snapshot of an update."""
        return update in self._found and update not in self._problems

    async def open(self, update: str, ticket: str = "") -> SnapshotCopy:
        """Return the snapshot of an update as a copy for reading.

        Raises:
            RefusedError: There is no such snapshot.
            StagedError: The snapshot is damaged, or the volume does not answer.
        """
        found = self._require(update)
        try:
            return await self._volume.run(lambda: open_snapshot(found, self._volume, ticket))
        except StagedError as error:
            if error.fault is StagedFault.WRONG_DIGEST:
                self.note_damage(update, str(error))
            raise

    def note_damage(self, update: str, problem: str) -> None:
        """Note that a snapshot cannot be used. It stays on the volume until newer ones replace it."""
        log.warning("The snapshot of update %s is not used: %s", update, problem)
        self._problems[update] = problem

    async def commit(self, request: StoreCommitRequest, copy: Copy) -> None:
        """Write the snapshot of a committed version in the background, if one is due and none is there. May be repeated.

        Raises:
            RefusedError: The volume has not been listed yet.
        """
        if self._listing is not None and not (await asyncio.wait({self._listing}, timeout=LIST_SECONDS))[0]:
            message = f"The snapshots in {self._settings.directory} are not listed yet. Does the volume answer?"
            raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, message))
        end = copy.index.end
        if end is None or self.has(request.update) or request.update == self._counted:
            return
        self._counted = request.update
        self._commits = self._settings.every if self._commits is None else self._commits + 1
        if self._commits < self._settings.every:
            return
        self._commits = 0
        job = WriteJob(
            directory=self._settings.directory, keep=self._settings.keep, source=copy.folder, update=request.update,
            version=request.version, digest=end.digest, bytes=end.bytes, author=request.author, epoch=request.epoch,
            fleet_id=request.fleet_id,
        )  # fmt: skip
        if self._writing is None:
            self._begin(job)
        else:
            self._waiting = job

    async def drop(self, kept: set[str]) -> None:
        """Give up the snapshots of versions that are being deleted."""
        if self._waiting is not None and self._waiting.update not in kept:
            job, self._waiting = self._waiting, None
            self._fail(job, describe_dropped(job.version))
        if self._writing is not None and self._writing[0].update not in kept:
            self._writing[1].cancel()

    async def verify(self, update: str, seconds: float) -> list[str]:
        """Read all files of a snapshot, and return how they differ from their digests, as sentences.

        Raises:
            RefusedError: There is no such snapshot, or it was not read in time.
        """
        found = self._require(update)
        try:
            async with asyncio.timeout(seconds):
                problems = (await _run_child(Job(verify=VerifyJob(snapshot=found.path)))).problems
        except TimeoutError:
            message = f"The snapshot {found.path.name} was not read within {seconds:g} s. Does its volume answer?"
            raise RefusedError(Refusal(RefusalCode.UNAVAILABLE, message)) from None
        if problems:
            self.note_damage(update, problems[0])
        else:
            self._problems.pop(update, None)
        return problems

    async def close(self) -> None:
        """End what runs in the background. A snapshot that is not complete is removed at the next start."""
        self._is_closed, self._waiting = True, None
        tasks = [task for task in (self._listing, self._writing[1] if self._writing is not None else None) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _require(self, update: str) -> files.Snapshot:
        found = self._found.get(update)
        if found is None:
            message = f"The weight store has no snapshot of update {update}."
            raise RefusedError(Refusal(RefusalCode.NOT_FOUND, message))
        return found

    def _begin(self, job: WriteJob) -> None:
        task = asyncio.create_task(self._write(job), name=f"snapshot of update {job.update}")
        self._writing = job, task

    async def _write(self, job: WriteJob) -> None:
        failed = False
        try:
            while problem := await self._try_to_write(job):
                failed = True
                self._fail(job, problem)
                await asyncio.sleep(RETRY_SECONDS)
                if self._waiting is not None:
                    return  # a newer version
            self.written, self._message = self.written + 1, ""
            log.info("Version %s is a snapshot in %s.", job.version.label, job.directory)
            await self._list()
        except asyncio.CancelledError:
            if not failed and not self._is_closed:
                self._fail(job, describe_dropped(job.version))
            raise
        finally:
            self._writing = None
            following, self._waiting = self._waiting, None
            if following is not None:
                self._begin(following)

    async def _try_to_write(self, job: WriteJob) -> str:
        """Write a snapshot. Returns why it failed, as a sentence; empty if it is on disk."""
        log.info("Version %s is being written to %s (%d bytes).", job.version.label, job.directory, job.bytes)
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                result = await _run_child(Job(write=job))
        except TimeoutError:
            return f"The snapshot of {job.version.label} was not written within {WRITE_SECONDS:g} s. Does its volume answer?"
        return next(iter(result.problems), "")

    def _fail(self, job: WriteJob, problem: str) -> None:
        """Note that a snapshot was not written. The next commit is written, however many are left out otherwise."""
        self.failures += 1
        self._commits = None
        self._message = problem
        log.warning("%s", problem)

    async def _open_directory(self) -> None:
        def clean() -> None:
            with lock_directory(self._settings.directory):
                remove_leftovers(self._settings.directory)

        try:
            await self._volume.run(clean, None)
        except DirectoryInUseError as error:
            log.warning("%s Its unfinished snapshots stay.", error)
        except OSError as error:
            self._message = f"The directory {self._settings.directory} cannot be used for snapshots: {describe_refusal(error)}"
            log.warning("%s", self._message)
        await self._list()

    async def _list(self) -> None:
        listed = await self._volume.run(lambda: _list_snapshots(self._settings.directory), None)
        self._found = {each.manifest.update: each for each in listed if each.manifest.update}
        self._problems = {update: problem for update, problem in self._problems.items() if update in self._found}


def _list_snapshots(directory: Path) -> list[files.Snapshot]:
    try:
        found = files.list_snapshots(directory)
        entries = list(directory.iterdir()) if directory.exists() else []
    except OSError as error:
        log.warning("The snapshots in %s cannot be listed: %s", directory, error.strerror or error)
        return []
    readable = {each.path for each in found}
    for entry in entries:
        if not entry.name.startswith(files.HIDDEN) and entry not in readable and entry.is_dir():
            log.warning("%s is not used: it has no readable %s.", entry, files.MANIFEST)
    return found


def _describe(snapshot: files.Snapshot, problem: str) -> Snapshot:
    manifest = snapshot.manifest
    version = Version(run=manifest.run, step=manifest.step, label=manifest.label)
    return Snapshot(
        update=manifest.update, version=version, digest=manifest.digest, bytes=manifest.bytes, author=manifest.author,
        created=manifest.created, problem=problem,
    )  # fmt: skip


async def _run_child(job: Job) -> Result:
    """Run a job in a child process, which is killed if this task is cancelled."""
    pipe = asyncio.subprocess.PIPE
    line = [sys.executable, "-m", _MODULE, str(os.getpid())]
    process = await asyncio.create_subprocess_exec(*line, stdin=pipe, stdout=pipe, env=clean_environment(os.environ))
    try:
        output, _ = await process.communicate(job.model_dump_json(exclude_none=True).encode() + b"\n")
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
    try:
        return Result.model_validate_json(output)
    except ValidationError:
        return Result(problems=[f"The process that handles snapshots ended with code {process.returncode}."])
