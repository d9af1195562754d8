"""Request reconciles: watch with kopf, and list all rollouts from time to time. No other module uses kopf.

Only ``on.event`` is used. kopf's state-keeping handlers, timers and daemons put annotations and finalizers on the user's object.
They are also edge-triggered: a change during an absence of the operator would never be handled.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from itertools import chain, repeat
from typing import Any

import kopf

from sglang_rollout.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from sglang_rollout.controller.metrics import Key, Metrics
from sglang_rollout.controller.render.names import LABEL_ROLLOUT, LISTED_KINDS
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.credentials import Credentials
from sglang_rollout.kube.errors import KubeError
from sglang_rollout.kube.resources import ROLLOUTS

log = logging.getLogger(__name__)

Wake = Callable[[Key], None]
Login = Callable[[], Awaitable[Credentials]]

RELIST_RETRY_SECONDS = 5.0


class Connection(kopf.ConnectionInfo):
    """A connection of kopf that accepts the same certificates as our own client."""

    def as_ssl_context(self) -> ssl.SSLContext:
        """Return kopf's context without ``VERIFY_X509_STRICT``, which Python 3.13 sets by default."""
        context = super().as_ssl_context()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


def build_registry(wake: Wake, login: Login) -> kopf.OperatorRegistry:
    """Return all handlers of the operator. ``wake`` requests a reconcile; ``login`` finds credentials."""
    registry = kopf.OperatorRegistry()

    # Every handler returns None, because kopf writes any other result into the object's status.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def on_rollout(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            wake((namespace, name))

    async def on_child(body: Mapping[str, Any], **_: Any) -> None:
        key = find_rollout_key(body)
        if key is not None:
            wake(key)

    for resource in list_watched_kinds():
        kopf.on.event(*resource, registry=registry)(on_child)

    @kopf.on.login(registry=registry)
    async def on_login(**_: Any) -> kopf.ConnectionInfo:
        # Use the credentials of our own client, because kopf's search has another order and supports no exec plug-ins.
        # trust_env makes kopf use the proxies of the environment, as our own client does.
        return Connection(**asdict(await login()), trust_env=True)

    return registry


def find_rollout_key(body: Mapping[str, Any]) -> Key | None:
    """Return the key of the rollout that a child belongs to, from its label, or from its owner if the label was removed."""
    metadata = body.get("metadata") or {}
    namespace = metadata.get("namespace")
    if not namespace:
        return None
    name = (metadata.get("labels") or {}).get(LABEL_ROLLOUT)
    if name is None:
        owners = metadata.get("ownerReferences") or []
        name = next((owner["name"] for owner in owners if owner.get("kind") == KIND), None)
    return (namespace, name) if name else None


async def watch_rollouts(wake: Wake, login: Login, namespaces: tuple[str, ...]) -> None:
    """Watch until SIGTERM or SIGINT. Raises if kopf can no longer watch."""
    settings = kopf.OperatorSettings()
    configure_kopf(settings)
    await kopf.operator(
        registry=build_registry(wake, login),
        settings=settings,
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )


async def relist_periodically(kube: Kube, wake: Wake, namespaces: tuple[str, ...], *, seconds: float, metrics: Metrics) -> None:
    """Request a reconcile of every rollout each ``seconds``, so that a watch that ended silently only delays a reconcile."""
    while True:
        try:
            for namespace in namespaces or (None,):
                for item in (await kube.list(ROLLOUTS, namespace)).items:
                    wake((item["metadata"]["namespace"], item["metadata"]["name"]))
        except KubeError as error:
            log.debug("relist: %s", error)
            await asyncio.sleep(RELIST_RETRY_SECONDS)
        else:
            metrics.mark_relisted()
            await asyncio.sleep(seconds)


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
    # Leases decide which operator acts (standing.py). kopf's peering needs a resource of its own.
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
    kinds = [(kind.api_version, kind.plural) for kind in LISTED_KINDS] + [("v1", "pods")]
    return tuple(_kopf_key(api_version, plural) for api_version, plural in kinds)


def _kopf_key(api_version: str, plural: str) -> tuple[str, str, str] | tuple[str, str]:
    group, _, version = api_version.rpartition("/")
    return (group, version, plural) if group else (version, plural)


class OutageFilter(logging.Filter):
    """Pass one warning per minute while the API server is away. kopf logs a line per watch and attempt."""

    PERIOD_SECONDS = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line to drop."""
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
