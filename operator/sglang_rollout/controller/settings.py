"""Settings of the operator process and of kopf, each with its reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain, repeat

import kopf

from sglang_rollout.controller.render.common import Settings
from sglang_rollout.controller.render.names import CHILD_KINDS, LABEL_ROLLOUT
from sglang_rollout.logs import make_formatter
from sglang_rollout.wire.ports import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT


@dataclass(frozen=True)
class OperatorSettings:
    """Settings from the command line."""

    render: Settings
    """Settings of the rendered objects: images and their pull policy."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    kubeconfig: str | None = None
    metrics_port: int = OPERATOR_METRICS_PORT
    """Port of ``/metrics``; 0: no metrics server."""
    health_port: int = OPERATOR_HEALTH_PORT
    """Port of ``/healthz``; 0: no health server."""
    workers: int = 4
    """Concurrent reconciles. A reconcile takes a dozen small reads, so four workers suffice for hundreds of rollouts."""
    relist_seconds: float = 300.0
    """Period after which every rollout is reconciled without an event, so that correctness never depends on a watch."""


class RetryDelays:
    """Endless delays between kopf's attempts to reach the API server: short at first, then 3 s.

    With a finite list, kopf gives up after a minute and the operator ends. An upgrade of the API server takes longer, and a
    restarted operator could only wait as well.
    """

    def __iter__(self) -> chain[float]:
        return chain((0.2, 0.5, 1.0, 2.0), repeat(3.0))


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Set up kopf for watching only."""
    # The operator posts Events itself, on transitions only.
    settings.posting.enabled = False
    # Watching CRDs and namespaces would need more RBAC rules. The CRD is checked at start.
    settings.scanning.disabled = True
    # There is one replica. Two during an upgrade are harmless, because they apply the same fields as the same manager.
    settings.peering.standalone = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = RetryDelays()
    settings.watching.connect_timeout = 5
    # Pages keep the first list of a large cluster from arriving as one body.
    settings.watching.chunk_size = 500
    # Handlers only put a key into the queue, so nothing is lost when they are cancelled.
    settings.queueing.exit_timeout = 0.5
    # The server filters by label, so that the memory of the operator grows with its objects and not with the cluster.
    # Keys must be tuples: "v1/pods" as one string matches nothing (kopf 1.45.2).
    for key in list_watched_kinds():
        settings.watching.label_selectors[key] = LABEL_ROLLOUT


def list_watched_kinds() -> tuple[tuple[str, str, str] | tuple[str, str], ...]:
    """Return the kinds whose changes may require a reconcile, in kopf's notation."""
    kinds = [(kind.api_version, kind.plural) for kind in CHILD_KINDS] + [("v1", "pods")]
    return tuple(_kopf_key(api_version, plural) for api_version, plural in kinds)


def _kopf_key(api_version: str, plural: str) -> tuple[str, str, str] | tuple[str, str]:
    group, _, version = api_version.rpartition("/")
    return (group, version, plural) if group else (version, plural)


class _OutageFilter(logging.Filter):
    """Pass one warning per minute while the API server is away. kopf logs a line per watch and attempt."""

    PERIOD_SECONDS = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        retried = record.name.startswith("kopf.") and "failed; will retry" in message
        # A refusal (403) is not an outage: the RBAC rules must be repaired.
        if not retried or "Forbidden" in message:
            return True
        if record.created < self._next:
            return False
        self._next = record.created + self.PERIOD_SECONDS
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
        handler.setFormatter(make_formatter(log_format))
        handler.addFilter(_OutageFilter())
    # kopf logs "Handler … succeeded" for every event at INFO. The operator logs changes itself.
    logging.getLogger("kopf").setLevel(logging.DEBUG if verbose else logging.WARNING)
