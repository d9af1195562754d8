"""Options that the commands of agents and of the weight store share."""

from __future__ import annotations

from pathlib import Path

import click

from sglang_rollout.credentials import CredentialFile, Credentials


def read_token_file(path: Path) -> Credentials:
    """Return the credentials in the file of ``--token-file``. Raises UsageError if it cannot be read or is empty."""
    try:
        return CredentialFile(path)
    except OSError as error:
        raise click.UsageError(f"the token file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise click.UsageError(f"the token file {path} is empty: no caller could be accepted") from None
