"""Delta uploads from a trainer to the engines: less is sent, and the fleet holds what it holds after a complete upload.

All parts are processes: `sglang-rollout local` with its weight store, the engines, and a trainer with torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from e2e.engine import LabError, environment

from sglang_rollout.sglang.checksums import CHECKSUM, parse_checksums
from sglang_rollout.wire.ports import BASE_HEADER, DIGEST_HEADER, FLEET_UPDATES, TICKET_HEADER
from tests.contract.fleet.test_dialects import close_groups, session
from tests.contract.fleet.test_staged import SECONDS, Uploader, kill_store, next_version, uploader
from tests.contract.support.trainer_dialects import Fleet, fleet, trainer

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]

FEW = 0.01
"""Share of the elements that change."""


@pytest.fixture(scope="module", params=["staged", pytest.param("sglang-staged", marks=pytest.mark.long)])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with fleet(request.param, tmp_path_factory.mktemp("deltas")) as made:
        yield made


stand_ins = pytest.mark.parametrize("lab", ["staged"], indirect=True)
"""Tests of the fleet's own parts, for which SGLang adds nothing."""


@pytest.fixture(scope="module")
def deltas(lab: Fleet) -> Iterator[Uploader]:
    """A trainer that makes delta uploads. Tests share it, because torch takes seconds to import."""
    with uploader(lab, "delta") as made:
        yield made


def push(trainer: Uploader, lab: Fleet, scale: float, changed: float = 0.0) -> tuple[int, int]:
    """Push, and return the bytes of the version and the bytes that were sent."""
    version = next_version(lab)
    result = trainer.push(scale, version, changed=changed)
    assert (result.get("state"), result.get("fenced")) == ("committed", {}), result
    assert lab.committed()["label"] == version
    lab.serving(2, SECONDS)
    return result.get("bytes", 0), result.get("transferred", 0)


def held(lab: Fleet) -> tuple[str, set[tuple[str, ...]]]:
    """Return the digest of the committed version, which all pods and the weight store hold, and the checksums of all engines."""
    document = lab.document()
    rows = [copy for member in document["members"] for copy in member["staged"]] + document["store"]["copies"]
    digests = {row["digest"] for row in rows if row["version"] == document["committed"]}
    assert len(digests) == 1
    replies = [requests.post(f"{engine.url}/weights_checker", json=CHECKSUM, timeout=60).json() for engine in lab.engines]
    return digests.pop(), {tuple(parse_checksums(reply) or ()) for reply in replies}


def transferred(lab: Fleet) -> list[int]:
    """Return the bytes that were sent for the committed version to the weight store and to each engine's pod."""
    document = lab.document()
    owners = [document["store"]["copies"], *(member["staged"] for member in document["members"])]
    return [copy["transferred"] for copies in owners for copy in copies if copy["version"] == document["committed"]]


def test_a_delta_upload_brings_what_a_complete_upload_brings(lab: Fleet, deltas: Uploader) -> None:
    scale = lab.others()[0]
    size, sent = push(deltas, lab, scale)
    assert sent == size, "the first upload is complete"
    before, before_checksums = held(lab)
    size, sent = push(deltas, lab, scale, FEW)
    assert 0 < sent < size / 10
    assert lab.document()["last_update"]["transferred"] == sent
    assert lab.document()["last_update"]["bytes"] == size
    assert transferred(lab) == [sent] * 3, "pods copy the differences, too"
    after, checksums = held(lab)
    assert after != before
    assert len(checksums) == 1
    assert checksums != before_checksums
    # Back and forth, and an upload in which nothing has changed.
    assert push(deltas, lab, scale)[1] < size / 10
    assert held(lab) == (before, before_checksums)
    assert lab.everywhere() == [(lab.expected[scale], lab.committed()["label"])] * 3
    assert push(deltas, lab, scale) == (size, 0)
    assert transferred(lab) == [0] * 3
    with uploader(lab) as complete:
        push(complete, lab, scale, FEW)
    assert held(lab) == (after, checksums)


@stand_ins
def test_a_trainer_whose_version_was_replaced_uploads_everything(lab: Fleet, deltas: Uploader) -> None:
    """By another trainer's upload, or by a push through a process group."""
    first, second = lab.others()
    push(deltas, lab, first)
    with uploader(lab) as other:
        push(other, lab, second)
    size, sent = push(deltas, lab, first, FEW)
    assert sent == size
    with trainer(lab) as made:
        session(made, second, next_version(lab))
        close_groups(lab)
    size, sent = push(deltas, lab, first, FEW)
    assert sent == size
    assert push(deltas, lab, first)[1] < size / 10


@stand_ins
def test_a_restarted_weight_store_takes_differences(lab: Fleet, deltas: Uploader) -> None:
    scale = lab.others()[0]
    size, _ = push(deltas, lab, scale)
    kill_store(lab)
    assert push(deltas, lab, scale, FEW)[1] < size / 10


# --- bad input ---------------------------------------------------------------------------------------------------------


def described(lab: Fleet) -> list[dict[str, Any]]:
    """Return the tensors of the model in one shard each, which is not how the client uploads them."""
    rows = requests.get(f"{lab.url}/fleet/tensors", timeout=60).json()["shapes"]
    return [{"tensors": [{"name": name, "dtype": "F32", "shape": shape}]} for name, shape in rows.items()]


def begin(lab: Fleet, **fields: Any) -> requests.Response:
    return requests.post(f"{lab.url}{FLEET_UPDATES}", json={"label": "bad", "shards": described(lab), **fields}, timeout=30)


@stand_ins
def test_a_base_or_a_difference_that_the_fleet_cannot_use_is_refused(lab: Fleet, deltas: Uploader) -> None:
    push(deltas, lab, lab.others()[0])
    before = held(lab)
    for base, status, code, message in (
        ("0" * 64, 409, "BaseMissing", "the committed version has the digest"),
        (before[0], 409, "BaseMissing", "it has other tensors or shards"),
        ("latest", 400, "InvalidRequest", "is no digest"),
        (7, 400, "InvalidRequest", "is no digest"),
    ):
        reply = begin(lab, base=base)
        assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
        assert message in reply.json()["message"]
        assert lab.document()["update"] is None
    begun = begin(lab).json()["fleet"]
    url, ticket = f"{lab.url}{FLEET_UPDATES}/{begun['update']}", {TICKET_HEADER: begun["ticket"]}
    headers = {**ticket, DIGEST_HEADER: hashlib.sha256(b"").hexdigest(), BASE_HEADER: before[0]}
    reply = requests.put(f"{url}/pieces/0/0", data=b"garbage", headers=headers, timeout=30)
    assert (reply.status_code, reply.json()["code"]) == (400, "InvalidRequest"), reply.text
    assert "began without a base" in reply.json()["message"]
    assert requests.delete(url, headers=ticket, timeout=30).ok
    assert held(lab) == before
    assert push(deltas, lab, lab.others()[0])[0] > 0
