"""The decision who may call the fleet's URL. Pure.

Identity is the pod with the caller's address, or the token that the caller sends. A caller is refused unless one of them is allowed, so a
meaningless token, such as the API key that OpenAI's clients always send, takes nothing from an allowed pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from sglang_rollout.api.security_spec import (
    Callers,
    ControlAccess,
    GenerateAccess,
    LabelRequirement,
    LabelSelector,
    PodPeers,
    Security,
    SelectorOperator,
)
from sglang_rollout.coordinator.callers.pods import Caller, Pod, PodTable
from sglang_rollout.wire.access import PathKind
from sglang_rollout.wire.reasons import Refusal, RefusalCode

NOT_ALLOWED = "the coordinator may not watch pods and namespaces of the cluster, which security selects (NotAllowed)"
"""Why callers of other namespaces are refused."""


STATIC_TOKEN_CALLER = Caller(owner="token")
"""Everyone who has the token of ``security.token.secretName``."""


@dataclass(frozen=True, slots=True)
class StaticToken:
    """The caller sent the token of ``security.token.secretName``."""


@dataclass(frozen=True, slots=True)
class AccountToken:
    """The caller sent a valid token of a ServiceAccount, which was issued for this rollout."""

    namespace: str
    service_account: str
    pod_uid: str | None = None
    """Pod that the token is bound to. The token counts only while this pod lives. None: it is bound to no pod."""

    def __str__(self) -> str:
        return f"ServiceAccount {self.namespace}/{self.service_account}"


@dataclass(frozen=True, slots=True)
class BadToken:
    """The caller sent a token that is not accepted."""

    reason: str
    """Why, as the end of a sentence."""


Credential = StaticToken | AccountToken | BadToken | None
"""Token of a call; None: it has no token."""


@dataclass(frozen=True, slots=True)
class Policy:
    """``spec.security`` of one rollout."""

    security: Security
    namespace: str
    """Namespace of the rollout."""
    trusts_loopback: bool = False
    """True for a fleet without Kubernetes, where programs of the same machine need no token."""
    holder: str = ""
    """Name of the trainer that holds the fleet; empty: not known."""


@dataclass(frozen=True, slots=True)
class _Access:
    """What one kind of path demands."""

    is_open: bool
    needs_token: bool
    callers: tuple[Callers | None, ...]
    """Selections, any of which is enough; None: the default selection."""
    setting: str
    keeps_holder: bool = False
    """True if only the trainer that holds the fleet may continue by its address while the watch of its pod is silent."""


def authorize(kind: PathKind, address: str | None, credential: Credential, pods: PodTable, policy: Policy) -> Caller | Refusal:
    """Return the caller of an allowed call, or the refusal.

    Args:
        kind: Kind of the path.
        address: Normalized address of the caller; None: not known.
        credential: Token of the call.
        pods: The live pods.
        policy: Settings of the rollout.
    """
    accesses = _accesses(kind, policy.security)
    if any(access.is_open for access in accesses):
        return _describe(address, credential, pods)
    if credential is not None and (refusal := _refuse_token_of_rollout(address, pods)) is not None:
        return refusal
    if isinstance(credential, StaticToken):
        return STATIC_TOKEN_CALLER
    verdicts = [_check_access(address, credential, access, pods, policy) for access in accesses]
    return next((verdict for verdict in verdicts if isinstance(verdict, Caller)), verdicts[0])


def _refuse_token_of_rollout(address: str | None, pods: PodTable) -> Refusal | None:
    """Refuse a token that comes from a pod of a rollout: code in an engine's container may have taken it from a trainer's call."""
    found = pods.at(address) if address is not None else ()
    owner = next((pod for pod in found if pod.rollout is not None), None)
    if owner is None:
        return None
    message = f"The call comes from {owner}, which belongs to the rollout {owner.rollout}. No token is accepted from such a pod."
    return Refusal(RefusalCode.FORBIDDEN, message)


def check_trainer_address(address: str, pods: PodTable, policy: Policy) -> Refusal | None:
    """Return None if ``security.trainers`` selects the pod at an address, or names the address; otherwise why not.

    This holds with any ``control``: callers with a token, too, have their trainers in these pods.
    """
    access = _Access(is_open=False, needs_token=False, callers=(policy.security.trainers,), setting="security.trainers")
    verdict = _check_address(address, access, pods, policy)
    return verdict if isinstance(verdict, Refusal) else None


def needs_all_namespaces(security: Security, own: str) -> bool:
    """Return True if pods of other namespaces than ``own`` may be callers."""
    peers = [peers for peers in (security.trainers, security.clients, security.proxies) if peers is not None]
    accounts = [name for callers in peers if isinstance(callers, Callers) for name in callers.service_accounts]
    return any(each.namespace_selector is not None for each in peers) or any(
        "/" in name and not name.startswith(f"{own}/") for name in accounts
    )


def _accesses(kind: PathKind, security: Security) -> list[_Access]:
    """Return what a kind demands: each item alone is enough. The first item is the one that a refusal names."""
    control = _Access(
        security.control is ControlAccess.OPEN,
        security.control is ControlAccess.TOKEN,
        (security.trainers,),
        "security.trainers",
        keeps_holder=kind is PathKind.CONTROL,
    )
    trainers = (security.trainers,) if security.trainers_may_generate else ()
    data = _Access(
        security.generate is GenerateAccess.OPEN,
        security.generate is GenerateAccess.TOKEN,
        (security.clients, *trainers),
        "security.clients",
    )
    match kind:
        case PathKind.HEALTH:
            return [_Access(is_open=True, needs_token=False, callers=(), setting="")]
        case PathKind.DATA:
            return [data]
        case PathKind.READ:
            return [data, control]
        case PathKind.CONTROL:
            return [control]


def _describe(address: str | None, credential: Credential, pods: PodTable) -> Caller:
    """Return who calls a path that is open to everyone."""
    if isinstance(credential, StaticToken):
        return STATIC_TOKEN_CALLER
    bound = pods.find(credential.pod_uid) if isinstance(credential, AccountToken) else None
    if bound is not None:
        return bound.caller
    found = pods.at(address) if address else ()
    return found[0].caller if len(found) == 1 else Caller(owner=address or "unknown")


def _check_access(address: str | None, credential: Credential, access: _Access, pods: PodTable, policy: Policy) -> Caller | Refusal:
    """Return the caller that the token or else the address proves, or the refusal."""
    token = _check_account(credential, access, pods, policy) if isinstance(credential, AccountToken) else None
    if isinstance(token, Caller):
        return token
    verdict = _check_address(address, access, pods, policy)
    if isinstance(verdict, Caller):
        return verdict
    refused = token or (credential if isinstance(credential, BadToken) else None)
    return _explain(verdict, refused, access, policy)


def _check_account(token: AccountToken, access: _Access, pods: PodTable, policy: Policy) -> Caller | Refusal:
    """Return the caller that the token of a ServiceAccount proves, or the refusal."""
    if token.pod_uid is None:
        return _check_unbound(token, access, policy)
    pod = pods.find(token.pod_uid)
    if pod is None and not pods.is_current:
        return _describe_unknown(f"The token is of {token}, whose pod is not known", pods)
    if pod is None or (pod.namespace, pod.service_account) != (token.namespace, token.service_account):
        return Refusal(RefusalCode.FORBIDDEN, f"The token is of {token}, and its pod is not known or has ended.")
    return _check_selection(pod, "The token is of", access, pods, policy)


def _check_unbound(token: AccountToken, access: _Access, policy: Policy) -> Caller | Refusal:
    """Return the caller of a token that is bound to no pod, so that only its ServiceAccount is known."""
    account = (token.namespace, token.service_account)
    for callers in access.callers:
        has_selector = callers is None or callers.pod_selector is not None or callers.namespace_selector is not None
        if callers is not None and not has_selector and account in _accounts(callers, policy):
            return Caller(service_account=token.service_account, owner=str(token))
    return Refusal(
        RefusalCode.FORBIDDEN,
        f"The token is of {token} and bound to no pod, so that only serviceAccounts without other selectors select it.",
    )


def _check_address(address: str | None, access: _Access, pods: PodTable, policy: Policy) -> Caller | Refusal:
    """Return the caller at an address, or the refusal."""
    if address is None:
        return Refusal(RefusalCode.FORBIDDEN, "The address of the caller is not known.")
    if ip_address(address).is_loopback and not policy.trusts_loopback:
        return Refusal(RefusalCode.UNAUTHENTICATED, "The call comes from the router's own pod, as through kubectl port-forward.")
    if ip_address(address).is_loopback:
        return Caller(owner="localhost")
    if access.needs_token or policy.trusts_loopback:
        return Refusal(RefusalCode.UNAUTHENTICATED, f"The call comes from {address}.")
    match pods.at(address):
        case (pod,):
            return _check_pod(pod, address, access, pods, policy)
        case found:
            return _check_without_pod(address, access, pods, policy, len(found))


def _check_without_pod(address: str, access: _Access, pods: PodTable, policy: Policy, live: int) -> Caller | Refusal:
    """Return the caller at an address that no known pod has, or that several live pods have; or the refusal."""
    if live:
        return Refusal(RefusalCode.FORBIDDEN, f"{live} pods have the address {address}, so that the caller is not known.")
    if _in_blocks(address, access):
        caller = Caller(owner=address)
        if _may_have_changed(caller, address, access, pods, policy):
            return _describe_silent(f"The call comes from {address}, which belonged to a pod, and a new pod would not be noticed")
        return caller
    if not pods.is_current:
        return _describe_unknown(f"No pod with the address {address} is known", pods)
    return Refusal(
        RefusalCode.FORBIDDEN,
        f"No known pod has the address {address}. For a pod with hostNetwork, name this address in {access.setting}.cidrs.",
    )


def _describe_unknown(fact: str, pods: PodTable) -> Refusal:
    """Return the refusal of a caller whose pod may only be unknown because a watch does not run."""
    if pods.is_forbidden:
        return Refusal(RefusalCode.FORBIDDEN, f"{fact}, and {NOT_ALLOWED}.")
    return Refusal(RefusalCode.UNAVAILABLE, f"{fact}, and pods cannot be watched now.")


def _check_pod(pod: Pod, address: str, access: _Access, pods: PodTable, policy: Policy) -> Caller | Refusal:
    """Return the caller at the address of a pod, or the refusal."""
    origin, proxies = "The call comes from", policy.security.proxies
    if proxies is not None and _meets(pod, proxies.pod_selector, proxies.namespace_selector, pods, policy):
        return Refusal(RefusalCode.UNAUTHENTICATED, f"The call comes through {pod}, which security.proxies selects.")
    if _depends_on_namespace(pod, proxies, pods):
        return _refuse_until_namespace_is_known(pod, origin, pods)
    is_in_block = pod.rollout is None and _in_blocks(address, access)
    verdict = pod.caller if is_in_block else _check_selection(pod, origin, access, pods, policy)
    if isinstance(verdict, Caller) and _may_have_changed(verdict, address, access, pods, policy):
        return _describe_silent(f"{origin} {pod}, but its end would not be noticed")
    return verdict


def _may_have_changed(caller: Caller, address: str, access: _Access, pods: PodTable, policy: Policy) -> bool:
    """Return True if another pod than the known one may have the caller's address, and the caller does not hold the fleet."""
    return access.keeps_holder and str(caller) != policy.holder and pods.is_silent_at(address)


