"""Archives of compiled kernels at the weight store's data port: who may read and write them, and what is refused."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from sglang_rollout.credentials import Credentials
from sglang_rollout.staging.bandwidth import Bandwidth
from sglang_rollout.staging.copies import Copies
from sglang_rollout.store import kernels
from sglang_rollout.store.app import make_data_app
from sglang_rollout.store.kernels import KernelArchives
from sglang_rollout.store.receivers import Receivers
from sglang_rollout.store.store import Store
from sglang_rollout.wire.ports import DIGEST_HEADER, FILES_HEADER, KERNELS

KEY = "a" * 64
OTHER = "b" * 64
OWN = {"Authorization": "Bearer own"}
Client = TestClient[web.Request, web.Application]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


async def serve(folder: Path, volume: Path) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        store = Store(Copies(volume, volume / "state"), Receivers(), http, None, Bandwidth())
        app = make_data_app(store, KernelArchives(folder, Credentials("own")).routes())
        async with TestClient(TestServer(app)) as client:
            yield client


@pytest.fixture
async def client(folder: Path, tmp_path: Path) -> AsyncIterator[Client]:
    async for client in serve(folder, tmp_path / "volume"):
        yield client


async def put(client: Client, data: bytes, key: str = KEY, *, digest: str | None = None, **headers: str) -> int:
    described = {DIGEST_HEADER: sha256(data).hexdigest() if digest is None else digest, FILES_HEADER: "3"}
    async with client.put(f"{KERNELS}/{key}", data=data, headers=OWN | described | headers) as answer:
        return answer.status


async def get(client: Client, key: str = KEY) -> bytes | None:
    async with client.get(f"{KERNELS}/{key}", headers=OWN) as answer:
        return None if answer.status == 404 else await answer.read()


async def test_the_newest_archive_of_a_key_is_kept_also_over_a_restart(client: Client, folder: Path, tmp_path: Path) -> None:
    assert await get(client) is None
    for data in (b"old", b"new", b"new"):
        assert await put(client, data) == 200
    async for restarted in serve(folder, tmp_path / "volume"):
        async with restarted.head(f"{KERNELS}/{KEY}", headers=OWN) as answer:
            assert (answer.status, answer.headers[FILES_HEADER], answer.headers[DIGEST_HEADER]) == (200, "3", sha256(b"new").hexdigest())
        assert await get(restarted) == b"new"
    assert [file.stat().st_mode & 0o777 for file in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("token", ["", "Bearer other", "Bearer \u00fc"])
async def test_a_caller_without_the_credential_reads_and_writes_nothing(client: Client, folder: Path, token: str) -> None:
    assert await put(client, b"data") == 200
    async with client.get(f"{KERNELS}/{KEY}", headers={"Authorization": token}) as answer:
        assert answer.status in (401, 403)
        assert b"data" not in await answer.read()
    assert await put(client, b"evil", Authorization=token) in (401, 403)
    assert await get(client) == b"data"


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ("..%2f" + "a" * 59, {}),
        ("A" * 64, {}),
        (KEY, {DIGEST_HEADER: sha256(b"other").hexdigest()}),
        (KEY, {DIGEST_HEADER: "../" + "a" * 61}),
        (KEY, {FILES_HEADER: "-1"}),
        (KEY, {FILES_HEADER: "many"}),
        (KEY, {FILES_HEADER: "999999"}),
        (KEY, {"Transfer-Encoding": "chunked"}),
    ],
)
async def test_a_malformed_archive_is_refused_and_leaves_nothing(client: Client, folder: Path, key: str, headers: dict[str, str]) -> None:
    assert await put(client, b"data", key, **headers) == 400
    assert list(folder.iterdir()) == []


async def test_an_archive_that_is_too_large_is_refused_before_it_arrives(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_ARCHIVE_BYTES", 3)
    assert await put(client, b"data") == 400
    assert await put(client, b"dat") == 200


async def test_the_archive_that_was_used_longest_ago_makes_room(client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KEPT_BYTES", 10)
    for key, age in ((KEY, 2000), (OTHER, 1000)):
        assert await put(client, b"data", key) == 200
        (file,) = folder.glob(f"{key}*")
        os.utime(file, (age, age))
    assert await get(client, OTHER) == b"data"
    (file,) = folder.glob(f"{KEY}*")
    os.utime(file, (1, 1))
    assert await put(client, b"data", "c" * 64) == 200
    assert [await get(client, key) for key in (KEY, OTHER, "c" * 64)] == [None, b"data", b"data"]


async def test_an_upload_that_breaks_off_leaves_the_earlier_archive(client: Client, folder: Path) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"new"
        raise RuntimeError("the agent ends")

    assert await put(client, b"data") == 200
    headers = OWN | {DIGEST_HEADER: sha256(b"newer").hexdigest(), FILES_HEADER: "3", "Content-Length": "5"}
    with pytest.raises((aiohttp.ClientError, RuntimeError)):
        async with client.put(f"{KERNELS}/{KEY}", data=parts(), headers=headers):
            pass
    assert await get(client) == b"data"
    assert await put(client, b"newer") == 200, "the next archive need not wait for it"


def test_what_an_ended_store_had_not_received_is_deleted(folder: Path) -> None:
    folder.mkdir()
    (folder / ".arriving-1").write_bytes(b"half")
    KernelArchives(folder, Credentials("own"))
    assert list(folder.iterdir()) == []
