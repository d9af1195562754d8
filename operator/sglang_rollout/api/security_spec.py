"""``spec.security`` of an SGLangRollout: callers of the fleet's URL."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from sglang_rollout.api.network_spec import ABSOLUTE
from sglang_rollout.api.pod_template import Labels
from sglang_rollout.api.schema import ApiModel, plain_path, rule, rules, with_rules

_SUBDOMAIN = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_MAX_ITEMS = 64
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}([.]{_BYTE}){{3}}"
_IPV4_LENGTH = "/(3[0-2]|[12]?[0-9])"
_PAIRS = "([0-9A-Fa-f]{1,4}(:[0-9A-Fa-f]{1,4})*)"
_IPV6 = rf"({_PAIRS}?::{_PAIRS}?|[0-9A-Fa-f]{{1,4}}(:[0-9A-Fa-f]{{1,4}}){{7}})"
_IPV6_LENGTH = "/(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_HOST_NAME = rf"({_LABEL}[.])*[A-Za-z]([-A-Za-z0-9]*[A-Za-z0-9])?[.]?"


class ControlAccess(StrEnum):
    """Callers of control paths: those that change or show what the fleet serves."""

    TRAINERS = "Trainers"
    TOKEN = "Token"  # noqa: S105 - no secret
    OPEN = "Open"


class GenerateAccess(StrEnum):
    """Callers of data paths: generation, embeddings, scores and tokens."""

    OPEN = "Open"
    CLIENTS = "Clients"
    TOKEN = "Token"  # noqa: S105 - no secret


class NetworkAccess(StrEnum):
    """Network policies of the fleet's pods."""

    ISOLATED = "Isolated"
    OPEN = "Open"


class SelectorOperator(StrEnum):
    """Comparison of a label, as in Kubernetes."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelRequirement(ApiModel):
    """A condition on one label."""

    model_config = with_rules(
        rule(
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
            "matchExpressions: values belong to the operators In and NotIn, which need at least one; leave values out for Exists and"
            " DoesNotExist.",
            field=".values",
        )
    )

    key: str = Field(min_length=1, max_length=316)
    """Key of the label."""
    operator: SelectorOperator
    """`In`, `NotIn`, `Exists` or `DoesNotExist`."""
    values: list[Annotated[str, Field(max_length=63)]] = Field(default_factory=list, max_length=_MAX_ITEMS)
    """Values of `In` and `NotIn`."""


class LabelSelector(ApiModel):
    """A selector of objects by their labels, as in Kubernetes. An empty selector selects all."""

    match_labels: Labels | None = None
    """Labels that the object has."""
    match_expressions: list[LabelRequirement] = Field(default_factory=list, max_length=16)
    """Conditions that the labels of the object meet."""


def _names_something(fields: tuple[str, ...], name: str) -> ConfigDict:
    """Return the configuration of an object that selects nothing unless it has one of ``fields``."""
    is_set = " || ".join(f"has(self.{field})" for field in fields)
    return with_rules(rule(is_set, f"security.{name} must have at least one of {', '.join(fields)}; podSelector: {{}} selects all pods."))


class PodPeers(ApiModel):
    """Pods, by labels of the pod and of its namespace."""

    pod_selector: LabelSelector | None = None
    """Labels of the pods. Default: all pods of the namespaces."""
    namespace_selector: LabelSelector | None = None
    """Labels of the pods' namespaces. Default: the namespace of the rollout. It needs the chart's ClusterRole for callers, bound to the
    router's ServiceAccount; without it, the condition `Degraded` has the reason `NotAllowed`."""


ServiceAccountName = Annotated[str, Field(min_length=1, max_length=317, pattern=rf"^({_SUBDOMAIN}/)?{_SUBDOMAIN}$")]
"""``name`` in the namespace of the rollout, or ``namespace/name``."""

