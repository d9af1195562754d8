"""Read answers of other processes with limits.

An answer of any size would fill the memory of its reader, and so would a compressed one. So each reader names the most bytes that an
honest process sends, and takes no compressed answer. Engines run code of others, and any process may have a defect.
"""

from __future__ import annotations

from typing import Any

import aiohttp

from sglang_rollout.json_text import load_json
from sglang_rollout.keepalive import open_socket

KIB = 2**10
MIB = 2**20
ERROR_BYTES = 64 * KIB
"""Most bytes of an answer of which only a message is shown. Messages are cut to 2,000 characters."""
MESSAGE_BYTES = 4 * MIB
"""Most bytes of a message of the fleet's own processes. The largest has 1,000 engines or copies with a few hundred bytes each."""
_PLAIN = ("", "identity")


class AnswerTooLargeError(aiohttp.ClientError):
    """An answer is larger than an honest process would send, or compressed."""


def open_connector(**options: Any) -> aiohttp.TCPConnector:
    """Return a connector whose connections notice a lost peer, with further arguments of ``aiohttp.TCPConnector``."""
    return aiohttp.TCPConnector(socket_factory=open_socket, **options)


def open_session(**options: Any) -> aiohttp.ClientSession:
    """Return a session that asks for plain answers and decompresses none, with further arguments of ``aiohttp.ClientSession``."""
    headers = {"Accept-Encoding": "identity", **(options.pop("headers", None) or {})}
    connector = options.pop("connector", None) or open_connector()
    return aiohttp.ClientSession(headers=headers, auto_decompress=False, connector=connector, **options)


async def read_answer(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body of an answer.

    Args:
        answer: The answer.
        limit: Most bytes.

    Raises:
        AnswerTooLargeError: There are more bytes, or they are compressed. The connection is closed.
    """
    encoding = answer.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _PLAIN:
        answer.close()
        raise AnswerTooLargeError(f"the answer is compressed ({encoding[:20]}), and only plain answers are read")
    if (answer.content_length or 0) > limit:
        answer.close()
        raise AnswerTooLargeError(f"the answer has {answer.content_length} bytes, and at most {limit} are read")
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > limit:
            answer.close()
            raise AnswerTooLargeError(f"the answer has more than {limit} bytes")
    return bytes(body)


async def read_json(answer: aiohttp.ClientResponse, limit: int) -> Any:
    """Return the JSON of an answer. Raises AnswerTooLargeError as :func:`read_answer`, and ValueError if the body is not JSON."""
    return load_json(await read_answer(answer, limit))
