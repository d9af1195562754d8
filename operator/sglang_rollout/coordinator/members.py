"""Where the wanted engines are: URLs of the intent, or EndpointSlices by the hostname ``<engine>-0``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from sglang_rollout.api.intent import Intent
from sglang_rollout.coordinator.record_store import IntentSource
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import KubeError
from sglang_rollout.kube.resources import ENDPOINTSLICES, Object
from sglang_rollout.kube.watch import follow
from sglang_rollout.wire.ports import GATE_PORT

log = logging.getLogger(__name__)

SERVICE_LABEL = "kubernetes.io/service-name"


def hostnames(slices: Iterable[Object]) -> dict[str, str]:
    """Address of every pod, ready or not, by hostname.

    An engine must be reached before it is ready: it becomes ready only through us.
    """
    found: dict[str, str] = {}
    for item in slices:
        for endpoint in item.get("endpoints") or []:
            hostname, addresses = endpoint.get("hostname"), endpoint.get("addresses") or []
            if hostname and addresses:
                found[hostname] = addresses[0]
    return found


def gate_url(address: str, port: int | None = None) -> str:
    """URL of a pod's gate; IPv6 addresses need brackets."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port or GATE_PORT}"


class Members:
    """Follows intent and addresses; ``changed`` is told each new picture."""

    def __init__(self, source: IntentSource, *, kube: Kube | None, namespace: str, name: str) -> None:
        self._source = source
        self._kube = kube
        self._namespace = namespace
        self._service = f"{name}-engines"
        self._pods: dict[str, str] | None = None if kube is not None else {}
        self._urls: dict[str, str] = {}
        self.intent: Intent | None = None
        self.changed: Callable[[Intent, frozenset[str]], None] = lambda intent, addressed: None

    def url(self, name: str) -> str | None:
        """Base URL of an engine's gate; None: it has no pod that runs."""
        return self._urls.get(name)

    async def run(self) -> None:
        """Follow both, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_intent(), name="intent")
            if self._kube is not None:
                group.create_task(self._follow_slices(self._kube), name="endpointslices")

    async def _follow_intent(self) -> None:
        async for intent in self._source.follow():
            self.intent = intent
            self._update()

    async def _follow_slices(self, kube: Kube) -> None:
        def complain(error: KubeError) -> None:
            log.warning("addresses of engines cannot be followed: %s", error)

        labels: dict[str, str | None] = {SERVICE_LABEL: self._service}
        async for slices in follow(kube, ENDPOINTSLICES, self._namespace, labels=labels, on_error=complain):
            self._pods = hostnames(slices.values())
            self._update()

    def _update(self) -> None:
        """Nothing is concluded before both are known: an engine without a known address would count as empty."""
        if self.intent is None or self._pods is None:
            return
        urls: dict[str, str] = {}
        for engine in self.intent.engines:
            pod = self._pods.get(f"{engine.name}-0")
            url = engine.url or (gate_url(pod, engine.port) if pod is not None else None)
            if url is not None:
                urls[engine.name] = url.rstrip("/")
        if any(self._urls.get(name) != url for name, url in urls.items()):
            log.info("engines: %s", ", ".join(f"{name}={url}" for name, url in urls.items()) or "none has an address")
        # An engine that left the intent keeps its address: it may still take part in an update, which then ends.
        names = {engine.name for engine in self.intent.engines}
        self._urls = {**{name: url for name, url in self._urls.items() if name not in names}, **urls}
        self.changed(self.intent, frozenset(urls))
