"""Uploads against a scripted fleet: no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

from sglang_rollout.trainer import PushFailed, store_watch, upload
from sglang_rollout.trainer.calls import Cancellation, Http
from sglang_rollout.trainer.push import ALREADY_COMMITTED, PushOptions
from sglang_rollout.trainer.tensors import Source
from sglang_rollout.trainer.upload import SENDING_THREADS, PieceCutter, PieceData, Senders, Upload, Wait, plan_shards
from sglang_rollout.wire.ports import FLEET_UPDATES
from tests.unit.trainer.support.scripted_fleet import FakeFleet, Reply

GOOD = (200, {"success": True, "message": "ok"})
UPDATE = "0123456789abcdef0123456789abcdef"
PATH = f"{FLEET_UPDATES}/{UPDATE}"
COMMIT = f"{PATH}/commit"
PIECE_BYTES = 10
BEGUN = {
    "update": UPDATE,
    "ticket": "t",
    "piece_bytes": PIECE_BYTES,
    "expires_seconds": 60.0,
    "version": {"run": 1, "step": 1, "label": "7"},
}


@dataclass
class Tensor:
    """A tensor with bytes."""

    data: bytes
    dtype: str = "torch.uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.data) // self.element_size(),)

    def element_size(self) -> int:
        return {"torch.uint8": 1, "torch.float32": 4, "torch.float8_e4m3fnuz": 1}[self.dtype]


def letters(first: int, count: int) -> bytes:
    return bytes((first + n) % 256 for n in range(count))


MODEL = {"a": Tensor(letters(0, 7)), "b": Tensor(letters(50, 26)), "c": Tensor(letters(100, 8), "torch.float32")}
"""41 bytes: "c" is not aligned behind the others, so it begins a shard."""


@pytest.fixture
def willing(fake: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    monkeypatch.setattr(upload, "FIRST_PAUSE_SECONDS", 0.01)
    fake.replies |= {FLEET_UPDATES: (200, {"success": True, "message": "", "fleet": BEGUN}), "PUT": GOOD, PATH: GOOD, COMMIT: GOOD}
    return fake


def run(fake: FakeFleet, model: Any = None, *, wait: Wait = "committed", timeout: float = 30.0, **more: Any) -> Upload:
    source = Source(MODEL if model is None else model)
    source.check(64)
    options = PushOptions("7", bucket_bytes=64, timeout=timeout, checksums=more.pop("checksums", {}))
    made = Upload(Http(fake.url), options, wait=wait, read_bytes=lambda tensor: memoryview(tensor.data), **more)
    made.run(source)
    return made


def pieces(fake: FakeFleet) -> dict[str, bytes]:
    """Return the bytes of each piece by shard and piece."""
    return {path.removeprefix(f"{PATH}/pieces/"): body["data"] for path, body in fake.calls if "/pieces/" in path}


def deletions(fake: FakeFleet) -> int:
    return fake.counts[PATH]


def test_an_upload_announces_all_tensors_sends_pieces_and_commits(willing: FakeFleet) -> None:
    made = run(willing)
    first, *_, last = willing.calls
    assert (first[0], last) == (FLEET_UPDATES, (COMMIT, {"wait": "committed"}))
    described = [[(each["name"], each["dtype"], each["shape"]) for each in shard["tensors"]] for shard in first[1]["shards"]]
    assert described == [[("a", "U8", [7]), ("b", "U8", [26])], [("c", "F32", [2])]]
    assert first[1]["label"] == "7"
    sent = pieces(willing)
    whole = MODEL["a"].data + MODEL["b"].data
    assert sent == {**{f"0/{n}": whole[10 * n : 10 * n + 10] for n in range(4)}, "1/0": MODEL["c"].data}
    assert all(
        body["ticket"] == "t" and body["digest"] == sha256(body["data"]).hexdigest() for path, body in willing.calls if "/pieces/" in path
    )
    assert deletions(willing) == 0
    assert made.result(epoch=4) | {"phases": None} == {
        "version": "7", "epoch": 4, "world_size": 1, "bytes": 41, "transferred": 41, "buckets": 2, "phases": None, "fenced": {},
        "state": "committed",
    }  # fmt: skip
    assert set(made.phases) == {"begin", "prepare", "transfer", "end"}


def test_a_large_model_is_cut_into_shards(willing: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "SHARD_BYTES", 20)
    run(willing, {name: Tensor(letters(n, 9)) for n, name in enumerate("abcde")})
    assert [len(shard["tensors"]) for shard in willing.calls[0][1]["shards"]] == [2, 2, 1]
    assert sorted(pieces(willing)) == ["0/0", "0/1", "1/0", "1/1", "2/0"]


@pytest.mark.parametrize(
    "failure",
    [(503, {"success": False, "message": "starting"}), (502, {}), (200, {}, {"Content-Length": "99", "Connection": "close"})],
    ids=["503", "502", "lost"],
)
def test_a_piece_is_sent_again_after_an_error_that_may_pass(willing: FakeFleet, failure: Reply) -> None:
    willing.replies[f"{PATH}/pieces/0/2"] = [failure, failure, GOOD]
    assert run(willing, timeout=60).state == "committed"
    assert willing.counts[f"{PATH}/pieces/0/2"] == 3
    assert len({body["data"] for path, body in willing.calls if path == f"{PATH}/pieces/0/2"}) == 1


@pytest.mark.parametrize("status", [400, 403, 404, 409])
def test_a_refused_piece_ends_the_upload_and_deletes_it(willing: FakeFleet, status: int) -> None:
    willing.replies[f"{PATH}/pieces/0/2"] = (status, {"success": False, "message": "the ticket of this update has expired"})
    with pytest.raises(
        PushFailed, match=r"phase 'transfer': the ticket of this update has expired\. Push again\. The engines serve"
    ) as caught:
        run(willing)
    assert caught.value.phase == "transfer"
    assert willing.counts[f"{PATH}/pieces/0/2"] == 1
    assert (deletions(willing), willing.counts[COMMIT]) == (1, 0)


def test_a_store_that_stays_away_fails_the_upload_at_the_deadline(willing: FakeFleet) -> None:
    willing.replies["PUT"] = (503, {"success": False, "message": "the weight store does not answer"})
    with pytest.raises(PushFailed, match=r"phase 'transfer': the weight store does not answer"):
        run(willing, timeout=0.1)
    assert deletions(willing) == 1


@pytest.mark.parametrize(("status", "warns"), [(404, False), (409, False), (500, True)])
def test_only_an_upload_that_may_still_be_open_is_reported(
    willing: FakeFleet, caplog: pytest.LogCaptureFixture, status: int, warns: bool
) -> None:
    willing.replies |= {"PUT": (404, {"success": False, "message": "no such update"}), PATH: (status, {"success": False, "message": "no"})}
    with pytest.raises(PushFailed, match="no such update"):
        run(willing)
    assert ("could not be deleted" in caplog.text) is warns


def hang_pieces(fake: FakeFleet) -> threading.Event:
    """Leave pieces unanswered until the event is set."""
    release = threading.Event()

    def hang(_: dict[str, Any]) -> Reply:
        release.wait(60)
        return GOOD

    fake.replies |= {"PUT": hang, FLEET_UPDATES: (200, {"success": True, "message": "", "fleet": BEGUN | {"store": "demo-store"}})}
    return release


@pytest.mark.parametrize("answer", ["none", "502", "503", "504"])
def test_a_store_that_hangs_ends_the_upload_and_is_named(willing: FakeFleet, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """The attempts to send a piece have no deadline of their own here."""
    monkeypatch.setattr(store_watch, "SILENT_SECONDS", 0.2)
    release = hang_pieces(willing)

    def ask(_: dict[str, Any]) -> Reply:
        if answer == "none":
            release.wait(60)
        return (int(answer), {"error": {"message": "The weight store does not answer."}}) if answer != "none" else GOOD

    willing.replies["GET"] = ask
    del willing.replies[PATH]
    willing.replies["DELETE"] = GOOD
    with pytest.raises(
        PushFailed, match=r"the weight store demo-store has taken no piece and answered no question for \d+ s\..*Push again"
    ):
        run(willing, timeout=600)
    release.set()


def test_a_slow_piece_is_no_failure_while_the_store_answers(willing: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "SILENT_SECONDS", 0.05)
    release, asked = hang_pieces(willing), []

    def ask(_: dict[str, Any]) -> Reply:
        asked.append(True)
        if len(asked) == 3:
            release.set()
        return (200, {"update": UPDATE, "bytes": 0, "missing": []})

    willing.replies["GET"] = ask
    del willing.replies[PATH]
    assert run(willing, timeout=600).state == "committed"
    assert len(asked) >= 3


def test_an_upload_that_the_store_has_lost_ends_while_its_pieces_hang(willing: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "SILENT_SECONDS", 0.05)
    release = hang_pieces(willing)
    del willing.replies[PATH]
    willing.replies |= {"GET": (404, {"success": False, "message": "the weight store has no such update"}), "DELETE": GOOD}
    with pytest.raises(PushFailed, match=r"phase 'transfer': the weight store has no such update\."):
        run(willing, timeout=600)
    release.set()


def test_threads_of_a_failed_upload_end_before_it_returns() -> None:
    begun, ended = threading.Event(), []

    def send(_: PieceData) -> None:
        begun.set()
        time.sleep(0.2)
        ended.append(True)

    senders = Senders(send, Cancellation(), lambda: None)
    senders.put(PieceData(0, 0, ()))
    assert begun.wait(10)
    senders.stop()
    assert ended, "it still read tensors of the caller"


def test_a_slow_connection_may_take_longer_than_the_timeout_of_a_part(willing: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause of the reader is short, and all of them together are long. The kernel holds some MiB that the reader has not read."""
    size, seconds = 48 << 20, 1.2
    monkeypatch.setattr(upload, "STALLED_SECONDS", seconds)
    willing.replies[FLEET_UPDATES] = (200, {"success": True, "message": "", "fleet": BEGUN | {"piece_bytes": size}})
    willing.slow_read = lambda: time.sleep(seconds / 24)
    began = time.monotonic()
    run(willing, {"a": Tensor(bytes(size))})
    assert time.monotonic() - began > seconds, "the reader was too fast to show anything"
    assert willing.counts[f"{PATH}/pieces/0/0"] == 1


