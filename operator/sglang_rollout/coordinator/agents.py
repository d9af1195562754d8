"""HTTP client of the agents.

Every call has a deadline and the term, proves the credential of its engine, and returns a value instead of raising.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_exponential
from yarl import URL

from sglang_rollout.bounded import MESSAGE_BYTES, MIB, open_connector, open_session
from sglang_rollout.coordinator.agent_replies import parse_json, parse_result
from sglang_rollout.coordinator.tickets import complete_bodies, read_ticket, upload_ticket
from sglang_rollout.coordinator.update.events import Result, Send
from sglang_rollout.coordinator.update.requests import Body
from sglang_rollout.coordinator.update.steps import SLOWEST_FACTOR
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proven_calls import Answer, ForeignAnswerError, Peer
from sglang_rollout.sglang.api import ControlCall
from sglang_rollout.wire.agent import AgentStatus, SyncRequest
from sglang_rollout.wire.ports import (
    AGENT_CHECKPOINT,
    AGENT_RUN,
    AGENT_SYNC,
    DEADLINE_HEADER,
    STORE_READ,
    STORE_STATUS,
    STORE_VERIFY,
    TERM_HEADER,
)
from sglang_rollout.wire.staged import StoreStatus

log = logging.getLogger(__name__)

SYNC_DEADLINE_SECONDS = 2.0
CONNECT_DEADLINE_SECONDS = 5.0
READ_DEADLINE_SECONDS = 5.0
"""For reads of information: a scheduler that is stuck in a collective must not block a reader."""
CONFLICT = 409
MAX_LIST_BYTES = 64 * MIB
"""Most bytes of an answer that lists names or values: 100 rows of a tensor of 30,000 columns, or the names and shapes of 300,000 tensors.

Such an answer may hold what an engine has said. :data:`agent_replies.MAX_JSON_VALUES` limits what becomes of it in memory.
"""
_LISTS = frozenset({AGENT_CHECKPOINT, STORE_READ, STORE_VERIFY, ControlCall.GET_WEIGHTS.path, ControlCall.CHECK_WEIGHTS.path})

Address = Callable[[str], str | None]
"""Returns the base URL of an engine's gate; None if the engine has no address now."""
FindCredentials = Callable[[str], Credentials]
"""Returns the credentials of an engine by its name."""


