"""Staged versions of the stand-in's model, a data port that gives them to agents, and the calls of a coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from e2e.held_tensors import changed_state

from sglang_rollout.staging.copies import Copies, Copy
from sglang_rollout.staging.serve import staging_routes
from sglang_rollout.testing import Held
from sglang_rollout.wire.agent import AckRequest, AgentStatus
from sglang_rollout.wire.ports import AGENT_ACTIVATE, AGENT_STAGE
from sglang_rollout.wire.staged import ActivateRequest, Shard, StagedTensor, StageRequest
from sglang_rollout.wire.states import Version
from tests.contract.support.agent_pod import Answer, Pod
from tests.support.staged import LIMIT, TICKET, fill_shard, update_id


@dataclass
class StagedVersion:
    """A version in the source."""

    version: Version
    update: str
    digest: str
    tensors: dict[str, Held]

    @property
    def committed(self) -> dict[str, Any]:
        """The fields of a sync that name this version as the committed one."""
        return {"committed": self.version.model_dump(), "staged": {"update": self.update, "digest": self.digest, "bytes": 1}}


@dataclass
class Source:
    """A store's data port with its copies."""

    copies: Copies
    url: str
    made: dict[int, StagedVersion] = field(default_factory=dict)

    def make(self, step: int, *, sealed: bool = True, without: str = "") -> StagedVersion:
        """Create a version whose tensors follow from the step, without one of them."""
        version = Version(run=1, step=step, label=f"step-{step}")
        tensors = {name: held for name, held in changed_state(step).items() if name != without}
        copy = self.copies.open(update_id(step), TICKET, LIMIT)
        fill_with(copy, tensors)
        digest = copy.seal(version).digest if sealed else ""
        self.made[step] = StagedVersion(version, copy.update, digest, tensors)
        return self.made[step]


def fill_with(copy: Copy, tensors: dict[str, Held]) -> None:
    """Fill a copy with two shards."""
    items = list(tensors.items())
    for part in (items[::2], items[1::2]):
        shard = Shard(tensors=[StagedTensor(name=name, dtype="F32", shape=list(held.shape)) for name, held in part])
        fill_shard(copy, shard, b"".join(held.data for _, held in part))


@asynccontextmanager
async def run_source(folder: Path) -> AsyncIterator[Source]:
    """Run a data port for the length of the block."""
    copies = Copies(folder / "source", folder / "source-state")
    app = web.Application()
    app.add_routes(staging_routes(copies))
    async with TestServer(app) as server:
        yield Source(copies, str(server.make_url("")).rstrip("/"))


async def stage(pod: Pod, source: Source, made: StagedVersion, *, keep: tuple[StagedVersion, ...] = (), **changes: Any) -> Answer:
    """Copy a version into the pod, and wait until it is complete unless ``digest`` is empty."""
    request = StageRequest(
        update=made.update,
        version=made.version,
        parents=[source.url],
        ticket=TICKET,
        keep=[other.update for other in keep],
        size_limit=LIMIT,
        digest=made.digest,
        deadline=60,
    )
    return await pod.control(AGENT_STAGE, request.model_copy(update=changes).model_dump(mode="json"))


async def activate(pod: Pod, made: StagedVersion, *, boot_id: str | None = None, **changes: Any) -> Answer:
    """Load a version into the engine of the pod."""
    boot = boot_id if boot_id is not None else str((await pod.status()).boot_id)
    ack = AckRequest(version=made.version, boot_id=boot, cohort=["e0"])
    headers = changes.pop("headers", None)
    request = ActivateRequest(update=made.update, digest=made.digest, ack=ack).model_copy(update=changes)
    return await pod.control(AGENT_ACTIVATE, request.model_dump(mode="json"), headers=headers)


async def commit(pod: Pod, made: StagedVersion) -> AgentStatus:
    """Commit a version that the engine has loaded, and resume the engine, as the coordinator does."""
    status = await pod.status(**made.committed)
    assert (await pod.control("/continue_generation")).status == 200
    return status


async def serve_version(pod: Pod, source: Source, made: StagedVersion, *, keep: tuple[StagedVersion, ...] = ()) -> None:
    """Stage, load and commit a version."""
    answer = await stage(pod, source, made, keep=keep)
    assert answer.status == 200, answer.body
    answer = await activate(pod, made)
    assert answer.status == 200, answer.body
    status = await commit(pod, made)
    assert status.gate_open, status.message
