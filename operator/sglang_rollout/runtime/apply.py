"""Carry out a plan: server-side apply, deletes. Counts what it wrote; turns the server's refusals into one sentence."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from sglang_rollout.core.plan import Apply, Delete, Plan
from sglang_rollout.core.render.policies import token_of, with_token
from sglang_rollout.runtime.errors import Conflict, NotFound, Refused
from sglang_rollout.runtime.kube import Kube
from sglang_rollout.runtime.resources import SECRETS, Object, Resource

log = logging.getLogger(__name__)

# 256 bits: nobody guesses it, and it is made once in the life of a rollout.
TOKEN_BYTES = 32


@dataclass(frozen=True)
class Outcome:
    """What became of a plan."""

    writes: int
    """Requests that the server accepted. 0: the world is as the plan found it."""
    failure: str = ""
    """The server's sentence for the first apply that it refused; empty when all went well."""


async def execute(kube: Kube, namespace: str, plan: Plan) -> Outcome:
    """Run the actions in order. Raises ApiUnavailable or Conflict when the whole should be tried again."""
    done: list[str] = []
    failure = ""
    try:
        for action in plan.actions:
            if isinstance(action, Delete):
                # A plan that could not be applied as a whole deletes nothing: its deletes may rest on what was refused.
                if not failure and await _delete(kube, namespace, action):
                    done.append(f"deleted {action.kind} {action.name}: {action.reason}")
                continue
            try:
                await _apply(kube, namespace, action)
            except Refused as error:
                failure = failure or str(error)
            else:
                name = action.object["metadata"]["name"]
                done.append(f"applied {action.object['kind']} {name}: {action.reason}")
    finally:
        _tell(namespace, done)
    return Outcome(len(done), failure)


def _tell(namespace: str, done: list[str]) -> None:
    """One line, also for the twelve objects of a new rollout; all of them at DEBUG."""
    if done:
        more = f" (and {len(done) - 1} more)" if len(done) > 1 else ""
        log.info("%s: %s%s", namespace, done[0], more)
    for line in done[1:]:
        log.debug("%s: %s", namespace, line)


async def _apply(kube: Kube, namespace: str, action: Apply) -> None:
    obj = action.object
    if action.needs_token:
        await _make_token(kube, namespace, obj)
    else:
        await kube.apply(obj)


async def _make_token(kube: Kube, namespace: str, secret: Object) -> None:
    """Create rather than apply: a token that is there stays, because engines may have read it already.

    The plan sees no token also when somebody took the label off the Secret, and two operators (an upgrade in which
    both run for a moment) may both find none.
    """
    filled = with_token(secret, secrets.token_urlsafe(TOKEN_BYTES))
    try:
        await kube.create(filled)
    except Conflict as error:
        if not error.already_exists:
            raise
        token = token_of(await kube.get(SECRETS, namespace, secret["metadata"]["name"]))
        await kube.apply(with_token(secret, token) if token else filled)


async def _delete(kube: Kube, namespace: str, action: Delete) -> bool:
    """Whether it was there to be deleted."""
    resource = Resource.of(action.api_version, action.kind)
    try:
        await kube.delete(resource, namespace, action.name, uid=action.uid)
    except (NotFound, Conflict):
        # Gone already, or a new object has its name: what the plan wanted away is away.
        return False
    return True
