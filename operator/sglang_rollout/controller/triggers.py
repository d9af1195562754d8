"""Watch with kopf, and put the key of each changed rollout into the queue. Nothing else happens here.

Only ``on.event`` is used. kopf's state-keeping handlers, timers and daemons put annotations and finalizers on the user's object.
They are also edge-triggered: a change during an absence of the operator would never be handled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf

from sglang_rollout.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from sglang_rollout.controller.metrics import Key
from sglang_rollout.controller.render.names import LABEL_ROLLOUT
from sglang_rollout.controller.settings import configure_kopf, list_watched_kinds
from sglang_rollout.kube.credentials import Credentials

Wake = Callable[[Key], None]
Login = Callable[[], Awaitable[Credentials]]


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
        # The same credentials as our own client: kopf's own search has another order and supports no exec plug-ins.
        found = await login()
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path,
            insecure=found.insecure,
            scheme=found.scheme,
            token=found.token,
            certificate_path=found.certificate_path,
            private_key_path=found.private_key_path,
            proxy_url=found.proxy,
            # Proxies from the environment, as for our own client. Otherwise one of the two clients may not reach the server.
            trust_env=True,
        )

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