class Agents:
    """Calls agents by engine name. Calls ``on_outranked`` with the term of an agent that refused this coordinator's lower term."""

    def __init__(
        self,
        *,
        address: Address,
        credentials: FindCredentials,
        term: Callable[[], int],
        key: Credentials | None = None,
        data_url: Address = lambda name: None,
    ) -> None:
        """Create the client.

        Args:
            address: Finds the base URL of a peer: of an engine's gate, or of the weight store.
            credentials: Finds the credentials of a peer.
            term: Returns the coordinator's term.
            key: Key of the rollout, from which tickets are derived. None: the fleet has no weight store.
            data_url: Finds the base URL of a peer's data port.
        """
        self._key = key
        self._data_url = data_url
        self._address = address
        self._credentials = credentials
        self._term = term
        self._session: aiohttp.ClientSession | None = None
        self._peers: dict[str, tuple[Credentials, Peer]] = {}
        self._foreign: dict[str, str] = {}
        """Problem of each peer whose answers have no proof."""
        self._sync_locks: dict[str, asyncio.Lock] = {}
        self._heard: dict[str, float] = {}
        self.on_outranked: Callable[[int], None] = lambda term: None

    async def start(self) -> None:
        """Open the connection pool."""
        # No limit, because a call that waits for a connection would look like a slow engine.
        connector = open_connector(limit=0)
        timeout = aiohttp.ClientTimeout(connect=CONNECT_DEADLINE_SECONDS)
        self._session = open_session(connector=connector, timeout=timeout)

    async def close(self) -> None:
        """Close the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def fan_out(self, effect: Send, cut: asyncio.Future[str] | None = None) -> dict[str, Result]:
        """Carry out a Send effect: call all engines at once and return one result for each, within the deadline of the effect.

        Args:
            effect: Path, bodies and limits.
            cut: Ends the wait early. Its result is the message for engines that have not answered.
        """
        tasks = {
            asyncio.create_task(self._call_once_or_retry(name, effect, body), name=f"{effect.path} {name}"): name
            for name, body in _encode_bodies(self._complete(effect)).items()
        }
        results: dict[str, Result] = {}
        loop = asyncio.get_running_loop()
        began = loop.time()
        end, message = math.inf, ""
        waiting = set(tasks)
        try:
            while waiting:
                ends: set[asyncio.Future[Any]] = {*waiting, *([cut] if cut is not None else [])}
                limit = None if end == math.inf else max(0.0, end - loop.time())
                done, _ = await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                ended = waiting & done
                waiting -= ended
                for task in ended:
                    results[tasks[task]] = task.result()
                if not done or (cut is not None and cut.done()):
                    break
                seconds, limit_message = _remaining_wait(effect, results, loop.time() - began)
                if loop.time() + seconds < end:
                    end, message = loop.time() + seconds, limit_message
            if cut is not None and cut.done():
                message = cut.result()
            for task in waiting:
                results[tasks[task]] = Result(ok=False, message=message)
        finally:
            for task in waiting:
                task.cancel()
        return {name: results[name] for name in effect.bodies}

    def _complete(self, effect: Send) -> Mapping[str, Body]:
        """Return the bodies with tickets and addresses."""
        return effect.bodies if self._key is None else complete_bodies(effect.path, effect.bodies, self._key, self._data_url)

    def upload_ticket(self, update: str) -> str:
        """Return the ticket for the trainer that uploads a version."""
        if self._key is None:
            raise RuntimeError("a coordinator without the rollout's key gives no tickets")
        return upload_ticket(self._key, update)

    def read_ticket(self, update: str) -> str:
        """Return the ticket for readers of a version."""
        if self._key is None:
            raise RuntimeError("a coordinator without the rollout's key gives no tickets")
        return read_ticket(self._key, update)

    async def poll_store(self) -> StoreStatus | None:
        """Return the status of the weight store; None if it does not answer."""
        return (await self.call(STORE, STORE_STATUS, {}, SYNC_DEADLINE_SECONDS)).store

    async def sync(self, name: str, request: SyncRequest) -> AgentStatus | None:
        """Send an agent the committed version and return its status; None if it does not answer."""
        return (await self.call(name, AGENT_SYNC, request.model_dump(mode="json"), SYNC_DEADLINE_SECONDS)).agent

    def silence(self, name: str) -> float:
        """Return the seconds since the agent last answered any call."""
        return time.monotonic() - self._heard.get(name, -math.inf)

    async def get(self, name: str, path: str, deadline: float = READ_DEADLINE_SECONDS) -> tuple[int, Any]:
        """GET a JSON document from an agent. Return status and body; without an answer, status 0 and a message."""
        return await self._read("GET", name, path, deadline)

    async def ask(self, name: str, path: str, body: Body, deadline: float) -> tuple[int, Any]:
        """POST a read to an agent. Return the engine's status and body; without an answer, status 0 and a message."""
        return await self._read("POST", name, path, deadline, json.dumps(dict(body)).encode())

    async def _read(self, method: str, name: str, path: str, deadline: float, body: bytes = b"") -> tuple[int, Any]:
        url = self._address(name)
        if url is None:
            return 0, "it has no address yet"
        try:
            answer = await self._send(method, name, url + path, body, deadline)
            return answer.status, parse_json(answer.body)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return 0, _error_message(error, deadline)

    async def _call_once_or_retry(self, name: str, effect: Send, body: bytes) -> Result:
        """Make one call of a fan-out. Retry an idempotent call after a lost connection, which shows nothing about the engine."""
        if not effect.idempotent:
            return await self.call(name, effect.path, body, effect.deadline)
        loop = asyncio.get_running_loop()
        end = loop.time() + effect.deadline
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_NoAnswerError),
            stop=stop_after_delay(effect.deadline),
            wait=wait_exponential(0.1, max=2.0),
        )
        try:
            async for attempt in retrying:
                with attempt:
                    result = await self.call(name, effect.path, body, max(0.05, end - loop.time()))
                    if result.status == 0 and loop.time() < end:
                        raise _NoAnswerError(result.message)
        except RetryError as error:
            return Result(ok=False, message=str(error.last_attempt.exception()))
        return result

    async def call(self, name: str, path: str, body: Body | bytes, deadline: float) -> Result:
        """POST to one agent. A body of type bytes is already JSON."""
        if path not in (AGENT_SYNC, AGENT_RUN):
            return await self._post(name, path, body, deadline)
        # A running sync with an older version must not arrive after this call, because it would close the gate again.
        lock = self._sync_locks.setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout(deadline):
                async with lock:
                    if path == AGENT_SYNC:
                        return await self._post(name, path, body, deadline)
                # The lock is released here: an engine may need long to continue, and syncs that begin now carry this version too.
                return await self._post(name, path, body, deadline)
        except TimeoutError as error:
            return Result(ok=False, message=_error_message(error, deadline))

    async def _post(self, name: str, path: str, body: Body | bytes, deadline: float) -> Result:
        url = self._address(name)
        if url is None:
            return Result(ok=False, message="it has no address: its pod does not run yet.")
        data = body if isinstance(body, bytes) else json.dumps(dict(body)).encode()
        try:
            answer = await self._send("POST", name, url + path, data, deadline)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return Result(ok=False, message=_error_message(error, deadline))
        if answer.is_proven:
            self._check_term(answer)
            self._heard[name] = time.monotonic()
        return parse_result(path, answer.status, parse_json(answer.body))

    async def _send(self, method: str, name: str, url: str, body: bytes, deadline: float) -> Answer:
        """Make one call. Log once if another process answers in place of the called one."""
        limit = MAX_LIST_BYTES if URL(url).path in _LISTS else MESSAGE_BYTES
        headers = self._headers(None if method == "GET" else deadline)
        try:
            async with asyncio.timeout(deadline):
                answer = await self._peer(name).call(self._pool(), method, url, body, headers, limit=limit)
        except ForeignAnswerError as error:
            if self._foreign.get(name) != str(error):
                log.warning("%s of %s: %s. Nothing of the answer is used.", URL(url).authority, name, error)
            self._foreign[name] = str(error)
            raise
        if answer.is_proven:
            self._foreign.pop(name, None)
        return answer

    def _peer(self, name: str) -> Peer:
        """Return the process with the credentials that it has now."""
        credentials = self._credentials(name)
        known = self._peers.get(name)
        if known is None or known[0].lines() != credentials.lines():
            known = self._peers[name] = credentials, Peer(credentials)
        return known[1]

    def _check_term(self, answer: Answer) -> None:
        """Report the higher term that an agent names when it refuses this coordinator's term."""
        text = answer.headers.get(TERM_HEADER, "")
        if answer.status == CONFLICT and text.isascii() and text.isdigit() and int(text) > self._term():
            self.on_outranked(int(text))

    def _headers(self, deadline: float | None) -> Mapping[str, str]:
        headers = {TERM_HEADER: str(self._term())}
        if deadline is not None:
            # The agent answers shortly before our own limit, because its message says more than a timeout.
            headers[DEADLINE_HEADER] = f"{max(deadline * 0.5, deadline - 1.0):.3f}"
        return headers

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Agents.start() has not been called")
        if self._session.closed:  # aiohttp raises RuntimeError, and every call must return a value
            raise aiohttp.ClientConnectionError("the coordinator ends")
        return self._session


class _NoAnswerError(Exception):
    """The call did not reach the agent, or its answer did not reach the coordinator."""


def _encode_bodies(bodies: Mapping[str, Body]) -> dict[str, bytes]:
    """Return the JSON of each body. Encode equal bodies once, because a bucket may hold thousands of names."""
    found: dict[str, bytes] = {}
    last: tuple[Body, bytes] | None = None
    for name, body in bodies.items():
        if last is None or body != last[0]:
            last = body, json.dumps(dict(body)).encode()
        found[name] = last[1]
    return found


def _remaining_wait(effect: Send, results: Mapping[str, Result], took: float) -> tuple[float, str]:
    """Return how many seconds to wait for the engines that have not answered, and their message after that."""
    if effect.grace is not None and any(not result.ok for result in results.values()):
        return effect.grace, "not waited for, because another engine failed."
    if effect.patience is not None and 2 * len(results) >= len(effect.bodies):
        seconds = max(effect.patience, SLOWEST_FACTOR * took)
        return seconds, f"no answer for {seconds:g} s after {len(results)} of {len(effect.bodies)} engines had answered."
    return math.inf, ""


def _error_message(error: BaseException, deadline: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {deadline:g} s."
    return f"{str(error) or type(error).__name__}."
