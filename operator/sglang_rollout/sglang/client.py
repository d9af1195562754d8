"""HTTP client of one SGLang server. It hides differences between SGLang's releases, and API keys.

The agent is its only caller: every other process reaches engines through their gates.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from sglang_rollout.bounded import MIB, AnswerTooLargeError, open_connector, open_session, read_answer
from sglang_rollout.json_text import load_json
from sglang_rollout.sglang.api import (
    FIRST_WITH_PING,
    FIRST_WITH_SESSIONS,
    LOADS,
    MODEL_INFO,
    OLDEST_SUPPORTED,
    SERVER_INFO,
    ControlCall,
    PauseMode,
)

POLL_SECONDS = 2.0
_INFO_SECONDS = 10.0
_CALL_SECONDS = 4 * 3600.0
MAX_ANSWER_BYTES = 64 * MIB
"""Most bytes of an engine's answer to a control call: the checksums of 50,000 tensors on 8 ranks, or 100 rows of a large tensor."""
_KEEP_ALIVE_SECONDS = 1.0
"""Less than the 5 s after which SGLang closes idle connections (SGLANG_TIMEOUT_KEEP_ALIVE), so that no call uses a closed connection."""
HEALTH_SECONDS = 25.0
"""SGLang's own limit on a health check that generates is 20 s."""
_HIDDEN = "(hidden)"


class EngineError(Exception):
    """The engine gave no valid answer; the message is a clause that says what happened."""


class EngineGoneError(EngineError):
    """Nothing listens, or the connection broke: the process ends or has ended."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of the engine."""

    status: int
    body: bytes
    content_type: str

    @property
    def ok(self) -> bool:
        """True if the HTTP status is 2xx and the body has no ``success: false``."""
        if not 200 <= self.status < 300:
            return False
        document = self.document
        return not (isinstance(document, dict) and document.get("success") is False)

    @property
    def document(self) -> Any:
        """The JSON body; None if the body is empty or not JSON."""
        try:
            return load_json(self.body) if self.body else None
        except ValueError:
            return None

    @classmethod
    def json(cls, status: int, document: object) -> Self:
        """Return a reply that does not come from the engine."""
        return cls(status=status, body=json.dumps(document).encode(), content_type="application/json")


