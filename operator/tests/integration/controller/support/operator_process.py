"""The operator as a process, and a stand-in for the kubelet and the coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from e2e.child import start_child

from sglang_rollout.controller.render import names
from sglang_rollout.kube.client import Kube
from sglang_rollout.kube.errors import NotFound
from sglang_rollout.kube.resources import CONFIGMAPS, PODS, ROLLOUTS, Object, Resource
from sglang_rollout.wire.record import EngineRow, Record
from sglang_rollout.wire.states import BASE, EngineState
from tests.support.ports import free_port

DEADLINE = 120.0


async def eventually(what: str, check: Callable[[], Awaitable[Any]], *, seconds: float = DEADLINE) -> Any:
    """Wait until ``check`` returns a true value, and return the value. Wait also while ``check`` raises AssertionError."""
    end = time.monotonic() + seconds
    problem: object = None
    while True:
        try:
            found = await check()
            if found:
                return found
            problem = found
        except (AssertionError, NotFound) as error:
            problem = error
        assert time.monotonic() < end, f"not within {seconds} s: {what} (last seen: {problem})"
        await asyncio.sleep(0.1)


def rollout(name: str, namespace: str, **spec: Any) -> Object:
    defaults = {"replicas": 2, "model": {"path": "tiny"}, "engine": {"image": "img:1", "gpuResource": ""}}
    return {
        "apiVersion": ROLLOUTS.api_version,
        "kind": ROLLOUTS.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**defaults, **spec},
    }


@dataclass
class OperatorProcess:
    """``sglang-rollout operator`` as users start it."""

    kubeconfig: Path
    namespaces: list[str]
    log: Path
    metrics_port: int = field(default_factory=free_port)
    health_port: int = field(default_factory=free_port)
    flags: tuple[str, ...] = ("--allow-host-network",)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "sglang_rollout.cli", "operator", "--kubeconfig", str(self.kubeconfig)]
        command += [f"--metrics-port={self.metrics_port}", f"--health-port={self.health_port}"]
        command += [*(f"--namespace={namespace}" for namespace in self.namespaces), *self.flags]
        environment = {**os.environ, "NO_PROXY": "*", "no_proxy": "*"}
        with self.log.open("ab") as log:
            self.process = start_child(command, stdout=log, stderr=log, env=environment)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(15)

    def said(self) -> str:
        return self.log.read_text()

    def health(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/healthz", timeout=5) as reply:
            return int(reply.status)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("sglang_rollout_operator_"): float(value) for name, value in pairs}


class Relay:
    """A TCP relay in front of the API server. Closing it plays an outage that breaks all connections."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = free_port()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._open |= {writer, back}
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer), return_exceptions=True)
        finally:
            self._open -= {writer, back}

    @staticmethod
    async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()


def kubeconfig_through(relay: Relay, original: Path, copy: Path) -> Path:
    config = yaml.safe_load(original.read_text())
    for cluster in config["clusters"]:
        cluster["cluster"]["server"] = f"https://127.0.0.1:{relay.port}"
    copy.write_text(yaml.safe_dump(config))
    return copy


