"""The condition ``NetworkIsolated``: does the cluster enforce the NetworkPolicies of a fleet? Pure.

The coordinator tries connections from the router pod to a port of each engine that the policies forbid, and records the result.
"""

from __future__ import annotations

import contextlib
import ipaddress

from sglang_rollout.api.security_spec import ControlAccess
from sglang_rollout.api.status import ConditionType, Finding, Reason, Status
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.view import FleetView
from sglang_rollout.controller.render.network_policies import has_process_groups, is_isolated, selects_engines
from sglang_rollout.wire.record import Isolation


def evaluate_isolation(fleet: FleetView) -> Finding:
    """Return the finding of ``NetworkIsolated``."""
    rollout = fleet.rollout
    if rollout is None or not is_isolated(rollout):
        return _finding("False", Reason.NETWORK_OPEN, "spec.security.network is Open: the operator creates no NetworkPolicies.")
    if not selects_engines(rollout):
        message = (
            "Engines use the network of their node (engine.network.hostNetwork), to which NetworkPolicies do not apply."
            " Only the router has a NetworkPolicy."
        )
        return _finding("False", Reason.HOST_NETWORK, message)
    if opening := _find_opening(fleet, rollout):
        return _finding("False", Reason.NETWORK_OPEN, opening)
    isolation = fleet.record.isolation if fleet.record else None
    if isolation is None:
        return _finding("Unknown", Reason.NOT_REPORTED, "No engine is up to which the router could try a forbidden connection.")
    return _describe_result(isolation)


def _find_opening(fleet: FleetView, rollout: SGLangRollout) -> str:
    """Return why the policies admit pods that are no trainers to the ports of process groups, as a sentence; empty if they do not."""
    if not has_process_groups(rollout):
        return ""
    security = rollout.spec.security
    if security.control is ControlAccess.OPEN:
        return "spec.security.control is Open: the NetworkPolicies admit every source to the engines."
    blocks = security.trainers.cidrs if security.trainers else []
    addresses = [str(pod.status.get("podIP")) for pod in fleet.router_pods if pod.status.get("podIP")]
    covered = next((f"{block} contains {address}" for address in addresses for block in blocks if _contains(block, address)), "")
    if not covered:
        return ""
    return f"spec.security.trainers.cidrs admits pods to the engines by their address: {covered}, the address of the router pod."


def _contains(block: str, address: str) -> bool:
    with contextlib.suppress(ValueError):  # the API server refuses such a NetworkPolicy
        return ipaddress.ip_address(address) in ipaddress.ip_network(block, strict=False)
    return False


def _describe_result(isolation: Isolation) -> Finding:
    if not isolation.reached_count:
        message = f"Forbidden connections from the router to {isolation.checked} of {isolation.checked} engines failed."
        return _finding("True", Reason.ENFORCED, message)
    message = (
        f"The router reached a forbidden port of {isolation.reached_count} of {isolation.checked} engines"
        f" ({', '.join(isolation.reached)}): the cluster's network plugin does not enforce NetworkPolicies."
        " Install one that does, or set spec.security.network to Open."
    )
    return _finding("False", Reason.NOT_ENFORCED, message)


def _finding(status: Status, reason: Reason, message: str) -> Finding:
    return Finding(ConditionType.NETWORK_ISOLATED, status, reason, message)
