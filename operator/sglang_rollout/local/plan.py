"""The processes of a local fleet, with their command lines and addresses. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from sglang_rollout.api.intent import Intent, WantedEngine
from sglang_rollout.api.limits_spec import Limits, gate_options, limits_options
from sglang_rollout.api.weights_spec import Weights
from sglang_rollout.proxy.address import Address
from sglang_rollout.wire import ports as wire

NAME = "local"
"""Name and namespace of a local fleet."""

_ROUTER_PORTS = 5
"""smg, its metrics, the coordinator, the batch server, and one port for the metrics of these and of the front."""
_ENGINE_PORTS = 3
"""Gate, agent, and one port for the metrics of engine, agent and gate."""

_PROGRAM = (sys.executable, "-m", "sglang_rollout.cli")


@dataclass(frozen=True, slots=True)
class EngineArg:
    """One ``--engine`` option: the URL of an SGLang server, and its required tensor parallel size."""

    address: Address
    tensor_size: int | None = None
    """None: any size, as the engine reports."""

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


@dataclass(frozen=True, slots=True)
class Child:
    """One process of the fleet."""

    name: str
    command: tuple[str, ...]
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""


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
    custom_logit_processors: bool = False
    """True if the engines run code from requests (``--enable-custom-logit-processor``)."""
    token_file: str | None = None
    """File with the token that callers from other machines send; None: only this machine may control the fleet."""

    def intent(self) -> Intent:
        """Return the intent that the coordinator reads."""
        wanted = [
            WantedEngine(name=each.name, tensor_size=each.engine.tensor_size, url=f"http://{each.gate}")
            for each in self._engine_addresses()
        ]
        return Intent(generation=1, name=NAME, namespace=NAME, engines=wanted, weights=self.weights)

    def children(self, folders: Folders) -> list[Child]:
        """Return all processes, in the order of their start."""
        smg, smg_metrics, coordinator, batches = (_loopback(port) for port in self.ports[:4])
        gate_arguments = gate_options(self.limits, custom_logit_processors=self.custom_logit_processors)
        limits = limits_options(self.limits)
        children: list[Child] = []
        for each in self._engine_addresses():
            children += _engine_children(each, folders, gate_arguments)
        smg_line = ("proxy", "smg", "--listen", str(smg), "--metrics-listen", str(smg_metrics), "--policy", self.policy)
        # smg serves for 5 s after SIGTERM, but no request reaches it, because the front is stopped first.
        children.append(Child("smg", (*_PROGRAM, *smg_line), grace=1.0))
        children.append(Child("coordinator", self._coordinator_command(smg, coordinator, folders)))
        urls = ("--smg-url", f"http://{smg}", "--coordinator-url", f"http://{coordinator}")
        children.append(Child("batches", (*_PROGRAM, "batches", "--listen", str(batches), *urls, *limits)))
        runtime = str(folders.runtime / "front")
        front = (
            *("proxy", "front", "--listen", str(self.listen), "--smg", str(smg), "--coordinator", str(coordinator)),
            *("--batches", str(batches)),
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
        return [
            {"targets": [str(address)], "labels": {"__metrics_path__": path, "container": container, "pod": pod}}
            for pod, address, paths in pods
            for container, path in paths.items()
        ]

    def _coordinator_command(self, smg: Address, listen: Address, folders: Folders) -> tuple[str, ...]:
        return (
            *(*_PROGRAM, "coordinator", "--name", NAME, "--namespace", NAME, "--listen", str(listen), "--smg-url", f"http://{smg}"),
            *("--policy", self.policy),
            *("--token-file", str(folders.token), "--intent-file", str(folders.intent), "--record-file", str(folders.record)),
            *("--public-url", self.listen.url),
            *(("--trainer-token-file", self.token_file) if self.token_file is not None else ()),
        )

    def _engine_addresses(self) -> Iterator[_EngineAddresses]:
        for i, engine in enumerate(self.engines):
            first = _ROUTER_PORTS + _ENGINE_PORTS * i
            gate, agent, metrics = (_loopback(port) for port in self.ports[first : first + _ENGINE_PORTS])
            yield _EngineAddresses(f"{NAME}-engine-{i}", engine, gate, agent, metrics)


def count_ports(engines: int) -> int:
    """Return the number of loopback ports that a fleet with this many engines needs."""
    return _ROUTER_PORTS + _ENGINE_PORTS * engines


def parse_engine(text: str, default_tensor_size: int | None = None) -> EngineArg:
    """Parse ``http://host:port`` or ``http://host:port,tp=2``.

    Args:
        text: Value of an ``--engine`` option.
        default_tensor_size: Tensor parallel size if the text has none.

    Raises:
        ValueError: The text is malformed.
    """
    url, *options = text.split(",")
    tensor_size = default_tensor_size
    for option in options:
        key, _, value = option.partition("=")
        if key.strip() != "tp" or not value.strip().isdigit() or int(value) < 1:
            raise ValueError(f"{option!r} in {text!r} is not valid: only tp=<tensor parallel size> may follow the URL")
        tensor_size = int(value)
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"{url!r} is not the URL of an SGLang server: write http://host:port")
    try:
        return EngineArg(Address.parse(parts.netloc), tensor_size)
    except ValueError as error:
        raise ValueError(f"{url!r} is not the URL of an SGLang server: {error}") from None


def _engine_children(addresses: _EngineAddresses, folders: Folders, gate_arguments: list[str]) -> list[Child]:
    name, engine, gate, agent, metrics = addresses
    socket = str(folders.runtime / name / "gate.sock")
    gate_line = (
        *("proxy", "gate", "--listen", str(gate), "--engine", str(engine.address), "--agent", str(agent), "--socket", socket),
        *("--metrics-listen", str(metrics), *gate_arguments),
    )
    agent_line = (
        *("agent", "--name", name, "--engine-url", engine.url, "--listen", str(agent), "--gate-socket", socket),
        *("--state-dir", str(folders.state / name), "--token-file", str(folders.credential(name))),
        *(("--tensor-size", str(engine.tensor_size)) if engine.tensor_size is not None else ()),
    )
    return [Child(f"{name}-gate", (*_PROGRAM, *gate_line)), Child(f"{name}-agent", (*_PROGRAM, *agent_line))]


def _loopback(port: int) -> Address:
    return Address("127.0.0.1", port)
