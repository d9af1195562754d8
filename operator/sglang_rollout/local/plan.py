"""Which processes make up a local fleet, and with which addresses. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from sglang_rollout.proxy.address import Address
from sglang_rollout.wire import ports as wire
from sglang_rollout.wire.intent import Intent, WantedEngine
from sglang_rollout.wire.policy import WeightsPolicy

NAME = "local"
"""Name and namespace of a fleet that no Kubernetes knows."""

_ROUTER_PORTS = 4
"""smg, its metrics, the coordinator, and the metrics of all three processes of a router pod."""
_ENGINE_PORTS = 3
"""Gate, agent, and the metrics of all three processes of an engine pod."""

_PROGRAM = (sys.executable, "-m", "sglang_rollout.cli")


@dataclass(frozen=True, slots=True)
class EngineArg:
    """One ``--engine``: the URL of an SGLang server, and its tensor parallel size if the command line says one."""

    address: Address
    tensor_size: int | None = None
    """None: the size that the engine reports."""

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://{self.address}"


class _Row(NamedTuple):
    """One engine and where its parts listen."""

    name: str
    engine: EngineArg
    gate: Address
    agent: Address
    metrics: Address


@dataclass(frozen=True, slots=True)
class Child:
    """One process to keep running."""

    name: str
    command: tuple[str, ...]
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a local fleet keeps what it writes."""

    state: Path
    """Survives: records, token, logs."""
    runtime: Path
    """Goes with the fleet: configurations and sockets, whose paths must be short."""

    @property
    def logs(self) -> Path:
        """One file for each child."""
        return self.state / "logs"

    @property
    def token(self) -> Path:
        """The control token."""
        return self.state / "token"

    @property
    def intent(self) -> Path:
        """What the operator writes in Kubernetes."""
        return self.state / "intent.json"

    @property
    def targets(self) -> Path:
        """What Prometheus scrapes."""
        return self.state / "prometheus-targets.json"

    @property
    def record(self) -> Path:
        """What the coordinator remembers."""
        return self.state / "weights.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """A local fleet."""

    listen: Address
    engines: tuple[EngineArg, ...]
    weights: WeightsPolicy
    policy: str
    ports: tuple[int, ...]
    """Free loopback ports, :func:`ports_needed` of them."""

    def intent(self) -> Intent:
        """The coordinator's orders."""
        wanted = [WantedEngine(name=row.name, tensor_size=row.engine.tensor_size, url=f"http://{row.gate}") for row in self._rows()]
        return Intent(generation=1, name=NAME, namespace=NAME, engines=wanted, weights=self.weights)

    def children(self, folders: Folders) -> list[Child]:
        """All processes, in the order in which they start."""
        smg, smg_metrics, coordinator = (_loopback(port) for port in self.ports[:3])
        children: list[Child] = []
        for row in self._rows():
            children += _engine_children(row, folders)
        smg_line = ("proxy", "smg", "--listen", str(smg), "--metrics-listen", str(smg_metrics), "--policy", self.policy)
        # smg serves 5 s more after SIGTERM. By then the front is gone and nobody can ask.
        children.append(Child("smg", (*_PROGRAM, *smg_line), grace=1.0))
        children.append(Child("coordinator", self._coordinator(smg, coordinator, folders)))
        runtime = str(folders.runtime / "front")
        front = ("proxy", "front", "--listen", str(self.listen), "--smg", str(smg), "--coordinator", str(coordinator))
        metrics = ("--metrics-listen", str(self.metrics), "--smg-metrics", str(smg_metrics))
        children.append(Child("front", (*_PROGRAM, *front, *metrics, "--runtime-dir", runtime)))
        return children

    @property
    def metrics(self) -> Address:
        """Where the metrics of coordinator, smg and front are served."""
        return _loopback(self.ports[3])

    def scrape_targets(self) -> list[dict[str, object]]:
        """The processes in the format of Prometheus' ``file_sd_configs``."""
        router = {"coordinator": wire.METRICS, "smg": wire.METRICS_SMG, "front": wire.METRICS_FRONT}
        engine = {"engine": wire.METRICS, "agent": wire.METRICS_AGENT, "gate": wire.METRICS_GATE}
        pods = [("local-router", self.metrics, router), *((row.name, row.metrics, engine) for row in self._rows())]
        return [
            {"targets": [str(address)], "labels": {"__metrics_path__": path, "container": container, "pod": pod}}
            for pod, address, paths in pods
            for container, path in paths.items()
        ]

    def _coordinator(self, smg: Address, listen: Address, folders: Folders) -> tuple[str, ...]:
        return (
            *(*_PROGRAM, "coordinator", "--name", NAME, "--namespace", NAME, "--listen", str(listen), "--smg-url", f"http://{smg}"),
            *("--policy", self.policy),
            *("--token-file", str(folders.token), "--intent-file", str(folders.intent), "--record-file", str(folders.record)),
            *("--public-url", self.listen.url),
        )

    def _rows(self) -> Iterator[_Row]:
        for i, engine in enumerate(self.engines):
            first = _ROUTER_PORTS + _ENGINE_PORTS * i
            gate, agent, metrics = (_loopback(port) for port in self.ports[first : first + _ENGINE_PORTS])
            yield _Row(f"{NAME}-engine-{i}", engine, gate, agent, metrics)


def ports_needed(engines: int) -> int:
    """Return how many loopback ports the parts of a fleet listen on."""
    return _ROUTER_PORTS + _ENGINE_PORTS * engines


def parse_engine(text: str, default_tensor_size: int | None = None) -> EngineArg:
    """Read ``http://host:port`` or ``http://host:port,tp=2``. Raises ValueError with a sentence."""
    url, *options = text.split(",")
    tensor_size = default_tensor_size
    for option in options:
        key, _, value = option.partition("=")
        if key.strip() != "tp" or not value.strip().isdigit() or int(value) < 1:
            raise ValueError(f"{option!r} in {text!r} is not understood: after the URL only tp=<tensor parallel size> can follow")
        tensor_size = int(value)
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"{url!r} is not the URL of an SGLang server: write http://host:port")
    try:
        return EngineArg(Address.parse(parts.netloc), tensor_size)
    except ValueError as error:
        raise ValueError(f"{url!r} is not the URL of an SGLang server: {error}") from None


def _engine_children(row: _Row, folders: Folders) -> list[Child]:
    name, engine, gate, agent, metrics = row
    socket = str(folders.runtime / name / "gate.sock")
    gate_line = (
        *("proxy", "gate", "--listen", str(gate), "--engine", str(engine.address), "--agent", str(agent), "--socket", socket),
        *("--metrics-listen", str(metrics)),
    )
    agent_line = (
        *("agent", "--name", name, "--engine-url", engine.url, "--listen", str(agent), "--gate-socket", socket),
        *("--state-dir", str(folders.state / name), "--token-file", str(folders.token)),
        *(("--tensor-size", str(engine.tensor_size)) if engine.tensor_size is not None else ()),
    )
    return [Child(f"{name}-gate", (*_PROGRAM, *gate_line)), Child(f"{name}-agent", (*_PROGRAM, *agent_line))]


def _loopback(port: int) -> Address:
    return Address("127.0.0.1", port)