def _describe_silent(fact: str) -> Refusal:
    return Refusal(RefusalCode.UNAVAILABLE, f"{fact}, because pods cannot be watched now. Try again, or send a token.")


def _check_selection(pod: Pod, origin: str, access: _Access, pods: PodTable, policy: Policy) -> Caller | Refusal:
    """Return the caller if a pod is selected, or the refusal, which begins with ``origin``."""
    if pod.rollout is not None:
        return Refusal(RefusalCode.FORBIDDEN, f"{origin} {pod}, which belongs to the rollout {pod.rollout}.")
    if _selects(pod, access, pods, policy):
        return pod.caller
    if any(_depends_on_namespace(pod, callers, pods) for callers in access.callers):
        return _refuse_until_namespace_is_known(pod, origin, pods)
    return Refusal(RefusalCode.FORBIDDEN, f"{origin} {pod}, which is not selected.")


def _refuse_until_namespace_is_known(pod: Pod, origin: str, pods: PodTable) -> Refusal:
    if pods.is_forbidden:
        return Refusal(RefusalCode.FORBIDDEN, f"{origin} {pod}, and {NOT_ALLOWED}.")
    return Refusal(RefusalCode.UNAVAILABLE, f"{origin} {pod}, and the labels of namespace {pod.namespace} are not known. Try again.")


