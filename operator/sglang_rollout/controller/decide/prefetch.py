"""How far ``model.prefetch`` is, and why a node does not have the model. Pure."""

from __future__ import annotations

from sglang_rollout.api.pod_template import DOWNLOAD_CONTAINER
from sglang_rollout.api.status import PrefetchStatus
from sglang_rollout.controller.decide import pods
from sglang_rollout.controller.decide.sentences import sentence
from sglang_rollout.controller.decide.view import Object, World
from sglang_rollout.controller.render import names


def prefetch_status(world: World) -> PrefetchStatus | None:
    """Return what status says; None without ``model.prefetch``, and as long as nobody knows how many nodes are wanted."""
    rollout = world.rollout
    if rollout is None or not rollout.spec.model.prefetch:
        return None
    live = world.child("DaemonSet", names.prefetch_name(rollout.name))
    status = (live or {}).get("status") or {}
    if live is None or status.get("observedGeneration") != live["metadata"].get("generation"):
        return None
    # Counted from the pods: the DaemonSet's own count includes pods that still hold the model before.
    current = [pod for _, pod in sorted(world.pods.items()) if _is_current(pod, live)]
    problems = [f"{pods.place(pod)}: {why}" for pod in current if (why := _problem(pod))]
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return PrefetchStatus(
        ready=sum(map(pods.is_ready, current)),
        wanted=int(status.get("desiredNumberScheduled") or 0),
        reason=sentence(problems[0]) + more if problems else "",
    )


def _is_current(pod: Object, daemon_set: Object) -> bool:
    labels = pod["metadata"].get("labels") or {}
    wanted = daemon_set["spec"]["template"]["metadata"]["labels"]
    keys = (names.LABEL_COMPONENT, names.LABEL_REVISION)
    return all(labels.get(key) == wanted[key] for key in keys) and not pods.is_terminating(pod)


def _problem(pod: Object) -> str:
    """A download that failed stays one while it is tried again, so that status does not go to and fro with each attempt."""
    if pods.is_ready(pod):
        return ""
    if ended := pods.last_failure(pod, DOWNLOAD_CONTAINER):
        return f"the download {pods.describe_end(ended)}"
    found = pods.trouble(pod)
    if found:
        return found.text
    nowhere = pods.unschedulable(pod)
    return f"no room for its pod: {nowhere}" if nowhere else ""
