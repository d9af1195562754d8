"""The token with which this machine calls the fleets of the cases, through ``kubectl port-forward`` and at addresses of Services.

Neither names a pod, so the fleets refuse control calls from here without a token. Trainers in pods send none.
"""

from __future__ import annotations

from typing import Any

SECRET = "machine-token"
TOKEN = "token-of-the-machine"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def security(**fields: Any) -> dict[str, Any]:
    """Return ``spec.security`` of a fleet that accepts the token, has these fields, and is otherwise as by default."""
    return {"token": {"secretName": SECRET}, **fields}


def secret() -> dict[str, Any]:
    """Return the Secret with the token, for a namespace with fleets."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {"token": TOKEN}}