def _depends_on_namespace(pod: Pod, peers: PodPeers | None, pods: PodTable) -> bool:
    """Return True if only the labels of the pod's namespace, which are not known, decide whether ``peers`` select it."""
    if peers is None or peers.namespace_selector is None or pods.namespace_labels(pod.namespace) is not None:
        return False
    return peers.pod_selector is None or matches(peers.pod_selector, pod.labels)


def _in_blocks(address: str, access: _Access) -> bool:
    """Return True if a block of ``cidrs`` contains an address."""
    found = ip_address(address)
    return any(found in block for callers in access.callers if callers is not None for block in parse_blocks(tuple(callers.cidrs)))


@lru_cache
def parse_blocks(cidrs: tuple[str, ...]) -> tuple[IPv4Network | IPv6Network, ...]:
    """Return blocks of addresses. Leave out what is no block: patterns of the API server cannot count the groups of IPv6."""
    found = []
    for cidr in cidrs:
        with suppress(ValueError):
            found.append(ip_network(cidr, strict=False))
    return tuple(found)


def _selects(pod: Pod, access: _Access, pods: PodTable, policy: Policy) -> bool:
    """Return True if a pod, which belongs to no rollout, is among the callers."""
    return any(_selects_pod(pod, callers, pods, policy) for callers in access.callers)


