"""One live pod as typed properties: its node, its readiness, and why it does not run. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from sglang_rollout.api.pod_template import ENGINE_CONTAINER, GATE_CONTAINER, MODEL_VOLUME
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.engines import GRACE_SECONDS
from sglang_rollout.kube.resources import Object, find_mounted_secrets
from sglang_rollout.wire.agent import is_group_restart

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
_ERROR_LINE = re.compile(
    r"\b(\w*Error|\w*Exception|error|fatal|panic|Killed|out of memory|No such file|not found|cannot|failed)\b",
    re.IGNORECASE,
)
_NOISE_LINE = re.compile(
    r"sigquit|killed by signal|resource_tracker|FutureWarning|DeprecationWarning"
    r"|^\s*(File \"|\^|~|at 0x|warnings\.warn)",
    re.IGNORECASE,
)
_MAX_QUOTED_CHARACTERS = 400
_KILLED = (137, 143)
"""Exit codes of a process that SIGKILL or SIGTERM ended."""
_KILL_DELAY_SECONDS = 30
"""Time for the last attempt of a probe, and for the kubelet to act on it."""


class EngineEnd(NamedTuple):
    """How an engine process failed in a pod."""

    time: str
    """RFC 3339, UTC."""
    reason: str
    """Reason in the status of the container or the pod, such as ``OOMKilled``."""
    message: str


class TroubleKind(Enum):
    """What keeps a container from running."""

    IMAGE = auto()
    """The image cannot be pulled."""
    CREATE = auto()
    """The container cannot be created."""
    CRASH = auto()
    """The container ended repeatedly, or the pod failed."""
    RESTART = auto()
    """The container ended once and is starting again."""


ANNOTATION_RESTARTED = "kubectl.kubernetes.io/restartedAt"


@dataclass(frozen=True)
class Trouble:
    """Why a container does not run."""

    kind: TroubleKind
    text: str
    """A phrase that names the container, without a full stop."""
    follows_other_pod: bool = False
    """True if the container was ended because another pod of its engine failed."""


_NO_REPOSITORY = "Repo id must be in the form"
"""Error of the Hugging Face library for a path that is no folder."""
_MISSING_FOLDER = (
    "the container has no folder of this name, so that it was taken for a name of the Hugging Face Hub: check the path and its volume"
)


def find_restart(pod: Object) -> str:
    """Return the time that ``kubectl rollout restart`` wrote into a pod or pod template; empty if there is none."""
    return str(((pod.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION_RESTARTED) or "")


@dataclass(frozen=True)
class Pod:
    """A live pod. Each property reads the object once."""

    raw: Object
    """The object as the API server returned it."""

    @cached_property
    def name(self) -> str:
        """Name of the pod."""
        return str(self.raw["metadata"]["name"])

    @cached_property
    def uid(self) -> str:
        """UID of the pod; empty if unknown."""
        return str(self.raw["metadata"].get("uid", ""))

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """Labels of the pod."""
        return self.raw["metadata"].get("labels") or {}

    @cached_property
    def created(self) -> str | None:
        """Creation time (RFC 3339)."""
        created: str | None = self.raw["metadata"].get("creationTimestamp")
        return created

    @cached_property
    def is_terminating(self) -> bool:
        """True if the pod is being deleted."""
        return bool(self.raw["metadata"].get("deletionTimestamp"))

    @cached_property
    def is_ready(self) -> bool:
        """True if the kubelet reports the pod as ready and the pod is not being deleted."""
        return not self.is_terminating and self._condition("Ready").get("status") == "True"

    @cached_property
    def component(self) -> str:
        """The part of the fleet that the pod belongs to: engine, router or store."""
        return self.labels.get(names.LABEL_COMPONENT, "")

    @cached_property
    def revision(self) -> str:
        """Revision that the pod was made from; empty if it has no such label."""
        return self.labels.get(names.LABEL_REVISION, "")

    def is_older_than_restart(self, workload: Object | None) -> bool:
        """Return True if ``kubectl rollout restart`` was called for the pod's workload since the pod was created."""
        requested = find_restart(((workload or {}).get("spec") or {}).get("template") or {})
        return bool(requested) and find_restart(self.raw) != requested

    @cached_property
    def pod_group(self) -> str | None:
        """Name of the PodGroup that the pod belongs to."""
        return self.labels.get(names.LABEL_POD_GROUP)

    @cached_property
    def spec(self) -> Object:
        """``spec`` of the pod."""
        return self.raw.get("spec") or {}

    @cached_property
    def status(self) -> Object:
        """``status`` of the pod."""
        return self.raw.get("status") or {}

    @cached_property
    def node(self) -> str | None:
        """Node that the pod was assigned to."""
        node: str | None = self.spec.get("nodeName")
        return node

    @cached_property
    def gate_port(self) -> int | None:
        """Port of the gate in this pod. The current spec may want another port."""
        containers = self.spec.get("initContainers") or []
        ports = next((container.get("ports") for container in containers if container.get("name") == GATE_CONTAINER), None)
        return int(ports[0]["containerPort"]) if ports else None

    @cached_property
    def mounts_key(self) -> bool:
        """True if an earlier release made the pod: it mounts the rollout's key, and accepts no credential of its engine."""
        return names.control_name(self.labels.get(names.LABEL_ROLLOUT, "")) in find_mounted_secrets(self.raw)

    @cached_property
    def engine_restarts(self) -> int:
        """Restart count of the engine container."""
        return int(self._container_status(ENGINE_CONTAINER).get("restartCount", 0))

    @cached_property
    def has_started(self) -> bool:
        """True if the running engine process has passed its startup probe."""
        return bool(self._container_status(ENGINE_CONTAINER).get("started"))

    @cached_property
    def label(self) -> str:
        """Name and node of the pod, for messages about an engine of several pods."""
        return f"pod {self.name}" + (f" on node {self.node}" if self.node else "")

    @cached_property
    def scheduler_message(self) -> str:
        """The scheduler's message if it found no node; empty otherwise."""
        scheduled = self._condition("PodScheduled")
        if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
            return str(scheduled.get("message") or "no node fits")
        return ""

    def has_engine_flag(self, flag: str) -> bool:
        """Return True if the pod starts SGLang with this flag."""
        return flag in (_container(self.spec, ENGINE_CONTAINER).get("args") or [])

    def has_volume(self, name: str) -> bool:
        """Return True if the pod has this volume."""
        return any(volume.get("name") == name for volume in self.spec.get("volumes") or [])

    @cached_property
    def download_limit(self) -> str:
        """Limit of the pod's own volume for the model that it downloads; empty if it has none."""
        found: Object = next((volume for volume in self.spec.get("volumes") or [] if volume.get("name") == MODEL_VOLUME), {})
        return str((found.get("emptyDir") or {}).get("sizeLimit") or "")

    def find_trouble(self, *, failed_before: bool = False) -> Trouble | None:
        """Return why the pod does not come up; None if no problem is known.

        Args:
            failed_before: True if the engine was Failed in the last status. The engine stays Failed until it has come up,
                because each restart of a crash loop would otherwise look like a recovery.
        """
        for status in self._container_statuses:
            name = str(status.get("name"))
            waiting = (status.get("state") or {}).get("waiting") or {}
            reason = str(waiting.get("reason") or "")
            if reason in IMAGE_REASONS:
                text = f"container {name}: image {status.get('image')!r} cannot be pulled ({_pull_error(waiting)})"
                return Trouble(TroubleKind.IMAGE, text)
            if reason in CREATE_REASONS:
                return Trouble(TroubleKind.CREATE, f"container {name} cannot be created: {waiting.get('message') or reason}")
            ended = self._failed_end(status)
            if ended and name == ENGINE_CONTAINER and (limit := self._missed_start(ended)):
                return Trouble(TroubleKind.CRASH, f"container {name} {_describe_slow_start(limit, ended)}{_restarts(status)}")
            if ended:
                # The kubelet restarts a container at once the first time, and backs off if it ends again soon after.
                kind = TroubleKind.CRASH if failed_before or reason == CRASH_REASON else TroubleKind.RESTART
                text = f"container {name} {_describe_end(ended)}{_restarts(status)}"
                return Trouble(kind, text, follows_other_pod=_follows_other_pod(ended))
        return self._pod_failure()

    def engine_failures(self) -> list[EngineEnd]:
        """Return time and cause of the engine's failures in this pod that the kubelet still reports.

        Deletions, preemptions, evictions and ends caused by another pod of the engine are not failures.
        """
        if self.is_terminating or self._condition("DisruptionTarget").get("status") == "True":
            return []
        status = self._container_status(ENGINE_CONTAINER)
        ends = [(status.get(state) or {}).get("terminated") or {} for state in ("lastState", "state")]
        failed = [end for end in ends if end.get("exitCode") and end.get("finishedAt") and not _follows_other_pod(end)]
        refusal = self._pod_failure()
        if self.created and refusal and not failed:
            # The kubelet refused the pod, for example because a device that the scheduler had counted on is missing.
            return [EngineEnd(str(self.created), str(self.status.get("reason") or ""), refusal.text)]
        return [EngineEnd(str(end["finishedAt"]), str(end.get("reason") or ""), _describe_end(end)) for end in failed]

    @cached_property
    def _container_statuses(self) -> list[Object]:
        """The engine's container comes first: if it and a sidecar fail, the user can repair the engine."""
        found = [*(self.status.get("containerStatuses") or []), *(self.status.get("initContainerStatuses") or [])]
        return sorted(found, key=lambda status: status.get("name") != ENGINE_CONTAINER)

    def _container_status(self, name: str) -> Object:
        return next((status for status in self._container_statuses if status.get("name") == name), {})

    def _condition(self, kind: str) -> Object:
        return next((condition for condition in self.status.get("conditions") or [] if condition.get("type") == kind), {})

    def _failed_end(self, status: Object) -> Object | None:
        """Return how a container ended; None if the container has come up since.

        An init container must end with 0, and the kubelet reports it as started while it runs. Sidecars are init containers
        with restartPolicy Always.
        """
        name, containers = str(status.get("name")), self.spec.get("initContainers") or []
        if any(container.get("name") == name and container.get("restartPolicy") != "Always" for container in containers):
            return _last_failure(status)
        return None if status.get("ready") or status.get("started") else _last_end(status)

    def _missed_start(self, ended: Object) -> int:
        """Return the time limit of the engine's start if the kubelet ended the engine because of it; 0 otherwise.

        The pods of a larger engine wait for each other, so the agent of its head pod limits the start, and reports it.
        """
        probe = _container(self.spec, ENGINE_CONTAINER).get("startupProbe") or {}
        limit = int(probe.get("failureThreshold", 0)) * int(probe.get("periodSeconds", 0))
        if not limit or self.has_engine_flag(names.NODES_FLAG) or ended.get("reason") == "OOMKilled":
            return 0
        first, last = (str(ended.get(key) or "") for key in ("startedAt", "finishedAt"))
        if ended.get("exitCode") not in _KILLED or not first or not last:
            return 0
        seconds = (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
        return limit if limit <= seconds <= limit + GRACE_SECONDS + _KILL_DELAY_SECONDS else 0

    def _pod_failure(self) -> Trouble | None:
        if self.status.get("phase") != "Failed":
            return None
        text = f"its pod failed: {self.status.get('reason') or ''} {self.status.get('message') or ''}".strip()
        return Trouble(TroubleKind.CRASH, text)


def count_designed_pods(statefulset: Object) -> int:
    """Return the number of pods that SGLang in this StatefulSet expects. ``spec.replicas`` differs if a user scaled the StatefulSet."""
    arguments = _container(statefulset.get("spec", {}).get("template", {}).get("spec", {}), ENGINE_CONTAINER).get("args") or []
    return int(arguments[arguments.index(names.NODES_FLAG) + 1]) if names.NODES_FLAG in arguments else 1


def _describe_end(ended: Object) -> str:
    """Return how a container ended: its exit code and the most informative line of its last output."""
    reason, code = str(ended.get("reason") or ""), ended.get("exitCode")
    how = "was killed for using more memory than its limit (OOMKilled)" if reason == "OOMKilled" else f"exited with code {code}"
    line = find_error_line(str(ended.get("message") or ""))
    advice = f" ({_MISSING_FOLDER})" if _NO_REPOSITORY in line else ""
    return f"{how}: {line}{advice}" if line else how


def _describe_slow_start(limit: int, ended: Object) -> str:
    line = find_error_line(str(ended.get("message") or ""))
    text = f"was not up {limit} s after its start, and was restarted: raise engine.startSeconds, or see its log"
    return f"{text} ({line})" if line else text


def find_error_line(text: str) -> str:
    """Return the last line that names an error; if there is none, the last line."""
    lines = [_ANSI.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not _NOISE_LINE.search(line)]
    errors = [line for line in lines if _ERROR_LINE.search(line) or is_group_restart(line)]
    return (errors or lines or [""])[-1][:_MAX_QUOTED_CHARACTERS]


def _container(pod_spec: Object, name: str) -> Object:
    return next((container for container in pod_spec.get("containers") or [] if container.get("name") == name), {})


def _follows_other_pod(ended: Object) -> bool:
    """Return True if the termination message has the agent's marker. The kubelet keeps nothing else of an ended container."""
    return is_group_restart(str(ended.get("message")))


def _last_failure(status: Object) -> Object | None:
    """Return how the container failed last, also while it is being retried."""
    ends = [(status.get(state) or {}).get("terminated") or {} for state in ("state", "lastState")]
    newest = next((end for end in ends if end), {})
    return newest if newest.get("exitCode") else None


def _last_end(status: Object) -> Object | None:
    """Return how the container ended last; None for an init container that has completed."""
    for state in (status.get("state") or {}, status.get("lastState") or {}):
        ended: Object | None = state.get("terminated")
        if ended:
            return None if ended.get("exitCode") == 0 and ended.get("reason") == "Completed" and status.get("ready") else ended
    return None


def _restarts(status: Object) -> str:
    """Return an addition to a message: how often the container was restarted; empty before the first restart."""
    count = int(status.get("restartCount", 0))
    return "" if not count else " (restarted once)" if count == 1 else f" (restarted {count} times)"


def _pull_error(waiting: Object) -> str:
    """Return the message if there is one; a back-off's message does not include the first error."""
    return str(waiting.get("message") or waiting.get("reason"))[:_MAX_QUOTED_CHARACTERS]
