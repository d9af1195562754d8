"""The fleet described: the discovery document, and the fleet as one big SGLang server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_rollout.coordinator.update import adapters as lora
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.wire.trainer import FleetDocument, FleetMember

if TYPE_CHECKING:
    from sglang_rollout.coordinator.http.parts import Parts

SECRETS = ("api_key", "admin_api_key")


def document(parts: Parts) -> FleetDocument:
    """``GET /fleet``."""
    machine = parts.machine
    fleet = machine.fleet
    if fleet.committed is None:
        raise Refusal("The coordinator has just started and asks the engines what they hold. Try again.", status=503)
    offsets = fleet.table.offsets()
    members = []
    for name, engine in fleet.engines.items():
        url = parts.members.url(name) or ""
        members.append(
            FleetMember(
                **engine.row().model_dump(),
                url=url,
                tensor_size=engine.tensor_size,
                rank_offset=offsets.get(name),
                routed=url in parts.router.routed,
                sglang_version=engine.status.sglang_version if engine.status is not None else None,
                nccl=engine.status.nccl if engine.status is not None else None,
            )
        )
    return FleetDocument(
        name=parts.name,
        namespace=parts.namespace,
        term=fleet.term,
        epoch=fleet.epoch,
        world_size=fleet.table.world_size,
        backend=fleet.policy.backend.value,
        fleet_id=fleet.weights.fleet_id,
        lease=fleet.policy.trainer_lease.ttl_seconds,
        committed=fleet.committed,
        serving=sum(engine.serving for engine in fleet.engines.values()),
        members=members,
        groups=[group.shown() for group in fleet.groups.values()],
        phase=machine.phase.value,
        last_update=fleet.last_update,
        adapters=lora.rows(fleet),
        state=fleet.applied_state,
        held=fleet.why_not_generating,
        urls={"control": parts.public_url, "data": parts.public_url},
    )


def server_info(parts: Parts) -> dict[str, Any]:
    """``GET /server_info``: everything that trainers compute a world size from says the same number of GPUs."""
    machine = parts.machine
    info = parts.infos.first(machine, "/server_info")
    if info is None:
        raise Refusal("No engine of this fleet has been up yet, so nothing is known of it. Try again.", status=503)
    for secret in SECRETS:
        if info.get(secret):
            info[secret] = "[redacted]"
    table = machine.fleet.table
    same = len(set(table.sizes)) == 1
    sizes = {"tp_size": table.sizes[0], "dp_size": len(table.sizes)} if same else {"tp_size": table.gpus, "dp_size": 1}
    committed = machine.fleet.committed
    return {
        **info,
        **sizes,
        "pp_size": 1,
        "nnodes": 1,
        "num_gpus": table.gpus,
        "disaggregation_mode": "null",
        "fleet": {
            **machine.fleet.advice(),
            "name": parts.name,
            "committed": committed.model_dump(mode="json") if committed is not None else None,
            "serving": sum(engine.serving for engine in machine.fleet.engines.values()),
        },
    }
