"""What the coordinator's routes share: its parts, and the shape of a refusal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from sglang_rollout.coordinator.agents import Agents
from sglang_rollout.coordinator.driver import Driver
from sglang_rollout.coordinator.engine_infos import Infos
from sglang_rollout.coordinator.generate.client import Smg
from sglang_rollout.coordinator.generate.smg_workers import Router
from sglang_rollout.coordinator.http.dialects import reason_phrase
from sglang_rollout.coordinator.members import Members
from sglang_rollout.coordinator.metrics import Metrics
from sglang_rollout.coordinator.update.machine import Machine
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.wire.trainer import ControlReply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Parts:
    """What the routes need."""

    name: str
    namespace: str
    public_url: str
    driver: Driver
    agents: Agents
    members: Members
    router: Router
    smg: Smg
    infos: Infos
    metrics: Metrics

    @property
    def machine(self) -> Machine:
        """The state machine; refuses while the record cannot be read."""
        machine = self.driver.machine
        if machine is None:
            raise Refusal("The coordinator has just started and cannot read its record yet. Try again.", status=503)
        return machine


PARTS = web.AppKey("parts", Parts)


def refuse(status: int, message: str, fleet: dict[str, object] | None = None) -> web.Response:
    """A refusal in SGLang's shape, with the reason in the status line too: clients print that and drop the body."""
    body = ControlReply(success=False, message=message, fleet=fleet)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response(body.model_dump(mode="json", exclude_none=True), status=status, reason=reason_phrase(message), headers=headers)
