"""The one module that talks HTTP to Kubernetes: dicts in, dicts out, sentences as errors, a deadline on everything.

It uses ``kubernetes.aio`` for what that library is good at (finding credentials, TLS, signing requests) and calls its
``ApiClient`` raw: the typed models cost memory and reject fields that newer servers send. Used by the operator and by
the coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Literal, Self

import aiohttp
from kubernetes.aio import client

from sglang_rollout.kube.credentials import Credentials, load_configuration, log_in
from sglang_rollout.kube.errors import ApiUnavailable, KubeError, from_status
from sglang_rollout.kube.requests import Call, as_yaml, call_of, selectors
from sglang_rollout.kube.resources import Object, Resource, name_of, resource_of
from sglang_rollout.kube.stream import Listing, WatchEvent, lines, parse_event, parse_object

# A healthy API server answers in milliseconds; etcd's own request limit is 7 s and the server's default is 60 s. After
# 30 s nobody waits for the answer any more: a retry with back-off is better than a worker that hangs.
REQUEST_DEADLINE = 30.0
CONNECT_DEADLINE = 5.0
# The server ends each watch after this time, which also moves watches to other API servers after a roll-out of them.
WATCH_SECONDS = 300
# Bookmarks arrive about once a minute; a stream that is silent for longer is dead (a load balancer dropped it).
WATCH_SILENCE = 75.0
PAGE = 500

UNAUTHORIZED = 401

CallHook = Callable[[str, str, str], None]
"""Called after each request: verb (get, list, watch, apply, patch, create, delete), plural, outcome (ok, error)."""


class Kube:
    """A connection to one API server. Make it with :meth:`connect`, close it (or use ``async with``)."""

    def __init__(
        self,
        configuration: client.Configuration,
        *,
        field_manager: str,
        kubeconfig: str | None = None,
        on_call: CallHook | None = None,
        deadline: float = REQUEST_DEADLINE,
    ) -> None:
        self.field_manager = field_manager
        self._kubeconfig = kubeconfig
        self._on_call: CallHook = on_call or (lambda verb, plural, outcome: None)
        self._api = client.ApiClient(configuration)
        self._api.user_agent = field_manager
        self._login = asyncio.Lock()
        self._limit = aiohttp.ClientTimeout(total=deadline, connect=min(CONNECT_DEADLINE, deadline))

    @classmethod
    async def connect(
        cls,
        *,
        field_manager: str,
        kubeconfig: str | None = None,
        on_call: CallHook | None = None,
        deadline: float = REQUEST_DEADLINE,
    ) -> Kube:
        """Find credentials (explicit kubeconfig, else the pod's service account, else KUBECONFIG, else ~/.kube/config).

        Opens no connection yet. ``field_manager`` names us in managedFields, in audit logs and as User-Agent.
        ``deadline`` is the limit of one request in seconds (watches have their own).
        """
        configuration = await load_configuration(kubeconfig)
        return cls(configuration, field_manager=field_manager, kubeconfig=kubeconfig, on_call=on_call, deadline=deadline)

    @property
    def server(self) -> str:
        """URL of the API server, for messages."""
        return str(self._api.configuration.host)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Read one object from the server (never from a cache)."""
        return await self._json(call_of("get", "GET", resource, namespace, name))

    async def get_path(self, path: str) -> Object:
        """GET a path that is no object: API discovery, ``/version``."""
        return await self._json(Call("get", f"get {path}", "GET", path))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str | None] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Listing:
        """All objects that match, page by page. ``namespace`` None: everywhere; a label's value None: it exists."""
        items: list[Object] = []
        query = {"limit": str(PAGE), **selectors(labels, fields)}
        while True:
            page = await self._json(call_of("list", "GET", resource, namespace, query=query))
            for item in page.get("items") or []:
                # Items of a list carry neither kind nor apiVersion; what comes from here must look like from get().
                items.append({"apiVersion": resource.api_version, "kind": resource.kind, **item})
            metadata = page.get("metadata", {})
            if not metadata.get("continue"):
                return Listing(items, str(metadata.get("resourceVersion", "")))
            query["continue"] = metadata["continue"]

    async def apply(self, obj: Object, *, force: bool = True, subresource: str | None = None) -> Object:
        """Server-side apply: create it, or make our fields so. ``force``: a field that another owns becomes ours."""
        resource = resource_of(obj)
        query = {"fieldManager": self.field_manager, "force": "true" if force else "false"}
        call = call_of(
            "apply", "PATCH", resource, obj["metadata"].get("namespace"), name_of(obj), subresource=subresource,
            query=query, body=as_yaml(obj), content_type="application/apply-patch+yaml; charset=utf-8",
        )  # fmt: skip
        return await self._json(call)

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
        """Merge-patch an object or subresource. ``resource_version``: only if it still is that one, else Conflict."""
        if resource_version is not None:
            metadata = {**patch.get("metadata", {}), "resourceVersion": resource_version}
            patch = {**patch, "metadata": metadata}
        call = call_of(
            "patch", "PATCH", resource, namespace, name, subresource=subresource,
            query={"fieldManager": self.field_manager}, body=patch, content_type="application/merge-patch+json",
        )  # fmt: skip
        return await self._json(call)

    async def create(self, obj: Object) -> Object:
        """Create an object; Conflict with ``already_exists`` when there is one of that name."""
        query = {"fieldManager": self.field_manager}
        namespace = obj["metadata"].get("namespace")
        return await self._json(call_of("create", "POST", resource_of(obj), namespace, query=query, body=obj))

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> None:
        """Delete an object. With ``uid``: only this one, not a new one of the same name (Conflict then)."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self._json(call_of("delete", "DELETE", resource, namespace, name, body=body))

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: Mapping[str, str | None] | None = None,
        fields: Mapping[str, str] | None = None,
        seconds: int = WATCH_SECONDS,
    ) -> AsyncIterator[WatchEvent]:
        """Changes since ``resource_version``. Ends when the server ends it; raises Expired when one must list again."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
            **selectors(labels, fields),
        }
        limit = aiohttp.ClientTimeout(total=seconds + REQUEST_DEADLINE, connect=CONNECT_DEADLINE, sock_read=WATCH_SILENCE)
        call = call_of("watch", "GET", resource, namespace, query=query, limit=limit)
        async with self._request(call) as response:
            async for line in lines(response.content.iter_any()):
                yield parse_event(call.what, line)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _json(self, call: Call) -> Object:
        async with self._request(call) as response:
            return parse_object(call.what, await response.read())

    @asynccontextmanager
    async def _request(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request: signed, counted, with a deadline. The one place where library errors become ours."""
        outcome = "error"
        try:
            response = await self._send_signed(call)
            try:
                if not response.ok:
                    retry_after = response.headers.get("Retry-After")
                    body, read = await response.read(), call.method == "GET"
                    raise from_status(call.what, response.status, body, retry_after=retry_after, read=read)
                outcome = "ok"
                yield response
            finally:
                # A watch that is left half-read cannot go back to the pool; anything else was read to its end.
                response.close()
        except TimeoutError as error:
            outcome = "error"
            raise ApiUnavailable(f"{call.what}: no answer from {self.server} within the deadline") from error
        except (aiohttp.ClientError, OSError) as error:
            outcome = "error"
            reason = str(error) or type(error).__name__
            raise ApiUnavailable(f"{call.what}: the API server at {self.server} cannot be reached: {reason}") from error
        finally:
            self._on_call(call.verb, call.plural, outcome)

    async def _send_signed(self, call: Call) -> aiohttp.ClientResponse:
        api = self._api
        response = await self._send(api, call, self._limit)
        if response.status != UNAUTHORIZED:
            return response
        # Tokens of exec plug-ins and of rotated service accounts expire while we run: log in again, once.
        response.close()
        async with self._login:
            if self._api is api:
                fresh = client.ApiClient(await load_configuration(self._kubeconfig))
                fresh.user_agent = self.field_manager
                self._api = fresh
                await api.close()
        return await self._send(self._api, call, self._limit)

    @staticmethod
    async def _send(api: client.ApiClient, call: Call, default: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        prepared = await api.param_serialize(
            call.method,
            call.path,
            query_params=list(call.query.items()),
            header_params={"Accept": "application/json", "Content-Type": call.content_type},
            body=call.body,
            auth_settings=["BearerToken"],
        )
        reply = await api.call_api(*prepared, _request_timeout=call.limit or default)
        response: aiohttp.ClientResponse = reply.response
        return response

    async def log_in(self) -> Credentials:
        """Find credentials anew, for another HTTP client (kopf) that talks to the same server as the same user."""
        return await log_in(self._kubeconfig)


__all__ = ["CallHook", "Kube", "KubeError", "Listing", "WatchEvent"]
