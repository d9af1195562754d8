"""The attacks that a fleet refuses: who calls, what, and the answer. ``test_attacks.py`` sends each, and the documentation lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import Any

from e2e.stand_in import CKPT
from sglang_rollout.coordinator.http.control import routes as control_routes
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_AUTHORIZATION_HEADER, RELAYED_CALLER_HEADER
from sglang_rollout.wire.ports import (
    AGENT_ACK,
    AGENT_FENCE,
    AGENT_PORT,
    AGENT_SYNC,
    BATCHES_PORT,
    COORDINATOR_PORT,
    ENGINE_PORT,
    FLEET,
    FLEET_CLAIM,
    FLEET_ENGINES,
    FLEET_LEASE,
    FLEET_RUN,
    FLEET_TENSORS,
    FRONT_PORT,
    GATE_PORT,
    GENERATE_PORT,
    METRICS_PORT,
    PROBES_PORT,
    SMG_PORT,
)
from sglang_rollout.wire.reasons import RefusalCode

ROLLOUT, OTHER_ROLLOUT = "stand", "other"
"""The rollout that is attacked, and another one of the same namespace with ``mode: Hybrid``."""
ENGINES = 3
"""Engines of the rollout that is attacked."""
PATHS, OUTSIDE, LINK = f"{CKPT}/allowed", f"{CKPT}/outside", "link"
"""``security.paths`` while a trainer's pod calls, a folder beside it, and a symbolic link below the first that leads to the second."""


class Source(StrEnum):
    """Who calls."""

    OTHER_NAMESPACE = "a pod of another namespace"
    NOT_SELECTED = "a pod of the namespace that `security.trainers` does not select"
    TRAINER = "a trainer's pod"
    SECOND_TRAINER = "a trainer's pod while another trainer has paused the fleet"
    HYBRID_TRAINER = "a trainer's pod of a rollout with `mode: Hybrid`"
    ENGINE = "an engine container of the rollout"
    OTHER_ENGINE = "an engine container of another rollout"
    HOST_NETWORK = "a pod of the namespace with `hostNetwork`"
    FORWARD = "`kubectl port-forward`"
    ENDED_POD = "a pod of another namespace, with the address of a pod that has ended"
    DELETED_POD = "a pod of another namespace, with the address of a pod that was deleted"
    SHARED_ADDRESS = "a pod whose address a second live pod reports"


class Host(StrEnum):
    """Where a call goes."""

    ROUTER_SERVICE = "Service `NAME-router`"
    GENERATE_SERVICE = "Service `NAME-generate`"
    ROUTER_POD = "the router pod"
    ENGINE_POD = "an engine pod"
    HYBRID_ENGINE = "an engine pod of a rollout with `mode: Hybrid`"
    OWN_POD = "127.0.0.1 in the same pod"


@dataclass(frozen=True)
class Request:
    """One request of an attack."""

    host: Host
    port: int
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Body of a POST; empty: that of a request for tokens."""


@dataclass(frozen=True)
class Attack:
    """Requests that get the same answer."""

    name: str
    source: Source
    tried: str
    """What is tried, as a part of a sentence."""
    calls: tuple[tuple[str, str], ...]
    """Methods and paths."""
    status: int
    """HTTP status of the answer; 0: no connection is accepted."""
    gain: str
    """What the caller could do otherwise, as the end of a sentence about the caller."""
    code: str = ""
    """Code in the body of the answer; empty: the body has none."""
    hosts: tuple[tuple[Host, int], ...] = ((Host.ROUTER_SERVICE, FRONT_PORT),)
    headers: tuple[Mapping[str, str], ...] = field(default=({},), hash=False)
    """Headers, each set of which is sent with each call. ``{trainer}`` is the address of a trainer's pod, ``{token}`` the token and
    ``{control}`` the key of another rollout, ``{credential}`` the credential of the engine that calls. ``{foreign}``, ``{unbound}`` and
    ``{engine}`` are tokens of ServiceAccounts: for another rollout, bound to no pod, and bound to the pod of an engine."""
    bodies: tuple[Mapping[str, Any], ...] = field(default=({},), hash=False)
    """Bodies, each of which is sent with each call. ``{router}`` is the address of the router's pod."""
    message: str = ""
    """A part of the answer's message; empty: any message."""

    @property
    def answer(self) -> str:
        """The answer in words."""
        return f"{self.status} {self.code}".strip() if self.status else "no connection"

    def is_refused(self, status: int, code: str, message: str) -> bool:
        """Return whether an answer is the expected one."""
        return status == self.status and self.code in ("", code) and self.message in message

    def requests(self) -> Iterator[Request]:
        """Yield each request."""
        for (host, port), (method, path), headers, body in product(self.hosts, self.calls, self.headers, self.bodies):
            yield Request(host, port, method, path, headers, body)


