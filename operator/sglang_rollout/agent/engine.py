"""Client of the local SGLang server: what it is, what it holds, and the control calls put to it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from sglang_rollout.agent.run_files import read_all_reduce, read_nccl
from sglang_rollout.agent.state import EngineFacts
from sglang_rollout.sglang.api import FIRST_WITH_PING, FIRST_WITH_SESSIONS, LOADS, MODEL_INFO, OLDEST_SUPPORTED, SERVER_INFO, ControlCall
from sglang_rollout.wire.trainer import ControlReply

_POLL_TIMEOUT = 2.0
_IDENTIFY_TIMEOUT = 10.0
_LONGEST_CALL = 4 * 3600.0
_KEPT = 1.0
"""Seconds for which an idle connection is used again. SGLang closes its own after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE): a call never meets one
that is closing."""
_HEALTH_TIMEOUT = 25.0
"""SGLang's own limit on a health check that generates is 20 s."""
_HIDDEN = "(hidden)"
NCCL_FILE = "nccl"
"""Beside the boot file; written by the start script of the engine's container."""
ALL_REDUCE_FILE = "all-reduce"
"""The same, if it measures."""


class EngineError(Exception):
    """The engine did not answer as it should; the message says what happened."""


class EngineGoneError(EngineError):
    """Nothing listens, or the connection broke: the process ends or has ended."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the engine, ready to be passed on."""

    status: int
    body: bytes
    content_type: str

    @property
    def ok(self) -> bool:
        """Whether the call succeeded: by HTTP status, and by SGLang's ``success`` where the body has one."""
        if not 200 <= self.status < 300:
            return False
        document = self.document
        return not (isinstance(document, dict) and document.get("success") is False)

    @property
    def document(self) -> Any:
        """The JSON body, or None."""
        try:
            return json.loads(self.body) if self.body else None
        except ValueError:
            return None

    @classmethod
    def json(cls, status: int, document: object) -> Self:
        """An answer made here."""
        return cls(status=status, body=json.dumps(document).encode(), content_type="application/json")


def complaint(status: int, message: str) -> Reply:
    """A refusal in SGLang's own shape."""
    return Reply.json(status, ControlReply(success=False, message=message).model_dump(exclude_none=True))


