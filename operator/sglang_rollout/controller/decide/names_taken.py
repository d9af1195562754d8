"""Which live objects belong to a rollout, and which only have the name of one of its children. Pure.

A name is no right: the pods of a rollout must not use an account, a Secret or a ConfigMap of another owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_rollout.controller.render import names
from sglang_rollout.kube.resources import ROLLOUTS, Object


def is_foreign(live: Object, wanted: Object) -> bool:
    """Return True if the operator must never apply ``wanted`` over ``live``.

    An object with our label or our owner reference is ours: the apply restores a removed label, and adopts a child without
    an owner. Any other object of this name belongs to a user, and so does an object that another controller manages.
    """
    rollout = wanted["metadata"]["labels"][names.LABEL_ROLLOUT]
    is_labelled = (live["metadata"].get("labels") or {}).get(names.LABEL_ROLLOUT) == rollout
    owner = find_controller(live)
    if owner is None:
        return not is_labelled
    return owner.get("uid") != (find_controller(wanted) or {})["uid"] and not (is_labelled and _is_rollout(owner, rollout))


def describe_taken_names(taken: Sequence[Object]) -> str:
    """Return one message about the children whose names other owners have, with what to do."""
    first, *others = (f"{child['kind']} {child['metadata']['name']}" for child in taken)
    rollout = taken[0]["metadata"]["labels"][names.LABEL_ROLLOUT]
    more = f" The same is true of {', '.join(others)}." if others else ""
    return (
        f"{first} exists and does not belong to this rollout, so it is left alone.{more}"
        " The operator creates and changes nothing meanwhile. Delete it, give the SGLangRollout another name,"
        f" or hand an object without a controller over with the label {names.LABEL_ROLLOUT}={rollout}."
    )


def is_leftover(live: Object, uid: str) -> bool:
    """Return True if the object is being deleted, or belongs to an earlier custom resource of the same name.

    An apply would give the object two controllers, which the API server refuses. Objects with our label and without a
    controller (left by ``kubectl delete --cascade=orphan``) are adopted.
    """
    if live["metadata"].get("deletionTimestamp"):
        return True
    owner = find_controller(live)
    return owner is not None and owner.get("uid") != uid


def find_controller(live: Object) -> Object | None:
    """Return the owner reference of the object's controller."""
    owners = live["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), None)


def _is_rollout(owner: Object, name: str) -> bool:
    """Return True for an earlier rollout of the same name."""
    return owner.get("kind") == ROLLOUTS.kind and owner.get("name") == name
