"""The only module that sends HTTP requests to Kubernetes: objects are dicts, errors are messages for people.

``kubernetes.aio`` provides credentials, TLS and signed requests. Its ``ApiClient`` is called directly, because its typed models cost
memory and reject fields that newer servers send.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import aiohttp
from kubernetes.aio import client

from sglang_rollout.json_text import load_json
from sglang_rollout.kube.credentials import load_configuration
from sglang_rollout.kube.errors import ApiUnavailable, Expired, error_from_status
from sglang_rollout.kube.resources import Call, Object, Resource, build_call, build_selectors, name_of, resource_of, to_yaml

REQUEST_DEADLINE_SECONDS = 30.0
"""A healthy API server answers in milliseconds; etcd's own limit is 7 s. After 30 s, a retry is better than a worker that hangs."""
CONNECT_DEADLINE_SECONDS = 5.0
WATCH_SECONDS = 300
"""The server ends each watch after this time, which also spreads watches over restarted API servers."""
WATCH_SILENCE_SECONDS = 75.0
"""Bookmarks arrive about once a minute. A stream that is silent for longer is dead, for example dropped by a load balancer."""
PAGE_SIZE = 500

_UNAUTHORIZED = 401

CallHook = Callable[[str, str, str], None]
"""Called after each request: verb (get, list, watch, apply, patch, create, delete), plural, outcome (ok, error)."""


@dataclass(frozen=True)
class Listing:
    """Result of a list: the objects, and the resourceVersion from which a watch misses no change."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """One change. The object of a BOOKMARK has only a newer resourceVersion."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


