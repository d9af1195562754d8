"""Uploads to the weight store, its restart, and its callers."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
import requests

from sglang_rollout.staging.index import version_digest
from sglang_rollout.wire.ports import (
    DIGEST_HEADER,
    FLEET_UPDATES,
    METRICS,
    STORE_DROP,
    STORE_OPEN,
    STORE_PREFLIGHT,
    STORE_SEAL,
    STORE_STATUS,
    TERM_HEADER,
    TICKET_HEADER,
)
from sglang_rollout.wire.staged import PIECE_BYTES, Shard
from tests.contract.support.store_process import SIZE_LIMIT, UPLOAD_TICKET, StoreProcess, TensorRow, new_update, shard_of, version
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(180)

TENSORS: list[list[TensorRow]] = [
    [("a", "uint8", [PIECE_BYTES]), ("b", "uint8", [PIECE_BYTES + 5])],
    [("c", "float32", [3])],
]
SIZES = {(0, 0): PIECE_BYTES, (0, 1): PIECE_BYTES, (0, 2): 5, (1, 0): 12}


def piece(place: tuple[int, int], seed: int = 0) -> bytes:
    start = bytes((place[0] + 1, place[1] + 1, seed))
    return (start * (SIZES[place] // 3 + 1))[: SIZES[place]]


def upload(store: StoreProcess, update: str, seed: int = 0) -> None:
    assert store.open(update, TENSORS, keep=list(store.updates()))[0] == 200
    for place in SIZES:
        status, body = store.put(update, place, piece(place, seed))
        assert status == 200, body


def test_parallel_and_repeated_pieces_become_a_version(upload_store: StoreProcess) -> None:
    store, update = upload_store, new_update()
    store.open(update, TENSORS)
    assert store.missing(update) == list(SIZES)
    with ThreadPoolExecutor(2) as pool:
        # Both threads send all pieces, in opposite order, so that some arrive twice and one at the same time.
        sent = [pool.submit(store.put, update, place, piece(place)) for pair in zip(SIZES, reversed(SIZES), strict=True) for place in pair]
        assert {future.result()[0] for future in sent} == {200}
    assert store.missing(update) == []
    status, body = store.seal(update, 1)
    assert status == 200, body
    digests = {place: sha256(piece(place)).hexdigest() for place in SIZES}
    assert store.updates() == {update: version_digest([Shard.model_validate(shard_of(rows)) for rows in TENSORS], digests)}
    assert store.data_digest(update, 0) == sha256(piece((0, 0)) + piece((0, 1)) + piece((0, 2))).hexdigest()
    assert store.seal(update, 1)[0] == 200, "sealing may be repeated"
    assert "sglang_rollout_store_uploaded_bytes_total" in requests.get(f"http://127.0.0.1:{store.metrics_port}{METRICS}", timeout=30).text


def test_a_version_without_all_pieces_is_not_sealed(upload_store: StoreProcess) -> None:
    update = new_update()
    upload_store.open(update, TENSORS)
    status, body = upload_store.seal(update, 1)
    assert (status, body["code"]) == (409, "Conflict")
    assert "4 of 4 pieces have not arrived" in body["message"]


def test_wrong_bytes_change_nothing(upload_store: StoreProcess) -> None:
    store, update = upload_store, new_update()
    store.open(update, TENSORS)
    good = piece((1, 0))
    status, body = store.put(update, (1, 0), b"x" * 12, digest=sha256(good).hexdigest())
    assert (status, body["code"]) == (400, "InvalidRequest")
    assert "arrived with other bytes than announced" in body["message"]
    assert (1, 0) in store.missing(update)
    assert store.put(update, (1, 0), good)[0] == 200
    status, body = store.put(update, (1, 0), b"y" * 12)
    assert (status, body["code"]) == (400, "InvalidRequest")
    assert "is there already, with other bytes" in body["message"]


def test_a_piece_whose_sender_leaves_does_not_count(upload_store: StoreProcess) -> None:
    store, update, place = upload_store, new_update(), (0, 0)
    store.open(update, TENSORS)
    data = piece(place)
    lines = [f"PUT {FLEET_UPDATES}/{update}/pieces/0/0 HTTP/1.1", "Host: store", f"Content-Length: {len(data)}"]
    lines += [f"{TICKET_HEADER}: {UPLOAD_TICKET}", f"{DIGEST_HEADER}: {sha256(data).hexdigest()}", "", ""]
    with socket.create_connection(("127.0.0.1", store.data_port), timeout=30) as sender:
        sender.sendall("\r\n".join(lines).encode() + data[: len(data) // 2])
    assert place in store.missing(update)
    assert store.put(update, place, data)[0] == 200
    assert place not in store.missing(update)
    for other in SIZES:
        assert store.put(update, other, piece(other))[0] == 200
    assert store.seal(update, 1)[0] == 200
    assert store.data_digest(update, 0) == sha256(data + piece((0, 1)) + piece((0, 2))).hexdigest()


@pytest.mark.parametrize(
    ("place", "size", "message"),
    [
        ((1, 0), 11, "the body has 11 bytes, but the piece has 12"),
        ((1, 1), 12, "There is no piece 1"),
        ((2, 0), 12, "There is no shard 2"),
    ],
)
def test_a_piece_that_the_version_does_not_have_is_refused(
    upload_store: StoreProcess, place: tuple[int, int], size: int, message: str
) -> None:
    update = new_update()
    upload_store.open(update, TENSORS)
    status, body = upload_store.put(update, place, b"x" * size)
    assert (status, body["code"]) == (400, "InvalidRequest")
    assert message in body["message"]


def test_pieces_of_finished_and_unknown_updates_are_refused(upload_store: StoreProcess) -> None:
    store, update = upload_store, new_update()
    upload(store, update)
    store.seal(update, 1)
    status, body = store.put(update, (1, 0), piece((1, 0)))
    assert (status, body["code"]) == (409, "Conflict")
    assert "the version is complete" in body["message"]
    status, body = store.put(new_update(), (1, 0), piece((1, 0)))
    assert (status, body["code"]) == (404, "NotFound")
    through_group = new_update()
    store.open(through_group, keep=[update])
    status, body = store.put(through_group, (0, 0), b"")
    assert (status, body["code"]) == (409, "Conflict")
    assert "arrives through a process group" in body["message"]
    store.call(STORE_DROP, {"keep": [update]})
    assert list(store.updates()) == [update]


@pytest.mark.parametrize("ticket", ["", "read-ticket", "other", "ticket-\xe4"])
def test_a_wrong_ticket_is_refused(upload_store: StoreProcess, ticket: str) -> None:
    update = new_update()
    upload_store.open(update, TENSORS)
    status, body = upload_store.put(update, (1, 0), piece((1, 0)), ticket=ticket)
    assert (status, body["code"]) == (403, "Forbidden")
    assert len(upload_store.missing(update)) == 4


def test_an_expired_ticket_is_refused_until_the_coordinator_renews_it(upload_store: StoreProcess) -> None:
    store, update = upload_store, new_update()
    store.open(update, TENSORS, upload_seconds=1e-6)
    status, body = store.put(update, (1, 0), piece((1, 0)))
    assert (status, body["code"]) == (403, "Forbidden")
    assert "expired" in body["message"]
    store.open(update, TENSORS)
    assert store.put(update, (1, 0), piece((1, 0)))[0] == 200


def test_an_upload_above_the_limit_is_refused_with_both_numbers(upload_store: StoreProcess) -> None:
    update = new_update()
    status, body = upload_store.open(update, [[("a", "uint8", [SIZE_LIMIT]), ("b", "uint8", [1])]])
    assert (status, body["code"]) == (400, "InvalidRequest")
    assert str(SIZE_LIMIT + 1) in body["message"]
    assert str(SIZE_LIMIT) in body["message"].replace(str(SIZE_LIMIT + 1), "")
    assert upload_store.updates() == {}


def test_the_same_update_cannot_begin_with_other_shards(upload_store: StoreProcess) -> None:
    update = new_update()
    upload_store.open(update, TENSORS)
    assert upload_store.open(update, TENSORS)[0] == 200
    status, body = upload_store.open(update, TENSORS[:1])
    assert (status, body["code"]) == (409, "Conflict")


def test_a_restart_keeps_complete_versions_and_drops_unfinished_ones(upload_store: StoreProcess) -> None:
    store, complete, unfinished = upload_store, new_update(), new_update()
    upload(store, complete)
    store.seal(complete, 1)
    store.open(unfinished, TENSORS, keep=[complete])
    store.put(unfinished, (1, 0), piece((1, 0)))
    before = store.status()
    digest = store.updates()[complete]
    store.restart()
    after = store.status()
    assert store.updates() == {complete: digest}
    assert after["copies"][0]["version"] == version(1)
    assert after["instance"] != before["instance"]
    assert store.put(unfinished, (1, 0), piece((1, 0)))[1]["code"] == "NotFound"
    assert store.put(complete, (1, 0), piece((1, 0)))[1]["code"] == "Conflict"
    assert store.seal(complete, 1)[0] == 200
    assert store.seal(complete, 2)[1]["code"] == "Conflict", "it is version 1 already"


def test_a_lower_term_is_refused_also_after_a_restart(upload_store: StoreProcess) -> None:
    store = upload_store
    store.term += 5
    assert store.call(STORE_STATUS)[0] == 200
    for _ in range(2):
        status, body = store.call(STORE_STATUS, term=store.term - 1)
        assert (status, body["code"], body["headers"][TERM_HEADER]) == (409, "Conflict", str(store.term))
        store.restart()
    assert store.call(STORE_STATUS, term=store.term)[0] == 200


@pytest.mark.parametrize("path", [STORE_STATUS, STORE_OPEN, STORE_SEAL, STORE_PREFLIGHT])
def test_other_callers_than_the_coordinator_are_refused(upload_store: StoreProcess, path: str) -> None:
    status, body = upload_store.call(path, token="other")
    assert (status, body["code"]) == (403, "Forbidden")
    reply = requests.post(f"http://127.0.0.1:{upload_store.port}{path}", json={}, timeout=30)
    assert (reply.status_code, reply.json()["code"]) == (401, "Unauthenticated")
    assert requests.post(f"{upload_store.data_url}{path}", json={}, timeout=30).status_code == 404


def test_an_unreachable_trainer_is_reported(upload_store: StoreProcess) -> None:
    status, body = upload_store.call(STORE_PREFLIGHT, {"host": "127.0.0.1", "port": free_port(), "deadline": 0.2})
    assert status == 200
    assert "connection refused" in body["refusal"]["message"]


def test_a_process_group_without_torch_is_refused(upload_store: StoreProcess) -> None:
    body = {"group_name": "g", "master_address": "127.0.0.1", "master_port": 1, "deadline": 1}
    status, reply = upload_store.call("/store/join", body)
    assert (status, reply["code"]) == (400, "BackendUnavailable")
    assert f"The Python of the weight store, {sys.executable}, has no torch" in reply["message"]
    assert "--store-python" in reply["message"]


def test_malformed_calls_name_the_field(upload_store: StoreProcess) -> None:
    calls: list[Callable[[], tuple[int, dict[str, object]]]] = [
        lambda: upload_store.call(STORE_OPEN, {"update": "x"}),
        lambda: upload_store.open(new_update(), [[("a", "uint8", [-1])]]),
        lambda: upload_store.open(new_update(), [[("a", "uint8", [1]), ("a", "uint8", [1])]]),
    ]
    for call, word in zip(calls, ("update", "the size -1", "twice"), strict=True):
        status, body = call()
        assert (status, body["code"]) == (400, "InvalidRequest")
        assert word in str(body["message"])
