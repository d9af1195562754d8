"""haproxy configurations of gate and front. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import jinja2

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.keepalive import IDLE_SECONDS, LOST_SECONDS, PROBE_SECONDS, PROBES
from sglang_rollout.proxy.address import Address, Endpoint, UnixSocket
from sglang_rollout.proxy.gate_map import (
    GENERATES_KEY,
    NO_VERSION,
    TOKENIZER_KEY,
    VERSION_KEY,
    version_map_path,
)
from sglang_rollout.sglang.api import DATA_PATHS, DIRECT_PATHS, GENERATING_PATHS, HEALTH_PATHS, MODELS
from sglang_rollout.sglang.smg_limits import GENERATE_PATTERN, OPENAI_PATTERN
from sglang_rollout.wire import ports
from sglang_rollout.wire.access import CALLER_HEADER
from sglang_rollout.wire.ports import AGENT_GATE, BROKEN_HEADER, FLEET_HELD, VERSION_HEADER
from sglang_rollout.wire.reasons import DATA_PATHS_ONLY

GATE_CONNECTIONS = 4096
"""Maximum of concurrent connections of a gate, if the limit on open files allows it."""
FRONT_CONNECTIONS = 8000
"""Maximum of concurrent connections of the front, if the limit on open files allows it."""
_RESERVED_FILES = 256
"""Files that haproxy needs besides these connections: metrics, probes, listening sockets, checks, pollers, the stats socket."""
GATE_FILES, FRONT_FILES, TLS_FILES = 2, 4, 2
"""Open files of a request. In the front it passes through two proxies, and with TLS through one more."""
_LEAST_CONNECTIONS = 32
_SMG_METRICS = Address("127.0.0.1", ports.SMG_METRICS_PORT)
_METRICS_CONNECTIONS = 16
"""Concurrent scrapes: a few paths for a few Prometheus servers."""
_PROBE_CONNECTIONS = 32
"""Concurrent probes, for some addresses. The kubelet has one connection for each probe of a pod."""
_PROBES_PER_ADDRESS = 12
_BODY_SECONDS = 60
"""Longest wait for the start of a body."""
_REFUSALS, _REFUSAL_SECONDS = 1000, 10
"""Calls of one address that may be refused in so many seconds, before front or gate refuses its further calls.

