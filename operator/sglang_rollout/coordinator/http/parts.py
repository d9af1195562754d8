"""Objects that the routes of the coordinator share, and the shape of a refusal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.driver import Driver
from sglang_rollout.coordinator.engine_infos import EngineInfos
from sglang_rollout.coordinator.generate.client import GenerateClient
from sglang_rollout.coordinator.generate.smg_workers import SmgWorkers
from sglang_rollout.coordinator.http.dialects import reason_phrase
from sglang_rollout.coordinator.members import Members
from sglang_rollout.coordinator.metrics import Metrics
from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.trainer import ControlReply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Parts:
    """Objects that the routes need."""

    name: str
    namespace: str
    public_url: str
    driver: Driver
    agents: Agents
    members: Members
    workers: SmgWorkers
    generate: GenerateClient
    infos: EngineInfos
    metrics: Metrics

    @property
    def machine(self) -> Machine:
        """The state machine. Raises RefusedError until the record has been read."""
        machine = self.driver.machine
        if machine is None:
            raise RefusedError("The coordinator has just started and cannot read its record yet. Try again.", status=503)
        return machine


PARTS = web.AppKey("parts", Parts)


def refuse(status: int, message: str, fleet: dict[str, object] | None = None) -> web.Response:
    """Return a refusal in SGLang's shape. The reason is in the status line too, because clients print that and drop the body."""
    body = ControlReply(success=False, message=message, fleet=fleet)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response(body.model_dump(mode="json", exclude_none=True), status=status, reason=reason_phrase(message), headers=headers)
