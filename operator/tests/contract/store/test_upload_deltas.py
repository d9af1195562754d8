"""Delta uploads to the weight store: pieces that differ from those of a version that it has, and differences that it refuses."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from hashlib import sha256

import pytest
import requests

from sglang_rollout.staging.differences import encode
from sglang_rollout.wire.ports import METRICS
from tests.contract.store.test_uploads import SIZES, TENSORS, piece, upload
from tests.contract.support.store_process import StoreProcess, new_update

pytestmark = pytest.mark.timeout(180)

OTHER_BASE = "0" * 64


def change(data: bytes) -> bytes:
    """Change one byte in the middle of each piece that is not the last of its shard."""
    middle = len(data) // 2
    return data if len(data) < 100 else data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


@pytest.fixture
def base(upload_store: StoreProcess) -> tuple[str, str]:
    """Update and digest of a complete version."""
    update = new_update()
    upload(upload_store, update)
    assert upload_store.seal(update, 1)[0] == 200
    return update, upload_store.updates()[update]


def begin(store: StoreProcess, base: tuple[str, str]) -> str:
    update = new_update()
    status, body = store.open(update, TENSORS, keep=[base[0]], base=base[1])
    assert status == 200, body
    return update


def uploaded(store: StoreProcess) -> float:
    """Return the bytes that uploaders have sent, as the metrics say."""
    text = requests.get(f"http://127.0.0.1:{store.metrics_port}{METRICS}", timeout=30).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("sglang_rollout_store_uploaded_bytes_total"))


def test_differences_become_the_version_that_whole_pieces_become(upload_store: StoreProcess, base: tuple[str, str]) -> None:
    store, update, before = upload_store, begin(upload_store, base), uploaded(upload_store)
    sent = 0
    for place in SIZES:
        old = piece(place)
        difference = encode(old, change(old))
        assert difference is not None
        for _ in range(2):  # a piece may be repeated
            status, body = store.put(update, place, difference, digest=digest(change(old)), base=base[1])
            assert status == 200, body
        sent += len(difference)
    assert store.seal(update, 2)[0] == 200
    assert store.data_digest(update, 0) == digest(b"".join(change(piece((0, n))) for n in range(3)))
    assert store.data_digest(update, 1) == digest(piece((1, 0)))
    assert uploaded(store) - before == sent < 100_000
    assert {copy["update"]: copy["transferred"] for copy in store.status()["copies"]}[update] == sent
    whole = new_update()
    store.open(whole, TENSORS, keep=[update])
    for place in SIZES:
        store.put(whole, place, change(piece(place)))
    store.seal(whole, 3)
    assert store.updates()[whole] == store.updates()[update]


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "garbage": (lambda _: b"garbage", "The difference is damaged: zlib cannot read it"),
    "short": (lambda good: good[:-1], "The difference is damaged: its end is missing"),
    "bomb": (lambda _: zlib.compress(bytes(2 * SIZES[0, 0])), "it is that of a piece with more than"),
    "wrong": (lambda _: zlib.compress(bytes(SIZES[0, 0])), "arrived with other bytes than announced"),
    "empty": (lambda _: b"", "arrived with other bytes than announced"),
    "large": (lambda _: bytes(SIZES[0, 0] // 2 + 1), "half of those of the piece"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_difference_is_refused_and_the_whole_piece_is_taken(
    upload_store: StoreProcess, base: tuple[str, str], damage: Callable[[bytes], bytes], message: str
) -> None:
    store, update, new = upload_store, begin(upload_store, base), change(piece((0, 0)))
    status, body = store.put(update, (0, 0), damage(encode(piece((0, 0)), new) or b""), digest=digest(new), base=base[1])
    assert (status, body["code"]) == (400, "InvalidRequest")
    assert message in body["message"]
    assert (0, 0) in store.missing(update)
    assert store.put(update, (0, 0), new)[0] == 200
    assert store.data_digest(base[0], 1) == digest(piece((1, 0)))


def test_a_difference_from_another_version_or_without_a_base_is_refused(upload_store: StoreProcess, base: tuple[str, str]) -> None:
    store, update = upload_store, begin(upload_store, base)
    status, body = store.put(update, (1, 0), b"", digest=digest(piece((1, 0))), base=OTHER_BASE)
    assert (status, body["code"]) == (400, "InvalidRequest")
    assert f"the update began with the base {base[1][:12]}" in body["message"]
    plain = new_update()
    store.open(plain, TENSORS, keep=[base[0]])
    for named in (base[1], "", "x"):
        status, body = store.put(plain, (1, 0), b"", digest=digest(piece((1, 0))), base=named)
        assert (status, body["code"]) == (400, "InvalidRequest")
        assert "the update began without a base" in body["message"]


def test_an_upload_whose_base_is_missing_does_not_begin(upload_store: StoreProcess, base: tuple[str, str]) -> None:
    """Nor one with a base that is deleted when it begins, as with ``copies: 1``, or that has other tensors."""
    store = upload_store
    cases = [
        (TENSORS, [base[0]], OTHER_BASE, "the weight store does not have it"),
        (TENSORS, [], base[1], "the weight store does not have it"),
        (TENSORS[:1], [base[0]], base[1], "it has other tensors or shards"),
    ]
    for tensors, keep, named, message in cases:
        status, body = store.open(new_update(), tensors, keep=keep, base=named)
        assert (status, body["code"]) == (409, "BaseMissing")
        assert message in body["message"]
    assert store.updates() == {base[0]: base[1]}


@pytest.mark.parametrize("lost", ["version", "files"])
def test_a_base_that_is_deleted_meanwhile_is_named(upload_store: StoreProcess, base: tuple[str, str], lost: str) -> None:
    store, update = upload_store, begin(upload_store, base)
    if lost == "version":
        store.call("/store/drop", {"keep": [update]})
    else:
        for file in (store.volume / base[0]).iterdir():
            file.unlink()
    status, body = store.put(update, (1, 0), b"", digest=digest(piece((1, 0))), base=base[1])
    assert (status, body["code"]) == (409, "BaseMissing")
    assert store.put(update, (1, 0), piece((1, 0)))[0] == 200