class Engine:
    """One SGLang server. Use as an async context manager."""

    def __init__(self, url: str, *, boot_file: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self._boot_file = boot_file
        self._session: aiohttp.ClientSession | None = None
        self._needs_session: bool | None = None
        self.info: dict[str, Any] = {}
        """The last /server_info, without secrets."""
        self.model_info: dict[str, Any] = {}
        """The last /model_info."""
        self.vocabulary: int | None = None
        """How many tokens the model knows; None if the engine did not tell."""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=_KEPT, limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def generates(self) -> bool:
        """False for a model that gives embeddings or rewards."""
        return self.model_info.get("is_generation") is not False

    def container_boot(self) -> str | None:
        """What the engine's container wrote at its start; None without such a file."""
        if self._boot_file is None:
            return None
        try:
            return self._boot_file.read_text().strip() or None
        except OSError:
            return None

    async def until_it_ends(self) -> None:
        """Hold an idle connection and return when the other side ends it: the process died, however soon another takes its place."""
        parts = urlsplit(self.url)
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError as error:
            raise EngineGoneError(f"nothing listens at {self.url} ({error.strerror or error})") from None
        try:
            while await reader.read(1024):
                pass
        except OSError:
            return  # reset: the same news
        finally:
            writer.close()

    async def label(self, *, timeout: float = _POLL_TIMEOUT) -> str:
        """The live weight version. Answers also while the scheduler is busy for minutes."""
        info = (await self.get(MODEL_INFO, timeout=timeout)).document
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(f"{self.url}/model_info names no weight_version: is this an SGLang server?")
        self.model_info = info
        return str(info["weight_version"])

    async def refresh_info(self, *, timeout: float) -> dict[str, Any]:
        """Ask for /server_info; ``info`` keeps it without secrets."""
        info = (await self.get(SERVER_INFO, timeout=timeout)).document
        if not isinstance(info, dict):
            raise EngineError(f"{self.url}/server_info is not a JSON object: is this an SGLang server?")
        self.info = redacted(info)
        return info

    async def identify(self, label: str, known_boot_id: str | None) -> EngineFacts:
        """Who the engine is. Raises EngineError while it is still warming up; the life ``known_boot_id`` has warmed up before."""
        info = await self.refresh_info(timeout=_IDENTIFY_TIMEOUT)
        if self._boot_file is not None and self.container_boot() is None:
            raise EngineError(f"its container has not written {self._boot_file} yet")
        boot_id = self.container_boot() or fingerprint(info)
        version = info.get("version")
        _check_age(version)
        if boot_id != known_boot_id:
            await self._warm(_numbers(version))
        self._needs_session = await self._asks_for_session(version)
        self.vocabulary = await self._vocabulary() or self.vocabulary
        tensor_size = info.get("tp_size")
        return EngineFacts(
            boot_id=boot_id,
            live_label=label,
            launch_label=str(info.get("weight_version")),
            sglang_version=str(version) if version is not None else None,
            tensor_size=tensor_size if isinstance(tensor_size, int) else None,
            served_name=str(info["served_model_name"]) if info.get("served_model_name") else None,
            nccl=read_nccl(self._boot_file.with_name(NCCL_FILE), info) if self._boot_file is not None else None,
            all_reduce=read_all_reduce(self._boot_file.with_name(ALL_REDUCE_FILE)) if self._boot_file is not None else None,
        )

    async def running(self) -> int:
        """Requests that run or wait in the engine."""
        loads = (await self.get(LOADS, timeout=_POLL_TIMEOUT)).document
        rows = loads.get("loads", []) if isinstance(loads, dict) else []
        return sum(int(row.get("num_running_reqs", 0)) + int(row.get("num_waiting_reqs", 0)) for row in rows)

    async def prove_alive(self, *, timeout: float) -> None:
        """Return when the scheduler has worked: SGLang generates a token, unless others come out anyway. Raises EngineError."""
        reply = await self.get("/health_generate", timeout=timeout)
        if reply.status != 200:
            raise EngineError(f"/health_generate says HTTP {reply.status}: its scheduler does not work")

    async def call(self, name: str, body: dict[str, Any]) -> Reply:
        """Put a control call to the engine and wait for its answer, however long it takes."""
        if name in (ControlCall.BEGIN_UPDATE, ControlCall.END_UPDATE) and self._needs_session is False:
            return Reply.json(200, {"success": True, "message": "This SGLang knows no update sessions and needs none."})
        if name == ControlCall.PAUSE and self._needs_session is False and body.get("mode") == "retract":
            # Requests that wait keep SGLang 0.5.20 from flushing what it computed with the old weights, and an update that is to
            # flush then ends it (scheduler.py, is_fully_idle).
            body = {**body, "mode": "abort"}
        reply = await self.post(f"/{name}", body, timeout=_LONGEST_CALL)
        if name == ControlCall.BEGIN_UPDATE and reply.status == 400 and b"already open" in reply.body:
            # Left behind by a trainer that died. A session belongs to the server, not to a client: end it and begin anew.
            await self.post(f"/{ControlCall.END_UPDATE}", {}, timeout=_LONGEST_CALL)
            reply = await self.post(f"/{name}", body, timeout=_LONGEST_CALL)
        return reply

    async def get(self, path: str, *, timeout: float) -> Reply:
        """GET one path."""
        return await self._request("GET", path, None, timeout)

    async def post(self, path: str, body: dict[str, Any], *, timeout: float) -> Reply:
        """POST a JSON object to one path."""
        return await self._request("POST", path, body, timeout)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Reply:
        if self._session is None:
            raise RuntimeError("Engine is used outside its 'async with' block")
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as answer:
                return Reply(answer.status, await answer.read(), answer.content_type)
        except TimeoutError:
            raise EngineError(f"{path} was not answered within {timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise EngineGoneError(f"nothing listens at {self.url} ({error.os_error.strerror or error.os_error})") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"the connection broke during {path} ({type(error).__name__})") from None

    async def _warm(self, version: tuple[int, ...] | None) -> None:
        """Return when the engine has finished its warm-up: it listens before that, and its first request would take long."""
        reply = await self.get("/ready", timeout=_POLL_TIMEOUT)
        if reply.status == 200:
            return
        # /ready is 503 during a pause. /ping tells the rest since 0.5.23; before it says 200 of whatever listens, and there
        # is only /health, which may generate a token.
        path, timeout = ("/ping", _POLL_TIMEOUT) if version and version >= FIRST_WITH_PING else ("/health", _HEALTH_TIMEOUT)
        if (await self.get(path, timeout=timeout)).status != 200:
            raise EngineError("it listens but has not finished warming up")

    async def _asks_for_session(self, version: object) -> bool:
        """Whether updates must run in a session. Asked without opening one: a wrong method on a known path is 405, not 404."""
        status = (await self.get(f"/{ControlCall.BEGIN_UPDATE}", timeout=_POLL_TIMEOUT)).status
        if status in (404, 405):
            return status == 405
        numbers = _numbers(version)
        return numbers is None or numbers >= FIRST_WITH_SESSIONS

    async def _vocabulary(self) -> int | None:
        """SGLang tells the size of the vocabulary only when it refuses a bias for a token that does not exist. Nothing is generated."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {"-1": 0.0}}}
        try:
            reply = await self.post("/generate", body, timeout=_POLL_TIMEOUT)
        except EngineGoneError:
            raise
        except EngineError:
            return None  # a paused engine holds the request
        found = re.search(rb"logit_bias .*\[0, (\d+)\]", reply.body)
        return int(found[1]) + 1 if found else None


def _numbers(version: object) -> tuple[int, ...] | None:
    """``(0, 5, 23)`` of a release's version; None if it is none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(int(number) for number in match.groups()) if match else None


def _check_age(version: object) -> None:
    """Refuse what is too old. A version that is no release's, of somebody's own build, is taken."""
    numbers = _numbers(version)
    if numbers is not None and numbers < OLDEST_SUPPORTED:
        oldest = ".".join(map(str, OLDEST_SUPPORTED))
        raise EngineError(f"it is SGLang {version}, and the oldest that can be driven is {oldest}: use a newer image or installation")


def fingerprint(info: dict[str, Any]) -> str:
    """Identifies one life of a server by what differs at every start: measured start-up times, seed and ports."""
    telling = {key: info.get(key) for key in ("startup_time", "random_seed", "nccl_port", "launch_command")}
    return hashlib.sha256(json.dumps(telling, sort_keys=True, default=str).encode()).hexdigest()[:32]


def redacted(info: dict[str, Any]) -> dict[str, Any]:
    """/server_info without API keys, wherever they appear: SGLang shows them in clear, also inside ``launch_command``."""
    secrets = {value for key, value in info.items() if key.endswith("api_key") and isinstance(value, str) and value}
    command = str(info.get("launch_command") or "")
    secrets |= set(re.findall(r"--(?:admin-)?api-key[= ](\S+)", command))
    cleaned = _without(info, secrets)
    return cleaned if isinstance(cleaned, dict) else {}


def _without(value: object, secrets: set[str]) -> object:
    if isinstance(value, dict):
        return {key: _HIDDEN if key.endswith("api_key") and item else _without(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in sorted(secrets, key=len, reverse=True):
            value = value.replace(secret, _HIDDEN)
    return value