def test_a_refused_begin_sends_nothing(willing: FakeFleet) -> None:
    message = "The version has at least 41 bytes, more than the limit of 40 bytes"
    willing.replies[FLEET_UPDATES] = (400, {"success": False, "message": message, "code": "InvalidRequest"})
    with pytest.raises(PushFailed, match=f"phase 'begin': {message}"):
        run(willing)
    assert [path for path, _ in willing.calls] == [FLEET_UPDATES]


def test_an_answer_of_another_release_is_reported(willing: FakeFleet) -> None:
    willing.replies[FLEET_UPDATES] = (200, {"success": True, "message": "", "fleet": {"update": UPDATE}})
    with pytest.raises(PushFailed, match=r"phase 'begin'.*not that of an upload"):
        run(willing)


def test_a_commit_is_repeated_until_the_fleet_has_committed(willing: FakeFleet) -> None:
    staged, committed = (
        (200, {"success": True, "message": "", "fleet": {"state": state, "fenced": {}}}) for state in ("staged", "committed")
    )
    willing.replies[COMMIT] = [(503, {"success": False, "message": "the coordinator has just started"}), staged, staged, committed]
    assert run(willing).state == "committed"
    assert willing.counts[COMMIT] == 4


def test_a_push_may_return_when_its_bytes_are_staged(willing: FakeFleet) -> None:
    willing.replies[COMMIT] = (200, {"success": True, "message": "", "fleet": {"state": "staged"}})
    assert run(willing, wait="staged").state == "staged"
    assert [body for path, body in willing.calls if path == COMMIT] == [{"wait": "staged"}]


