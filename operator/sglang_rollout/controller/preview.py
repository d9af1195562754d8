"""Preview the operator's work from files: ``sglang-rollout plan`` and ``sglang-rollout render``.

Reads no API server and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

import click
import yaml

from sglang_rollout.api.crdgen import to_yaml
from sglang_rollout.api.v1alpha1 import KIND
from sglang_rollout.api.validation import find_problems
from sglang_rollout.controller.clock import utc_now
from sglang_rollout.controller.decide.allowed import Allowed
from sglang_rollout.controller.decide.plan import Apply, Plan, make_plan
from sglang_rollout.controller.decide.view import FleetView, build_fleet_view
from sglang_rollout.controller.options import allow_options, image_options
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.common import Settings
from sglang_rollout.kube.resources import POD_GROUPS, Object

_CHILD_KINDS = frozenset(kind.kind for kind in (*names.CHILD_KINDS, POD_GROUPS))
_NO_STEPS = "nothing to do: every child is as the spec says"


def load_objects(stream: TextIO) -> list[Object]:
    """Return the Kubernetes objects of a YAML or JSON file: documents, or a List as ``kubectl get -o yaml`` prints it.

    Raises:
        click.ClickException: The file holds no Kubernetes objects.
    """
    try:
        documents = list(yaml.safe_load_all(stream))
    except yaml.YAMLError as error:
        raise click.ClickException(f"{stream.name} is not valid YAML: {error}") from error
    return list(_flatten(documents, stream.name))


def find_rollout(objects: Sequence[Object], source: str) -> Object:
    """Return the only SGLangRollout among ``objects``.

    Raises:
        click.ClickException: The objects contain no SGLangRollout, or several.
    """
    found = [obj for obj in objects if obj["kind"] == KIND]
    if len(found) != 1:
        raise click.ClickException(f"{source} must hold one {KIND}, and holds {len(found)}")
    return found[0]


def place_rollout(rollout: Object, live: Sequence[Object], namespace: str | None = None) -> Object:
    """Return ``rollout`` with a namespace: its own, ``namespace``, that of the live object of this name, or ``default``.

    Raises:
        click.ClickException: ``namespace`` differs from the rollout's own, or several namespaces have a rollout of this name.
    """
    name, own = rollout["metadata"]["name"], rollout["metadata"].get("namespace")
    if own and namespace and own != namespace:
        raise click.ClickException(f"{KIND} {name} names the namespace {own}, and --namespace names {namespace}: leave one of them out")
    stored = sorted({_namespace(obj) for obj in live if obj["kind"] == KIND and obj["metadata"]["name"] == name})
    place = own or namespace
    if place is None and len(stored) > 1:
        raise click.ClickException(f"the live objects hold {KIND} {name} in the namespaces {', '.join(stored)}: add --namespace")
    return {**rollout, "metadata": {**rollout["metadata"], "namespace": place or next(iter(stored), "default")}}


def check_rollout(rollout: Object, live: Sequence[Object], source: str) -> None:
    """Check a rollout as the API server would.

    Raises:
        click.ClickException: The API server would refuse it. The message names each field.
    """
    if problems := find_problems(rollout, _find_stored(rollout, live)):
        raise click.ClickException("\n  ".join((f"the API server would refuse {source}:", *problems)))


def build_preview(rollout: Object, live: Sequence[Object]) -> FleetView:
    """Return the view that the operator would have after ``rollout`` was applied to a cluster with the objects ``live``.

    Raises:
        click.ClickException: There are live objects, but not the live SGLangRollout, which has UID, generation and status; or none
            of the live objects is in the rollout's namespace.
    """
    name, namespace = rollout["metadata"]["name"], rollout["metadata"]["namespace"]
    places = sorted({_namespace(obj) for obj in live})
    if live and namespace not in places:
        raise click.ClickException(
            f"{KIND} {name} is in the namespace {namespace}, and the live objects are in {', '.join(places)}: correct --namespace,"
            " the file, or the namespace of kubectl get"
        )
    near = [obj for obj in live if _namespace(obj) == namespace]
    ours = [obj for obj in near if (obj["metadata"].get("labels") or {}).get(names.LABEL_ROLLOUT) == name]
    stored = _find_stored(rollout, live)
    if ours and stored is None:
        raise click.ClickException(f"the live objects must include {KIND} {name} itself: add sglr to kubectl get")
    children = [obj for obj in ours if obj["kind"] in _CHILD_KINDS]
    pods = [obj for obj in ours if obj["kind"] == "Pod"]
    return build_fleet_view(_merge_identity(rollout, stored) if stored else rollout, children, pods)


def describe_plan(plan: Plan) -> list[str]:
    """Return one line per step, then the delay until the operator would look again without an event."""
    lines = []
    for action in plan.actions:
        if isinstance(action, Apply):
            lines.append(("apply", action.object["kind"], action.object["metadata"]["name"], action.reason))
        else:
            lines.append(("delete", action.kind, action.name, action.reason))
    width = max((len(f"{kind} {name}") for _, kind, name, _ in lines), default=0)
    again = [f"look again in {plan.requeue_after:g} s"] if plan.requeue_after is not None else []
    return [f"{verb:<6}  {f'{kind} {name}':<{width}}  {reason}" for verb, kind, name, reason in lines] + again


_NAMESPACE = click.option(
    "-n", "--namespace", help="Namespace, as for kubectl apply.  [default: that of the file, else of the live object, else default]"
)


@click.command()
@click.option("-f", "--file", "rollout_file", type=click.File(), required=True, help="YAML of the SGLangRollout; - reads standard input.")
@click.option("--live", "live_file", type=click.File(), help="YAML of the live objects, from kubectl get.  [default: an empty namespace]")
@_NAMESPACE
@image_options
@allow_options
def plan_command(
    *,
    rollout_file: TextIO,
    live_file: TextIO | None,
    namespace: str | None,
    coordinator_image: str,
    router_image: str,
    image_pull_policy: str,
    allowed: Allowed,
) -> None:
    """Print the steps that the operator would take in its next pass.

    Without --live, the steps create a new fleet. Take the live objects from the cluster:

    \b
    kubectl get sglr,sa,role,rolebinding,netpol,secret,cm,svc,deploy,ds,sts,pod -o yaml > live.yaml

    Give the images and the --allow options of your operator, because the steps depend on them. Queues, nodes, quotas and changes of
    children by other clients are not known here.
    """  # noqa: D301 - click reads the character \b, which a raw string would not contain
    live = load_objects(live_file) if live_file else []
    rollout = place_rollout(find_rollout(load_objects(rollout_file), rollout_file.name), live, namespace)
    check_rollout(rollout, live, rollout_file.name)
    fleet = build_preview(rollout, live)
    if fleet.rollout is None:
        raise click.ClickException(fleet.invalid)
    settings = Settings(coordinator_image=coordinator_image, router_image=router_image, image_pull_policy=image_pull_policy)
    plan = make_plan(fleet, settings, utc_now(), allowed, new_key="unknown")
    if plan.refusal:
        raise click.ClickException(plan.refusal.message)
    for line in describe_plan(plan) or [_NO_STEPS]:
        click.echo(line)


@click.command()
@click.option("-f", "--file", "rollout_file", type=click.File(), required=True, help="YAML of the SGLangRollout; - reads standard input.")
@_NAMESPACE
@image_options
def render_command(rollout_file: TextIO, namespace: str | None, coordinator_image: str, router_image: str, image_pull_policy: str) -> None:
    """Print the objects that the operator would create for an SGLangRollout, as YAML.

    Owner references have no UID, and there are no credentials, because only a cluster has them.
    """
    rollout = place_rollout(find_rollout(load_objects(rollout_file), rollout_file.name), [], namespace)
    check_rollout(rollout, [], rollout_file.name)
    fleet = build_preview(rollout, [])
    if fleet.rollout is None:
        raise click.ClickException(fleet.invalid)
    settings = Settings(coordinator_image=coordinator_image, router_image=router_image, image_pull_policy=image_pull_policy)
    click.echo("---\n".join(to_yaml(child) for child in render_all(fleet.rollout, settings)), nl=False)


def _namespace(obj: Object) -> str:
    return str(obj["metadata"].get("namespace") or "default")


def _find_stored(rollout: Object, live: Sequence[Object]) -> Object | None:
    """Return the live SGLangRollout of the same namespace and name."""
    identity = (KIND, _namespace(rollout), rollout["metadata"]["name"])
    return next((obj for obj in live if (obj["kind"], _namespace(obj), obj["metadata"]["name"]) == identity), None)


def _flatten(documents: Sequence[object], source: str) -> Iterator[Object]:
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
            raise click.ClickException(f"{source} holds a document that is no Kubernetes object")
        if document["kind"].endswith("List"):
            yield from _flatten(document.get("items") or [], source)
        elif not isinstance(document.get("metadata"), dict) or "name" not in document["metadata"]:
            raise click.ClickException(f"{source} holds a {document['kind']} without metadata.name")
        else:
            yield document


def _merge_identity(rollout: Object, stored: Object) -> Object:
    """Return ``rollout`` with UID, status and generation of the stored object. A changed spec has the next generation."""
    metadata = stored["metadata"]
    before, after = (build_fleet_view(cr, [], []).rollout for cr in (stored, rollout))
    is_changed = before is None or after is None or before.spec != after.spec
    identity = {"uid": metadata.get("uid", ""), "generation": metadata.get("generation", 1) + is_changed}
    return {**rollout, "metadata": {**rollout["metadata"], **identity}, "status": stored.get("status") or {}}
