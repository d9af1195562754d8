"""The weight store: versions in a folder, which arrive by uploads or through the process groups of trainers.

``app`` calls it for the coordinator. It decides nothing about updates: the coordinator opens, seals and drops versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable

import aiohttp

from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.index import StagedError, StagedFault, piece_count, tensor_bytes
from sglang_rollout.store.fetch import Fetcher
from sglang_rollout.store.receivers import ReceiverError, Receivers
from sglang_rollout.store.snapshots import Snapshots
from sglang_rollout.store.uploads import Uploads
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.staged import (
    PIECE_BYTES,
    Shard,
    StageRequest,
    StoreCommitRequest,
    StoreGroupRequest,
    StoreOpenRequest,
    StoreReadReply,
    StoreReadRequest,
    StoreReceiveRequest,
    StoreSealRequest,
    StoreStatus,
    StoreVerifyReply,
    StoreVerifyRequest,
)

log = logging.getLogger(__name__)

_HASHING_THREADS = 4
"""Pieces of process groups that are hashed at a time."""
_MAX_FAILURES = 16
"""Failed updates whose reason is remembered."""
_MAX_READABLE = 4
"""Snapshots that may be read at a time."""


class Store:
    """The versions and the process groups of one weight store.

    Args:
        copies: The versions.
        receivers: The process groups.
        session: HTTP session for the agents.
        snapshots: Where committed versions are written; None: nowhere.
    """

    def __init__(self, copies: Copies, receivers: Receivers, session: aiohttp.ClientSession, snapshots: Snapshots | None) -> None:
        self._copies = copies
        self._receivers = receivers
        self._snapshots = snapshots
        self._fetcher = Fetcher(copies, session)
        self.uploads = Uploads(copies)
        self.instance = uuid.uuid4().hex
        """Identifies this run of the process."""
        self.on_received: Callable[[int, float], None] = lambda _bytes, _seconds: None
        """Called after each bucket from a process group, for metrics."""
        self._hashing = asyncio.Semaphore(_HASHING_THREADS)
        self._confirmations: dict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self._failures: OrderedDict[str, str] = OrderedDict()
        """Why the versions of these updates were deleted before they were complete."""
        self._committed = ""
        self._readable: OrderedDict[str, Copy] = OrderedDict()
        """Snapshots that readers with a ticket may read."""

    def status(self) -> StoreStatus:
        """Return the versions, the snapshots and the open process groups."""
        return StoreStatus(
            instance=self.instance, copies=self._copies.status(), groups=self._receivers.names, committed=self._committed,
            snapshots=self._snapshots.status() if self._snapshots is not None else None,
        )  # fmt: skip

    def get(self, update: str) -> Copy | None:
        """Return the copy of an update that readers with its ticket may read: in memory, or a snapshot; None if there is none."""
        return self._copies.get(update) or self._readable.get(update)

    async def open(self, request: StoreOpenRequest) -> None:
        """Begin a version. May be repeated.

        Raises:
            StagedError: The shards are malformed or too large, or there is no space. Nothing is left of the version.
            RefusedError: The version has other shards already, its update has failed, or ``base`` is missing or has other shards.
        """
        self._check_base(request)
        await self.drop([*request.keep, request.update])
        known = self._copies.get(request.update)
        if known is None:
            self._check_failure(request.update)
        elif known.index.shards != request.shards:
            raise _conflict(f"Update {request.update} has begun already, with other shards.")
        copy = self._copies.open(request.update, request.ticket, request.size_limit)
        if known is None:
            await self._add_shards(copy, request.shards)
        if request.upload_ticket:
            self.uploads.allow(request.update, request.upload_ticket, request.upload_seconds, request.base)

    async def join(self, request: StoreGroupRequest) -> None:
        """Join a process group of a trainer.

        Raises:
            RefusedError: The process group could not be joined before the deadline.
        """
        try:
            await self._receivers.join(request)
        except ReceiverError as error:
            raise RefusedError(Refusal(error.code, str(error))) from error
        log.info("Joined process group %s at %s:%d.", request.group_name, request.master_address, request.master_port)

    async def leave(self, group: str) -> None:
        """Leave a process group. This ends a call that waits in it."""
        await self._receivers.leave(group)

    async def receive(self, request: StoreReceiveRequest) -> None:
        """Receive one bucket as the next shard. Its pieces enter the index while and after it arrives.

        If the bucket does not arrive, the version is deleted, because a trainer does not send a bucket twice.

        Raises:
            StagedError: The shard is malformed or too large, or there is no space.
            RefusedError: There is no such update or process group, or the bucket did not arrive before the deadline.
        """
        copy = self._find(request.update)
        receiver = self._receivers.find(request.group_name)
        if receiver is None or receiver.is_busy:
            problem = "is not open" if receiver is None else "receives another bucket"
            raise _conflict(f"Process group {request.group_name} {problem}.")
        if copy.is_complete:
            raise _conflict(f"The version of update {request.update} is complete and takes no further tensors.")
        began = time.monotonic()
        try:
            sizes = [tensor_bytes(tensor) for tensor in request.shard.tensors]
            total, shard = sum(sizes), len(copy.index.shards)
            copy.add_shard(request.shard)
            await copy.allocate(shard)
            confirm = self._confirmer(copy, shard)
            path, start = copy.shard_path(shard), copy.data_start(shard)
            await receiver.receive(path, start, [total] if request.flattened else sizes, request.deadline, confirm)
            if copy.is_deleted:
                raise StagedError(f"Update {request.update} was dropped meanwhile.", StagedFault.DELETED)
            confirm(total)
        except ReceiverError as error:
            await self._receivers.leave(request.group_name)
            await self._fail(request.update, f"Process group {request.group_name}: {error}")
            raise _upstream(self._failures[request.update]) from error
        except StagedError as error:
            await self._fail(request.update, str(error))
            raise
        self.on_received(total, time.monotonic() - began)

    async def seal(self, request: StoreSealRequest) -> None:
        """Declare a version complete. May be repeated.

        Raises:
            StagedError: Pieces are missing.
            RefusedError: There is no such update, or it became another version.
        """
        copy = self._find(request.update)
        if copy.is_complete and copy.version not in (None, request.version):
            raise _conflict(f"Update {request.update} has become version {copy.version} already.")
        await asyncio.gather(*self._confirmations.get(request.update, ()))
        self._check_failure(request.update)
        copy.seal(request.version)

    async def fetch(self, request: StageRequest) -> None:
        """Copy a version from agents that hold it, after this store has lost it.

        Raises:
            StagedError: The version cannot be copied, or is not complete in time.
        """
        await self.drop([*request.keep, request.update])
        self._failures.pop(request.update, None)
        if request.parents:
            await self._fetcher.fetch(request)
            return
        snapshots = self._require_snapshots()
        source = await snapshots.open(request.update)
        try:
            await self._fetcher.fetch(request, source)
        except StagedError as error:
            if error.fault is StagedFault.WRONG_DIGEST:
                snapshots.note_damage(request.update, str(error))
            if error.fault is not StagedFault.DELETED:  # else another call has taken the copy over, or has dropped it
                await self._delete(request.update)
            raise

    async def commit(self, request: StoreCommitRequest) -> None:
        """Note that a version is committed, and write its snapshot in the background if one is due. May be repeated.

        Raises:
            RefusedError: There is no such version, or it is not complete.
        """
        copy = self._find(request.update)
        if not copy.is_complete:
            raise _conflict(f"The version of update {request.update} is not complete.")
        if self._snapshots is not None:
            await self._snapshots.commit(request, copy)
        self._committed = request.update

    async def read(self, request: StoreReadRequest) -> StoreReadReply:
        """Let readers with the ticket read a complete version, in memory or on the volume, and describe it.

        Raises:
            RefusedError: There is no such version.
            StagedError: The snapshot is damaged.
        """
        copy = self._copies.get(request.update)
        if copy is not None and copy.is_complete:
            self._copies.open(request.update, request.ticket, copy.size_limit)
        else:
            copy = await self._require_snapshots().open(request.update, request.ticket)
            self._readable[request.update] = copy
            self._readable.move_to_end(request.update)
            while len(self._readable) > _MAX_READABLE:
                self._readable.popitem(last=False)
        end = copy.index.end
        if end is None:
            raise _conflict(f"The version of update {request.update} is not complete.")
        return StoreReadReply(version=copy.version, digest=end.digest, bytes=end.bytes)

    async def verify(self, request: StoreVerifyRequest) -> StoreVerifyReply:
        """Read all files of a snapshot, and compare them with their digests. Raises RefusedError if there is no such snapshot."""
        return StoreVerifyReply(problems=await self._require_snapshots().verify(request.update, request.deadline))

    async def drop(self, keep: Iterable[str]) -> None:
        """Delete all versions but these."""
        kept = set(keep)
        await self._fetcher.keep(kept)
        if self._snapshots is not None:
            await self._snapshots.drop(kept)
        await self._copies.keep(kept)
        self.uploads.forget(kept)
        for update in [each for each in self._confirmations if each not in kept]:
            del self._confirmations[update]

    async def close(self) -> None:
        """Leave all process groups, and end all copies and snapshots that are under way."""
        await self._fetcher.keep(set())
        if self._snapshots is not None:
            await self._snapshots.close()
        await self._receivers.close()

    def _check_base(self, request: StoreOpenRequest) -> None:
        """Raise RefusedError if pieces cannot come as differences from the base of an upload."""
        if not request.base:
            return
        base = self._copies.find(request.base)
        problem = "the weight store does not have it" if base is None or base.update not in request.keep else ""
        if base is not None and base.index.shards != request.shards:
            problem = "it has other tensors or shards"
        if problem:
            message = f"The upload cannot differ from the base {request.base[:12]}…: {problem}. Upload all pieces whole."
            raise RefusedError(Refusal(RefusalCode.BASE_MISSING, message))

    async def _add_shards(self, copy: Copy, shards: list[Shard]) -> None:
        try:
            for shard in shards:
                copy.add_shard(shard)
        except StagedError:
            await self._delete(copy.update)
            raise

    def _require_snapshots(self) -> Snapshots:
        """Return the snapshots. Raises RefusedError if the store has none."""
        if self._snapshots is None:
            message = "The weight store has no such version, and writes no snapshots (weights.store.snapshots)."
            raise RefusedError(Refusal(RefusalCode.NOT_FOUND, message))
        return self._snapshots

    def _confirmer(self, copy: Copy, shard: int) -> Callable[[int], None]:
        """Return a function that enters the pieces of a shard into the index, given how many of its bytes have arrived."""
        size = copy.index.sizes[shard]
        done = 0

        def confirm(received: int) -> None:
            nonlocal done
            complete = piece_count(size) if received == size else received // PIECE_BYTES
            for piece in range(done, complete):
                task = asyncio.create_task(self._confirm(copy, shard, piece), name=f"hash piece {piece} of shard {shard}")
                tasks = self._confirmations[copy.update]
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            done = max(done, complete)

        return confirm

    async def _confirm(self, copy: Copy, shard: int, piece: int) -> None:
        try:
            async with self._hashing:
                await copy.confirm_piece(shard, piece)
        except (StagedError, OSError) as error:
            if copy.is_deleted:
                return
            await self._fail(copy.update, f"Piece {piece} of shard {shard} cannot be read: {error}")

    def _find(self, update: str) -> Copy:
        """Return the copy of an update. Raises RefusedError if there is none."""
        self._check_failure(update)
        copy = self._copies.get(update)
        if copy is None:
            message = f"The weight store has no update {update}: it was dropped, or the store was restarted."
            raise RefusedError(Refusal(RefusalCode.NOT_FOUND, message))
        return copy

    def _check_failure(self, update: str) -> None:
        """Raise RefusedError for an update that has failed."""
        if update in self._failures:
            raise _conflict(f"Update {update} has failed and can only be dropped. {self._failures[update]}")

    async def _fail(self, update: str, message: str) -> None:
        """Delete a version that cannot become complete, and remember why."""
        log.warning("Update %s has failed: %s", update, message)
        self._failures.setdefault(update, message)
        while len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)
        await self._delete(update)

    async def _delete(self, update: str) -> None:
        await self.drop([copy.update for copy in self._copies.status() if copy.update != update])


def refusal_of(error: StagedError) -> RefusedError:
    """Return the refusal that answers a call which failed with this error."""
    codes = {
        StagedFault.NO_SPACE: RefusalCode.UNAVAILABLE,
        StagedFault.LATE: RefusalCode.UNAVAILABLE,
        StagedFault.WRONG_DIGEST: RefusalCode.UPSTREAM_FAILED,
        StagedFault.INCOMPLETE: RefusalCode.CONFLICT,
        StagedFault.DELETED: RefusalCode.NOT_FOUND,
    }
    return RefusedError(Refusal(codes.get(error.fault, RefusalCode.INVALID_REQUEST), str(error)))


def _conflict(message: str) -> RefusedError:
    return RefusedError(Refusal(RefusalCode.CONFLICT, message))


def _upstream(message: str) -> RefusedError:
    return RefusedError(Refusal(RefusalCode.UPSTREAM_FAILED, message))
