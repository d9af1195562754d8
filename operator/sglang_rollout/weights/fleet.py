"""Calls to a fleet about its versions: what is where, the bytes of one, and checks of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pydantic import ValidationError

from sglang_rollout.staging.copies import Copy
from sglang_rollout.staging.index import StagedError
from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.errors import FleetError, FleetRefused
from sglang_rollout.trainer.refusals import parse_object
from sglang_rollout.weights.choose import choose_version
from sglang_rollout.wire.ports import FLEET, FLEET_UPDATES, STAGED, TICKET_HEADER
from sglang_rollout.wire.staged import IndexReply, Piece
from sglang_rollout.wire.states import Version
from sglang_rollout.wire.trainer import FleetDocument

CALL_SECONDS = 60.0
VERIFY_SECONDS = 660.0
"""Longer than the coordinator waits for the weight store."""
PARALLEL_PIECES = 4
"""Pieces that are downloaded at a time."""


@dataclass
class Row:
    """One version, and where it is."""

    update: str
    version: Version | None = None
    digest: str = ""
    bytes: int = 0
    author: str = ""
    places: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True if it has a digest."""
        return bool(self.digest)


class FleetWeights:
    """The versions of one fleet.

    Args:
        http: The fleet's URL.
    """

    def __init__(self, http: Http) -> None:
        self._http = http

    def document(self) -> FleetDocument:
        """Return the discovery document. Raises FleetError if the fleet has no weight store."""
        try:
            found = FleetDocument.model_validate(self._http.get(FLEET, timeout=CALL_SECONDS))
        except ValidationError as error:
            raise FleetError(f"{self._http.url}{FLEET} is not a discovery document. Is this the URL of a rollout's router?") from error
        if found.store is None:
            raise FleetError(f"The fleet {found.name} has no weight store, because its weights.transport is {found.transport}.")
        return found

    def rows(self) -> list[Row]:
        """Return all versions, oldest first."""
        return list_rows(self.document())

    def find(self, name: str) -> Row:
        """Return the complete version with this name. Raises NoSuchVersionError."""
        rows = {row.update: row for row in self.rows() if row.is_complete}
        return rows[choose_version(name, {update: row.version for update, row in rows.items()})]

    def snapshots(self) -> list[tuple[str, Version]]:
        """Return update and version of each snapshot, oldest first. Raises FleetError if the weight store writes none."""
        store = self.document().store
        if store is None or store.snapshots is None:
            raise FleetError("The weight store writes no snapshots: set weights.store.snapshots.")
        return [(each.update, each.version) for each in store.snapshots.snapshots]

    def verify(self, update: str) -> list[str]:
        """Let the weight store read a snapshot, and return how it differs from its digests."""
        reply = self._http.send("POST", f"{FLEET_UPDATES}/{update}/verify", {}, timeout=VERIFY_SECONDS)
        body = parse_object(reply)
        fleet = body.get("fleet")
        if not reply.ok or not isinstance(fleet, dict):
            raise FleetRefused(f"{FLEET_UPDATES}/{update}/verify", reply.status_code, str(body.get("message", reply.reason)))
        return [str(problem) for problem in fleet.get("problems", [])]

    def download(self, update: str, copy: Copy, progress: Callable[[int], None]) -> None:
        """Download a version into a folder. Every piece is checked against its digest. ``progress`` receives the bytes so far.

        Raises:
            FleetError: The version is gone, or the fleet does not answer.
            StagedError: Bytes do not have their digest, or there is no space.
        """
        fleet = self._http.post(f"{FLEET_UPDATES}/{update}/read", {}, timeout=CALL_SECONDS).get("fleet") or {}
        headers = {TICKET_HEADER: str(fleet.get("ticket", ""))}
        pieces: list[Piece] = []
        for reply in self._read_index(update, headers):
            for entry in reply.entries:
                if entry.shard is not None:
                    copy.add_shard(entry.shard)
                elif entry.piece is not None:
                    pieces.append(entry.piece)

        def get(piece: Piece) -> tuple[Piece, bytes]:
            path = f"{STAGED}/{update}/pieces/{piece.shard}/{piece.piece}"
            answer = self._http.send("GET", path, None, timeout=CALL_SECONDS, headers=headers)
            if not answer.ok:
                raise FleetRefused(path, answer.status_code, answer.reason)
            return piece, answer.content

        with ThreadPoolExecutor(PARALLEL_PIECES) as pool:
            for start in range(0, len(pieces), PARALLEL_PIECES):
                for piece, data in pool.map(get, pieces[start : start + PARALLEL_PIECES]):
                    copy.write_piece(piece.shard, piece.piece, data, piece.digest)
                progress(copy.index.bytes_arrived)
        if copy.index.seal().digest != fleet.get("digest"):
            raise StagedError(f"The bytes of update {update} do not have the digest {str(fleet.get('digest'))[:12]}…. Export it again.")

    def _read_index(self, update: str, headers: dict[str, str]) -> Iterator[IndexReply]:
        position = 0
        while True:
            path = f"{STAGED}/{update}/index?from={position}"
            answer = self._http.send("GET", path, None, timeout=CALL_SECONDS, headers=headers)
            if not answer.ok:
                raise FleetRefused(path, answer.status_code, answer.reason)
            try:
                reply = IndexReply.model_validate(parse_object(answer))
            except ValidationError as error:
                raise FleetError(f"The fleet's answer to {path} is no index of a version: {error.errors()[0]['msg']}.") from error
            yield reply
            if not reply.entries or reply.entries[-1].end is not None:
                return
            position = reply.next


def list_rows(document: FleetDocument) -> list[Row]:
    """Return all versions of a fleet, oldest first: those of its store, its snapshots and its engines' pods. Pure."""
    rows: dict[str, Row] = {}
    store = document.store
    copies = store.copies if store is not None else []
    snapshots = store.snapshots.snapshots if store is not None and store.snapshots is not None else []
    for copy in copies:
        rows[copy.update] = Row(copy.update, copy.version, copy.digest, copy.bytes, places=["store" if copy.digest else "store (arriving)"])
    for each in snapshots:
        row = rows.setdefault(each.update, Row(each.update, each.version, each.digest, each.bytes))
        row.version, row.author = row.version or each.version, each.author
        row.places.append("snapshot (damaged)" if each.problem else "snapshot")
    engines: dict[str, int] = {}
    for copy in (copy for member in document.members for copy in member.staged if copy.digest):
        row = rows.setdefault(copy.update, Row(copy.update, copy.version, copy.digest, copy.bytes))
        row.version = row.version or copy.version
        engines[copy.update] = engines.get(copy.update, 0) + 1
    for update, count in engines.items():
        rows[update].places.append(f"{count} of {len(document.members)} engines")
    last = document.last_update
    if last is not None and last.update in rows:
        rows[last.update].author = rows[last.update].author or last.author
    for row in rows.values():
        if row.version is not None and row.version == document.committed and row.is_complete:
            row.places.insert(0, "committed")
    return sorted(rows.values(), key=lambda row: (row.version is None, (row.version.run, row.version.step) if row.version else (0, 0)))
