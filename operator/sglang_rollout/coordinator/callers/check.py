"""Check the caller of each request before its body is read."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address

from sglang_rollout.api.security_spec import Security, token_audience
from sglang_rollout.coordinator.callers.keys import SigningKeys
from sglang_rollout.coordinator.callers.pods import Caller, PodTable, normalize_address
from sglang_rollout.coordinator.callers.policy import STATIC_TOKEN_CALLER, Policy, authorize
from sglang_rollout.coordinator.callers.tokens import TokenFile, bearer_token, check_token
from sglang_rollout.credentials import Credentials
from sglang_rollout.wire.access import (
    CALLER_HEADER,
    POD_PATHS,
    RELAYED_AUTHORIZATION_HEADER,
    RELAYED_CALLER_HEADER,
    PathKind,
    kind_of_path,
)
from sglang_rollout.wire.ports import FLEET, FLEET_ENGINES
from sglang_rollout.wire.reasons import Refusal, RefusalCode, quote_value

NEW_POD_POLLS = 30
"""Number of polls for the pod of an unknown address (3 s in total). A pod may call before the kubelet has reported its address, which takes
a second."""
_POLL_SECONDS = 0.1
_MAX_WAITING = 64
"""Addresses whose calls may wait at the same time, so that callers without a pod cannot occupy the coordinator."""

_PORT = re.compile(r":[0-9]*$")

_NO_CALLER = Refusal(
    RefusalCode.UNAUTHENTICATED, "The call does not come through the fleet's URL, so that its caller is not known. Call the fleet's URL."
)
_MANY_WAIT = Refusal(
    RefusalCode.UNAVAILABLE,
    "The pod of this caller is not known yet, and the coordinator is searching for the pods of too many other callers. Try again.",
)
_JUST_STARTED = Refusal(RefusalCode.UNAVAILABLE, "The coordinator has just started and does not know yet who may call. Try again.")


def caller_address(headers: Mapping[str, str], peer: str | None) -> str | None:
    """Return the normalized address of a caller that came through the front; None if it is not known."""
    return normalize_address(headers.get(CALLER_HEADER) or peer or "")


@dataclass
class CallerCheck:
    """Decides about callers by their address and their token."""

    name: str
    """Name of the rollout."""
    namespace: str
    security: Callable[[], Security | None]
    """Returns ``spec.security``; None while it is not known."""
    pods: PodTable
    """Live pods."""
    credentials: Callable[[str], Credentials]
    """Returns the credentials of an engine. The agent that relays a call of its trainer proves itself with one."""
    token_file: TokenFile | None = None
    """Token of ``security.token.secretName``."""
    keys: SigningKeys | None = None
    """Keys of the API server, which verify tokens of ServiceAccounts."""
    in_cluster: bool = True
    """False for a fleet without Kubernetes, whose callers are programs of this machine."""
    url_host: str = ""
    """Host of the fleet's URL. Only a fleet without Kubernetes needs it."""
    holder: Callable[[], str] = lambda: ""
    """Returns the name of the trainer that holds the fleet; empty: not known."""
    _waiting: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Searches for pods, by address."""

    async def check(self, path: str, headers: Mapping[str, str], peer: str | None) -> Caller | Refusal:
        """Return the caller of a request, or why it is refused.

        Args:
            path: Decoded path.
            headers: Headers of the request.
            peer: Address of the connection's other end.
        """
        sent = headers.get(CALLER_HEADER)
        if sent is None and path in POD_PATHS:
            return Caller(owner="router")
        if sent is None and self.in_cluster:
            return _NO_CALLER
        address = caller_address(headers, peer)
        authorization = headers.get("Authorization")
        relayed = headers.get(RELAYED_CALLER_HEADER)
        if relayed is not None and self._is_agent(path, address, authorization):
            address, authorization = self._named_address(relayed, address), headers.get(RELAYED_AUTHORIZATION_HEADER)
        kind = kind_of_path(path)
        verdict = await self.check_kind(kind, address, authorization)
        if self.in_cluster and path == FLEET and isinstance(verdict, Refusal):
            command = f"sglang-rollout status {self.name} -n {self.namespace}"
            return replace(verdict, message=f"{verdict.message} To look without a token: {command}")
        if self.in_cluster or isinstance(verdict, Refusal) or kind is PathKind.HEALTH:
            return verdict
        return self._check_host(verdict, address, headers.get("Host"))

    def _named_address(self, relayed: str, agent: str | None) -> str | None:
        """Return the address that an agent names: of its own pod, if the caller is a process there and has an address of loopback."""
        named = normalize_address(relayed)
        return agent if self.in_cluster and named is not None and ip_address(named).is_loopback else named

    def _check_host(self, caller: Caller, address: str | None, host: str | None) -> Caller | Refusal:
        """Refuse a program of this machine, which needs no token, if it calls this machine by a name of another one.

        A browser does so for a page whose name was first resolved to the page's server and then to this machine (DNS rebinding).
        """
        is_trusted = caller != STATIC_TOKEN_CALLER and address is not None and _is_this_machine(address)
        if host is None or not is_trusted or self._is_own_host(host):
            return caller
        message = f"The request is for the host {quote_value(host)}, which is not this machine. Use 127.0.0.1, or send the token."
        return Refusal(RefusalCode.FORBIDDEN, message)

    def _is_own_host(self, host: str) -> bool:
        """Return True if a ``Host`` header names this machine, or the fleet's URL."""
        bare = _PORT.sub("", host).lower().rstrip(".")
        found = normalize_address(bare)
        if found is not None:
            return _is_this_machine(found)
        own = {"localhost", self.url_host.lower(), socket.gethostname().lower()} - {""}
        return bare in own or bare.endswith(".localhost")

    async def check_kind(self, kind: PathKind, address: str | None, authorization: str | None) -> Caller | Refusal:
        """Return who calls paths of one kind, or why the caller is refused.

        Args:
            kind: Kind of the path.
            address: Normalized address of the caller; None: not known.
            authorization: The caller's ``Authorization`` header.
        """
        security = self.security()
        if kind is PathKind.HEALTH:
            return Caller()
        if security is None:
            return _JUST_STARTED
        if not self.in_cluster and address is not None and _is_this_machine(address):
            address = "127.0.0.1"
        policy = Policy(security, self.namespace, trusts_loopback=not self.in_cluster, holder=self.holder())
        static = self.token_file.read() if self.token_file is not None else b""
        audience = token_audience(security, self.namespace, self.name)
        credential = await check_token(authorization, static, keys=self.keys, audience=audience)
        verdict = authorize(kind, address, credential, self.pods, policy)
        if not isinstance(verdict, Refusal) or verdict.code is RefusalCode.UNAUTHENTICATED:
            return verdict
        if address is None or self.pods.at(address):
            return verdict
        if not await self.wait_for_pod(address):
            return _MANY_WAIT
        return authorize(kind, address, credential, self.pods, policy)

    def _is_agent(self, path: str, address: str | None, authorization: str | None) -> bool:
        """Return True if the agent of the engine in the path relays a call of its trainer: only then it may name another caller."""
        given = bearer_token(authorization)
        prefix, _, rest = path.partition(f"{FLEET_ENGINES}/")
        if prefix or not rest or given is None or not self.credentials(rest.partition("/")[0]).accept(given):
            return False
        if not self.in_cluster:
            return True
        found = self.pods.at(address) if address is not None else ()
        return len(found) == 1 and (found[0].namespace, found[0].rollout) == (self.namespace, self.name)

    async def wait_for_pod(self, address: str) -> bool:
        """Wait until the watch may have reported the pod of an unknown address. Return False if too many addresses wait.

        All calls from one address share one search, so that one caller without a pod takes no place of another.
        """
        search = self._waiting.get(address)
        if search is None:
            if len(self._waiting) >= _MAX_WAITING:
                return False
            search = self._waiting[address] = asyncio.create_task(self._search_pod(address), name=f"pod of {address}")
            search.add_done_callback(lambda _: self._waiting.pop(address, None))
        await asyncio.shield(search)
        return True

    async def _search_pod(self, address: str) -> None:
        for _ in range(NEW_POD_POLLS):
            await asyncio.sleep(_POLL_SECONDS)
            if self.pods.at(address):
                return


def _is_this_machine(address: str) -> bool:
    return ip_address(address).is_loopback or is_own_address(address)


def is_own_address(address: str) -> bool:
    """Return True if an address is this machine's own, so that only its own programs can call from it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # the kernel refuses addresses that no interface has
        except OSError:
            return False
    return True
