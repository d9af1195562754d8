"""The front with a certificate: HTTPS at both ports, and a renewal that no request notices."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from sglang_rollout.controller.render.router import SOFT_STOP_SCRIPT
from sglang_rollout.trainer import FleetRefused, FleetUntrusted, connect
from sglang_rollout.trainer.credentials import CA_VARIABLES
from sglang_rollout.wire.access import CALLER_HEADER
from sglang_rollout.wire.ports import FRONT_HEALTH
from tests.contract.proxy.test_front import Part
from tests.contract.support.agent_pod import Process, until
from tests.support.certificates import Authority, Issued
from tests.support.ports import free_port

pytestmark = pytest.mark.router


@dataclass
class SecureFront:
    folder: Path
    process: Process
    port: int
    generate_port: int
    probes_port: int
    smg: Part
    coordinator: Part
    authority: Authority = field(default_factory=Authority)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def certificate(self) -> Path:
        return self.folder / "tls" / "front.pem"

    @property
    def ca(self) -> Path:
        file = self.folder / "ca.crt"
        file.write_bytes(self.authority.certificate)
        return file

    @property
    def log(self) -> str:
        return self.process.log.read_text()

    def renew(self) -> Issued:
        issued = self.authority.issue("127.0.0.1")
        issued.write(self.certificate)
        return issued

    async def served(self) -> bytes:
        """Return the certificate of a new connection."""
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", self.port))
        return pem.encode()

    def session(self, *, trusts: bool = True, reuses: bool = False) -> aiohttp.ClientSession:
        context = ssl.create_default_context(cafile=str(self.ca) if trusts else None)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, force_close=not reuses))


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[SecureFront]:
    parts = [Part(name, free_port()) for name in ("smg", "coordinator", "batches")]
    smg, coordinator, batches = parts
    for part in parts:
        await part.start()
    port, generate, probes = free_port(), free_port(), free_port()
    (tmp_path / "tls").mkdir()
    line = ["proxy", "front", "--listen", f"127.0.0.1:{port}", "--generate-listen", f"127.0.0.1:{generate}"]
    line += ["--probes-listen", f"127.0.0.1:{probes}", "--runtime-dir", str(tmp_path / "run"), "--smg", f"127.0.0.1:{smg.port}"]
    line += ["--coordinator", f"127.0.0.1:{coordinator.port}", "--batches", f"127.0.0.1:{batches.port}"]
    line += ["--certificate", str(tmp_path / "tls" / "front.pem")]
    process = Process(line, tmp_path / "front.log")
    made = SecureFront(tmp_path, process, port, generate, probes, smg, coordinator)
    made.renew()
    await process.start()
    try:
        await until(lambda: _is_up(made), 60, "the front answers")
        yield made
    finally:
        await process.end()
        for part in parts:
            await part.stop()


async def _is_up(front: SecureFront) -> bool:
    try:
        async with front.session() as http, http.get(front.url + FRONT_HEALTH) as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


async def test_both_ports_serve_https_and_know_their_callers(front: SecureFront) -> None:
    async with front.session() as http:
        async with http.post(f"{front.url}/generate", data="{}") as reply:
            assert (reply.status, (await reply.json())["from"]) == (200, "smg")
        async with http.get(f"{front.url}/fleet") as reply:
            assert (reply.status, (await reply.json())["from"]) == (200, "coordinator")
        assert front.coordinator.received[CALLER_HEADER.lower()] == "127.0.0.1", "the front passes the address of the caller on"
        generate = f"https://127.0.0.1:{front.generate_port}"
        async with http.post(f"{generate}/generate", data="{}") as reply:
            assert reply.status == 200
        async with http.get(f"{generate}/fleet") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (403, "data_paths_only")


async def test_the_certificate_is_refused_without_its_authority(front: SecureFront) -> None:
    async with front.session(trusts=False) as http:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="certificate verify failed"):
            await http.get(f"{front.url}/fleet")


@pytest.mark.parametrize("port", ["port", "generate_port"])
async def test_plain_http_gets_an_answer_that_names_https(front: SecureFront, port: str) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{getattr(front, port)}/generate", data="{}") as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "https_only")


async def test_probes_stay_plain(front: SecureFront) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{front.probes_port}{FRONT_HEALTH}") as reply:
        assert reply.status == 200


async def test_a_renewed_certificate_is_served_and_no_request_breaks(front: SecureFront) -> None:
    done = asyncio.Event()
    counts = {True: 0, False: 0}

    async def load(*, reuses: bool) -> None:
        async with front.session(reuses=reuses) as http:
            while not done.is_set():
                async with http.post(f"{front.url}/generate", data="{}") as reply:
                    assert reply.status == 200
                    assert (await reply.json())["from"] == "smg"
                counts[reuses] += 1

    async with asyncio.TaskGroup() as group:
        for reuses in (True, False, True, False):
            group.create_task(load(reuses=reuses))
        for _ in range(2):
            renewed = front.renew()
            await until(lambda: _serves(front, renewed), 60, "the renewed certificate is served", every=0.3)  # noqa: B023 - awaited at once
        done.set()
    assert min(counts.values()) > 0
    assert front.log.count("the renewed certificate is served") == 2


async def _serves(front: SecureFront, issued: Issued) -> bool:
    return await front.served() == issued.certificate


async def test_a_certificate_without_its_key_changes_nothing(front: SecureFront) -> None:
    before = await front.served()
    front.certificate.write_bytes(front.authority.issue("127.0.0.1").certificate)
    await until(lambda: _logs(front, "the earlier one stays"), 60, "the front refuses the pair")
    assert await front.served() == before
    renewed = front.renew()
    await until(lambda: _serves(front, renewed), 60, "the next pair is served", every=0.3)


async def _logs(front: SecureFront, text: str) -> bool:
    return text in front.log


async def test_the_client_takes_the_authority(front: SecureFront, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = str(front.ca)
    for name in CA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (await asyncio.to_thread(connect, front.url, ca=ca, timeout=30)).close()
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    (await asyncio.to_thread(connect, front.url, timeout=30)).close()
    monkeypatch.delenv("SSL_CERT_FILE")
    other = front.ca.with_name("other-ca.crt")
    other.write_bytes(Authority().certificate)
    for trusted, shown in ((None, "certifi"), (other, str(other))):
        with pytest.raises(FleetUntrusted, match=f"is not accepted: .*{shown}.*SGLANG_ROLLOUT_CA"):
            await asyncio.to_thread(connect, front.url, ca=trusted, timeout=3600)
    with pytest.raises(FleetRefused, match="https://"):
        await asyncio.to_thread(connect, front.url.replace("https", "http"), timeout=3600)


async def test_a_soft_stop_lets_requests_end(front: SecureFront) -> None:
    front.smg.seconds = 3
    async with front.session() as http:
        running = asyncio.create_task(_generate(http, front.url))
        await asyncio.sleep(0.5)
        assert front.process.process is not None
        script = SOFT_STOP_SCRIPT.replace("USR1 1", f"USR1 {front.process.process.pid}")
        hook = await asyncio.create_subprocess_exec("/bin/sh", "-c", script)
        assert await running == 200
        await asyncio.wait_for(hook.wait(), 15)
        assert await front.process.end(signal.SIGKILL) is not None


async def _generate(http: aiohttp.ClientSession, url: str) -> int:
    async with http.post(f"{url}/generate", data="{}") as reply:
        return reply.status