Cidr = Annotated[
    str,
    Field(
        max_length=43,
        pattern=f"^({_IPV4}{_IPV4_LENGTH}|{_IPV6}{_IPV6_LENGTH})$",
        json_schema_extra=rules(
            rule("!self.endsWith('/0')", "cidrs must not contain all addresses: set control or generate to Open instead."),
            rule(
                "!self.startsWith('127.') && !self.startsWith('::')",
                "cidrs must not contain addresses of loopback, because kubectl port-forward has them in every pod: use a token.",
            ),
        ),
    ),
]
"""Block of addresses; ``::`` begins the loopback and the IPv4-mapped addresses of IPv6."""


TrainerAddress = Annotated[
    str,
    Field(
        max_length=253,
        pattern=f"^({_IPV4}({_IPV4_LENGTH})?|{_IPV6}({_IPV6_LENGTH})?|{_HOST_NAME})$",
        json_schema_extra=rules(
            rule("!self.endsWith('/0')", "trainerAddresses must not contain all addresses: name the networks of the trainers."),
            rule(
                "self != 'localhost' && !self.startsWith('127.') && !self.startsWith('::') && !self.startsWith('169.254.')",
                "trainerAddresses must not contain loopback or link-local addresses: from an engine's pod they lead to that pod or its"
                " node. Name the addresses of the trainers.",
            ),
        ),
    ),
]
"""Address, block of addresses, or host name."""


CheckpointPath = Annotated[str, Field(max_length=1024, pattern=ABSOLUTE, json_schema_extra=plain_path("security.paths"))]
"""Absolute path of a folder."""


class Callers(PodPeers):
    """Callers that are allowed without a token.

    A pod is selected if it meets all of `podSelector`, `namespaceSelector` and `serviceAccounts` that are set. Pods that belong to a
    rollout are never selected.
    """

    service_accounts: list[ServiceAccountName] = Field(default_factory=list, max_length=_MAX_ITEMS)
    """ServiceAccounts of the pods, as `name` or `namespace/name`."""
    cidrs: list[Cidr] = Field(default_factory=list, max_length=_MAX_ITEMS)
    """Further addresses, for trainers with `hostNetwork`, which have the address of their node. Every process with such an address is
    allowed. With `cidrs` alone no pod is selected."""


class Trainers(Callers):
    """Callers of control paths. Default: all pods of the rollout's namespace that belong to no rollout."""

    model_config = _names_something(("podSelector", "namespaceSelector", "serviceAccounts", "cidrs"), "trainers")


class Clients(Callers):
    """Callers of data paths, beside the trainers. Default: all pods of the rollout's namespace that belong to no rollout."""

    model_config = _names_something(("podSelector", "namespaceSelector", "serviceAccounts", "cidrs"), "clients")


class Scrapers(PodPeers):
    """Pods that may reach the metrics port."""

    model_config = _names_something(("podSelector", "namespaceSelector"), "scrapers")


class Proxies(PodPeers):
    """Gateways and meshes. Their address says nothing about their callers, who therefore need a token."""

    model_config = _names_something(("podSelector", "namespaceSelector"), "proxies")


class Token(ApiModel):
    """Tokens that identify callers: `Authorization: Bearer TOKEN`."""

    model_config = with_rules(rule("has(self.secretName) || has(self.audience)", "security.token must have secretName, audience or both."))

    secret_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=f"^{_SUBDOMAIN}$")
    """Secret of the rollout's namespace whose key `token` is accepted. A new value needs no restart. Default: only tokens of
    ServiceAccounts are accepted."""
    audience: str | None = Field(default=None, min_length=1, max_length=253, pattern=r"^[!-~]+$")
    """Audience of the tokens of ServiceAccounts, which the kubelet mounts (`projected` volumes). Never set it to an audience of the API
    server. Default: `rollout.sglang.io/NAMESPACE/NAME`."""


class Tls(ApiModel):
    """TLS at the fleet's URL."""

    secret_name: str = Field(min_length=1, max_length=253, pattern=f"^{_SUBDOMAIN}$")
    """Secret of the rollout's namespace in the format of cert-manager: the certificate and its chain in `tls.crt`, the private key in
    `tls.key`, and the certificate of the authority in `ca.crt`. Without `ca.crt` agents trust the authorities of their image. A renewed
    certificate needs no restart."""