def _selects_pod(pod: Pod, callers: Callers | None, pods: PodTable, policy: Policy) -> bool:
    if callers is None:
        return pod.namespace == policy.namespace
    if callers.pod_selector is None and callers.namespace_selector is None and not callers.service_accounts:
        return False
    if callers.service_accounts and (pod.namespace, pod.service_account) not in _accounts(callers, policy):
        return False
    # A ServiceAccount of another namespace names that namespace.
    is_named = bool(callers.service_accounts) and callers.namespace_selector is None
    if is_named:
        return callers.pod_selector is None or matches(callers.pod_selector, pod.labels)
    return _meets(pod, callers.pod_selector, callers.namespace_selector, pods, policy)


def _meets(pod: Pod, labels: LabelSelector | None, namespaces: LabelSelector | None, pods: PodTable, policy: Policy) -> bool:
    """Return True if a pod meets both selectors. Without a selector of namespaces it must be in the rollout's namespace."""
    if labels is not None and not matches(labels, pod.labels):
        return False
    if namespaces is None:
        return pod.namespace == policy.namespace
    found = pods.namespace_labels(pod.namespace)
    return found is not None and matches(namespaces, found)


def _accounts(callers: Callers, policy: Policy) -> set[tuple[str, str]]:
    """Return the ServiceAccounts as pairs of namespace and name."""
    pairs = (name.rpartition("/") for name in callers.service_accounts)
    return {(namespace or policy.namespace, name) for namespace, _, name in pairs}


def matches(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Return True if labels meet a selector, as Kubernetes decides it."""
    wanted = (selector.match_labels or {}).items()
    return all(labels.get(key) == value for key, value in wanted) and all(
        _meets_requirement(each, labels) for each in selector.match_expressions
    )


def _meets_requirement(requirement: LabelRequirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key)
    match requirement.operator:
        case SelectorOperator.IN:
            return value in requirement.values
        case SelectorOperator.NOT_IN:
            return value not in requirement.values
        case SelectorOperator.EXISTS:
            return value is not None
        case SelectorOperator.DOES_NOT_EXIST:
            return value is None


def _explain(refusal: Refusal, token: BadToken | Refusal | None, access: _Access, policy: Policy) -> Refusal:
    """Return the refusal of an address with a sentence about the refused token, and one that says who is allowed."""
    code, sentence = refusal.code, ""
    match token:
        case BadToken(reason):
            sentence = f"Its token is not accepted: {reason}. "
        case Refusal():
            sentence = f"{token.message} "
            code = token.code if token.code is RefusalCode.UNAVAILABLE else code
    is_token_needed = access.needs_token or policy.trusts_loopback or refusal.code is RefusalCode.UNAUTHENTICATED
    allowed = "callers with a token (Authorization: Bearer)" if is_token_needed else _describe_allowed(access, policy)
    return Refusal(code, f"{refusal.message} {sentence}Allowed: {allowed}.")


def _describe_allowed(access: _Access, policy: Policy) -> str:
    if all(callers is None for callers in access.callers):
        return f"pods of namespace {policy.namespace} that belong to no rollout, and callers with a token"
    return f"callers that {access.setting} selects, and callers with a token"
