"""Checks of the client's arguments, before the first call to the fleet. The rules are those of the fleet's URL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_rollout.wire import arguments as rules


def require(*problems: str | None) -> None:
    """Raise ValueError for the first problem.

    Args:
        problems: What the rules have found; None: nothing.
    """
    found = next(filter(None, problems), None)
    if found is not None:
        raise ValueError(f"{found} Nothing was sent.")


def check_push(arguments: Mapping[str, Any], waits: tuple[str, ...]) -> None:
    """Check the arguments of ``Fleet.push``, except each tensor.

    Args:
        arguments: Values by name.
        waits: The values of ``wait``.

    Raises:
        ValueError: An argument is wrong.
    """
    for name, value in (("named_tensors", arguments["named_tensors"]), ("specs", arguments["specs"] or ())):
        if callable(getattr(value, "state_dict", None)):
            require(f"{name} is a model ({type(value).__name__}); pass its state_dict(), which has the name of each weight.")
        if not isinstance(value, Iterable) or isinstance(value, str | bytes):
            require(f"{name} is {type(value).__name__}; pass model.state_dict(), or a list with an entry for each tensor.")
    wait, snapshot, checksums = arguments["wait"], arguments["snapshot"], arguments["checksums"]
    require(
        rules.find_label_problem(arguments["version"], "version"),
        rules.find_count_problem(arguments["bucket_bytes"], "bucket_bytes"),
        rules.find_seconds_problem(arguments["timeout"], "timeout"),
        None if snapshot is None else rules.find_flag_problem(snapshot, "snapshot"),
        None if checksums is None else rules.find_checksums_problem(checksums, "checksums"),
        rules.find_flag_problem(arguments["check_model"], "check_model"),
        rules.find_number_problem(arguments["retries"], "retries"),
        None if isinstance(wait, str) and wait in waits else f"wait is {wait!r}; expected one of {', '.join(waits)}.",
    )


def check_group_options(backend: str | None, host: str | None, device: str | None, timeout: float) -> None:
    """Check the arguments of ``Fleet.open_group``. Raises ValueError."""
    texts = {"backend": backend, "host": host, "device": device}
    require(
        *(rules.find_text_problem(value, name) for name, value in texts.items() if value is not None),
        rules.find_seconds_problem(timeout, "timeout"),
    )
