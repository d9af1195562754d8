"""The processes of a local fleet, with their command lines and addresses. Pure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from sglang_rollout.api.engine_spec import PluginUse
from sglang_rollout.api.intent import Intent, WantedEngine, WantedStore
from sglang_rollout.api.limits_spec import Limits, limits_options
from sglang_rollout.api.weights_spec import Weights
from sglang_rollout.proxy.address import Address
from sglang_rollout.wire import ports as wire

NAME = "local"
"""Name and namespace of a local fleet."""

_ROUTER_PORTS = 5
"""smg, its metrics, the coordinator, the batch server, and one port for the metrics of these and of the front."""
_ENGINE_PORTS = 3
"""Gate, agent, and one port for the metrics of engine, agent and gate."""
_STORE_PORTS = 3
"""The weight store: calls of the coordinator, data, and metrics."""

STORE = f"{NAME}-store"
"""Name of the weight store."""

_SIZES = ("tp", "pp", "dp")
"""Parallel sizes of an ``--engine`` option."""
_MODULE = ("-m", "sglang_rollout.cli")
_PROGRAM = (sys.executable, *_MODULE)
_PACKAGES = Path(__file__).parents[2]
"""Folder of this package, for another Python."""


@dataclass(frozen=True, slots=True)
class EngineArg:
    """One ``--engine`` option: the URL of an SGLang server, and its parallel sizes."""

    address: Address
    tensor_size: int | None = None
    """Required tensor parallel size. None: any size, as the engine reports."""
    pipeline_size: int = 1
    """Pipeline stages, whose ranks all load a staged version."""
    data_size: int = 1
    """Replicas of the model, which all load a staged version."""

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{self.address}"


class _EngineAddresses(NamedTuple):
    """One engine, and the addresses of its gate and agent and of their metrics."""

    name: str
    engine: EngineArg
    gate: Address
    agent: Address
    metrics: Address
    data: Address | None
    """Where the agent serves staged versions; None with another transport."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process of the fleet."""

    name: str
    command: tuple[str, ...]
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of this process."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders and files of a local fleet."""

    state: Path
    """Kept after the end if the user names it: records, token, logs."""
    runtime: Path
    """Removed at the end: configurations and sockets, whose paths must be short."""

    @property
    def logs(self) -> Path:
        """Folder with one log per process."""
        return self.state / "logs"

    @property
    def token(self) -> Path:
        """File with the fleet's key, from which the credentials of its engines are derived."""
        return self.state / "token"

    def credential(self, engine: str) -> Path:
        """Return the file with the credential of an engine."""
        return self.state / "credentials" / engine

    def staged(self, name: str) -> Path:
        """Return the folder for staged versions of an engine or of the weight store."""
        return self.state / "staged" / name

    def verdicts(self, engine: str) -> Path:
        """Return the folder in which the loader of an engine reports its results."""
        return self.state / "verdicts" / engine

    @property
    def intent(self) -> Path:
        """File with the intent, which the operator writes in Kubernetes."""
        return self.state / "intent.json"

    @property
    def targets(self) -> Path:
        """File with Prometheus' scrape targets."""
        return self.state / "prometheus-targets.json"

    @property
    def record(self) -> Path:
        """File with the coordinator's record."""
        return self.state / "weights.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a local fleet."""

    listen: Address
    engines: tuple[EngineArg, ...]
    weights: Weights
    policy: str
    ports: tuple[int, ...]
    """Free loopback ports, as many as :func:`count_ports` returns."""
    limits: Limits = field(default_factory=Limits)
    reports: Path = Path()
    """Folder in which the plug-in inside the engines reports."""
    shared_prefix_cache: bool = False
    """True if versions share one prefix cache, so that the plug-in sets no key."""
    plugin: PluginUse = PluginUse.REQUIRED
    """Whether an engine serves only while its plug-in is active."""
    token_file: str | None = None
    """File with the token that callers from other machines send; None: only this machine may control the fleet."""
    store_python: str = sys.executable
    """Python that runs the weight store. To receive process groups, it needs torch."""

    def intent(self) -> Intent:
        """Return the intent that the coordinator reads."""
        wanted = [
            WantedEngine(
                name=each.name,
                tensor_size=each.engine.tensor_size,
                url=f"http://{each.gate}",
                data_url=each.data.url if each.data else None,
            )
            for each in self._engine_addresses()
        ]
        store = self._store_addresses()
        wanted_store = WantedStore(name=STORE, url=store[0].url, data_url=store[1].url) if store else None
        return Intent(generation=1, name=NAME, namespace=NAME, engines=wanted, store=wanted_store, weights=self.weights)

    def children(self, folders: Folders) -> list[Child]:
        """Return all processes, in the order of their start."""
        smg, smg_metrics, coordinator, batches = (_loopback(port) for port in self.ports[:4])
        limits, store = limits_options(self.limits), self._store_addresses()
        children: list[Child] = []
        flags = {"--plugin-optional": self.plugin is PluginUse.OPTIONAL, "--shared-prefix-cache": self.shared_prefix_cache}
        plugin = ("--reports-dir", str(self.reports), *(flag for flag, is_set in flags.items() if is_set))
        for each in self._engine_addresses():
            children += _engine_children(each, folders, limits, plugin)
        children += self._store_children(folders)
        smg_line = ("proxy", "smg", "--listen", str(smg), "--metrics-listen", str(smg_metrics), "--policy", self.policy, *limits)
        # smg serves for 5 s after SIGTERM, but no request reaches it, because the front is stopped first.
        children.append(Child("smg", (*_PROGRAM, *smg_line), grace=1.0))
        children.append(Child("coordinator", self._coordinator_command(smg, batches, coordinator, folders)))
        urls = ("--smg-url", f"http://{smg}", "--coordinator-url", f"http://{coordinator}")
        children.append(Child("batches", (*_PROGRAM, "batches", "--listen", str(batches), *urls, *limits)))
        runtime = str(folders.runtime / "front")
        front = (
            *("proxy", "front", "--listen", str(self.listen), "--smg", str(smg), "--coordinator", str(coordinator)),
            *("--batches", str(batches)),
            *(("--store", str(store[1])) if store else ()),
        )
        metrics = ("--metrics-listen", str(self.metrics), "--smg-metrics", str(smg_metrics))
        children.append(Child("front", (*_PROGRAM, *front, *metrics, "--runtime-dir", runtime, *limits)))
        return children

    @property
    def metrics(self) -> Address:
        """Address of the metrics of coordinator, batch server, smg and front."""
        return _loopback(self.ports[4])

    def scrape_targets(self) -> list[dict[str, object]]:
        """Return all processes as targets of Prometheus, in the format of ``file_sd_configs``."""
        router = {"coordinator": wire.METRICS, "smg": wire.METRICS_SMG, "front": wire.METRICS_FRONT, "batches": wire.METRICS_BATCHES}
        engine = {"engine": wire.METRICS, "agent": wire.METRICS_AGENT, "gate": wire.METRICS_GATE}
        pods = [("local-router", self.metrics, router), *((each.name, each.metrics, engine) for each in self._engine_addresses())]
        if store := self._store_addresses():
            pods.append((STORE, store[2], {"store": wire.METRICS}))
        return [
            {"targets": [str(address)], "labels": {"__metrics_path__": path, "container": container, "pod": pod}}
            for pod, address, paths in pods
            for container, path in paths.items()
        ]

    def _coordinator_command(self, smg: Address, batches: Address, listen: Address, folders: Folders) -> tuple[str, ...]:
        return (
            *(*_PROGRAM, "coordinator", "--name", NAME, "--namespace", NAME, "--listen", str(listen)),
            *("--smg-url", f"http://{smg}", "--batches-url", f"http://{batches}"),
            *("--policy", self.policy),
            *("--token-file", str(folders.token), "--intent-file", str(folders.intent), "--record-file", str(folders.record)),
            *("--public-url", self.listen.url),
            *(("--trainer-token-file", self.token_file) if self.token_file is not None else ()),
        )

    def _store_children(self, folders: Folders) -> list[Child]:
        """Return the process of the weight store; none with another transport."""
        store = self._store_addresses()
        if store is None:
            return []
        line = (
            *(self.store_python, *_MODULE, "store", "--name", STORE, "--listen", str(store[0]), "--data-listen", str(store[1])),
            *("--metrics-listen", str(store[2])),
            *("--volume", str(folders.staged(STORE)), "--state-dir", str(folders.state / STORE)),
            *("--token-file", str(folders.credential(STORE))),
            *self._snapshot_options(),
        )
        return [Child(STORE, line, environment=store_variables(os.environ))]

    def _snapshot_options(self) -> tuple[str, ...]:
        """Return the arguments of the weight store about snapshots."""
        wanted = self.weights.store.snapshots if self.weights.store is not None else None
        if wanted is None or wanted.volume.host_path is None:
            return ()
        kept = ("--snapshots-every", str(wanted.every), "--snapshots-keep", str(wanted.keep_last))
        return ("--snapshots", wanted.volume.host_path, *kept)

    def _store_addresses(self) -> tuple[Address, Address, Address] | None:
        """Return the addresses of the weight store for the coordinator, for data and for metrics; None with another transport."""
        if not self.weights.is_staged:
            return None
        first = _ROUTER_PORTS + _ENGINE_PORTS * len(self.engines)
        return _loopback(self.ports[first]), _loopback(self.ports[first + 1]), _loopback(self.ports[first + 2])

    def _engine_addresses(self) -> Iterator[_EngineAddresses]:
        first_data = _ROUTER_PORTS + _ENGINE_PORTS * len(self.engines) + _STORE_PORTS
        for i, engine in enumerate(self.engines):
            first = _ROUTER_PORTS + _ENGINE_PORTS * i
            gate, agent, metrics = (_loopback(port) for port in self.ports[first : first + _ENGINE_PORTS])
            data = _loopback(self.ports[first_data + i]) if self.weights.is_staged else None
            yield _EngineAddresses(f"{NAME}-engine-{i}", engine, gate, agent, metrics, data)


