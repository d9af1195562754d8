"""Decide whether engines may connect to the store that a trainer names as ``master_address``.

The engines connect with the rights of their own pods. So the address must be one of a trainer: otherwise a trainer could make engines
connect to any service that only they reach. A name is resolved once, and engines receive the address.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

from sglang_rollout.api.security_spec import ControlAccess
from sglang_rollout.coordinator.callers.check import CallerCheck
from sglang_rollout.coordinator.callers.pods import normalize_address
from sglang_rollout.coordinator.callers.policy import Policy, check_trainer_address, parse_blocks
from sglang_rollout.coordinator.update.requests import Master
from sglang_rollout.wire.reasons import Refusal, RefusalCode, quote_value

RESOLVE_SECONDS = 5.0
_CLOUD_SERVICES = frozenset(map(ip_address, ("fd00:ec2::254", "168.63.129.16")))
"""Metadata service of AWS over IPv6, and WireServer of Azure. The other metadata service, 169.254.169.254, is a link-local address."""
Resolve = Callable[[str], Awaitable[tuple[str, ...]]]
"""Returns the addresses of a host; none if it cannot be resolved."""


async def resolve_host(host: str) -> tuple[str, ...]:
    """Return the normalized addresses of a host name or an address; none if it cannot be resolved."""
    literal = normalize_address(host)
    if literal is not None:
        return (literal,)
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: the text is no name
        return ()
    addresses = (normalize_address(str(target[0])) for *_, target in found)
    return tuple(dict.fromkeys(address for address in addresses if address is not None))


async def find_master(callers: CallerCheck, host: object, caller: str | None, resolve: Resolve = resolve_host) -> Master | None:
    """Return the address to which engines connect, or why they may not connect.

    Args:
        callers: The check of callers.
        host: ``master_address`` as the trainer sent it.
        caller: Normalized address of the caller.
        resolve: Resolves names.

    Returns:
        None if nothing is to be decided: the body names no host, or the fleet runs without Kubernetes, where callers are programs of
        this machine or have its token.
    """
    security = callers.security()
    if not callers.in_cluster or security is None or not isinstance(host, str) or not host.strip():
        return None
    check = _Check(callers, Policy(security, callers.namespace), caller, resolve)
    return await check.decide(host.strip())


class _Check:
    """The decision about one call."""

    def __init__(self, callers: CallerCheck, policy: Policy, caller: str | None, resolve: Resolve) -> None:
        self._callers, self._policy, self._caller, self._resolve = callers, policy, caller, resolve
        self._security = policy.security

    async def decide(self, host: str) -> Master:
        """Return the first allowed address of the host, the caller's own before others."""
        hides_reasons = self._is_open and (self._caller is None or self._refuse_as_trainer(self._caller) is not None)
        found = await self._resolve(host)
        refusal = _refuse(f"master_address {quote_value(host)} cannot be resolved in the router's pod. {self._advice}")
        for address in sorted(found, key=lambda address: address != self._caller):
            refused = await self._check(host, address)
            if refused is None:
                return Master(address, hides_reasons=hides_reasons)
            refusal = refused
        return Master(refusal=refusal, hides_reasons=hides_reasons)

    @property
    def _is_open(self) -> bool:
        return self._security.control is ControlAccess.OPEN

    async def _check(self, host: str, address: str) -> Refusal | None:
        what = host if normalize_address(host) == address else f"{host} ({address})"
        if _is_never_a_trainer(address):
            return _refuse(
                f"master_address {what} leads from an engine's pod to the engine's own pod or node, or to a service of the cloud,"
                f" not to the trainer. {self._advice}"
            )
        if address == self._caller or (self._is_open and not self._security.trainer_addresses):
            return None
        if self._is_listed(host, address):
            return None
        refusal = self._refuse_as_trainer(address)
        if refusal is not None and not self._callers.pods.at(address):
            await self._callers.wait_for_pod(address)
            refusal = self._refuse_as_trainer(address)
        if refusal is None or await self._is_listed_by_name(address):
            return None
        if refusal.code is RefusalCode.UNAVAILABLE:
            return Refusal(refusal.code, f"master_address {what} cannot be checked, because pods cannot be watched now. Try again.")
        return _refuse(f"master_address {what} belongs to no trainer of this fleet. {self._advice}")

    def _refuse_as_trainer(self, address: str) -> Refusal | None:
        return check_trainer_address(address, self._callers.pods, self._policy)

    def _is_listed(self, host: str, address: str) -> bool:
        listed = self._security.trainer_addresses
        names = {_normalize_name(entry) for entry in listed}
        return _normalize_name(host) in names or any(ip_address(address) in block for block in parse_blocks(tuple(listed)))

    async def _is_listed_by_name(self, address: str) -> bool:
        """Return True if a listed name now has the address."""
        names = [entry for entry in self._security.trainer_addresses if not parse_blocks((entry,))]
        return any(address in found for found in await asyncio.gather(*(self._resolve(name) for name in names)))

    @property
    def _advice(self) -> str:
        """What is allowed, and what to do, as sentences."""
        own = "" if self._caller is None or _is_never_a_trainer(self._caller) else f"; yours is {self._caller}"
        pods = f"pods of namespace {self._policy.namespace} that belong to no rollout"
        trainers = pods if self._security.trainers is None else "callers that security.trainers selects"
        return (
            f"Use the address of the pod on which rank 0 runs{own}. Allowed: your own address, {trainers}, and security.trainerAddresses."
        )


def _refuse(message: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, f"{message} No engine has joined anything.")


def _normalize_name(name: str) -> str:
    return name.lower().rstrip(".")


def _is_never_a_trainer(address: str) -> bool:
    """Return True for addresses with another meaning in each pod or node, and for the metadata services of clouds."""
    found = ip_address(address)
    if found in _CLOUD_SERVICES:
        return True
    return found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified
