"""kopf's part: watch, and put keys into our queue. Nothing else happens here.

Only ``on.event`` is used: the state-keeping handlers, timers and daemons of kopf put annotations and finalizers on the
user's object, and they are edge-triggered: what was missed while the operator was away would stay undone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf

from sglang_rollout.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from sglang_rollout.controller.metrics import Key
from sglang_rollout.controller.render.names import LABEL_ROLLOUT
from sglang_rollout.controller.settings import configure, watched_children
from sglang_rollout.kube.credentials import Credentials

Wake = Callable[[Key], None]
Login = Callable[[], Awaitable[Credentials]]


def build_registry(wake: Wake, login: Login) -> kopf.OperatorRegistry:
    """All handlers of the operator. ``wake`` asks for a reconcile; ``login`` finds credentials."""
    registry = kopf.OperatorRegistry()

    # Every handler returns None: kopf writes any other result into the object's status.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def on_rollout(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            wake((namespace, name))

    async def on_child(body: Mapping[str, Any], **_: Any) -> None:
        key = owner_of(body)
        if key is not None:
            wake(key)

    for resource in watched_children():
        kopf.on.event(*resource, registry=registry)(on_child)

    @kopf.on.login(registry=registry)
    async def on_login(**_: Any) -> kopf.ConnectionInfo:
        # The same credentials as our own client, found in the same way: kopf's own search differs from it in order
        # and in what it understands (no exec plug-ins).
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
            # Proxies from the environment, as for our own client: else one of the two cannot reach the server.
            trust_env=True,
        )

    return registry


def owner_of(body: Mapping[str, Any]) -> Key | None:
    """The rollout that a child belongs to: by its label, or by its owner if somebody took the label away."""
    metadata = body.get("metadata") or {}
    namespace = metadata.get("namespace")
    if not namespace:
        return None
    name = (metadata.get("labels") or {}).get(LABEL_ROLLOUT)
    if name is None:
        owners = metadata.get("ownerReferences") or []
        name = next((owner["name"] for owner in owners if owner.get("kind") == KIND), None)
    return (namespace, name) if name else None


async def watch(wake: Wake, login: Login, namespaces: tuple[str, ...]) -> None:
    """Watch until SIGTERM or SIGINT; raises when watching has become impossible."""
    settings = kopf.OperatorSettings()
    configure(settings)
    await kopf.operator(
        registry=build_registry(wake, login),
        settings=settings,
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )
