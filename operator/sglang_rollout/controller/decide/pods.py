"""What a pod's status means: pure readings of one pod."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_rollout.api.pod_template import ENGINE_CONTAINER, GATE_CONTAINER
from sglang_rollout.controller.render import names
from sglang_rollout.wire.launch import WITH_THE_OTHERS

Object = dict[str, Any]

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "ImageInspectError",
    }
)
CREATE_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
CRASH_REASON = "CrashLoopBackOff"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TELLING = re.compile(
    r"\b(\w*Error|\w*Exception|error|fatal|panic|Killed|out of memory|No such file|not found|cannot|failed)\b",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"sigquit|killed by signal|resource_tracker|FutureWarning|DeprecationWarning"
    r"|^\s*(File \"|\^|~|at 0x|warnings\.warn)",
    re.IGNORECASE,
)
_LONGEST_LINE = 400


@dataclass(frozen=True)
class Trouble:
    """Why a container does not run."""

    kind: str
    """``image``, ``create``, ``crash``, or ``restart``: it ended once and is coming up again."""
    container: str
    text: str
    """A sentence that names the container."""


def is_terminating(pod: Object) -> bool:
    """Whether the pod has been told to go."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_ready(pod: Object | None) -> bool:
    """Whether the kubelet calls the pod ready, and it is not going away."""
    return pod is not None and not is_terminating(pod) and _condition(pod, "Ready").get("status") == "True"


def revision_of(pod: Object) -> str:
    """Return the revision that the pod was made from."""
    return str((pod["metadata"].get("labels") or {}).get(names.LABEL_REVISION, ""))


def group_of(pod: Object) -> str | None:
    """Return the name of the PodGroup that the pod belongs to."""
    return (pod["metadata"].get("labels") or {}).get(names.LABEL_POD_GROUP)


def node_of(pod: Object | None) -> str | None:
    """Return the node that the pod runs on."""
    return ((pod or {}).get("spec") or {}).get("nodeName")


def gate_port_of(pod: Object | None) -> int | None:
    """Return the port of the pod's gate, as the pod was made; it may be another than is wanted now."""
    containers = ((pod or {}).get("spec") or {}).get("initContainers") or []
    found = next((container.get("ports") for container in containers if container.get("name") == GATE_CONTAINER), None)
    return int(found[0]["containerPort"]) if found else None


def restarts_of(pod: Object | None, container: str = ENGINE_CONTAINER) -> int:
    """Return how often a container of the pod was restarted."""
    return next((int(status.get("restartCount", 0)) for status in _statuses(pod or {}) if status.get("name") == container), 0)


def made_for(statefulset: Object) -> int:
    """Return how many pods an engine's StatefulSet was made for, as SGLang is told; what somebody scaled it to does not matter."""
    containers = statefulset["spec"].get("template", {}).get("spec", {}).get("containers") or []
    words = next((container.get("args") or [] for container in containers if container["name"] == ENGINE_CONTAINER), [])
    return int(words[words.index(names.NODES_FLAG) + 1]) if names.NODES_FLAG in words else 1


def started_with(pod: Object, flag: str) -> bool:
    """Return whether the pod starts SGLang with this flag."""
    containers = (pod.get("spec") or {}).get("containers") or []
    return any(flag in (container.get("args") or []) for container in containers if container.get("name") == ENGINE_CONTAINER)


def place(pod: Object) -> str:
    """Return name and node of a pod, for sentences about an engine that has several."""
    node = node_of(pod)
    return f"pod {pod['metadata']['name']}" + (f" on node {node}" if node else "")


def unschedulable(pod: Object) -> str:
    """Return the scheduler's sentence if it found no node; else an empty string."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return str(scheduled.get("message") or "no node fits")
    return ""


def trouble(pod: Object, *, failed_before: bool = False) -> Trouble | None:
    """Return why the pod does not come up; None if nothing is known to be wrong.

    ``failed_before``: it was called crashed when it was looked at last. It stays so until it has come up, else a crash
    loop would look like a recovery at each of its restarts.
    """
    for status in _statuses(pod):
        name = str(status.get("name"))
        waiting = (status.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason in IMAGE_REASONS:
            return Trouble(
                "image",
                name,
                f"container {name}: image {status.get('image')!r} cannot be pulled ({_pull_error(waiting)})",
            )
        if reason in CREATE_REASONS:
            return Trouble("create", name, f"container {name} cannot be created: {waiting.get('message') or reason}")
        ended = _failed_end(pod, status)
        if ended:
            return Trouble(_crash_kind(status, failed_before), name, f"container {name} {describe_end(ended)} ({_times(status)})")
    return _pod_failure(pod)


def started(pod: Object) -> bool:
    """Whether the present life of the engine container has come up."""
    return any(status.get("name") == ENGINE_CONTAINER and status.get("started") for status in _statuses(pod))


def failures(pod: Object) -> list[tuple[str, str]]:
    """Return when and how the engine failed in this pod, as far as the kubelet still tells.

    Not what somebody asked for (deletion, preemption, eviction), nor what another pod of the engine brought about.
    """
    if is_terminating(pod) or _condition(pod, "DisruptionTarget").get("status") == "True":
        return []
    status = next((one for one in _statuses(pod) if one.get("name") == ENGINE_CONTAINER), {})
    ends = [(status.get(state) or {}).get("terminated") or {} for state in ("lastState", "state")]
    failed = [end for end in ends if end.get("exitCode") and end.get("finishedAt") and WITH_THE_OTHERS not in str(end.get("message"))]
    made, refused = pod["metadata"].get("creationTimestamp"), _pod_failure(pod)
    if made and refused and not failed:
        # The kubelet did not take it, for example for want of a device that the scheduler had counted on.
        return [(str(made), refused.text)]
    return [(str(end["finishedAt"]), describe_end(end)) for end in failed]


def last_failure(pod: Object, container: str) -> Object | None:
    """Return how a container of the pod failed last, also while it is tried again."""
    status = next((one for one in _statuses(pod) if one.get("name") == container), {})
    ends = [(status.get(state) or {}).get("terminated") or {} for state in ("state", "lastState")]
    newest = next((end for end in ends if end), {})
    return newest if newest.get("exitCode") else None


def describe_end(ended: Object) -> str:
    """Return how a container ended: exit code, and the last telling line of its log."""
    reason, code = str(ended.get("reason") or ""), ended.get("exitCode")
    how = "was killed for using more memory than its limit (OOMKilled)" if reason == "OOMKilled" else f"exited with code {code}"
    line = telling_line(str(ended.get("message") or ""))
    return f"{how}: {line}" if line else how


def telling_line(text: str) -> str:
    """Return the last line that says what went wrong; the last line at all if none does."""
    lines = [_ANSI.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not _NOISE.search(line)]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or [""])[-1][:_LONGEST_LINE]


def _statuses(pod: Object) -> Iterator[Object]:
    """Engine first: when it and a sidecar are in trouble, it is the one the user can do something about."""
    status = pod.get("status") or {}
    found = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
    yield from sorted(found, key=lambda one: one.get("name") != ENGINE_CONTAINER)


def _condition(pod: Object, kind: str) -> Object:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})


def _failed_end(pod: Object, status: Object) -> Object | None:
    """Return how a container ended that has not come up since. An init container comes up by ending well; the kubelet calls it started
    while it runs. Sidecars are init containers that stay."""
    name = str(status.get("name"))
    init = (pod.get("spec") or {}).get("initContainers") or []
    if any(one.get("name") == name and one.get("restartPolicy") != "Always" for one in init):
        return last_failure(pod, name)
    return None if status.get("ready") or status.get("started") else _last_end(status)


def _last_end(status: Object) -> Object | None:
    """Return how the container ended last, unless it ended well (an init container that has done its work)."""
    for state in (status.get("state") or {}, status.get("lastState") or {}):
        ended: Object | None = state.get("terminated")
        if ended:
            return None if ended.get("exitCode") == 0 and ended.get("reason") == "Completed" and status.get("ready") else ended
    return None


def _crash_kind(status: Object, failed_before: bool) -> str:
    """The kubelet restarts a container at once the first time, and backs off when it ends again soon after."""
    waiting = (status.get("state") or {}).get("waiting") or {}
    return "crash" if failed_before or waiting.get("reason") == CRASH_REASON else "restart"


def _times(status: Object) -> str:
    count = int(status.get("restartCount", 0))
    return "restarted once" if count == 1 else f"restarted {count} times"


def _pull_error(waiting: Object) -> str:
    """The message of a back-off hides the cause behind it; both are bounded."""
    return str(waiting.get("message") or waiting.get("reason"))[:_LONGEST_LINE]


def _pod_failure(pod: Object) -> Trouble | None:
    status = pod.get("status") or {}
    if status.get("phase") != "Failed":
        return None
    return Trouble("crash", "pod", f"its pod failed: {status.get('reason') or ''} {status.get('message') or ''}".strip())
