"""Progress of ``model.prefetch``, and why a node does not have the model. Pure."""

from __future__ import annotations

from sglang_rollout.api.pod_template import DOWNLOAD_CONTAINER
from sglang_rollout.api.status import PrefetchStatus, Reason
from sglang_rollout.controller.decide.messages import end_sentence
from sglang_rollout.controller.decide.pods import Object, Pod, TroubleKind, describe_end
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render import names

_TROUBLE_REASONS = {TroubleKind.IMAGE: Reason.IMAGE_PULL_FAILED, TroubleKind.CREATE: Reason.CREATE_FAILED}


def build_prefetch_status(fleet: FleetView) -> PrefetchStatus | None:
    """Return ``status.prefetch``; None without ``model.prefetch``, and until the number of wanted nodes is known."""
    rollout = fleet.rollout
    if rollout is None or not rollout.spec.model.prefetch:
        return None
    live = fleet.child("DaemonSet", names.prefetch_name(rollout.name))
    status = (live or {}).get("status") or {}
    if live is None or status.get("observedGeneration") != live["metadata"].get("generation"):
        return None
    # Counted from the pods, because the DaemonSet's own count includes pods that still hold the previous model.
    current = [pod for _, pod in sorted(fleet.pods.items()) if _is_current(pod, live)]
    problems = [(problem[0], f"{pod.label}: {problem[1]}") for pod in current if (problem := _find_problem(pod))]
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return PrefetchStatus(
        ready=sum(pod.is_ready for pod in current),
        wanted=int(status.get("desiredNumberScheduled") or 0),
        reason=problems[0][0].value if problems else "",
        message=end_sentence(problems[0][1]) + more if problems else "",
    )


def _is_current(pod: Pod, daemon_set: Object) -> bool:
    wanted = daemon_set["spec"]["template"]["metadata"]["labels"]
    if pod.is_terminating or pod.component != wanted[names.LABEL_COMPONENT]:
        return False
    return pod.revision == str(wanted[names.LABEL_REVISION])


def _find_problem(pod: Pod) -> tuple[Reason, str] | None:
    """Return why a pod has not fetched the model. A failed download stays a problem during retries, so that the status is stable."""
    if pod.is_ready:
        return None
    if ended := pod.last_failure(DOWNLOAD_CONTAINER):
        return Reason.DOWNLOAD_FAILED, f"the download {describe_end(ended)}"
    if trouble := pod.find_trouble():
        return _TROUBLE_REASONS.get(trouble.kind, Reason.DOWNLOAD_FAILED), trouble.text
    return (Reason.UNSCHEDULABLE, f"no room for its pod: {pod.scheduler_message}") if pod.scheduler_message else None