Control calls, data requests and calls of web pages are counted apart.
"""
_CALLS_PER_ADDRESS = 256
"""Open control calls of one address. The coordinator needs less than a millisecond for a refused call, and answers one after the other."""
_BROKEN_STATUS = 501
"""Status with which a gate reports an engine that broke off: haproxy can repeat a request after it, and smg never does."""
_GATE_WINDOW = 4096
"""Bytes of a body for which the gate waits."""
_REQUEST_BYTES = Limits().request_bytes
"""Default of ``engine.limits.requestBytes``."""

_SENTENCES = {
    "closed": (
        "engine_closed",
        "The gate of this engine is closed: the engine is not up, or does not hold the weights that the fleet has committed. "
        "Use another engine, or try again.",
    ),
    "address_full": (
        "too_many_requests_open",
        "This address has a quarter of all open requests for tokens, which is its limit. Try again when some have ended.",
    ),
    "full": ("too_many_requests_open", "The limit of open requests is reached. Try again when some have ended."),
    "broken": ("engine_broke_off", "The server of this request closed the connection before it answered."),
    "agent_away": (
        "agent_unavailable",
        "The agent of this engine does not answer, so control calls fail. It restarts automatically: try again.",
    ),
    "no_engine": (
        "no_engine_serves",
        "No engine serves this request now: none holds the weights that the fleet has committed, or the router is restarting. "
        "GET /fleet shows the state of each engine. Try again.",
    ),
    "batches_away": (
        "batch_server_unavailable",
        "The batch server, which splits batches, does not answer. It restarts automatically: try again. "
        "Requests with one prompt are served meanwhile.",
    ),
    "coordinator_broke": (
        "coordinator_broke_off",
        "The coordinator closed the connection before it answered. GET /fleet shows the result of the call.",
    ),
    "store_away": (
        "store_unavailable",
        "The weight store does not answer. It restarts automatically: ask for the state of the update, and send what is missing.",
    ),
    "refused_often": (
        "too_many_refused_calls",
        f"More than {_REFUSALS} calls from this address were refused within {_REFUSAL_SECONDS} s."
        " Wait, and call once: the answer says why.",
    ),
    "coordinator_away": (
        "coordinator_unavailable",
        "The coordinator does not answer, so control calls fail; requests for tokens are served meanwhile. "
        "It restarts automatically: try again.",
    ),
}

_ENCODED = ("encoded_path", "The path contains percent-encoded characters. Write it without them.")
_DATA_ONLY = (
    DATA_PATHS_ONLY,
    f"This port serves requests for tokens, embeddings and scores, {MODELS}, and health. "
    "Other calls need the URL of the fleet (status.endpoints.url), which only trainers may use.",
)
_HTTPS_ONLY = ("https_only", "This fleet serves HTTPS only. Write https:// in its URL.")
_ONLY_GET = ("method_not_allowed", "This port serves metrics only. Use GET.")
_ONLY_PROBES = ("method_not_allowed", "This port serves probes only. Use GET.")
_NO_METRICS = ("metrics_unavailable", "The process that exports these metrics does not answer. Its container may be starting.")

_NO_TOKENIZER = (
    "no_tokenizer",
    "This engine was started without a tokenizer (engine.skipTokenizerInit, --skip-tokenizer-init), which this path needs. "
    "Send token ids as input_ids to /generate, or to /classify of a reward model, or start the engines with a tokenizer.",
)
_NO_GENERATION = (
    "model_does_not_generate",
    "The model of this fleet gives embeddings or rewards and generates no tokens. "
    "Use /classify, /encode, /v1/embeddings, /v1/classify, /v1/rerank or /v1/score.",
)

_NO_LENGTH = ("length_required", "The request has no Content-Length. Send its body with one, or send the request to the URL of the fleet.")

_BATCH_PATHS = ("/generate", "/v1/completions")
_BODY_WINDOW = 16384
"""Bytes of a body that the front inspects. Nearly every request for tokens is smaller, and larger ones begin with their prompt."""
_SESSION_CHARACTERS = 1024
"""Longest name of a session."""
_PLAIN_TEXT_BYTES = 2000
"""Most bytes of a refusal in plain text that are quoted."""
_PLAIN_TEXT_STATUSES = (400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 422, 429, 431, 500, 501, 502, 503, 504)
_PLAIN_TEXT = '{"error": {"code": "refused_by_server", "type": "invalid_request_error", "message": "%[var(txn.said)]"}}'
_LONG_SESSION = ("session_too_long", f"The name of the session has more than {_SESSION_CHARACTERS} characters. Use a shorter one.")
_OWN_ERRORS = {
    400: "The request cannot be read.",
    403: "The request is refused.",
    408: "The request did not arrive completely in time. Send it again.",
    413: "The request is too large.",
    429: "Too many requests. Send fewer.",
    500: "The proxy cannot handle this request: its headers may be too large. Its log has more.",
    502: "The server of this request sent an answer that cannot be read, or closed the connection.",
    503: "No server takes this request now. Try again.",
    504: "The server of this request did not answer in time.",
}
"""Statuses that haproxy answers itself, with sentences where no rule has a better one."""
_SESSION_WINDOW = 60000
"""Bytes of a body in which the front searches for a session's name; slightly less than the buffer (tune.bufsize).

