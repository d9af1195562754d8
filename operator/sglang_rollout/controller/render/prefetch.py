"""Brings the model to nodes before engines need it there (``model.prefetch``).

A DaemonSet whose pods are made from an engine's: its download, on the nodes that it may go to, and nothing else. What runs afterwards
only keeps the pod there: a node that joins later gets the files by itself, and the engine's image stays on the node as well.
"""

from __future__ import annotations

from sglang_rollout.api.pod_template import DOWNLOAD_CONTAINER
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, Settings, child, requests, restricted
from sglang_rollout.controller.render.engines import engine_template
from sglang_rollout.controller.render.hashing import digest

_TAKEN_OVER = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "imagePullSecrets",
    "securityContext",
    "runtimeClassName",
    "hostNetwork",
    "dnsPolicy",
    "dnsConfig",
    "nodeSelector",
    "tolerations",
)
"""What an engine's pod says about where the download runs, and how. Not its priority, with which it would drive others away, nor what
concerns other pods (spreading, gangs, affinity to pods)."""

_STAY = "trap 'exit 0' TERM; sleep infinity & wait"
"""With a handler, because a container's first process ends on no signal without one."""


def prefetch(rollout: SGLangRollout, settings: Settings) -> list[Object]:
    """Return the DaemonSet; none if nobody asked for it."""
    if not rollout.spec.model.prefetch:
        return []
    engine = engine_template(rollout, settings, 0, "")["spec"]
    download = next((one for one in engine.get("initContainers") or [] if one["name"] == DOWNLOAD_CONTAINER), None)
    if download is None:  # taken away by spec.podTemplate
        return []
    name, component = names.prefetch_name(rollout.name), names.COMPONENT_PREFETCH
    made = child(rollout, api_version="apps/v1", kind="DaemonSet", name=name, component=component)
    spec = _pod_spec(engine, download)
    # Clouds inject credentials when a pod is made, so changed annotations of the account need new pods.
    annotations = rollout.spec.engine.service_account_annotations
    made_from = [spec, annotations] if annotations else spec
    made["spec"] = {
        "selector": {"matchLabels": names.selector(rollout.name, component)},
        # Nothing serves here: a changed model is fetched on all nodes at once, as the first one was.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
        "revisionHistoryLimit": 2,
        "template": {
            "metadata": {"labels": {**names.labels(rollout.name, component), names.LABEL_REVISION: digest(made_from)}},
            "spec": spec,
        },
    }
    return [made]


def _pod_spec(engine: Object, download: Object) -> Object:
    mounted = {mount.get("name") for mount in download.get("volumeMounts") or []}
    nodes = (engine.get("affinity") or {}).get("nodeAffinity")
    return {
        **{key: engine[key] for key in _TAKEN_OVER if key in engine},
        **({"affinity": {"nodeAffinity": nodes}} if nodes else {}),
        "initContainers": [download],
        "containers": [
            {
                "name": names.COMPONENT_PREFETCH,
                "image": download["image"],
                "command": ["/bin/sh", "-c", _STAY],
                "resources": requests("1m", "8Mi"),
                "securityContext": restricted(),
            }
        ],
        "volumes": [volume for volume in engine.get("volumes") or [] if volume["name"] in mounted],
    }