CONTROL_CALLS = (
    *((route.method, route.path.format(engine=f"{ROLLOUT}-engine-0", call="release_memory_occupation")) for route in control_routes),
    ("GET", FLEET),
    ("GET", FLEET_TENSORS),
    ("GET", "/workers"),
    ("GET", "/list_workers"),
    ("GET", "/get_weights_by_name"),
    ("POST", "/get_weights_by_name"),
    ("POST", "/unknown"),
)
"""Every call that changes what a fleet serves, or shows weights, engines or addresses."""
_SOME_CALLS = (("GET", FLEET), ("POST", "/pause_generation"), ("POST", FLEET_RUN), ("POST", FLEET_CLAIM), ("POST", FLEET_LEASE))
_AT_ENGINES = tuple(
    ("POST", path)
    for path in (
        AGENT_SYNC,
        AGENT_ACK,
        AGENT_FENCE,
        "/update_weights_from_tensor",
        "/update_weights_from_disk",
        "/release_memory_occupation",
    )
)
_RELAYED_CALL = (("POST", f"{FLEET_ENGINES}/{ROLLOUT}-engine-0/release_memory_occupation"),)
_NAMES_TRAINER = (
    {CALLER_HEADER: "{trainer}"},
    {"X-Forwarded-For": "{trainer}", "X-Real-IP": "{trainer}", "Forwarded": "for={trainer}"},
    {CALLER_HEADER: "127.0.0.1", "X-Forwarded-For": "127.0.0.1"},
    {RELAYED_CALLER_HEADER: "{trainer}"},
)
_TOKENS = ({"Authorization": "Bearer {token}"}, {"Authorization": "Bearer {control}"}, {"Authorization": "Bearer "})
_CONTROL_TOKEN = {"Authorization": "Bearer {control}"}
_RELAY = _CONTROL_TOKEN | {RELAYED_CALLER_HEADER: "{trainer}"}
_RELAYED_TOKEN = _RELAY | {RELAYED_AUTHORIZATION_HEADER: "Bearer {token}"}
_CREDENTIAL = {"Authorization": "Bearer {credential}"}
_ENGINE = ((Host.ENGINE_POD, GATE_PORT),)
_FORBIDDEN, _UNAUTHENTICATED = RefusalCode.FORBIDDEN.value, RefusalCode.UNAUTHENTICATED.value
_INVALID, _CONFLICT = RefusalCode.INVALID_REQUEST.value, RefusalCode.CONFLICT.value
_INSIDE = tuple((Host.ENGINE_POD, port) for port in (ENGINE_PORT, AGENT_PORT)) + tuple(
    (Host.ROUTER_POD, port) for port in (SMG_PORT, COORDINATOR_PORT, BATCHES_PORT)
)
_OPEN_GROUP, _FROM_DISK = (("POST", "/init_weights_update_group"),), (("POST", "/update_weights_from_disk"),)
_GROUP = {"master_port": FRONT_PORT, "rank_offset": 1, "world_size": ENGINES + 1, "group_name": "attack"}
_TAKES_OVER = "pauses the fleet, or commits weights of its own"

