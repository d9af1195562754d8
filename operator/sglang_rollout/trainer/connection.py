"""``connect``: wait for a fleet, and return a handle on it. Refuses at once what no wait can mend."""

from __future__ import annotations

import os
import time
from http import HTTPStatus
from pathlib import Path

from sglang_rollout.trainer.arguments import require
from sglang_rollout.trainer.calls import Deadline, Http
from sglang_rollout.trainer.credentials import find_credentials
from sglang_rollout.trainer.errors import FleetError, FleetRefused, FleetUnreachable, FleetUntrusted, is_permanent
from sglang_rollout.trainer.fleet import INFO_SECONDS, Fleet
from sglang_rollout.trainer.snapshots import Snapshots
from sglang_rollout.wire.arguments import find_flag_problem, find_seconds_problem, find_text_problem
from sglang_rollout.wire.ports import FLEET_HEALTH
from sglang_rollout.wire.reasons import DATA_PATHS_ONLY, end_sentence

_FORBIDDEN = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_UNKNOWN_PATH = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED})


def connect(
    url: str,
    *,
    timeout: float = 300.0,
    snapshots: Snapshots | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    delta: bool = False,
) -> Fleet:
    """Wait until the fleet can take weights, which needs at least one engine that is up. Return a handle on the fleet.

    Args:
        url: The fleet's URL: ``http://<name>-router:30000``. With ``http://<name>-generate:30005`` only ``generate`` works.
            ``https`` if the fleet has a certificate (``spec.security.tls``).
        timeout: Seconds to wait.
        snapshots: Which pushes are also written to disk. None: no push.
        token: Token of each call, for a fleet that does not know the trainer by its pod (``spec.security``).
            None: of ``token_file``, or else of the variables ``SGLANG_ROLLOUT_TOKEN_FILE`` or ``SGLANG_ROLLOUT_TOKEN``.
        token_file: File with the token, which is read at each call.
        ca: File with the certificates of authorities that are trusted for an ``https`` URL.
            None: of the variables ``SGLANG_ROLLOUT_CA``, ``REQUESTS_CA_BUNDLE``, ``CURL_CA_BUNDLE`` or ``SSL_CERT_FILE``,
            or else those of ``requests``.
        delta: True: keep the bytes of each upload in host memory (``weights.transport: Staged``), and let the next one send only what
            has changed. The fleet holds exactly the same bytes as after a complete upload.

    Raises:
        ValueError: An argument is wrong.
        FleetError: Both ``token`` and ``token_file`` are given.
        FleetRefused: The URL refuses this caller, or is not that of a fleet. A retry does not help.
        FleetUnreachable: The fleet did not become healthy in time.
        FleetUntrusted: The certificate of the URL is not accepted.
    """
    require(
        find_text_problem(url, "url") if url != "" else None,
        find_seconds_problem(timeout, "timeout"),
        find_flag_problem(delta, "delta"),
        None
        if snapshots is None or isinstance(snapshots, Snapshots)
        else f"snapshots is {snapshots!r}; expected Snapshots(directory, ...).",
    )
    credentials = find_credentials(token, token_file, ca)
    if credentials.ca is not None and not Path(credentials.ca).exists():
        raise FleetError(f"There is no file {credentials.ca!r} with certificates of authorities (ca=, or the variable SGLANG_ROLLOUT_CA).")
    http = Http(url, credentials)
    deadline = Deadline(timeout)
    last_answer = "none."
    while True:
        try:
            seconds = min(INFO_SECONDS, max(deadline.remaining, 1.0))
            _check_is_fleet(http, seconds)
            http.get("/health", timeout=seconds)
            return Fleet(http, snapshots=snapshots, delta=delta)
        except FleetError as error:
            if isinstance(error, FleetUntrusted) or is_permanent(error):
                http.close()
                raise
            last_answer = str(error)
        if deadline.has_passed:
            http.close()
            raise FleetUnreachable(
                f"The fleet at {url} did not become healthy within {timeout:.0f} s. The last answer: {last_answer} "
                "Check the URL, and the engines with `kubectl get sglr`."
            )
        time.sleep(min(1.0, deadline.remaining))


def _check_is_fleet(http: Http, seconds: float) -> None:
    """Raise FleetRefused if the URL refuses this caller, or is that of something else than a fleet, for example of one engine."""
    try:
        answer = http.get(FLEET_HEALTH, timeout=seconds)
    except FleetRefused as error:
        if error.code == DATA_PATHS_ONLY:
            return
        if error.status in _FORBIDDEN:
            advice = "Pass token= or token_file=, or let an administrator admit this trainer (spec.security.trainers)."
            raise FleetRefused(error.path, error.status, f"{end_sentence(error.reason)} {advice}", code=error.code) from error
        if error.status not in _UNKNOWN_PATH:
            raise
        status = error.status
    else:
        if "term" in answer:
            return
        status = HTTPStatus.NOT_FOUND
    raise FleetRefused(
        FLEET_HEALTH,
        status,
        f"{http.url} is not the URL of a rollout fleet. Use the URL of its router (status.endpoints.url), such as http://demo-router:30000."
        " If this is one engine, connect_engine(url) samples from it.",
    )


def connect_engine(url: str) -> Fleet:
    """Return a handle on one engine of a fleet, to sample from this engine. Only ``generate`` works on the handle.

    An engine that may not serve answers 503.

    Args:
        url: URL of the engine: ``members[].url`` of the discovery document.
    """
    return Fleet(Http(url))
