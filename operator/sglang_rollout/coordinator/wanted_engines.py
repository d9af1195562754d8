"""The engines that the fleet should have (the intent), and their addresses: URLs of the intent, or EndpointSlices.

:mod:`.update.membership` decides which of these engines take part in updates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from pydantic import ValidationError

from sglang_rollout.api.intent import Intent
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.json_text import load_json
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import KubeError
from sglang_rollout.kube.resources import CONFIGMAPS, ENDPOINTSLICES, Object
from sglang_rollout.kube.watch import follow
from sglang_rollout.wire.ports import GATE_PORT, STAGING_PORT

log = logging.getLogger(__name__)

INTENT_KEY = "intent.json"
FILE_POLL_SECONDS = 0.5
SERVICE_LABEL = "kubernetes.io/service-name"


class IntentSource(Protocol):
    """Reads the intent."""

    def follow(self) -> AsyncIterator[Intent]:
        """Yield the intent, and again after each change, forever."""


class FileIntent:
    """The intent in a file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def follow(self) -> AsyncIterator[Intent]:
        """Yield the intent of the file. An unreadable or invalid file changes nothing."""
        seen, last_warning = "", ""
        while True:
            try:
                text = await asyncio.to_thread(self._path.read_text)
                if text != seen:
                    seen = text
                    yield Intent.model_validate_json(text)
                last_warning = ""
            except (OSError, ValidationError) as error:
                if str(error) != last_warning:
                    last_warning = str(error)
                    log.warning("the intent %s cannot be used: %s", self._path, last_warning)
            await asyncio.sleep(FILE_POLL_SECONDS)


class ConfigMapIntent:
    """The intent in ConfigMap ``<name>-intent``, which the operator writes."""

    def __init__(self, kube: Kube, namespace: str, name: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = f"{name}-intent"

    async def follow(self) -> AsyncIterator[Intent]:
        """Yield the intent of the ConfigMap. An absent or invalid ConfigMap changes nothing."""

        def warn(error: KubeError) -> None:
            log.warning("the intent cannot be followed: %s", error)

        async for objects in follow(self._kube, CONFIGMAPS, self._namespace, name=self._name, on_error=warn):
            text = (objects.get(self._name, {}).get("data") or {}).get(INTENT_KEY)
            if not text:
                log.warning("ConfigMap %s has no %s yet", self._name, INTENT_KEY)
                continue
            try:
                yield Intent.model_validate(load_json(text))
            except ValueError as error:
                log.error("the intent in ConfigMap %s cannot be used: %s", self._name, error)  # noqa: TRY400


def addresses_by_hostname(slices: Iterable[Object]) -> dict[str, str]:
    """Return the address of each pod, ready or not: a pod becomes ready only after the coordinator has reached its engine."""
    found: dict[str, str] = {}
    for item in slices:
        for endpoint in item.get("endpoints") or []:
            hostname, addresses = endpoint.get("hostname"), endpoint.get("addresses") or []
            if hostname and addresses:
                found[hostname] = addresses[0]
    return found


def gate_url(address: str, port: int | None = None) -> str:
    """Return the URL of a pod's gate, with brackets around an IPv6 address."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port or GATE_PORT}"


def staging_url(url: str) -> str:
    """Return the URL of the data port of the agent in the pod at this URL."""
    host = urlsplit(url).hostname or ""
    return gate_url(host, STAGING_PORT)


class WantedEngines:
    """Follows the intent and the addresses. Calls ``on_change`` with the intent and the names of engines that have an address."""

    def __init__(self, source: IntentSource, *, kube: Kube | None, namespace: str, name: str) -> None:
        self._source = source
        self._kube = kube
        self._namespace = namespace
        self._service = f"{name}-engines"
        self._pods: dict[str, str] | None = None if kube is not None else {}
        self._urls: dict[str, str] = {}
        self._data_urls: dict[str, str] = {}
        self.intent: Intent | None = None
        self.on_change: Callable[[Intent, frozenset[str]], None] = lambda intent, addressed: None

    def url(self, name: str) -> str | None:
        """Return the base URL of an engine's gate; None if its head pod has no address. For the weight store: of its calls."""
        if name == STORE:
            return self.intent.store.url.rstrip("/") if self.intent is not None and self.intent.store is not None else None
        return self._urls.get(name)

    def data_url(self, name: str) -> str | None:
        """Return the base URL of the data port of an engine's agent, or of the weight store; None if it has no address."""
        if name == STORE:
            return self.intent.store.data_url.rstrip("/") if self.intent is not None and self.intent.store is not None else None
        return self._data_urls.get(name)

    def credential_name(self, name: str) -> str:
        """Return the name from which the credential of an engine, or of the weight store, is derived."""
        return self.intent.store.name if name == STORE and self.intent is not None and self.intent.store is not None else name

    async def run(self) -> None:
        """Follow the intent and the addresses forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_intent(), name="intent")
            if self._kube is not None:
                group.create_task(self._follow_slices(self._kube), name="endpointslices")

    async def _follow_intent(self) -> None:
        async for intent in self._source.follow():
            self.intent = intent
            self._update()

    async def _follow_slices(self, kube: Kube) -> None:
        def warn(error: KubeError) -> None:
            log.warning("the engines' addresses cannot be followed: %s", error)

        labels: dict[str, str | None] = {SERVICE_LABEL: self._service}
        async for slices in follow(kube, ENDPOINTSLICES, self._namespace, labels=labels, on_error=warn):
            self._pods = addresses_by_hostname(slices.values())
            self._update()

    def _update(self) -> None:
        # Wait until both are known. Without the addresses, every engine would count as absent.
        if self.intent is None or self._pods is None:
            return
        urls: dict[str, str] = {}
        data_urls: dict[str, str] = {}
        for engine in self.intent.engines:
            pod = self._pods.get(f"{engine.name}-0")
            url = engine.url or (gate_url(pod, engine.port) if pod is not None else None)
            if url is not None:
                urls[engine.name] = url.rstrip("/")
                data_urls[engine.name] = (engine.data_url or staging_url(url)).rstrip("/")
        if any(self._urls.get(name) != url for name, url in urls.items()):
            log.info("engines: %s", ", ".join(f"{name}={url}" for name, url in urls.items()) or "none has an address")
        # An engine that left the intent keeps its address, because it may still take part in an update.
        names = {engine.name for engine in self.intent.engines}
        self._urls = {**{name: url for name, url in self._urls.items() if name not in names}, **urls}
        self._data_urls = data_urls
        self.on_change(self.intent, frozenset(urls))
