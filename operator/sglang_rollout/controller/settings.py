"""Settings of the operator process, and kopf's settings, each with its reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain, repeat

import kopf

from sglang_rollout.controller.render.names import CHILD_KINDS, LABEL_ROLLOUT
from sglang_rollout.controller.render.settings import Settings
from sglang_rollout.wire.ports import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT


@dataclass(frozen=True)
class OperatorSettings:
    """What the command line says."""

    render: Settings
    """What shapes the objects that are rendered: images and their pull policy."""
    namespaces: tuple[str, ...] = ()
    """Where to look for SGLangRollouts; empty means everywhere."""
    kubeconfig: str | None = None
    metrics_port: int = OPERATOR_METRICS_PORT
    """0: no metrics server."""
    health_port: int = OPERATOR_HEALTH_PORT
    """0: no health server."""
    workers: int = 4
    """Reconciles at the same time. One takes a dozen small reads, so a few keep hundreds of rollouts fresh."""
    relist_seconds: float = 300.0
    """Every rollout is looked at this often even if no watch says anything: correctness never rests on a watch."""


class Patience:
    """Delays between kopf's attempts to reach the API server: short at first, then every 3 s, without end.

    With a finite list kopf gives up after a minute and the operator dies; an API server that is being upgraded is away
    for longer, and a restarted operator could do nothing but wait either.
    """

    def __iter__(self) -> chain[float]:
        return chain((0.2, 0.5, 1.0, 2.0), repeat(3.0))


def configure(settings: kopf.OperatorSettings) -> None:
    """Set up kopf for watching only."""
    # We post our own Events, on transitions only.
    settings.posting.enabled = False
    # No watching of CRDs and namespaces: less RBAC. That our CRD is there is checked at start-up.
    settings.scanning.disabled = True
    # One replica; two for a moment do no harm (same fields, same manager), pausing each other would.
    settings.peering.standalone = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = Patience()
    settings.watching.connect_timeout = 5
    # Pages, so that the first list of a big cluster does not come as one body.
    settings.watching.chunk_size = 500
    # Our handlers only put a key into a queue: nothing is lost when they are cut off.
    settings.queueing.exit_timeout = 0.5
    # The server filters: the memory of the operator grows with our objects, not with the cluster.
    # Keys must be tuples: "v1/pods" as one string matches nothing (kopf 1.45.2).
    for key in watched_children():
        settings.watching.label_selectors[key] = LABEL_ROLLOUT


def watched_children() -> tuple[tuple[str, str, str] | tuple[str, str], ...]:
    """The kinds whose changes may need a reconcile, as kopf names resources."""
    kinds = [(kind.api_version, kind.plural) for kind in CHILD_KINDS] + [("v1", "pods")]
    return tuple(_kopf_key(api_version, plural) for api_version, plural in kinds)


def _kopf_key(api_version: str, plural: str) -> tuple[str, str, str] | tuple[str, str]:
    group, _, version = api_version.rpartition("/")
    return (group, version, plural) if group else (version, plural)


class _Outages(logging.Filter):
    """Of kopf's line per watch and attempt while the API server is away, lets one pass per minute, as a warning."""

    EVERY = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        retried = record.name.startswith("kopf.") and "failed; will retry" in message
        # A refusal (403) is no outage: somebody has to mend the RBAC rules.
        if not retried or "Forbidden" in message:
            return True
        if record.created < self._next:
            return False
        self._next = record.created + self.EVERY
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def configure_logging(log_format: str, *, verbose: bool) -> None:
    """Log to stderr: ``text`` for people, ``json`` for collectors."""
    kopf.configure(
        verbose=verbose,
        log_format=kopf.LogFormat.JSON if log_format == "json" else kopf.LogFormat.FULL,
        log_prefix=False,
    )
    for handler in logging.getLogger().handlers:
        if log_format == "text":
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        handler.addFilter(_Outages())
    # kopf says "Handler … succeeded" for every event at INFO; we say what changed.
    logging.getLogger("kopf").setLevel(logging.DEBUG if verbose else logging.WARNING)
