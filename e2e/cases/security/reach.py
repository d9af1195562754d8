"""Runs in a pod: send requests, all at the same time, and print a line of JSON: status, code and message of each answer, in the same order.

usage: python - SECONDS '[{"address": …, "method": …, "path": …, "headers": {…}, "body": {…}}, …]'

The status is 0 if no connection was accepted. Code and message are those in the answer's body, or empty.
"""

import http.client
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BODY = {"input_ids": [11, 22, 33], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}


def read_refusal(body: bytes) -> tuple[str, str]:
    """Return code and message in the body of an answer, in SGLang's shape or in OpenAI's."""
    try:
        answer = json.loads(body)
        refusal = answer.get("error") or answer
        return str(refusal.get("code") or ""), str(refusal.get("message") or "")
    except (ValueError, AttributeError):
        return "", ""


def send(request: dict[str, Any], seconds: float) -> tuple[int, str, str]:
    """Send one request, and return status, code and message of the answer."""
    connection = http.client.HTTPConnection(request["address"], timeout=seconds)
    body = json.dumps(request.get("body") or BODY) if request["method"] == "POST" else None
    try:
        connection.request(request["method"], request["path"], body, {"Content-Type": "application/json", **request.get("headers", {})})
        reply = connection.getresponse()
        return (reply.status, *read_refusal(reply.read()))
    except (OSError, http.client.HTTPException):
        return 0, "", ""
    finally:
        connection.close()


def send_all(requests: list[dict[str, Any]], seconds: float) -> list[tuple[int, str, str]]:
    """Send all requests at the same time, and return status, code and message of each answer."""
    with ThreadPoolExecutor(max(1, min(len(requests), 64))) as pool:
        return list(pool.map(lambda request: send(request, seconds), requests))


if __name__ == "__main__":
    print(json.dumps(send_all(json.loads(sys.argv[2]), float(sys.argv[1]))))
