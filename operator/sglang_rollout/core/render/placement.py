"""Where engine pods may run: ``spec.scheduling`` in a pod's words."""

from __future__ import annotations

from sglang_rollout.api.scheduling_spec import Spread
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.core import names
from sglang_rollout.core.render.common import Object

_UNSATISFIABLE = {Spread.PREFERRED: "ScheduleAnyway", Spread.REQUIRED: "DoNotSchedule"}


def pod_placement(rollout: SGLangRollout) -> Object:
    """Return the fields of a pod's spec that say so; none where nothing is said."""
    wanted = rollout.spec.scheduling
    made: Object = {}
    if wanted.node_selector:
        made["nodeSelector"] = wanted.node_selector
    if wanted.tolerations:
        made["tolerations"] = [toleration.model_dump(mode="json", by_alias=True, exclude_none=True) for toleration in wanted.tolerations]
    if wanted.affinity:
        made["affinity"] = wanted.affinity
    if wanted.priority_class_name:
        made["priorityClassName"] = wanted.priority_class_name
    if wanted.spread_engines is not Spread.OFF:
        made["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": _UNSATISFIABLE[wanted.spread_engines],
                "labelSelector": {"matchLabels": names.selector(rollout.name, names.COMPONENT_ENGINE)},
            }
        ]
    return made