@dataclass
class World:
    """One namespace of a real API server without nodes. It plays the kubelet and the coordinator."""

    kube: Kube
    namespace: str

    async def wake(self, name: str) -> None:
        """Request a reconcile, because the operator does not watch Secrets."""
        annotations = {"woken": str(time.monotonic())}
        await self.kube.merge_patch(ROLLOUTS, self.namespace, name, {"metadata": {"annotations": annotations}})

    async def children(self, name: str) -> dict[tuple[str, str], Object]:
        labels: dict[str, str | None] = {names.LABEL_ROLLOUT: name}
        found = [item for kind in names.CHILD_KINDS for item in (await self.kube.list(kind, self.namespace, labels=labels)).items]
        return {(item["kind"], item["metadata"]["name"]): item for item in found}

    async def pods(self, name: str, component: str = "engine") -> dict[str, Object]:
        labels: dict[str, str | None] = {names.LABEL_ROLLOUT: name, names.LABEL_COMPONENT: component}
        listing = await self.kube.list(PODS, self.namespace, labels=labels)
        return {pod["metadata"]["name"]: pod for pod in listing.items}

    async def status(self, name: str) -> Object:
        found: Object = (await self.kube.get(ROLLOUTS, self.namespace, name)).get("status") or {}
        return found

    async def condition(self, name: str, kind: str = "Ready") -> Object:
        conditions = (await self.status(name)).get("conditions") or []
        return next((one for one in conditions if one["type"] == kind), {})

    async def is_degraded(self, name: str, reason: str) -> bool:
        """Return True if the rollout is Degraded for this reason."""
        condition = await self.condition(name, "Degraded")
        return (condition["status"], condition["reason"]) == ("True", reason)

    async def is_complete(self, name: str, engines: int = 2) -> bool:
        """Return True if all children and the engines' pods exist, and the status reports them."""
        missing = expected(name, engines) - set(await self.children(name))
        assert not missing, f"missing: {missing}"
        assert len(await self.pods(name)) == engines
        return (await self.status(name)).get("replicas") == engines

    async def make_ready(self, pod: Object) -> None:
        """Play the kubelet: report a pod as ready."""
        conditions = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady", "Initialized")]
        status = {"phase": "Running", "conditions": conditions}
        await self.kube.merge_patch(PODS, self.namespace, pod["metadata"]["name"], {"status": status}, subresource="status")

    async def record(self, name: str, engines: list[str]) -> None:
        """Play the coordinator: these engines hold the base version behind open gates."""
        rows = [EngineRow(name=engine, state=EngineState.CLEAN, version=BASE, boot_id="b", gate_open=True) for engine in engines]
        record = Record(term=1, epoch=1, committed=BASE, engines=rows)
        data = {names.WEIGHTS_KEY: record.model_dump_json()}
        await self.kube.merge_patch(CONFIGMAPS, self.namespace, names.weights_name(name), {"data": data})

    async def serve(self, name: str, engines: int) -> None:
        """Play kubelet and coordinator until the fleet is Ready."""

        async def step() -> bool:
            for component in ("engine", "router"):
                for pod in (await self.pods(name, component)).values():
                    await self.make_ready(pod)
            return (await self.condition(name)).get("status") == "True"

        await eventually("children", lambda: self.is_complete(name, engines))
        await self.record(name, [names.engine_name(name, index) for index in range(engines)])
        await eventually("Ready", step)

    async def versions(self, name: str) -> dict[tuple[str, str], str]:
        return {key: obj["metadata"]["resourceVersion"] for key, obj in (await self.children(name)).items()}

    async def settled(self, name: str) -> dict[tuple[str, str], str]:
        """Wait until nothing has been written for a second."""
        before: dict[tuple[str, str], str] = {}

        async def quiet() -> bool:
            nonlocal before
            last, before = before, await self.versions(name)
            await asyncio.sleep(0 if last != before else 1.0)
            return last == before == await self.versions(name)

        await eventually("quiet", quiet)
        return before

    async def gone(self, resource: Resource, name: str) -> bool:
        try:
            await self.kube.get(resource, self.namespace, name)
        except NotFound:
            return True
        return False


def expected(name: str, engines: int) -> set[tuple[str, str]]:
    """What the contract says a rollout consists of."""
    return {
        ("ServiceAccount", f"{name}-engine"),
        ("ServiceAccount", f"{name}-router"),
        ("Role", f"{name}-router"),
        ("RoleBinding", f"{name}-router"),
        ("Secret", f"{name}-control"),
        ("Secret", f"{name}-credentials"),
        ("ConfigMap", f"{name}-intent"),
        ("ConfigMap", f"{name}-weights"),
        ("Service", f"{name}-engines"),
        ("Service", f"{name}-router"),
        ("Service", f"{name}-generate"),
        ("NetworkPolicy", f"{name}-engines"),
        ("NetworkPolicy", f"{name}-router"),
        ("Deployment", f"{name}-router"),
        *(("StatefulSet", f"{name}-engine-{index}") for index in range(engines)),
    }