The front can repeat requests of this size. The batch server gets larger ones.
"""
_B = "[[:space:]]*"
_MANY = "|".join((rf'text"{_B}:{_B}\[', rf'(input_ids|input_embeds)"{_B}:{_B}\[{_B}\[', rf'prompt"{_B}:{_B}\[{_B}[-[0-9]'))
"""Several prompts, or prompts of token IDs in completions. Also matches embeddings of one prompt, which the batch server recognizes."""
_ONE = "|".join((rf'text"{_B}:{_B}"', rf'input_ids"{_B}:{_B}\[{_B}-?[0-9]', rf'prompt"{_B}:{_B}(\[{_B})?"'))
"""A prompt that smg accepts."""


@dataclass(frozen=True, slots=True)
class GateParams:
    """Parameters of a gate's configuration."""

    listen: Address
    engine: Address
    agent: Endpoint
    socket: str
    """Path of the stats socket, through which the agent opens and closes the gate."""
    request_bytes: int = _REQUEST_BYTES
    """Largest body of a data request. The plug-in in the engine checks the other limits."""
    maxconn: int = GATE_CONNECTIONS
    metrics: Address | None = None
    """Address at which the pod's metrics are served; None: nowhere."""
    probes: Address | None = None
    """Address at which the kubelet's probes are answered; None: nowhere."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of the front, and what renews it."""

    file: str
    """Path of the certificate with its chain, in PEM. The private key is in the file of the same name with the suffix ``.key``."""
    folder: str
    """Folder of the front alone, for its sockets and the program that renews the certificate."""

    @property
    def admin(self) -> str:
        """Path of haproxy's stats socket."""
        return f"{self.folder}/admin.sock"

    @property
    def renewal(self) -> str:
        """Path of the program that renews the certificate. The file must exist when haproxy starts."""
        return f"{self.folder}/renewal.lua"

    def socket(self, name: str) -> UnixSocket:
        """Return the socket through which the front gets the connections of a port."""
        return UnixSocket(f"{self.folder}/{name}.sock")


@dataclass(frozen=True, slots=True)
class FrontParams:
    """Parameters of the front's configuration."""

    listen: Address
    smg: Address
    coordinator: Endpoint
    batches: Address
    store: Address | None = None
    """Data port of the weight store, which gets uploads of versions; None: there is none."""
    generate: Address | None = None
    """Address that serves data paths and refuses control calls; None: nowhere."""
    request_bytes: int = _REQUEST_BYTES
    """Largest body of a data request. The plug-in in the engines checks the other limits."""
    maxconn: int = FRONT_CONNECTIONS
    threads: int = 2
    metrics: Address | None = None
    """Address at which the pod's metrics are served; None: nowhere."""
    probes: Address | None = None
    """Address at which the kubelet's probes are answered; None: nowhere."""
    smg_metrics: Address = _SMG_METRICS
    certificate: Certificate | None = None
    """Certificate of ``listen`` and ``generate``, which then serve HTTPS; None: HTTP."""
    checks_data_callers: bool = False
    """True if all data requests go to the batch server, because not everyone may send them."""


@dataclass(frozen=True, slots=True)
class _MetricsSource:
    """Process whose metrics haproxy forwards."""

    name: str
    server: Endpoint
    path: str
    """Path on the pod's metrics port."""
    remote_path: str
    """Path at the process."""