class Security(ApiModel):
    """Callers of the fleet's URL, and its encryption."""

    # has(), because the API server checks the default of security, {}, before it fills in the fields.
    model_config = with_rules(
        rule(
            "!has(self.trainers) || !has(self.control) || self.control != 'Open'",
            "security.trainers has no effect with control Open: set control to Trainers or Token, or leave trainers out.",
            field=".trainers",
        ),
        rule(
            "!has(self.clients) || (has(self.generate) && self.generate != 'Open')",
            "security.clients has no effect with generate Open: set generate to Clients or Token, or leave clients out.",
            field=".clients",
        ),
        rule(
            "!has(self.token) || !has(self.control) || self.control != 'Open' || (has(self.generate) && self.generate != 'Open')",
            "security.token has no effect with control Open and generate Open: restrict one of them, or leave token out.",
            field=".token",
        ),
    )

    control: ControlAccess = ControlAccess.TRAINERS
    """Callers of control paths, which change or show what the fleet serves: weights, pauses, `/fleet`. `Trainers`: pods that `trainers`
    selects, and callers with a token. `Token`: callers with a token. `Open`: everyone who reaches the URL."""
    generate: GenerateAccess = GenerateAccess.OPEN
    """Callers of data paths such as `/generate`. `Open`: everyone who reaches the URL. `Clients`: pods that `clients` or `trainers`
    selects, and callers with a token; with `control: Trainers` set `trainers`, too, because its default is all pods of the namespace.
    `Token`: callers with a token."""
    trainers: Trainers | None = None
    """Callers of control paths. Default: all pods of the rollout's namespace that belong to no rollout."""
    clients: Clients | None = None
    """Callers of data paths, beside the trainers. Default: all pods of the rollout's namespace that belong to no rollout."""
    scrapers: Scrapers | None = None
    """Pods that may reach the metrics port. Default: all pods of the cluster."""
    proxies: Proxies | None = None
    """Gateways and meshes. Their address says nothing about their callers, who therefore need a token."""
    token: Token | None = None
    """Tokens that identify callers: `Authorization: Bearer TOKEN`. A token of a ServiceAccount is accepted if `trainers` or `clients`
    selects the pod that it is bound to. NetworkPolicies know no tokens: callers outside of the namespace must also be in `cidrs` or
    `namespaceSelector` of `trainers`, or come through `proxies`. Default: no Secret, and the default audience."""
    trainer_addresses: list[TrainerAddress] = Field(default_factory=list, max_length=_MAX_ITEMS)
    """Further addresses that trainers may name as `master_address`, to which engines then connect: addresses, blocks such as
    `10.1.0.0/16`, or host names. Always allowed are the address of the caller, and pods and `cidrs` of `trainers`; with `control: Open`
    and no `trainerAddresses` every address. Loopback and link-local addresses are never allowed. NetworkPolicies do not change."""
    paths: list[CheckpointPath] = Field(default_factory=list, max_length=_MAX_ITEMS)
    """Folders below which trainers may name checkpoints and adapters, as the engines' pods see them, for example `/checkpoints`. Symbolic
    links must not lead out of them, and names on the Hugging Face hub are refused. Default: every path that an engine can read. Paths in
    the spec itself, such as `engine.lora.adapters`, need not lie below them."""
    tls: Tls | None = None
    """Encrypts `status.endpoints.url` and `status.endpoints.generate` with HTTPS. Default: HTTP. A change restarts the router, and with
    `mode: Hybrid` or `Colocated` the engines, too. Engines, metrics and probes stay HTTP."""
    network: NetworkAccess = NetworkAccess.ISOLATED
    """`Isolated`: NetworkPolicies admit to each pod only the callers above and the fleet's own pods. `Open`: no NetworkPolicy."""

    @property
    def trainers_may_generate(self) -> bool:
        """True if trainers may call data paths. The default trainers may not if control paths are not for them."""
        return self.trainers is not None or self.control is ControlAccess.TRAINERS


def token_audience(security: Security, namespace: str, name: str) -> str:
    """Return the audience of tokens of ServiceAccounts for a rollout."""
    given = security.token.audience if security.token is not None else None
    return given or f"rollout.sglang.io/{namespace}/{name}"
