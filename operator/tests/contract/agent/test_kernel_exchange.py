"""When an agent fetches compiled kernels and when it sends its own, against the weight store's routes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_rollout.agent.kernels import exchange
from sglang_rollout.agent.kernels.exchange import KernelExchange
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.refusals import log_refusals
from sglang_rollout.internal.requests import answer_refusals
from sglang_rollout.store.kernels import KernelArchives
from tests.support.ports import free_port

KERNEL = "triton/AB/kernel.cubin"
CODE = b"compiled" * 1000
KEY = "a" * 64


@dataclass
class Rollout:
    """A weight store, and pods of one rollout."""

    folder: Path
    url: str

    @property
    def archives(self) -> list[Path]:
        return list((self.folder / "archives").glob("*.tar"))

    def pod(self, name: str, *, key: str = KEY, token: str = "own", url: str = "") -> KernelExchange:
        """Return the agent's part in a pod of this name, whose engine serves."""
        self.cache(name).mkdir(exist_ok=True)
        made = KernelExchange(self.cache(name), url or self.url, Credentials(token), key, self.folder / f"{name}-state")
        made.is_up = lambda: True
        return made

    def cache(self, name: str) -> Path:
        return self.folder / name

    def compile(self, name: str, kernel: str = KERNEL, data: bytes = CODE) -> None:
        """Write a kernel, as the engine of a pod does."""
        file = self.cache(name) / kernel
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def kernels(self, name: str) -> dict[str, bytes]:
        cache = self.cache(name)
        return {str(file.relative_to(cache)): file.read_bytes() for file in cache.rglob("*") if file.is_file()}

    async def send(self, name: str, *kernels: str) -> KernelExchange:
        """Let the engine of a new pod compile these kernels, and its agent send them."""
        pod = self.pod(name)
        for kernel in kernels or (KERNEL,):
            self.compile(name, kernel)
        await pod.offer()
        await pod.offer()
        return pod


@pytest.fixture
async def rollout(tmp_path: Path) -> AsyncIterator[Rollout]:
    app = web.Application(middlewares=[answer_refusals])
    log_refusals(app)
    app.add_routes(KernelArchives(tmp_path / "archives", Credentials("own")).routes())
    async with TestServer(app) as server:
        yield Rollout(tmp_path, str(server.make_url("")))


async def test_pods_collect_the_kernels_of_all_engines(rollout: Rollout) -> None:
    await rollout.send("first")
    second = rollout.pod("second")
    await second.fetch()
    assert rollout.kernels("second") == {KERNEL: CODE}
    rollout.compile("second", "inductor/cd/fg.py")
    for _ in range(2):
        await second.offer()
    await rollout.pod("third").fetch()
    assert rollout.kernels("third") == {KERNEL: CODE, "inductor/cd/fg.py": CODE}
    assert len(rollout.archives) == 1


async def test_kernels_of_any_size_arrive(rollout: Rollout) -> None:
    sizes = (0, 1, 511, 512, 1024, 3 * 2**20)
    for size in sizes:
        rollout.compile("first", f"triton/{size}/kernel", bytes(size))
    first = rollout.pod("first")
    for _ in range(2):
        await first.offer()
    await rollout.pod("second").fetch()
    assert rollout.kernels("second") == {f"triton/{size}/kernel": bytes(size) for size in sizes}


async def test_kernels_are_sent_only_while_the_engine_serves_and_none_changes(rollout: Rollout) -> None:
    pod = rollout.pod("first")
    rollout.compile("first")
    pod.is_up = lambda: False
    for _ in range(2):
        await pod.offer()
    pod.is_up = lambda: True
    await pod.offer()
    rollout.compile("first", "triton/CD/kernel.cubin")
    await pod.offer()
    assert rollout.archives == []
    await pod.offer()
    assert len(rollout.archives) == 1


async def test_fewer_kernels_do_not_replace_more(rollout: Rollout) -> None:
    await rollout.send("first", KERNEL, "triton/CD/kernel.cubin")
    before = rollout.archives
    await rollout.send("second", "triton/EF/kernel.cubin")
    assert rollout.archives == before


async def test_a_store_that_lost_the_kernels_gets_them_again(rollout: Rollout) -> None:
    pod = await rollout.send("first")
    rollout.archives[0].unlink()
    await pod.offer()
    assert len(rollout.archives) == 1


@pytest.mark.parametrize("other", [{"key": "b" * 64}, {"token": "of another rollout"}, {"url": f"http://127.0.0.1:{free_port()}"}])
async def test_a_pod_of_another_kind_or_rollout_or_without_store_gets_nothing(rollout: Rollout, other: dict[str, str]) -> None:
    await rollout.send("first")
    await rollout.pod("other", **other).fetch()
    assert rollout.kernels("other") == {}


async def test_a_pod_with_kernels_of_its_own_fetches_none(rollout: Rollout) -> None:
    await rollout.send("first")
    rollout.compile("second", "inductor/cd/fg.py")
    await rollout.pod("second").fetch()
    assert rollout.kernels("second") == {"inductor/cd/fg.py": CODE}


async def test_an_agent_that_restarts_writes_nothing_beside_its_engine(rollout: Rollout) -> None:
    await rollout.pod("second").fetch()
    await rollout.send("first")
    await rollout.pod("second").fetch()
    assert rollout.kernels("second") == {}


@pytest.mark.parametrize(
    ("old", "new", "is_digest_right", "reason"),
    [
        (b"compiled", b"modified", False, "another digest"),
        (b"triton/AB", b"../../out", True, "no regular file of a known folder"),
        (b"0000644\0", b"not-oct!", True, "is damaged"),
    ],
)
async def test_of_a_wrong_archive_nothing_is_left(
    rollout: Rollout, old: bytes, new: bytes, is_digest_right: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    await rollout.send("first")
    (archive,) = rollout.archives
    archive.write_bytes(wrong := fix_checksum(archive.read_bytes().replace(old, new)))
    if is_digest_right:
        archive.rename(archive.with_name(f"{KEY}-1-{sha256(wrong).hexdigest()}.tar"))
    with caplog.at_level(logging.WARNING):
        await rollout.pod("second").fetch()
    assert list(rollout.cache("second").iterdir()) == []
    assert "The engine starts without compiled kernels" in caplog.text
    assert reason in caplog.text


def fix_checksum(tar: bytes) -> bytes:
    """Return the archive with the right checksum of its first header."""
    header = tar[:148] + b" " * 8 + tar[156:512]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:] + tar[512:]


async def test_kernels_that_do_not_arrive_in_time_are_left_out(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    await rollout.send("first")
    monkeypatch.setattr(exchange, "FETCH_SECONDS", 0.0)
    await rollout.pod("second").fetch()
    assert list(rollout.cache("second").iterdir()) == []


async def test_after_a_failure_the_next_attempt_waits(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = rollout.pod("first", token="of another rollout")
    rollout.compile("first")
    for _ in range(2):
        await pod.offer()
    pod._credentials = Credentials("own")
    await pod.offer()
    assert rollout.archives == []
    monkeypatch.setattr(pod, "_not_before", 0.0)
    await pod.offer()
    assert len(rollout.archives) == 1
