"""Credentials of the trainer: the token of its calls, and the certificates that it trusts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.wire.arguments import find_text_problem

TOKEN_VARIABLE = "SGLANG_ROLLOUT_TOKEN"  # noqa: S105 - a name
TOKEN_FILE_VARIABLE = "SGLANG_ROLLOUT_TOKEN_FILE"  # noqa: S105 - a name
CA_VARIABLES = ("SGLANG_ROLLOUT_CA", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables with a file of authorities, the first that is set: ours, those of ``requests``, and that of OpenSSL."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a trainer proves itself to a fleet, and which certificates of the fleet it accepts."""

    token: str | None = None
    token_file: Path | None = None
    """Read at each call, because the kubelet replaces the tokens of ServiceAccounts every hour."""
    ca: str | None = None
    """File with the certificates of authorities. None: those of ``requests``."""

    def headers(self) -> dict[str, str]:
        """Return the headers of a call.

        Raises:
            FleetError: The file of the token cannot be read.
        """
        token = self.token
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except (OSError, ValueError) as error:
                raise FleetError(f"The token {self.token_file} cannot be read: {error}.") from error
        return {"Authorization": f"Bearer {token}"} if token else {}


def find_credentials(token: str | None, token_file: str | os.PathLike[str] | None, ca: str | os.PathLike[str] | None) -> Credentials:
    """Return the credentials of the arguments, or else of the environment.

    Raises:
        FleetError: A token and a file of a token are given, or the token cannot be sent.
    """
    if token is not None and token_file is not None:
        raise FleetError("Give token or token_file, not both.")
    if token is not None and (find_text_problem(token, "token") or not token.isascii()):
        raise FleetError("token must be a string of printable ASCII characters that is not empty.")  # the message never quotes it
    if token is None and token_file is None:
        token_file = os.environ.get(TOKEN_FILE_VARIABLE) or None
        token = None if token_file is not None else os.environ.get(TOKEN_VARIABLE) or None
    if ca is None:
        ca = next(filter(None, map(os.environ.get, CA_VARIABLES)), None)
    return Credentials(token, None if token_file is None else Path(token_file), None if ca is None else os.fspath(ca))
