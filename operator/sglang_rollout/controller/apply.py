"""Carry out a plan with server-side applies and deletes, count the writes, and turn a refusal into one message."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_rollout.api.status import Reason
from sglang_rollout.controller.decide.contest import Memory, note_apply
from sglang_rollout.controller.decide.drift import read_ownership
from sglang_rollout.controller.decide.names_taken import describe_taken_names, is_foreign
from sglang_rollout.controller.decide.plan import WORKLOADS, Apply, Delete, Failure, Plan
from sglang_rollout.controller.render.fleet_objects import token_of, with_token
from sglang_rollout.controller.render.hashing import digest
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, NotFound, Refused
from sglang_rollout.kube.resources import SECRETS, SERVICEACCOUNTS, Object, find_resource, resource_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Result of a plan."""

    writes: int
    """Number of requests that the server accepted. 0: no live object has changed since the plan."""
    failure: Failure | None = None
    """Why the first failed action failed; None if all succeeded."""


async def execute_plan(kube: Kube, namespace: str, plan: Plan, memory: Memory, now: str) -> Outcome:
    """Run the actions in order, and record each apply in ``memory``.

    If an object of another owner has the name of a child, nothing is written: the workloads would use that object.

    Raises:
        ApiUnavailable: The API server did not answer. Try the whole reconcile again.
        Conflict: Another writer was faster. Try the whole reconcile again.
    """
    live, taken = await _find_live_objects(kube, namespace, plan)
    if taken:
        return Outcome(0, Failure(Reason.NAME_TAKEN, describe_taken_names(taken)))
    progress = _Progress()
    try:
        for action in plan.actions:
            if isinstance(action, Delete):
                await _run_delete(kube, namespace, action, progress)
                memory.restores.pop((action.kind, action.name), None)
            elif progress.may_apply(action):
                found = await _apply(kube, action, live.get(_identity(action.object)))
                progress.note_apply(action, found)
                if not isinstance(found, Failure):
                    _remember_apply(memory, action, found, now)
    finally:
        _log_writes(namespace, progress.done)
    return Outcome(len(progress.done), progress.apply_failure or progress.delete_failure)


def _remember_apply(memory: Memory, action: Apply, found: Object, now: str) -> None:
    memory.ownership[found["metadata"].get("uid", "")] = read_ownership(found)
    key = _identity(action.object)
    memory.restores[key] = note_apply(memory.restores.get(key), digest(action.object), now, action.rival)


class _Progress:
    """What a plan has done so far, and so which of its actions may follow."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.apply_failure: Failure | None = None
        self.delete_failure: Failure | None = None
        self._refused: set[str] = set()
        """Kinds of the objects that the API server refused."""
        self._is_key_stored = True

    def may_apply(self, action: Apply) -> bool:
        """Return False if the object depends on an object that the API server refused.

        The credentials are derived from the key. Workloads name accounts, Secrets and ConfigMaps, which another user could create later.
        """
        kind = action.object["kind"]
        if kind == SECRETS.kind:
            return self._is_key_stored
        return kind not in WORKLOADS or self._refused <= WORKLOADS

    def note_apply(self, action: Apply, found: Object | Failure) -> None:
        if isinstance(found, Failure):
            self.apply_failure = self.apply_failure or found
            self._refused.add(action.object["kind"])
            self._is_key_stored = self._is_key_stored and not action.is_new_key
        else:
            self.done.append(f"applied {found['kind']} {found['metadata']['name']}: {action.reason}")


async def _run_delete(kube: Kube, namespace: str, action: Delete, progress: _Progress) -> None:
    """Delete nothing if an apply failed, because the deletes may depend on it."""
    if progress.apply_failure:
        return
    deleted = await _delete(kube, namespace, action)
    if deleted is True:
        progress.done.append(f"deleted {action.kind} {action.name}: {action.reason}")
    elif deleted is not False:
        progress.delete_failure = progress.delete_failure or deleted


async def _find_live_objects(kube: Kube, namespace: str, plan: Plan) -> tuple[dict[tuple[str, str], Object], list[Object]]:
    """Return the live objects that the plan has not seen, by kind and name, and the children whose names are taken."""
    found: dict[tuple[str, str], Object] = {}
    taken: list[Object] = []
    for action in plan.actions:
        if not isinstance(action, Apply) or not (action.unseen or action.is_new_key):
            continue
        child = action.object
        if live := await _get_live(kube, namespace, child):
            found[_identity(child)] = live
            if is_foreign(live, child):
                taken.append(child)
    return found, taken


def _identity(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def _log_writes(namespace: str, done: list[str]) -> None:
    """Log one line at INFO, because a new rollout has a dozen objects, and all lines at DEBUG."""
    if done:
        more = f" (and {len(done) - 1} more)" if len(done) > 1 else ""
        log.info("%s: %s%s", namespace, done[0], more)
    for line in done[1:]:
        log.debug("%s: %s", namespace, line)


async def _apply(kube: Kube, action: Apply, live: Object | None) -> Object | Failure:
    """Return the object after the apply, or why it was refused."""
    try:
        if action.unseen or action.is_new_key:
            return await _create_or_adopt(kube, action, live)
        return await kube.apply(action.object)
    except Refused as error:
        return Failure(Reason.APPLY_FAILED, str(error))


async def _get_live(kube: Kube, namespace: str, obj: Object) -> Object | None:
    try:
        return await kube.get(resource_of(obj), namespace, obj["metadata"]["name"])
    except NotFound:
        return None


async def _create_or_adopt(kube: Kube, action: Apply, live: Object | None) -> Object:
    """Apply over the live object, or create the object if there is no live object.

    Raises:
        Conflict: Another writer created the object first, or the plan did not see it. The next reconcile reads that object.
    """
    obj = action.object
    if action.is_new_key and (key := token_of(live)):
        # Keep the key, because engines have credentials of it. The plan does not see the Secret if its label was removed.
        await kube.apply(with_token(obj, key))
        raise Conflict(f"Secret {obj['metadata']['name']} has a key already")
    if live is not None:
        return await kube.apply(obj)
    if action.is_new_key:
        # An apply alone is not safe: during an upgrade two operators run with one field manager, and each could replace the key.
        # The apply after the create changes no value. The API server keeps fields of a create apart from fields of an apply.
        # Without this apply, the first apply after a restart would change the Secret's managedFields.
        await kube.create(obj)
        return await kube.apply(obj)
    if obj["kind"] == SERVICEACCOUNTS.kind:
        # An apply would merge into an account that was created after the check. Other kinds have fields in which such an apply conflicts.
        # Only what each later apply has as well is created, because an apply removes no field of a create.
        await kube.create({"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": _without_annotations(obj)})
        return await kube.apply(obj)
    return await kube.apply(obj, force=False)


def _without_annotations(obj: Object) -> Object:
    return {key: value for key, value in obj["metadata"].items() if key != "annotations"}


async def _delete(kube: Kube, namespace: str, action: Delete) -> bool | Failure:
    """Return True if the object was deleted, False if it was gone, or why the delete was refused."""
    resource = find_resource(action.api_version, action.kind)
    try:
        await kube.delete(resource, namespace, action.name, uid=action.uid)
    except (NotFound, Conflict):
        # The object is gone, or a new object has its name.
        return False
    except Refused as error:
        return Failure(Reason.APPLY_FAILED, str(error))
    return True