class EngineClient:
    """Requests to one SGLang server. Use as an async context manager."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.info: dict[str, Any] = {}
        """The last ``/server_info``, without secrets."""
        self.model_info: dict[str, Any] = {}
        """The last ``/model_info``."""
        self._http: aiohttp.ClientSession | None = None
        self._has_update_sessions: bool | None = None

    async def __aenter__(self) -> Self:
        self._http = open_session(connector=open_connector(keepalive_timeout=_KEEP_ALIVE_SECONDS, limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    @property
    def generates(self) -> bool:
        """False for a model that returns embeddings or rewards."""
        return self.model_info.get("is_generation") is not False

    async def get(self, path: str, *, timeout: float) -> Reply:
        """Send a GET request. ``timeout`` is in seconds. Raise EngineError if there is no answer."""
        return await self._request("GET", path, None, timeout)

    async def post(self, path: str, body: dict[str, Any], *, timeout: float) -> Reply:
        """Send a POST request with a JSON object. ``timeout`` is in seconds. Raise EngineError if there is no answer."""
        return await self._request("POST", path, body, timeout)

    async def read_label(self, *, timeout: float = POLL_SECONDS) -> str:
        """Return the current weight version. SGLang answers this even while its scheduler is busy for minutes."""
        info = (await self.get(MODEL_INFO, timeout=timeout)).document
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(f"{self.url}/model_info names no weight_version: is this an SGLang server?")
        self.model_info = info
        return str(info["weight_version"])

    async def read_info(self, *, timeout: float = _INFO_SECONDS) -> dict[str, Any]:
        """Return ``/server_info`` with its secrets; ``info`` keeps the reply without secrets."""
        info = (await self.get(SERVER_INFO, timeout=timeout)).document
        if not isinstance(info, dict):
            raise EngineError(f"{self.url}/server_info is not a JSON object: is this an SGLang server?")
        self.info = redact_secrets(info)
        return info

    async def count_requests(self) -> int:
        """Return the number of requests that run or wait in the engine."""
        loads = (await self.get(LOADS, timeout=POLL_SECONDS)).document
        rows = loads.get("loads", []) if isinstance(loads, dict) else []
        return sum(int(row.get("num_running_reqs", 0)) + int(row.get("num_waiting_reqs", 0)) for row in rows)

    async def abort_requests(self, *, timeout: float) -> None:
        """Abort all requests."""
        await self.post(ControlCall.ABORT_REQUEST.path, {"rid": "", "abort_all": True}, timeout=timeout)

    async def check_alive(self, *, timeout: float) -> None:
        """Return when the scheduler has worked: SGLang generates a token unless requests run. Raise EngineError otherwise."""
        reply = await self.get("/health_generate", timeout=timeout)
        if reply.status != 200:
            raise EngineError(f"/health_generate says HTTP {reply.status}: its scheduler does not work")

    async def wait_until_gone(self) -> None:
        """Hold an idle connection and return when its process ends, however soon a new process listens."""
        parts = urlsplit(self.url)
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError as error:
            raise EngineGoneError(f"nothing listens at {self.url} ({error.strerror or error})") from None
        try:
            while await reader.read(1024):
                pass
        except OSError:
            return  # the connection was reset
        finally:
            writer.close()

    async def prepare(self, version: object, *, is_warm: bool) -> None:
        """Find out which calls this engine supports. Raise EngineError if the engine is too old, or while it warms up.

        Args:
            version: SGLang's version. The version of a private build is accepted.
            is_warm: True if this process has finished its warm-up before.
        """
        numbers = _parse_release(version)
        if numbers is not None and numbers < OLDEST_SUPPORTED:
            oldest = ".".join(map(str, OLDEST_SUPPORTED))
            raise EngineError(f"it is SGLang {version}, and the oldest that can be driven is {oldest}: use a newer image or installation")
        if not is_warm:
            await self._check_warm(numbers)
        self._has_update_sessions = await self._find_sessions(numbers)

    async def call(self, name: str, body: dict[str, Any]) -> Reply:
        """Send a control call and wait for its answer, however long that takes."""
        if name in (ControlCall.BEGIN_UPDATE, ControlCall.END_UPDATE) and self._has_update_sessions is False:
            return Reply.json(200, {"success": True, "message": "This SGLang knows no update sessions and needs none."})
        if name == ControlCall.PAUSE and self._has_update_sessions is False and body.get("mode") == PauseMode.RETRACT.sglang:
            # SGLang 0.5.20 cannot flush its cache of the old weights while requests wait. An update with a flush then ends its
            # process (scheduler.py, is_fully_idle).
            body = {**body, "mode": PauseMode.ABORT.sglang}
        if name == ControlCall.UPDATE_TENSOR and self._has_update_sessions is False and body.get("selector") == "target":
            body = {**body, "disable_draft_model": True}  # the field before there was a selector
        reply = await self.post(f"/{name}", body, timeout=_CALL_SECONDS)
        if name == ControlCall.BEGIN_UPDATE and reply.status == 400 and b"already open" in reply.body:
            # A trainer that died left its session open. A session belongs to the server, so end it and begin a new one.
            await self.post(ControlCall.END_UPDATE.path, {}, timeout=_CALL_SECONDS)
            reply = await self.post(f"/{name}", body, timeout=_CALL_SECONDS)
        return reply

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Reply:
        if self._http is None:
            raise RuntimeError("EngineClient is used outside its 'async with' block")
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._http.request(method, self.url + path, json=body, timeout=limit) as answer:
                return Reply(answer.status, await read_answer(answer, MAX_ANSWER_BYTES), answer.content_type)
        except TimeoutError:
            raise EngineError(f"{path} was not answered within {timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise EngineGoneError(f"nothing listens at {self.url} ({error.os_error.strerror or error.os_error})") from None
        except AnswerTooLargeError as error:
            raise EngineError(f"{path}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"the connection broke during {path} ({type(error).__name__})") from None

    async def _check_warm(self, version: tuple[int, ...] | None) -> None:
        """Raise EngineError while the engine warms up. It already listens then, but its first request would take long."""
        reply = await self.get("/ready", timeout=POLL_SECONDS)
        if reply.status == 200:
            return
        # /ready is 503 during a pause, too. Since 0.5.23 /ping distinguishes pause and warm-up. In earlier versions /ping is 200 as
        # soon as SGLang listens, so only /health remains, which may generate a token.
        path, timeout = ("/ping", POLL_SECONDS) if version and version >= FIRST_WITH_PING else ("/health", HEALTH_SECONDS)
        if (await self.get(path, timeout=timeout)).status != 200:
            raise EngineError("it listens but has not finished warming up")

    async def _find_sessions(self, version: tuple[int, ...] | None) -> bool:
        """Return whether updates must run in a session, without opening one: a wrong method on a known path is 405, not 404."""
        status = (await self.get(ControlCall.BEGIN_UPDATE.path, timeout=POLL_SECONDS)).status
        if status in (404, 405):
            return status == 405
        return version is None or version >= FIRST_WITH_SESSIONS


def _parse_release(version: object) -> tuple[int, ...] | None:
    """Return ``(0, 5, 23)`` for the version of a release; None for any other."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(int(number) for number in match.groups()) if match else None


def redact_secrets(info: dict[str, Any]) -> dict[str, Any]:
    """Return ``/server_info`` without API keys, which SGLang shows in clear, also inside ``launch_command``."""
    secrets = {value for key, value in info.items() if key.endswith("api_key") and isinstance(value, str) and value}
    command = str(info.get("launch_command") or "")
    secrets |= set(re.findall(r"--(?:admin-)?api-key[= ](\S+)", command))
    cleaned = _hide_secrets(info, secrets)
    return cleaned if isinstance(cleaned, dict) else {}


def _hide_secrets(value: object, secrets: set[str]) -> object:
    if isinstance(value, dict):
        return {key: _HIDDEN if key.endswith("api_key") and item else _hide_secrets(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide_secrets(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in sorted(secrets, key=len, reverse=True):
            value = value.replace(secret, _HIDDEN)
    return value