def test_a_fleet_that_never_commits_fails_the_push_at_the_deadline(willing: FakeFleet) -> None:
    willing.replies[COMMIT] = (200, {"success": True, "message": "", "fleet": {"state": "staged"}})
    with pytest.raises(PushFailed, match=r"phase 'end': the fleet did not commit within 0.3 s\. The fleet may still commit it"):
        run(willing, timeout=0.1)


def test_a_refused_commit_names_the_engine(willing: FakeFleet) -> None:
    willing.replies[COMMIT] = (400, {"success": False, "message": "engine e0 refused the weights", "fleet": {"engine": "e0"}})
    with pytest.raises(PushFailed, match=r"phase 'end' on engine e0: engine e0 refused the weights"):
        run(willing)
    assert deletions(willing) == 1


def test_a_version_that_too_few_engines_have_loaded_is_not_pushed_again(willing: FakeFleet) -> None:
    fleet = {"reason": "TooFewEngines", "state": "committed", "fenced": {"e1": "was killed"}}
    willing.replies[COMMIT] = (500, {"success": False, "message": "only 1 of 2 engines have loaded it", "fleet": fleet})
    with pytest.raises(PushFailed, match="only 1 of 2 engines") as failure:
        run(willing)
    assert failure.value.advice == ALREADY_COMMITTED
    assert deletions(willing) == 0


def test_a_push_names_fenced_engines(willing: FakeFleet) -> None:
    willing.replies[COMMIT] = (200, {"success": True, "message": "", "fleet": {"state": "committed", "fenced": {"e1": "was killed"}}})
    assert run(willing).fenced == {"e1": "was killed"}


