"""The Python that runs the weight store of a local fleet: checked before any process starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from pydantic import BaseModel, ValidationError

from sglang_rollout.child_environment import clean_environment
from sglang_rollout.local.plan import store_variables

OPTION = "--store-python"
_OLDEST = (3, 11)
_PROBE_SECONDS = 60.0
"""Time to import the libraries of the weight store, which takes a second on an idle machine."""
_PROBE = f"""
import importlib, importlib.util, json, sys
missing = ""
if sys.version_info >= {_OLDEST}:
    try:
        importlib.import_module("sglang_rollout.store.cli")
    except ImportError as error:
        missing = error.name or str(error)
print(json.dumps({{"version": list(sys.version_info[:2]), "missing": missing, "torch": importlib.util.find_spec("torch") is not None}}))
"""
"""Runs in any Python 3, so that an old one is reported as such."""


class StorePythonError(Exception):
    """A Python cannot run the weight store. The message is a clause that says what it lacks, and what to do."""


class _Found(BaseModel):
    """What the probe has found."""

    version: tuple[int, int]
    missing: str
    """Library that the weight store needs and cannot import; empty: there is none."""
    torch: bool


def has_torch() -> bool:
    """Return True if this Python has torch."""
    return importlib.util.find_spec("torch") is not None


def check_store_python(python: Path) -> None:
    """Check a Python that ``--store-python`` names. Blocks.

    Raises:
        StorePythonError: It is no Python, too old, or lacks torch or a library of the weight store.
    """
    found, named = _probe(python), f"{OPTION} {python}"
    if found.version < _OLDEST:
        older = ".".join(map(str, found.version))
        raise StorePythonError(f"{named} is Python {older}, and the weight store needs 3.11 or newer: name another Python")
    if found.missing:
        raise StorePythonError(
            f"{named} cannot import {found.missing}, which the weight store needs: install sglang-rollout[coordinator] for this Python,"
            " or name another one"
        )
    if not found.torch:
        raise StorePythonError(
            f"{named} has no torch, which the weight store needs for process groups: install torch for this Python, name another one,"
            f" or leave {OPTION} out if trainers upload over HTTP"
        )


def _probe(python: Path) -> _Found:
    named = f"{OPTION} {python}"
    environment = clean_environment(os.environ) | store_variables(os.environ)
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False, env=environment
        )
    except OSError as error:
        raise StorePythonError(f"{named} cannot be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise StorePythonError(f"{named} has not imported the weight store within {_PROBE_SECONDS:g} s: try again") from None
    try:
        return _Found.model_validate_json(done.stdout.strip().rpartition("\n")[2])
    except ValidationError:
        shown = (done.stderr or done.stdout).strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise StorePythonError(f"{named} is no Python that can import the weight store: {shown}") from None
