"""A weight store that has lost the committed version copies it from the pods that hold it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_rollout.wire.ports import STORE_DROP, STORE_FETCH
from tests.contract.store.test_uploads import SIZES, TENSORS, piece
from tests.contract.support.store_process import SIZE_LIMIT, TICKET, StoreProcess, new_update, store_process, version
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A pod that holds versions. It is another weight store, because its data port has the same routes as an agent's."""
    with store_process(tmp_path_factory.mktemp("holder"), python=sys.executable) as made:
        yield made


@pytest.fixture
def held(holder: StoreProcess) -> str:
    update = new_update()
    holder.open(update, TENSORS)
    for place in SIZES:
        holder.put(update, place, piece(place))
    assert holder.seal(update, 1)[0] == 200
    return update


def request(holder: StoreProcess, update: str, **changes: Any) -> dict[str, Any]:
    return {
        "update": update, "version": version(1), "parents": [holder.data_url], "ticket": TICKET, "size_limit": SIZE_LIMIT,
        "digest": holder.updates()[update], "deadline": 20, **changes,
    }  # fmt: skip


def test_a_store_copies_the_version_from_a_pod_and_serves_it(holder: StoreProcess, held: str, upload_store: StoreProcess) -> None:
    other = new_update()
    upload_store.open(other, TENSORS)
    absent = f"http://127.0.0.1:{free_port()}"
    body = request(holder, held, parents=[absent, holder.data_url], keep=[other])
    status, answer = upload_store.call(STORE_FETCH, body)
    assert status == 200, answer
    copies = {copy["update"]: (copy["digest"], copy["version"]) for copy in answer["copies"]}
    assert copies == {held: (holder.updates()[held], version(1)), other: ("", None)}
    assert upload_store.data_digest(held, 0) == holder.data_digest(held, 0)
    assert upload_store.call(STORE_FETCH, request(holder, held))[0] == 200, "the call may be repeated"
    assert set(upload_store.updates()) == {held}, "it deletes what the request does not keep"
    upload_store.restart()
    assert upload_store.updates() == {held: holder.updates()[held]}


@pytest.mark.parametrize(
    ("changes", "expected", "message"),
    [
        ({"parents": [f"http://127.0.0.1:{free_port()}"], "deadline": 1}, (503, "Unavailable"), "is not complete after 1 s"),
        ({"parents": [f"http://127.0.0.1:{free_port()}"], "deadline": 600}, (503, "Unavailable"), "No new byte of update"),
        ({"digest": "0" * 64}, (502, "UpstreamFailed"), "No parent gives the right bytes"),
        ({"size_limit": 1000}, (400, "InvalidRequest"), "more than the limit of 1000 bytes"),
    ],
    ids=["no answer", "agents that have ended", "other bytes", "too large"],
)
def test_a_version_that_cannot_be_copied(
    holder: StoreProcess, held: str, upload_store: StoreProcess, changes: dict[str, Any], expected: tuple[int, str], message: str
) -> None:
    status, answer = upload_store.call(STORE_FETCH, request(holder, held, **changes))
    assert (status, answer["code"]) == expected
    assert message in answer["message"]
    assert not any(upload_store.updates().values()), "an incomplete copy has no digest"
    assert upload_store.call(STORE_FETCH, request(holder, held))[0] == 200, "the next attempt succeeds"


def test_pods_that_have_lost_their_copies_too_are_given_up(holder: StoreProcess, upload_store: StoreProcess) -> None:
    """They copy the version from the store, which would wait for them."""
    update = new_update()
    holder.open(update, TENSORS)
    for place in list(SIZES)[:1]:
        holder.put(update, place, piece(place))
    body = request(holder, update, digest="0" * 64, parents=[holder.data_url, holder.data_url], deadline=600)
    status, answer = upload_store.call(STORE_FETCH, body)
    assert (status, answer["code"]) == (503, "Unavailable")
    assert "it has only a part of the version" in answer["message"]


def test_dropping_the_version_ends_its_copy(holder: StoreProcess, held: str, upload_store: StoreProcess) -> None:
    waiting = upload_store.later(STORE_FETCH, request(holder, held, parents=[f"http://127.0.0.1:{free_port()}"], deadline=60))
    while not upload_store.updates():
        pass
    assert upload_store.call(STORE_DROP, {"keep": []})[0] == 200
    status, answer = waiting.result(60)
    assert (status, answer["code"]) == (404, "NotFound"), answer
