"""The Service of all engine pods (for the coordinator) and the Service of the router (the fleet's one URL)."""

from __future__ import annotations

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, child
from sglang_rollout.wire.ports import FRONT_PORT, GATE_PORT


def services(rollout: SGLangRollout) -> list[Object]:
    """Return both Services."""
    return [_engines(rollout), _router(rollout)]


def _engines(rollout: SGLangRollout) -> Object:
    """Headless, and with addresses of pods that are not ready: the coordinator must reach an engine that is loading or
    closed."""
    service = child(
        rollout,
        api_version="v1",
        kind="Service",
        name=names.engines_service(rollout.name),
        component=names.COMPONENT_ENGINE,
    )
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(rollout.name, names.COMPONENT_ENGINE),
        "ports": [{"name": "http", "port": GATE_PORT, "targetPort": GATE_PORT, "protocol": "TCP"}],
    }
    return service


def _router(rollout: SGLangRollout) -> Object:
    """The fleet's one URL.

    With addresses of a pod that is not ready: there is only one, and while its coordinator restarts the front still
    serves generation. A Service without addresses would refuse what the front could have answered or explained.
    """
    service = child(
        rollout,
        api_version="v1",
        kind="Service",
        name=names.router_name(rollout.name),
        component=names.COMPONENT_ROUTER,
    )
    service["spec"] = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": names.selector(rollout.name, names.COMPONENT_ROUTER),
        "ports": [{"name": "http", "port": FRONT_PORT, "targetPort": FRONT_PORT, "protocol": "TCP"}],
    }
    return service
