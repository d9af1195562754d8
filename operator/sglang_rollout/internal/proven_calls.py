"""Send and answer calls with proofs (:mod:`proofs`) in place of a credential."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from yarl import URL

from sglang_rollout.bounded import ERROR_BYTES, read_answer
from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proofs import CHALLENGE_HEADER, PROOF_HEADER, Call, CallProof, Challenges, digest
from sglang_rollout.internal.refusals import REPEATED
from sglang_rollout.internal.requests import Handler
from sglang_rollout.wire.ports import TERM_HEADER
from sglang_rollout.wire.reasons import RefusedError

PIECE_BYTES = 2**16
"""Bytes of a body that a connection gets at a time. A connection copies what it gets, and a body goes to all engines."""
_MAX_CHALLENGE_CHARACTERS = 64
_UNAUTHORIZED = 401
_PROVEN = web.RequestKey("proven", CallProof)


class ForeignAnswerError(aiohttp.ClientError):
    """An answer has no proof: it does not come from the process that was called."""


@dataclass(frozen=True)
class Answer:
    """Answer to a call."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_proven: bool
    """False for a failure that anybody may have answered: a proxy that finds no process, or a process that has taken the port."""


class Peer:
    """Another process that has the same credentials. Knows the challenge of that process for the next call."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._challenge = ""

    async def call(
        self, http: aiohttp.ClientSession, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, limit: int
    ) -> Answer:
        """Make a call, and return the answer only if it is proven or a failure.

        A process that knows the challenge of the call no longer names another one and has done nothing, so the call is sent once more.

        Args:
            http: Session that decompresses nothing.
            method: HTTP method.
            url: URL.
            body: Body, JSON.
            headers: Further headers.
            limit: Most bytes of a proven answer.

        Raises:
            ForeignAnswerError: Another process answers. Its answer is not read.
            aiohttp.ClientError: There is no answer, or it is too large.
        """
        address = URL(url)
        sent = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})} if body else dict(headers or {})
        call = Call(method, address.raw_path_qs, sent, digest(body))
        answer = await self._send(http, address, call, body, limit)
        if isinstance(answer, Answer):
            return answer
        again = await self._send(http, address, call, body, limit)
        return again if isinstance(again, Answer) else Answer(_UNAUTHORIZED, {}, b"", is_proven=False)

    async def _send(self, http: aiohttp.ClientSession, url: URL, call: Call, body: bytes, limit: int) -> Answer | None:
        """Return None if the call must be sent once more, with another challenge."""
        proof = call.prove(self._credentials, self._challenge)
        data = _pieces(body) if body else None
        async with http.request(call.method, url, data=data, headers={**call.headers, PROOF_HEADER: proof.header}) as reply:
            challenge = reply.headers.get(CHALLENGE_HEADER, "")[:_MAX_CHALLENGE_CHARACTERS]
            self._challenge = challenge or self._challenge
            if reply.status == _UNAUTHORIZED and challenge not in {"", proof.challenge}:
                reply.close()
                return None
            return await _read_proven(reply, proof, limit)


async def _read_proven(reply: aiohttp.ClientResponse, proof: CallProof, limit: int) -> Answer:
    wanted = proof.check_answer(reply.headers.get(PROOF_HEADER, ""), reply.status, reply.headers.get(TERM_HEADER, ""))
    if wanted is None:
        if reply.status < 400:
            reply.close()
            raise ForeignAnswerError("another process answers at this address: the answer has no proof")
        return Answer(reply.status, {}, await read_answer(reply, ERROR_BYTES), is_proven=False)
    body = await read_answer(reply, limit)
    if digest(body) != wanted:
        raise ForeignAnswerError("another process has changed the answer: its body does not fit its proof")
    return Answer(reply.status, reply.headers, body, is_proven=True)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def take_proven_calls(app: web.Application, credentials: Credentials, process: str = "engine") -> None:
    """Let an application check the proofs of its calls and prove its answers to them. Call :func:`require_proof` where a call needs one.

    Args:
        app: The application.
        credentials: Credentials of this process.
        process: Whose credentials they are: ``engine`` or ``weight store``.
    """
    challenges = Challenges()

    @web.middleware
    async def check_proof(request: web.Request, handler: Handler) -> web.StreamResponse:
        if text := request.headers.get(PROOF_HEADER):
            request[_PROVEN] = await _check_proof(request, text, credentials, challenges, process)
        return await handler(request)

    async def prove_answer(request: web.Request, response: web.StreamResponse) -> None:
        response.headers[CHALLENGE_HEADER] = challenges.current(time.monotonic())
        proof = request.get(_PROVEN)
        if proof is not None and isinstance(response, web.Response) and isinstance(response.body, bytes | bytearray | None):
            term = response.headers.get(TERM_HEADER, "")
            response.headers[PROOF_HEADER] = proof.prove_answer(response.status, term, digest(bytes(response.body or b"")))

    app.middlewares.append(check_proof)
    app.on_response_prepare.append(prove_answer)


async def _check_proof(request: web.Request, text: str, credentials: Credentials, challenges: Challenges, process: str) -> CallProof:
    """Return the proof of a call. The body is read only if the rest is proven.

    Raises:
        RefusedError: The call is not proven, not new, or not complete.
    """
    proof = CallProof.parse(text)
    if proof is None:
        raise RefusedError(f"{request.path}: the header {PROOF_HEADER} holds no proof.", status=403)
    if not challenges.is_known(proof.challenge, time.monotonic()):
        # The caller repeats the call with the challenge of this answer.
        request[REPEATED] = True
        raise RefusedError(f"{request.path}: the challenge of this call is not known here.", status=_UNAUTHORIZED)
    found = Call(request.method, request.raw_path, request.headers, proof.body_digest).check(proof, credentials)
    if found is None:
        raise RefusedError(f"{request.path}: this call is not proven with the credential of this {process}.", status=403)
    if digest(await request.read()) != proof.body_digest:
        raise RefusedError(f"{request.path}: the body is not the one that the caller has proven.", status=403)
    if not challenges.take(proof):
        raise RefusedError(f"{request.path}: this call was made before.", status=403)
    return found


def is_proven(request: web.Request) -> bool:
    """Return whether the call has a proof. A call with a wrong proof is refused before its handler runs."""
    return request.get(_PROVEN) is not None


def require_proof(request: web.Request, hint: str = "", *, process: str = "engine") -> None:
    """Refuse a call without a proof.

    Args:
        request: The call.
        hint: End of the message for a call without credentials.
        process: Whose calls they are: ``engine`` or ``weight store``.

    Raises:
        RefusedError: The call has no proof.
    """
    if is_proven(request):
        return
    article = "an" if process[0] in "aeiou" else "a"
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.isascii() and token.strip():
        raise RefusedError(f"{request.path}: {article} {process} takes no tokens.{hint}", status=403)
    called = f"Trainers call the fleet's URL, not {article} {process}.{hint}"
    raise RefusedError(f"{request.path}: control calls need a proof that they come from the fleet. {called}", status=_UNAUTHORIZED)


def requires_proof(handler: Handler) -> Handler:
    """Return a handler that refuses calls without a proof."""

    async def checked(request: web.Request) -> web.StreamResponse:
        require_proof(request)
        return await handler(request)

    return checked
