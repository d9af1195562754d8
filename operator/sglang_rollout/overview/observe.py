"""Read one rollout and its ConfigMaps with the rights of the caller."""

from __future__ import annotations

import asyncio

from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import KubeError, NotFound, Refused
from sglang_rollout.kube.resources import CONFIGMAPS, ROLLOUTS, Object, Resource
from sglang_rollout.overview.observation import Observation, build_observation
from sglang_rollout.wire.reasons import end_sentence

_FORBIDDEN = 403
CONFIG_MAPS = {
    "intent": "whether the coordinator has applied the spec",
    "weights": "the update in progress",
}
"""What is not known without a ConfigMap, by the end of its name."""


class AbsentError(Exception):
    """There is no such rollout. ``str()`` is a sentence that says where it is, if the caller may know."""


async def observe(kube: Kube, namespace: str, name: str) -> Observation:
    """Read a rollout.

    Raises:
        AbsentError: There is no such rollout.
        KubeError: The rollout cannot be read. ConfigMaps that cannot be read are gaps of the observation.
        UnreadableError: The rollout has another form than this release knows.
    """
    try:
        rollout = await kube.get(ROLLOUTS, namespace, name)
    except NotFound as error:
        raise AbsentError(await _explain_absence(kube, namespace, name)) from error
    except Refused as error:
        raise name_right(error, ("get",), ROLLOUTS, namespace, name) from error
    read = await asyncio.gather(*(_read_config_map(kube, namespace, name, end) for end in CONFIG_MAPS))
    (intent, _), (record, _) = read
    return build_observation(rollout, intent, record, tuple(gap for _, gap in read if gap))


async def _read_config_map(kube: Kube, namespace: str, name: str, end: str) -> tuple[Object | None, str]:
    """Return a ConfigMap, or None and why it cannot be read. A ConfigMap that does not exist is no gap: the conditions say why."""
    try:
        return await kube.get(CONFIGMAPS, namespace, f"{name}-{end}"), ""
    except NotFound:
        return None, ""
    except KubeError as error:
        return None, describe_gap(error, ("get",), namespace, name, end)


def describe_gap(error: KubeError, verbs: tuple[str, ...], namespace: str, name: str, end: str) -> str:
    """Return what is not known without a ConfigMap, and why it could not be read."""
    why = name_right(error, verbs, CONFIGMAPS, namespace, f"{name}-{end}") if isinstance(error, Refused) else error
    return end_sentence(f"Not known: {CONFIG_MAPS[end]}. {why}")


def name_right(error: Refused, verbs: tuple[str, ...], resource: Resource, namespace: str, name: str) -> Refused:
    """Return the error with a sentence that names the right that the caller lacks, and how to check it."""
    if error.code != _FORBIDDEN:
        return error
    message = (
        f"You may not {' and '.join(verbs)} {resource.plural} {name} in namespace {namespace}: ask for the ClusterRole view there."
        f" To check: kubectl -n {namespace} auth can-i {verbs[0]} {resource.plural}/{name}"
    )
    return Refused(message, code=error.code)


async def _explain_absence(kube: Kube, namespace: str, name: str) -> str:
    """Return why there is no such rollout: another namespace, another name, or no operator in this cluster."""
    absent = f"There is no SGLangRollout {name} in namespace {namespace} of {kube.server}."
    for where in (None, namespace):
        try:
            found = (await kube.list(ROLLOUTS, where)).items
        except NotFound:
            return (
                f"The cluster at {kube.server} knows no SGLangRollout: install the operator there, or use the context of another cluster."
            )
        except KubeError:
            continue  # a user may list one namespace, and not all
        elsewhere = sorted(str(each["metadata"]["namespace"]) for each in found if each["metadata"]["name"] == name)
        if elsewhere:
            return f"{absent} It is in namespace {', '.join(elsewhere)}: use -n {elsewhere[0]}."
        here = sorted(str(each["metadata"]["name"]) for each in found if each["metadata"]["namespace"] == namespace)
        return f"{absent} " + (f"There are: {', '.join(here[:10])}." if here else "There is none in this namespace.")
    return absent