ATTACKS = (
    Attack("control-calls", Source.OTHER_NAMESPACE, "each control call", CONTROL_CALLS, 403, _TAKES_OVER, _FORBIDDEN),
    Attack(
        "caller-headers",
        Source.OTHER_NAMESPACE,
        "headers that name a trainer's address, or loopback, as that of the caller",
        _SOME_CALLS,
        403,
        "calls as the trainer",
        _FORBIDDEN,
        headers=_NAMES_TRAINER,
    ),
    Attack(
        "tokens-of-another-rollout",
        Source.OTHER_NAMESPACE,
        "the tokens of another rollout, and an empty one",
        _SOME_CALLS,
        403,
        "takes over every fleet with the token of one",
        _FORBIDDEN,
        headers=_TOKENS,
    ),
    Attack(
        "relay",
        Source.OTHER_NAMESPACE,
        "a call that an agent would relay, with the key of another rollout",
        _RELAYED_CALL,
        403,
        "calls as the trainer",
        _FORBIDDEN,
        headers=(_RELAY, _RELAYED_TOKEN),
    ),
    Attack(
        "written-paths",
        Source.OTHER_NAMESPACE,
        "control paths written with `//`, `;`, `/./`, capital letters, or as an absolute URL",
        tuple(("GET", path) for path in ("//fleet", "/fleet;x", "/./fleet", "/FLEET", "/generate/../fleet", "http://localhost/fleet")),
        403,
        "reaches a control path as a data path",
        _FORBIDDEN,
    ),
    Attack(
        "encoded-paths",
        Source.OTHER_NAMESPACE,
        "control paths with percent-encoded characters",
        (("GET", "/%66leet"), ("POST", "/pause%5fgeneration"), ("GET", "/fleet%00")),
        400,
        "reaches a control path as a data path",
        "encoded_path",
        hosts=((Host.ROUTER_SERVICE, FRONT_PORT), (Host.GENERATE_SERVICE, GENERATE_PORT), (Host.ENGINE_POD, GATE_PORT)),
    ),
    Attack(
        "port-for-data",
        Source.OTHER_NAMESPACE,
        "each control call at the port for data paths",
        CONTROL_CALLS,
        403,
        _TAKES_OVER,
        "data_paths_only",
        hosts=((Host.GENERATE_SERVICE, GENERATE_PORT),),
    ),
    Attack(
        "engine-url",
        Source.OTHER_NAMESPACE,
        "control calls at an engine's own URL",
        _AT_ENGINES,
        401,
        "writes the weights of one engine, or opens its gate",
        hosts=_ENGINE,
    ),
    Attack(
        "engine-url-with-tokens",
        Source.OTHER_NAMESPACE,
        "control calls at an engine's own URL, with the tokens of another rollout",
        _AT_ENGINES,
        403,
        "writes the weights of one engine, or opens its gate",
        hosts=_ENGINE,
        headers=_TOKENS[:2],
    ),
    Attack(
        "inner-ports",
        Source.OTHER_NAMESPACE,
        "the ports of SGLang, agent, smg, coordinator and batch server",
        (("GET", FLEET),),
        0,
        "bypasses the gate, and the check of callers",
        hosts=_INSIDE,
    ),
    Attack(
        "probes-and-metrics",
        Source.OTHER_NAMESPACE,
        "control paths at the ports for probes and metrics",
        (("GET", FLEET), ("GET", "/get_weights_by_name")),
        404,
        "bypasses the check of callers",
        hosts=tuple((host, port) for host in (Host.ROUTER_POD, Host.ENGINE_POD) for port in (PROBES_PORT, METRICS_PORT)),
    ),
    Attack("not-selected", Source.NOT_SELECTED, "each control call", CONTROL_CALLS, 403, _TAKES_OVER, _FORBIDDEN),
    Attack(
        "not-selected-headers",
        Source.NOT_SELECTED,
        "headers that name a trainer's address, or loopback, as that of the caller",
        _SOME_CALLS,
        403,
        "calls as the trainer",
        _FORBIDDEN,
        headers=_NAMES_TRAINER,
    ),
    Attack(
        "web-page",
        Source.TRAINER,
        "control calls as a web page sends them, with `Origin`",
        (*((method, path) for method, path in _SOME_CALLS if method == "POST"), ("GET", "/flush_cache")),
        403,
        "pauses the fleet through the browser of a user",
        _FORBIDDEN,
        headers=({"Origin": "http://example.com"}, {"Sec-Fetch-Site": "cross-site"}),
    ),
    Attack(
        "master-address-of-a-node",
        Source.TRAINER,
        "a process group whose `master_address` is `localhost`, 127.0.0.1 or 169.254.169.254",
        _OPEN_GROUP,
        400,
        "lets engines connect to services of their nodes, such as the metadata service of a cloud",
        _INVALID,
        bodies=tuple(_GROUP | {"master_address": address} for address in ("localhost", "127.0.0.1", "169.254.169.254")),
        message="leads from an engine's pod to the engine's own pod or node",
    ),
    Attack(
        "master-address-of-the-router",
        Source.TRAINER,
        "a process group whose `master_address` is the router's pod",
        _OPEN_GROUP,
        400,
        "lets engines connect to each service that only they reach",
        _INVALID,
        bodies=(_GROUP | {"master_address": "{router}"},),
        message="belongs to no trainer of this fleet",
    ),
    Attack(
        "checkpoint-outside-of-paths",
        Source.TRAINER,
        "with `security.paths`, a checkpoint outside of it, with `..`, or behind a symbolic link",
        _FROM_DISK,
        400,
        "reads each folder of an engine's pod",
        _INVALID,
        bodies=tuple({"model_path": path} for path in (OUTSIDE, "/etc", f"{PATHS}/../outside", f"{PATHS}/{LINK}")),
        message="is no folder that an engine's agent can read below security.paths",
    ),
    Attack(
        "label-with-a-line-break",
        Source.TRAINER,
        "a label with a line break",
        (("POST", "/update_weight_version"),),
        400,
        "writes lines of its own into logs, headers and status",
        _INVALID,
        bodies=({"new_version": "7\n2026-01-01 00:00:00 INFO forged"}, {"new_version": "7\r\nX-Weight-Version: 8"}),
        message="contains a control character",
    ),
    Attack(
        "abort-by-another-trainer",
        Source.SECOND_TRAINER,
        "to abort all requests, and to end the pause",
        (("POST", "/abort_request"), ("POST", "/continue_generation")),
        409,
        "ends the requests and the push of the trainer that holds the fleet",
        _CONFLICT,
        bodies=({"abort_all": True},),
        message="Another trainer holds this fleet",
    ),
    Attack(
        "body-without-end",
        Source.HYBRID_TRAINER,
        "a trainer's call at an engine's URL, with a body that does not end",
        (("POST", "/update_weights_from_tensor"),),
        408,
        "uses a connection and memory of the engine's agent for as long as it likes",
        hosts=((Host.HYBRID_ENGINE, GATE_PORT),),
        headers=({"Content-Length": "50000"}, {"Content-Length": "16000000"}),
    ),
    Attack("engine-container", Source.ENGINE, "each control call", CONTROL_CALLS, 403, "chooses the weights from model code", _FORBIDDEN),
    Attack(
        "engine-container-headers",
        Source.ENGINE,
        "headers that name a trainer's address, or loopback, as that of the caller",
        (*_SOME_CALLS, *_RELAYED_CALL),
        403,
        "calls as the trainer from model code",
        _FORBIDDEN,
        headers=_NAMES_TRAINER,
    ),
    Attack(
        "engine-container-gates",
        Source.ENGINE,
        "control calls at the gates of its own and of another engine",
        _AT_ENGINES,
        401,
        "writes weights, or opens a gate, from model code",
        hosts=((Host.OWN_POD, GATE_PORT), *_ENGINE),
    ),
    Attack(
        "engine-container-agent",
        Source.ENGINE,
        "the agent in its own pod",
        _AT_ENGINES,
        0,
        "opens the gate from model code",
        hosts=((Host.OWN_POD, AGENT_PORT),),
        headers=({}, {CALLER_HEADER: "{trainer}"}),
    ),
    Attack(
        "engine-credential",
        Source.ENGINE,
        "control calls at the gate of another engine, with the credential of its own engine",
        _AT_ENGINES,
        403,
        "writes the weights of every engine, or opens their gates, with the credential of one",
        hosts=_ENGINE,
        headers=(_CREDENTIAL,),
    ),
    Attack(
        "engine-credential-relay",
        Source.ENGINE,
        "a call that the agent of another engine would relay, with the credential of its own engine",
        (("POST", f"{FLEET_ENGINES}/{ROLLOUT}-engine-1/release_memory_occupation"),),
        403,
        "calls as the trainer of another engine",
        _FORBIDDEN,
        headers=(_CREDENTIAL | {RELAYED_CALLER_HEADER: "{trainer}"},),
    ),
    Attack("other-engine", Source.OTHER_ENGINE, "each control call", CONTROL_CALLS, 403, _TAKES_OVER, _FORBIDDEN),
    Attack(
        "other-engine-relay",
        Source.OTHER_ENGINE,
        "a call that an agent would relay, with the key of its own rollout",
        _RELAYED_CALL,
        403,
        "calls as the trainer of every fleet",
        _FORBIDDEN,
        headers=(_RELAY, _RELAYED_TOKEN),
    ),
    Attack(
        "hybrid-agent",
        Source.OTHER_ENGINE,
        "with `mode: Hybrid`, calls at the agent in its own pod that name a trainer's address as that of the caller",
        _AT_ENGINES,
        0,
        "calls as the trainer from model code",
        hosts=((Host.OWN_POD, AGENT_PORT),),
        headers=({CALLER_HEADER: "{trainer}"}, {RELAYED_CALLER_HEADER: "{trainer}"}),
    ),
    Attack(
        "hybrid-gate",
        Source.OTHER_ENGINE,
        "with `mode: Hybrid`, a trainer's call at its own gate, with headers that name a trainer, or the token of its trainers",
        (("POST", "/release_memory_occupation"), ("POST", "/update_weights_from_tensor")),
        403,
        "calls as the trainer from model code, which sees the tokens of calls if it takes the gate's port",
        _FORBIDDEN,
        hosts=((Host.OWN_POD, GATE_PORT),),
        headers=({}, *_NAMES_TRAINER, {"Authorization": "Bearer {token}"}),
    ),
    Attack("host-network", Source.HOST_NETWORK, "control calls", _SOME_CALLS, 403, "calls from any process of a node", _FORBIDDEN),
    Attack(
        "port-forward",
        Source.FORWARD,
        "control calls without a token",
        _SOME_CALLS,
        401,
        "pushes with no right but that to forward ports",
        _UNAUTHENTICATED,
    ),
    Attack(
        "port-forward-with-wrong-tokens",
        Source.FORWARD,
        "control calls with the tokens of another rollout, or with headers that name a trainer's address",
        _SOME_CALLS,
        401,
        "pushes with no right but that to forward ports",
        _UNAUTHENTICATED,
        headers=(*_TOKENS, *_NAMES_TRAINER),
    ),
    Attack(
        "port-forward-with-tokens-of-accounts",
        Source.FORWARD,
        "control calls with tokens of ServiceAccounts: for another rollout, bound to no pod, or bound to the pod of an engine",
        _SOME_CALLS,
        401,
        "pushes with the token of any pod",
        _UNAUTHENTICATED,
        headers=tuple({"Authorization": f"Bearer {{{word}}}"} for word in ("foreign", "unbound", "engine")),
    ),
    Attack("ended-pod", Source.ENDED_POD, "control calls", _SOME_CALLS, 403, "inherits the rights of the pod", _FORBIDDEN),
    Attack("deleted-pod", Source.DELETED_POD, "control calls", _SOME_CALLS, 403, "inherits the rights of the pod", _FORBIDDEN),
    Attack("shared-address", Source.SHARED_ADDRESS, "control calls", _SOME_CALLS, 403, "calls as the other pod", _FORBIDDEN),
)
"""Each row of the table in ``docs/operations/security.md``."""
