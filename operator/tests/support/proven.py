"""Headers that prove a call as the coordinator does, for tests that send the call themselves."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
import requests
from yarl import URL

from sglang_rollout.credentials import Credentials
from sglang_rollout.internal.proofs import CHALLENGE_HEADER, PROOF_HEADER, Call, digest


def make_headers(method: str, url: str, body: bytes, headers: Mapping[str, str], token: str, challenge: str) -> dict[str, str]:
    """Return the headers of a call with its proof."""
    call = Call(method, URL(url).raw_path_qs, headers, digest(body))
    return {**headers, PROOF_HEADER: call.prove(Credentials(token), challenge).header}


async def prove(
    http: aiohttp.ClientSession, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, token: str
) -> dict[str, str]:
    """Ask the called process for its challenge, and return the headers of a call with its proof."""
    async with http.get(str(URL(url).origin())) as answer:
        challenge = answer.headers[CHALLENGE_HEADER]
    return make_headers(method, url, body, headers or {}, token, challenge)


def prove_now(url: str, body: bytes, headers: Mapping[str, str], *, token: str) -> dict[str, str]:
    """Return the headers of a POST, as :func:`prove`."""
    challenge = requests.get(str(URL(url).origin()), timeout=30).headers[CHALLENGE_HEADER]
    return make_headers("POST", url, body, headers, token, challenge)