def test_checksums_are_sent(willing: FakeFleet) -> None:
    run(willing, checksums={2: ["x", "y"]})
    assert willing.calls[-1] == (COMMIT, {"wait": "committed", "checksums": {"2": ["x", "y"]}})


def test_tensors_that_cannot_be_announced_are_refused_before_the_first_call(willing: FakeFleet) -> None:
    with pytest.raises(
        PushFailed, match=r"phase 'prepare'.*an iterator does not name them\. Pass specs=, or a state dict\. Nothing was sent"
    ):
        run(willing, iter(MODEL.items()))
    with pytest.raises(PushFailed, match=r"'a' has the type float8_e4m3fnuz, which safetensors does not have"):
        run(willing, {"a": Tensor(b"1", "torch.float8_e4m3fnuz")})
    assert willing.calls == []


def test_an_iterator_with_specs_is_uploaded(willing: FakeFleet) -> None:
    specs = [(name, tensor.shape, tensor.dtype) for name, tensor in MODEL.items()]
    source = Source(iter(MODEL.items()), specs)
    source.check(64)
    Upload(Http(willing.url), PushOptions("7", 64, 30.0), wait="committed", read_bytes=lambda tensor: memoryview(tensor.data)).run(source)
    assert sum(map(len, pieces(willing).values())) == 41


@pytest.mark.parametrize("error", [RuntimeError("shard 3 is lost"), KeyboardInterrupt()])
def test_an_upload_whose_tensors_fail_is_deleted(willing: FakeFleet, error: BaseException) -> None:
    class Lost(Tensor):
        @property
        def data(self) -> bytes:
            raise error

        @data.setter
        def data(self, _: bytes) -> None: ...

        @property
        def shape(self) -> tuple[int, ...]:
            return (5,)

    with pytest.raises(PushFailed if isinstance(error, RuntimeError) else KeyboardInterrupt):
        run(willing, MODEL | {"d": Lost(b"")})
    assert deletions(willing) == 1


def test_tensors_are_read_only_as_fast_as_pieces_are_sent(willing: FakeFleet) -> None:
    """A model of many buckets never lies in memory as a whole."""
    release, read = threading.Event(), []
    full = threading.Event()

    def hold(_: dict[str, Any]) -> Reply:
        release.wait(60)
        return GOOD

    def read_bytes(tensor: Tensor) -> memoryview:
        read.append(tensor)
        if len(read) == 2 * SENDING_THREADS + 1:
            full.set()
        return memoryview(tensor.data)

    willing.replies["PUT"] = hold
    source = Source({f"t{n}": Tensor(letters(n, PIECE_BYTES)) for n in range(100)})
    source.check(PIECE_BYTES)
    made = Upload(Http(willing.url), PushOptions("7", PIECE_BYTES, 60.0), wait="committed", read_bytes=read_bytes)
    thread = threading.Thread(target=made.run, args=(source,), daemon=True)
    thread.start()
    assert full.wait(60)
    thread.join(0.3)
    assert len(read) <= 2 * SENDING_THREADS + 2, "those being sent, those in the queue, and one that waits for a place"
    release.set()
    thread.join(60)
    assert len(pieces(willing)) == 100


@pytest.mark.parametrize("cuts", [[33, 8], [1] * 41, [41], [10, 10, 13, 8], [9, 2, 22, 1, 7]])
def test_pieces_do_not_depend_on_the_tensors(cuts: list[int]) -> None:
    data, cutter = letters(0, 41), PieceCutter([33, 8], PIECE_BYTES)
    found: list[PieceData] = []
    start = 0
    for size in cuts if cuts != [41] else [33, 8]:
        found += cutter.add(memoryview(data)[start : start + size])
        start += size
    assert [(piece.shard, piece.piece, len(piece.read())) for piece in found] == [(0, 0, 10), (0, 1, 10), (0, 2, 10), (0, 3, 3), (1, 0, 8)]
    assert b"".join(piece.read() for piece in found) == data


def test_a_tensor_above_the_size_of_a_shard_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "SHARD_BYTES", 10)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, size in (("a", 4), ("b", 30), ("c", 4)):
            yield name, Tensor(letters(0, size))

    source = Source(list(tensors()))
    source.check(64)
    shards, sizes = plan_shards(source.specs)
    assert ([len(shard.tensors) for shard in shards], sizes) == ([1, 1, 1], [4, 30, 4])
