"""Follow the pods, and the labels of namespaces, in the table of callers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from sglang_rollout.api.security_spec import Security
from sglang_rollout.coordinator.callers.pods import Feed, PodTable
from sglang_rollout.coordinator.callers.policy import needs_all_namespaces
from sglang_rollout.kube.client import Kube, Listing
from sglang_rollout.kube.errors import KubeError, Refused
from sglang_rollout.kube.resources import NAMESPACES, PODS, name_of
from sglang_rollout.kube.watch import follow_changes

log = logging.getLogger(__name__)

_SCOPE_SECONDS = 1.0
"""Interval at which a changed spec is noticed, and missing rights are reported."""
_FORBIDDEN = 403


async def follow_callers(kube: Kube, table: PodTable, security: Callable[[], Security | None], report: Callable[[bool], None]) -> None:
    """Keep the table equal to the live pods, forever: those of the rollout's namespace, and all others if ``security`` may select them.

    Args:
        kube: Client of the API server.
        table: The table.
        security: Returns ``spec.security``; None while it is not known.
        report: Called again and again with True while the coordinator lacks the rights for other namespaces.
    """
    async with asyncio.TaskGroup() as group:
        group.create_task(_follow_pods(kube, table, table.own), name="pods")
        group.create_task(_follow_others_on_demand(kube, table, security), name="pods of other namespaces")
        group.create_task(_report_rights(table, report), name="rights")


async def _report_rights(table: PodTable, report: Callable[[bool], None]) -> None:
    while True:
        report(table.is_forbidden)
        await asyncio.sleep(_SCOPE_SECONDS)


async def _follow_others_on_demand(kube: Kube, table: PodTable, security: Callable[[], Security | None]) -> None:
    def is_wanted() -> bool:
        current = security()
        return current is not None and needs_all_namespaces(current, table.own.namespace)

    while True:
        if is_wanted():
            await _follow_others_while(is_wanted, kube, table)
        await asyncio.sleep(_SCOPE_SECONDS)


async def _follow_others_while(is_wanted: Callable[[], bool], kube: Kube, table: PodTable) -> None:
    task = asyncio.create_task(_follow_others(kube, table, table.watch_others()), name="other namespaces")
    try:
        while is_wanted() and not task.done():
            await asyncio.wait({task}, timeout=_SCOPE_SECONDS)
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        table.forget_others()


async def _follow_others(kube: Kube, table: PodTable, feed: Feed) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_follow_pods(kube, table, feed), name="pods of the cluster")
        group.create_task(_follow_namespaces(kube, table, feed), name="namespaces")


async def _follow_pods(kube: Kube, table: PodTable, feed: Feed) -> None:
    where = f"namespace {feed.namespace}" if feed.is_own else "other namespaces"

    def note_failure(error: KubeError) -> None:
        if feed.is_current or _is_new_refusal(error, feed, PODS.plural):
            log.warning("pods of %s cannot be watched, so that only known callers are allowed: %s", where, error)
        feed.is_current = False

    async for change in follow_changes(kube, PODS, feed.namespace if feed.is_own else None, on_error=note_failure):
        feed.forbidden.discard(PODS.plural)
        if isinstance(change, Listing):
            table.replace(feed, change.items)
        elif change.type == "DELETED":
            table.remove(feed, change.object)
        elif change.type == "BOOKMARK":
            table.note_report(feed)
        else:
            table.update(feed, change.object)


async def _follow_namespaces(kube: Kube, table: PodTable, feed: Feed) -> None:
    known: dict[str, Mapping[str, str]] = {}

    def warn(error: KubeError) -> None:
        if _is_new_refusal(error, feed, NAMESPACES.plural) or not isinstance(error, Refused):
            log.warning("namespaces cannot be watched: %s", error)

    async for change in follow_changes(kube, NAMESPACES, None, on_error=warn):
        feed.forbidden.discard(NAMESPACES.plural)
        if isinstance(change, Listing):
            known = {name_of(item): item["metadata"].get("labels") or {} for item in change.items}
        elif change.type == "DELETED":
            known.pop(name_of(change.object), None)
        elif change.type != "BOOKMARK":
            known[name_of(change.object)] = change.object["metadata"].get("labels") or {}
        table.set_namespaces(known)


def _is_new_refusal(error: KubeError, feed: Feed, plural: str) -> bool:
    """Note that the coordinator may not watch a kind of object. Return True the first time."""
    is_forbidden = isinstance(error, Refused) and error.code == _FORBIDDEN
    is_new = is_forbidden and plural not in feed.forbidden
    if is_forbidden:
        feed.forbidden.add(plural)
    return is_new
