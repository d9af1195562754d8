"""Carry out a plan with server-side applies and deletes, count the writes, and turn a refusal into one message."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_rollout.api.status import Reason
from sglang_rollout.controller.decide.drift import Ownership, read_ownership
from sglang_rollout.controller.decide.plan import Apply, Delete, Failure, Plan, find_ownership_conflict
from sglang_rollout.controller.render.fleet_objects import token_of, with_token
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, NotFound, Refused
from sglang_rollout.kube.resources import SECRETS, Object, find_resource, resource_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Result of a plan."""

    writes: int
    """Number of requests that the server accepted. 0: no live object has changed since the plan."""
    failure: Failure | None = None
    """Why the first failed action failed; None if all succeeded."""


async def execute_plan(kube: Kube, namespace: str, plan: Plan, ownership: Ownership) -> Outcome:
    """Run the actions in order, and record in ``ownership`` what the operator owns after each apply.

    Raises:
        ApiUnavailable: The API server did not answer. Try the whole reconcile again.
        Conflict: Another writer was faster. Try the whole reconcile again.
    """
    done: list[str] = []
    is_key_stored = True
    apply_failure: Failure | None = None
    delete_failure: Failure | None = None
    try:
        for action in plan.actions:
            if isinstance(action, Apply):
                if not is_key_stored and action.object["kind"] == SECRETS.kind:
                    continue  # the credentials are derived from the key
                found = await _apply(kube, namespace, action)
                if isinstance(found, Failure):
                    apply_failure = apply_failure or found
                    is_key_stored = is_key_stored and not action.is_new_key
                    continue
                ownership[found["metadata"].get("uid", "")] = read_ownership(found)
                done.append(f"applied {found['kind']} {found['metadata']['name']}: {action.reason}")
            # Delete nothing if an apply failed, because the deletes may depend on it.
            elif not apply_failure:
                deleted = await _delete(kube, namespace, action)
                if deleted is True:
                    done.append(f"deleted {action.kind} {action.name}: {action.reason}")
                elif deleted is not False:
                    delete_failure = delete_failure or deleted
    finally:
        _log_writes(namespace, done)
    return Outcome(len(done), apply_failure or delete_failure)


def _log_writes(namespace: str, done: list[str]) -> None:
    """Log one line at INFO, because a new rollout has a dozen objects, and all lines at DEBUG."""
    if done:
        more = f" (and {len(done) - 1} more)" if len(done) > 1 else ""
        log.info("%s: %s%s", namespace, done[0], more)
    for line in done[1:]:
        log.debug("%s: %s", namespace, line)


async def _apply(kube: Kube, namespace: str, action: Apply) -> Object | Failure:
    """Return the object after the apply, or why it was refused."""
    try:
        if action.unseen or action.is_new_key:
            live = await _get_live(kube, namespace, action.object)
            conflict = find_ownership_conflict(live, action.object) if live else ""
            if conflict:
                return Failure(Reason.NAME_TAKEN, conflict)
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
    return await kube.apply(obj, force=False)


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