def store_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which another Python finds this package."""
    return {"PYTHONPATH": os.pathsep.join([str(_PACKAGES), *filter(None, [environment.get("PYTHONPATH", "")])])}


def count_ports(engines: int, *, staged: bool = False) -> int:
    """Return the number of loopback ports that a fleet with this many engines needs; ``staged``: with a weight store and data ports."""
    return _ROUTER_PORTS + _ENGINE_PORTS * engines + (_STORE_PORTS + engines if staged else 0)


def parse_engine(text: str, default_tensor_size: int | None = None) -> EngineArg:
    """Parse ``http://host:port``, ``http://host:port,tp=2`` or ``http://host:port,tp=2,pp=2,dp=2``.

    Args:
        text: Value of an ``--engine`` option.
        default_tensor_size: Tensor parallel size if the text has none.

    Raises:
        ValueError: The text is malformed.
    """
    url, *options = text.split(",")
    sizes: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key.strip() not in _SIZES or not value.strip().isdigit() or int(value) < 1:
            allowed = "tp=<tensor parallel size>, pp=<stages> and dp=<replicas>"
            raise ValueError(f"{option!r} in {text!r} is not valid: only {allowed} may follow the URL")
        sizes[key.strip()] = int(value)
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"{url!r} is not the URL of an SGLang server: write http://host:port")
    try:
        return EngineArg(Address.parse(parts.netloc), sizes.get("tp", default_tensor_size), sizes.get("pp", 1), sizes.get("dp", 1))
    except ValueError as error:
        raise ValueError(f"{url!r} is not the URL of an SGLang server: {error}") from None


def _engine_children(
    addresses: _EngineAddresses, folders: Folders, gate_arguments: list[str], plugin_arguments: tuple[str, ...]
) -> list[Child]:
    name, engine, gate, agent, metrics, data = addresses
    socket = str(folders.runtime / name / "gate.sock")
    gate_line = (
        *("proxy", "gate", "--listen", str(gate), "--engine", str(engine.address), "--agent", str(agent), "--socket", socket),
        *("--metrics-listen", str(metrics), *gate_arguments),
    )
    agent_line = (
        *("agent", "--name", name, "--engine-url", engine.url, "--listen", str(agent), "--gate-socket", socket),
        *("--state-dir", str(folders.state / name), "--token-file", str(folders.credential(name))),
        *(("--tensor-size", str(engine.tensor_size)) if engine.tensor_size is not None else ()),
        *plugin_arguments,
        *(_staging_options(name, engine, data, folders) if data is not None else ()),
    )
    return [Child(f"{name}-gate", (*_PROGRAM, *gate_line)), Child(f"{name}-agent", (*_PROGRAM, *agent_line))]


def _staging_options(name: str, engine: EngineArg, data: Address, folders: Folders) -> tuple[str, ...]:
    """Return the arguments of an agent for transport Staged."""
    return (
        *("--staging-volume", str(folders.staged(name)), "--verdicts-dir", str(folders.verdicts(name))),
        *("--data-listen", str(data), "--pipeline-size", str(engine.pipeline_size), "--data-size", str(engine.data_size)),
    )


def _loopback(port: int) -> Address:
    return Address("127.0.0.1", port)