class Kube:
    """A connection to one API server. Open it with :meth:`connect`, and use it with ``async with``."""

    def __init__(
        self, configuration: client.Configuration, *, field_manager: str, kubeconfig: str | None, on_call: CallHook, deadline: float
    ) -> None:
        self._field_manager = field_manager
        self._kubeconfig = kubeconfig
        self._on_call = on_call
        self._api = self._open(configuration)
        self._login = asyncio.Lock()
        self._limit = aiohttp.ClientTimeout(total=deadline, connect=min(CONNECT_DEADLINE_SECONDS, deadline))

    @classmethod
    async def connect(
        cls,
        *,
        field_manager: str,
        kubeconfig: str | None = None,
        on_call: CallHook = lambda verb, plural, outcome: None,
        deadline: float = REQUEST_DEADLINE_SECONDS,
    ) -> Self:
        """Return a client with the credentials that were found. Open no connection yet.

        Args:
            field_manager: Name of this client in ``managedFields``, in audit logs and as User-Agent.
            kubeconfig: Path; None: the pod's service account, else $KUBECONFIG, else ~/.kube/config.
            on_call: Called after each request.
            deadline: Limit of one request in seconds. Watches have their own limits.

        Raises:
            NoCredentials: There are no usable credentials.
        """
        configuration = await load_configuration(kubeconfig)
        return cls(configuration, field_manager=field_manager, kubeconfig=kubeconfig, on_call=on_call, deadline=deadline)

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._api.configuration.host)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Return one object, read from the server and never from a cache."""
        return await self._request_json(build_call("get", resource, namespace, name))

    async def get_path(self, path: str) -> Object:
        """Return the reply at a path that is not an object, such as API discovery or ``/version``."""
        return await self._request_json(Call(verb="get", description=f"get {path}", path=path))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str | None] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Listing:
        """Return all objects that match, read page by page.

        Args:
            resource: The kind of object.
            namespace: None: all namespaces.
            labels: Labels that objects must have; None as value: any value.
            fields: Fields that objects must have.
        """
        items: list[Object] = []
        query = {"limit": str(PAGE_SIZE), **build_selectors(labels, fields)}
        while True:
            page = await self._request_json(build_call("list", resource, namespace, query=query))
            for item in page.get("items") or []:
                # Items of a list have neither kind nor apiVersion. Callers get objects as get() returns them.
                items.append({"apiVersion": resource.api_version, "kind": resource.kind, **item})
            metadata = page.get("metadata", {})
            if not metadata.get("continue"):
                return Listing(items, str(metadata.get("resourceVersion", "")))
            query["continue"] = metadata["continue"]

    async def apply(self, obj: Object, *, force: bool = True, subresource: str | None = None) -> Object:
        """Create or change an object by server-side apply, and return it.

        Args:
            obj: The fields that this client owns.
            force: Take fields that other clients own. If False, such a field raises Conflict.
            subresource: Apply to this subresource, such as ``status``.
        """
        query = {"fieldManager": self._field_manager, "force": "true" if force else "false"}
        namespace, name = obj["metadata"].get("namespace"), name_of(obj)
        call = build_call("apply", resource_of(obj), namespace, name, subresource=subresource, query=query, body=to_yaml(obj))
        return await self._request_json(call)

    async def merge_patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        patch: Object,
        *,
        subresource: str | None = None,
        resource_version: str | None = None,
    ) -> Object:
        """Merge-patch an object or a subresource, and return the object.

        Raises:
            Conflict: ``resource_version`` was given, and the object has another resourceVersion.
        """
        if resource_version is not None:
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "resourceVersion": resource_version}}
        query = {"fieldManager": self._field_manager}
        return await self._request_json(build_call("patch", resource, namespace, name, subresource=subresource, query=query, body=patch))

    async def create(self, obj: Object) -> Object:
        """Create an object, and return it.

        Raises:
            Conflict: An object of this name exists.
        """
        query = {"fieldManager": self._field_manager}
        return await self._request_json(build_call("create", resource_of(obj), obj["metadata"].get("namespace"), query=query, body=obj))

    async def delete(self, resource: Resource, namespace: str | None, name: str, *, uid: str | None = None) -> None:
        """Delete an object; its children are deleted in the background.

        Raises:
            Conflict: ``uid`` was given, and the object of this name has another UID.
        """
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self._request_json(build_call("delete", resource, namespace, name, body=body))

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: Mapping[str, str | None] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> AsyncIterator[WatchEvent]:
        """Yield changes since ``resource_version`` until the server ends the watch.

        Raises:
            Expired: List again.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_SECONDS),
            **build_selectors(labels, fields),
        }
        limit = aiohttp.ClientTimeout(
            total=WATCH_SECONDS + REQUEST_DEADLINE_SECONDS, connect=CONNECT_DEADLINE_SECONDS, sock_read=WATCH_SILENCE_SECONDS
        )
        call = build_call("watch", resource, namespace, query=query)
        async with self._request(call, limit) as response:
            async for line in _split_lines(response.content.iter_any()):
                yield _parse_event(call, line)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._api.close()

    async def _request_json(self, call: Call) -> Object:
        async with self._request(call) as response:
            return _parse_object(call, await response.read())

    @asynccontextmanager
    async def _request(self, call: Call, limit: aiohttp.ClientTimeout | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request, count it, and turn the errors of the libraries into a KubeError."""
        outcome = "error"
        try:
            response = await self._send_signed(call, limit or self._limit)
            try:
                if not response.ok:
                    body, retry_after = await response.read(), response.headers.get("Retry-After")
                    is_read = call.method == "GET"
                    raise error_from_status(call.description, response.status, body, retry_after=retry_after, is_read=is_read)
                outcome = "ok"
                yield response
            finally:
                # The connection of a watch that was not read to its end cannot go back to the pool. Other responses were read.
                response.close()
        except TimeoutError as error:
            outcome = "error"
            raise ApiUnavailable(f"{call.description}: no answer from {self.server} within the deadline") from error
        except (aiohttp.ClientError, OSError) as error:
            outcome = "error"
            reason = str(error) or type(error).__name__
            raise ApiUnavailable(f"{call.description}: the API server at {self.server} cannot be reached: {reason}") from error
        finally:
            self._on_call(call.verb, call.plural, outcome)

    async def _send_signed(self, call: Call, limit: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Send a request, and send it again with new credentials if the server refused the first credentials.

        Tokens of exec plug-ins and of service accounts expire while the process runs.
        """
        api = self._api
        response = await self._send(api, call, limit)
        if response.status != _UNAUTHORIZED:
            return response
        response.close()
        async with self._login:
            if self._api is api:
                self._api = self._open(await load_configuration(self._kubeconfig))
                await api.close()
        return await self._send(self._api, call, limit)

    @staticmethod
    async def _send(api: client.ApiClient, call: Call, limit: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        prepared = await api.param_serialize(
            call.method,
            call.path,
            query_params=list(call.query.items()),
            header_params={"Accept": "application/json, */*", "Content-Type": call.content_type},
            body=call.body,
            auth_settings=["BearerToken"],
        )
        reply = await api.call_api(*prepared, _request_timeout=limit)
        response: aiohttp.ClientResponse = reply.response
        return response

    def _open(self, configuration: client.Configuration) -> client.ApiClient:
        api = client.ApiClient(configuration)
        api.user_agent = self._field_manager
        return api


def _parse_object(call: Call, data: bytes) -> Object:
    """Parse the JSON object of a reply. A reply that is not a JSON object does not come from an API server."""
    try:
        parsed = load_json(data)
    except ValueError as error:
        raise ApiUnavailable(f"{call.description}: the answer is no JSON: is this the address of a Kubernetes API server?") from error
    if not isinstance(parsed, dict):
        raise ApiUnavailable(f"{call.description}: the answer is no JSON object: is this the address of a Kubernetes API server?")
    return parsed


async def _split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield lines of any length. aiohttp's own line reader fails at lines that exceed its buffer."""
    pending = b""
    async for chunk in chunks:
        *complete, pending = (pending + chunk).split(b"\n")
        for line in complete:
            if line.strip():
                yield line


def _parse_event(call: Call, line: bytes) -> WatchEvent:
    """Parse one line of a watch. The server's ERROR event is raised as an exception."""
    parsed = _parse_object(call, line)
    kind, obj = parsed["type"], parsed["object"]
    if kind == "ERROR":
        error = error_from_status(call.description, int(obj.get("code") or 500), json.dumps(obj), is_read=True)
        # Whatever the error, a watch that failed continues with a new list.
        raise error if isinstance(error, Expired | ApiUnavailable) else Expired(str(error))
    return WatchEvent(kind, obj)
