"""Delta uploads against a scripted fleet: what is sent, and when an upload is complete instead."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

from sglang_rollout.trainer import PushFailed, upload
from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.deltas import LastUpload
from sglang_rollout.trainer.push import PushOptions
from sglang_rollout.trainer.tensors import Source
from sglang_rollout.trainer.upload import Upload
from sglang_rollout.wire.ports import FLEET_UPDATES
from tests.support.differences import apply
from tests.unit.trainer.support.scripted_fleet import FakeFleet, Reply
from tests.unit.trainer.test_upload import BEGUN, COMMIT, GOOD, PATH, Tensor, pieces

PIECE_BYTES = 1000
DIGESTS = [letter * 64 for letter in "abc"]
OLD = {"a": Tensor(os.urandom(1500)), "b": Tensor(os.urandom(2000))}
"""Four pieces: three of 1000 bytes, and one of 500."""
REFUSED: Reply = (409, {"success": False, "message": "the committed version is another one", "code": "BaseMissing"})


def begin(body: dict[str, Any]) -> Reply:
    """Take the base, as a fleet that has it."""
    taken = {"base": body["base"]} if "base" in body else {}
    return 200, {"success": True, "message": "", "fleet": {**BEGUN, "piece_bytes": PIECE_BYTES, **taken}}


@pytest.fixture
def willing(fake: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    monkeypatch.setattr(upload, "FIRST_PAUSE_SECONDS", 0.01)
    commits: list[Reply] = [(200, {"success": True, "message": "", "fleet": {"state": "committed", "digest": each}}) for each in DIGESTS]
    fake.replies |= {FLEET_UPDATES: begin, "PUT": GOOD, PATH: GOOD, COMMIT: [*commits]}
    return fake


def push(fake: FakeFleet, model: dict[str, Tensor], last: LastUpload | None) -> Upload:
    """Push, and forget the calls of earlier pushes."""
    fake.calls.clear()
    source = Source(model)
    source.check(4096)
    options = PushOptions("7", bucket_bytes=4096, timeout=30.0)
    made = Upload(Http(fake.url), options, wait="committed", read_bytes=lambda tensor: memoryview(tensor.data), last=last)
    made.run(source)
    return made


def changed(places: dict[str, list[int]]) -> dict[str, Tensor]:
    model = {}
    for name, tensor in OLD.items():
        data = bytearray(tensor.data)
        for place in places.get(name, []):
            data[place] ^= 1
        model[name] = Tensor(bytes(data))
    return model


def joined(model: dict[str, Tensor]) -> list[bytes]:
    data = b"".join(tensor.data for tensor in model.values())
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


def bases(fake: FakeFleet) -> list[str | None]:
    """Return the base of each begin."""
    return [body.get("base") for path, body in fake.calls if path == FLEET_UPDATES]


def check_complete(fake: FakeFleet, model: dict[str, Tensor]) -> None:
    assert [pieces(fake)[f"0/{n}"] for n in range(4)] == joined(model)
    assert not any("base" in body for path, body in fake.calls if "/pieces/" in path)


def test_the_second_upload_sends_what_has_changed(willing: FakeFleet) -> None:
    last, new = LastUpload(), changed({"a": [3], "b": [1999]})
    first = push(willing, OLD, last)
    assert bases(willing) == [None]
    check_complete(willing, OLD)
    assert first.result(1)["transferred"] == first.result(1)["bytes"] == 3500
    second = push(willing, new, last)
    assert bases(willing) == [DIGESTS[0]]
    sent = pieces(willing)
    assert [apply(before, sent[f"0/{n}"]) for n, before in enumerate(joined(OLD))] == joined(new)
    assert {body["base"] for path, body in willing.calls if "/pieces/" in path} == {DIGESTS[0]}
    assert sent["0/1"] == sent["0/2"] == b"", "they have not changed"
    assert (second.result(1)["bytes"], second.result(1)["transferred"]) == (3500, sum(map(len, sent.values())))
    assert second.result(1)["transferred"] < 200
    push(willing, OLD, last)
    assert bases(willing) == [DIGESTS[1]]


def test_a_trainer_may_change_its_tensors_after_an_upload(willing: FakeFleet) -> None:
    held = bytearray(OLD["a"].data)
    last, model = LastUpload(), {"a": Tensor(held)}  # type: ignore[arg-type]
    push(willing, model, last)
    before = bytes(held)
    held[700] ^= 1
    push(willing, model, last)
    assert apply(before[:PIECE_BYTES], pieces(willing)["0/0"]) == held[:PIECE_BYTES]


def test_a_piece_of_which_much_has_changed_is_sent_whole(willing: FakeFleet) -> None:
    last, new = LastUpload(), {**OLD, "b": Tensor(OLD["b"].data[:500] + os.urandom(1500))}
    push(willing, OLD, last)
    push(willing, new, last)
    sent = {path[-1]: body for path, body in willing.calls if "/pieces/" in path}
    assert ["base" in sent[str(n)] for n in range(4)] == [True, True, False, False]
    assert [sent["2"]["data"], sent["3"]["data"]] == joined(new)[2:]


def test_a_fleet_that_lacks_the_base_gets_a_complete_upload(willing: FakeFleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, upload.__name__)
    last, new = LastUpload(), changed({"a": [3]})
    push(willing, OLD, last)
    willing.replies[FLEET_UPDATES] = [REFUSED, begin]
    assert push(willing, new, last).state == "committed"
    assert bases(willing) == [DIGESTS[0], None]
    check_complete(willing, new)
    assert [each.message for each in caplog.records] == ["Version 7 is uploaded completely: the committed version is another one"]
    push(willing, OLD, last)
    assert bases(willing) == [DIGESTS[1]], "the complete upload is the next base"


def test_a_fleet_of_an_earlier_release_gets_complete_uploads(willing: FakeFleet) -> None:
    last, new = LastUpload(), changed({"a": [3]})
    push(willing, OLD, last)
    willing.replies[FLEET_UPDATES] = lambda body: begin({key: value for key, value in body.items() if key != "base"})
    push(willing, new, last)
    check_complete(willing, new)


@pytest.mark.parametrize("code", ["BaseMissing", "InvalidRequest"])
def test_a_piece_whose_difference_is_refused_is_sent_whole(willing: FakeFleet, code: str) -> None:
    last, new = LastUpload(), changed({"b": [1200]})
    push(willing, OLD, last)
    willing.replies[f"{PATH}/pieces/0/2"] = [(400, {"success": False, "message": "the difference is damaged", "code": code}), GOOD]
    push(willing, new, last)
    assert [body["data"] for path, body in willing.calls if path == f"{PATH}/pieces/0/2"][1] == joined(new)[2]


def refuse(path: str) -> Callable[[FakeFleet], None]:
    def script(fake: FakeFleet) -> None:
        fake.replies[path] = (403, {"success": False, "message": "no", "code": "Forbidden"})

    return script


@pytest.mark.parametrize("fails", [refuse(COMMIT), refuse(f"{PATH}/pieces/0/1")], ids=["commit", "piece"])
def test_after_a_failed_upload_the_next_one_is_complete(willing: FakeFleet, fails: Callable[[FakeFleet], None]) -> None:
    last, replies = LastUpload(), dict(willing.replies)
    push(willing, OLD, last)
    fails(willing)
    with pytest.raises(PushFailed):
        push(willing, changed({"a": [0]}), last)
    willing.replies = replies
    push(willing, OLD, last)
    assert bases(willing) == [None]
    check_complete(willing, OLD)


def test_a_refused_begin_keeps_the_base(willing: FakeFleet) -> None:
    last = LastUpload()
    push(willing, OLD, last)
    willing.replies[FLEET_UPDATES] = [(409, {"success": False, "message": "another trainer holds the fleet", "code": "Conflict"}), begin]
    with pytest.raises(PushFailed, match="another trainer holds the fleet"):
        push(willing, OLD, last)
    push(willing, OLD, last)
    assert bases(willing) == [DIGESTS[0]]


def test_another_model_is_uploaded_completely(willing: FakeFleet) -> None:
    last, other = LastUpload(), {"a": OLD["a"], "c": OLD["b"]}
    push(willing, OLD, last)
    push(willing, other, last)
    assert bases(willing) == [None]
    check_complete(willing, other)


def test_an_upload_without_delta_names_no_base(willing: FakeFleet) -> None:
    for _ in range(2):
        push(willing, OLD, None)
        assert bases(willing) == [None]
