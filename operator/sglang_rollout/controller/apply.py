"""Carry out a plan: server-side apply, deletes. Counts what it wrote; turns the server's refusals into one sentence."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from sglang_rollout.api.conditions import Reason
from sglang_rollout.controller.decide.facts import Failure
from sglang_rollout.controller.decide.plan import Apply, Delete, Plan, stranger
from sglang_rollout.controller.render.policies import token_of, with_token
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import Conflict, NotFound, Refused
from sglang_rollout.kube.resources import Object, Resource, resource_of

log = logging.getLogger(__name__)

# 256 bits: nobody guesses it, and it is made once in the life of a rollout.
TOKEN_BYTES = 32


@dataclass(frozen=True)
class Outcome:
    """What became of a plan."""

    writes: int
    """Requests that the server accepted. 0: the world is as the plan found it."""
    failure: Failure | None = None
    """Why the first action that did not go through did not; None when all went well."""


async def execute(kube: Kube, namespace: str, plan: Plan) -> Outcome:
    """Run the actions in order. Raises ApiUnavailable or Conflict when the whole should be tried again."""
    done: list[str] = []
    healed: set[str] = set()
    unapplied: Failure | None = None
    undeleted: Failure | None = None
    try:
        for action in plan.actions:
            if isinstance(action, Apply):
                found, name = await _apply(kube, namespace, action), action.object["metadata"]["name"]
                if isinstance(found, Failure):
                    unapplied = unapplied or found
                    continue
                done.append(f"applied {action.object['kind']} {name}: {action.reason}")
                if found["metadata"].get("resourceVersion") != action.version:
                    healed.add(name)
            # A plan that could not be applied as a whole deletes nothing: its deletes may rest on what was refused.
            elif not unapplied and action.unless_healed not in healed:
                deleted = await _delete(kube, namespace, action)
                if deleted is True:
                    done.append(f"deleted {action.kind} {action.name}: {action.reason}")
                elif deleted is not False:
                    undeleted = undeleted or deleted
    finally:
        _tell(namespace, done)
    return Outcome(len(done), unapplied or undeleted)


def _tell(namespace: str, done: list[str]) -> None:
    """One line, also for the twelve objects of a new rollout; all of them at DEBUG."""
    if done:
        more = f" (and {len(done) - 1} more)" if len(done) > 1 else ""
        log.info("%s: %s%s", namespace, done[0], more)
    for line in done[1:]:
        log.debug("%s: %s", namespace, line)


async def _apply(kube: Kube, namespace: str, action: Apply) -> Object | Failure:
    """The object as it is now, or why it is not so."""
    try:
        if action.unseen or action.needs_token:
            live = await _live(kube, namespace, action.object)
            taken = stranger(live, action.object) if live else ""
            if taken:
                return Failure(Reason.NAME_TAKEN, taken)
            return await _make(kube, action, live)
        return await kube.apply(action.object)
    except Refused as error:
        return Failure(Reason.APPLY_FAILED, str(error))


async def _live(kube: Kube, namespace: str, obj: Object) -> Object | None:
    try:
        return await kube.get(resource_of(obj), namespace, obj["metadata"]["name"])
    except NotFound:
        return None


async def _make(kube: Kube, action: Apply, live: Object | None) -> Object:
    """Apply over what there is. If there is nothing, nobody who is faster is overwritten: Conflict then, and all is looked
    at again.
    """
    obj = action.object
    if action.needs_token:
        # A token that is there stays, because engines may have read it already. The plan does not see it when somebody
        # took the label off the Secret.
        obj = with_token(obj, token_of(live) or secrets.token_urlsafe(TOKEN_BYTES))
    if live is not None:
        return await kube.apply(obj)
    if action.needs_token:
        # Apply would not do: of two operators (an upgrade in which both run for a moment) each may replace what is its own.
        return await kube.create(obj)
    return await kube.apply(obj, force=False)


async def _delete(kube: Kube, namespace: str, action: Delete) -> bool | Failure:
    """Whether it was there to be deleted, or why it could not be."""
    resource = Resource.of(action.api_version, action.kind)
    try:
        await kube.delete(resource, namespace, action.name, uid=action.uid)
    except (NotFound, Conflict):
        # Gone already, or a new object has its name: what the plan wanted away is away.
        return False
    except Refused as error:
        return Failure(Reason.APPLY_FAILED, str(error))
    return True