def fit_connections(wanted: int, open_files: int, *, files: int) -> int:
    """Return the number of connections that fit into a limit of ``open_files``. Each needs ``files``."""
    return max(_LEAST_CONNECTIONS, min(wanted, (open_files - _RESERVED_FILES) // files))


def gate_config(params: GateParams) -> str:
    """Return the configuration of a gate."""
    _check_path(params.socket, "the gate's socket")
    return _template("gate.cfg.j2").render(
        bind=_bind(params.listen),
        engine=params.engine,
        agent=params.agent,
        socket=params.socket,
        check_path=AGENT_GATE,
        version_map=version_map_path(params.socket),
        version_key=VERSION_KEY,
        no_length=_body(*_NO_LENGTH, kind="invalid_request_error"),
        tokenizer_key=TOKENIZER_KEY,
        generates_key=GENERATES_KEY,
        generating_paths=" ".join(GENERATING_PATHS),
        no_generation=_body(*_NO_GENERATION, kind="invalid_request_error"),
        no_tokenizer=_body(*_NO_TOKENIZER, kind="invalid_request_error"),
        no_version=NO_VERSION,
        version_header=VERSION_HEADER,
        window=_GATE_WINDOW,
        probes=_probes(params.probes, ports.GATE_HEALTH, {ports.AGENT_HEALTH: "agent", ports.AGENT_ENGINE: "agent"}),
        metrics=_metrics(
            params.metrics,
            ports.METRICS_GATE,
            _MetricsSource("engine", params.engine, ports.METRICS, "/metrics"),
            _MetricsSource("agent", params.agent, ports.METRICS_AGENT, ports.AGENT_METRICS),
        ),
        caller_header=CALLER_HEADER,
        per_address=params.maxconn - _reserved(params.maxconn) // 2,
        **_shared(params.maxconn, params.request_bytes),
    )


def renewal_text(certificate: Certificate) -> str:
    """Return the program that renews the front's certificate, in haproxy's Lua."""
    head = f"local FILE, SOCKET = {json.dumps(certificate.file)}, {json.dumps(f'unix@{certificate.admin}')}\n"
    return head + resources.files("sglang_rollout.proxy").joinpath("templates/renewal.lua").read_text()


def front_config(params: FrontParams) -> str:
    """Return the configuration of the front."""
    if params.certificate is not None:
        _check_path(params.certificate.file, "the certificate")
        _check_path(params.certificate.folder, "the folder of the front's sockets")
    return _template("front.cfg.j2").render(
        bind=_bind(params.listen),
        generate=None if params.generate is None else _bind(params.generate),
        open_paths=" ".join((MODELS, *HEALTH_PATHS)),
        data_only=_body(*_DATA_ONLY, kind="invalid_request_error"),
        smg=params.smg,
        attempt=f"abns@rollout-attempt-{params.listen.port}",
        coordinator=params.coordinator,
        batches=params.batches,
        store=params.store,
        store_limit=max(8, params.maxconn // 16),
        updates_path=ports.FLEET_UPDATES,
        staged_path=ports.STAGED,
        batch_paths=" ".join(_BATCH_PATHS),
        direct_paths=" ".join(DIRECT_PATHS),
        batch_limit=max(8, params.maxconn // 2),
        checks_data_callers=params.checks_data_callers,
        certificate=params.certificate,
        https_only=_body(*_HTTPS_ONLY, kind="invalid_request_error"),
        caller_header=CALLER_HEADER,
        window=_BODY_WINDOW,
        session_window=_SESSION_WINDOW,
        session_characters=_SESSION_CHARACTERS,
        long_session=_body(*_LONG_SESSION, kind="invalid_request_error"),
        calls_per_address=_CALLS_PER_ADDRESS,
        **_address_shares(params.maxconn),
        many=_regex(_MANY),
        one=_regex(_ONE),
        dropped=_regex(GENERATE_PATTERN),
        wide=_regex(OPENAI_PATTERN),
        held_path=FLEET_HELD,
        threads=params.threads,
        front_health=ports.FRONT_HEALTH,
        probes=_probes(params.probes, ports.FRONT_HEALTH, {ports.FLEET_HEALTH: "coordinator", ports.BATCHES_HEALTH: "batches"}),
        metrics=_metrics(
            params.metrics,
            ports.METRICS_FRONT,
            _MetricsSource("coordinator", params.coordinator, ports.METRICS, ports.FLEET_METRICS),
            _MetricsSource("smg", params.smg_metrics, ports.METRICS_SMG, "/metrics"),
            _MetricsSource("batches", params.batches, ports.METRICS_BATCHES, ports.BATCHES_METRICS),
        ),
        **_shared(params.maxconn, params.request_bytes),
    )


def _metrics(listen: Address | None, own_path: str, *sources: _MetricsSource) -> dict[str, object] | None:
    """Return the values of the metrics frontend; None: there is none. ``own_path`` serves haproxy's own metrics."""
    if listen is None:
        return None
    paths = ", ".join((*(source.path for source in sources), own_path))
    return {
        "bind": _bind(listen),
        "connections": _METRICS_CONNECTIONS,
        "own_path": own_path,
        "sources": sources,
        "unknown": _body("not_found", f"This port serves metrics only: GET {paths}.", kind="invalid_request_error"),
        "only_get": _body(*_ONLY_GET, kind="invalid_request_error"),
        "away": _body(*_NO_METRICS),
    }


def _probes(listen: Address | None, own_path: str, backends: Mapping[str, str]) -> dict[str, object] | None:
    """Return the values of the probes' frontend; None: there is none. haproxy answers ``own_path`` itself, ``backends`` further paths."""
    if listen is None:
        return None
    return {
        "bind": _bind(listen),
        "connections": _PROBE_CONNECTIONS,
        "per_address": _PROBES_PER_ADDRESS,
        "own_path": own_path,
        "backends": backends,
        "unknown": _body(
            "not_found", f"This port serves probes only: GET {', '.join((own_path, *backends))}.", kind="invalid_request_error"
        ),
        "only_get": _body(*_ONLY_PROBES, kind="invalid_request_error"),
    }


def _reserved(maxconn: int) -> int:
    """Return the number of connections that stay free for control calls: one in eight, at least 16."""
    return max(16, maxconn // 8)


def _address_shares(maxconn: int) -> dict[str, int]:
    """Return the most connections and open data requests of one address in the front: a quarter of all.

    The share of data requests is smaller, so that a client gets an answer before its connections are reset.
    """
    return {"per_address": maxconn // 4, "data_per_address": max(1, (maxconn - _reserved(maxconn)) // 4)}


def _shared(maxconn: int, request_bytes: int) -> dict[str, object]:
    """Return values for both templates."""
    too_large = f"The body has more than {request_bytes} bytes; engine.limits.requestBytes raises it."
    return {
        "maxconn": maxconn,
        "own_answers": {200: json.dumps({"status": "ok"})}
        | {status: _body(f"http_{status}", text) for status, text in _OWN_ERRORS.items()},
        "plain_text": _PLAIN_TEXT,
        "plain_text_bytes": _PLAIN_TEXT_BYTES,
        "plain_text_statuses": _PLAIN_TEXT_STATUSES,
        "keepalive": {"idle": IDLE_SECONDS, "interval": PROBE_SECONDS, "probes": PROBES, "lost": LOST_SECONDS},
        "other_connections": _METRICS_CONNECTIONS + _PROBE_CONNECTIONS,
        "body_seconds": _BODY_SECONDS,
        "refusals": _REFUSALS,
        "refusal_seconds": _REFUSAL_SECONDS,
        "data_limit": maxconn - _reserved(maxconn),
        "data_paths": " ".join(DATA_PATHS),
        "models_path": f"{MODELS}/",
        "encoded": _body(*_ENCODED, kind="invalid_request_error"),
        "broken_header": BROKEN_HEADER,
        "broken_status": _BROKEN_STATUS,
        "request_bytes": request_bytes,
        "too_large": _body("above_limit", too_large, kind="invalid_request_error"),
        **{name: _body(code, message) for name, (code, message) in _SENTENCES.items()},
    }


def _body(code: str, message: str, *, kind: str = "service_unavailable") -> str:
    """Return a JSON error body that is valid between single quotes and contains no haproxy format."""
    if "'" in message or "%" in message:
        raise ValueError(f"a sentence in a haproxy configuration cannot hold ' or %: {message}")
    return json.dumps({"error": {"code": code, "type": kind, "message": message}})


def _check_path(path: str, what: str) -> None:
    if not path.startswith("/") or any(c.isspace() or c in "'\"\\#" for c in path):
        raise ValueError(f"{what} must be an absolute path without blanks and quotes, not {path!r}")


def _regex(pattern: str) -> str:
    """Return the argument of a rule that matches a JSON key and its value."""
    if "'" in pattern:
        raise ValueError(f"a regular expression in a haproxy configuration cannot hold ': {pattern}")
    return f"'[{{,]{_B}\"({pattern})'"


def _bind(address: Address) -> str:
    """Return the argument of ``bind``. Without ``v4v6`` the system decides whether ``::`` also accepts IPv4."""
    return f"{address} v4v6" if address.host == "::" else str(address)


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sglang_rollout.proxy"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # noqa: S701 - not HTML; values are checked where they enter
    )
    return environment.get_template(name)
