"""Read-only routes. No route waits for an update: answers of engines that may be busy are cached."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable
from typing import Any

from aiohttp import web

from sglang_rollout.coordinator.callers.pods import normalize_address
from sglang_rollout.coordinator.http.app import PARTS, Parts, refusal_response, refuse
from sglang_rollout.coordinator.http.dialects import parse, weights_by_name
from sglang_rollout.coordinator.update import adapters as lora
from sglang_rollout.coordinator.update.membership import describe_none_up, why_incomplete
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.snapshots import why_lost
from sglang_rollout.sglang.api import MODEL_INFO, MODELS, SERVER_INFO
from sglang_rollout.sglang.smg_limits import CARRIED_SAMPLING_PARAMETERS
from sglang_rollout.wire.access import CALLER_HEADER, RELAYED_CALLER_HEADER, PathKind
from sglang_rollout.wire.agent import CheckpointRequest
from sglang_rollout.wire.ports import (
    AGENT_CHECKPOINT,
    FLEET,
    FLEET_CALLER,
    FLEET_HEALTH,
    FLEET_HELD,
    FLEET_SERVING,
    FLEET_TENSORS,
    VERSION_HEADER,
)
from sglang_rollout.wire.reasons import Refusal, RefusedError, reason_phrase
from sglang_rollout.wire.serving import Serving
from sglang_rollout.wire.states import FleetState, Version
from sglang_rollout.wire.trainer import FleetDocument, FleetMember, ModelTensors, StoreRow

SECRETS = ("api_key", "admin_api_key")
LOADS_DEADLINE_SECONDS = 5.0
TENSORS_DEADLINE_SECONDS = 30.0
"""Enough for the headers of some hundred files on a slow volume."""
WEIGHTS_DEADLINE_SECONDS = 30.0
"""An engine answers between two batches of requests."""


def make_document(parts: Parts) -> FleetDocument:
    """Return the discovery document (``GET /fleet``)."""
    machine = parts.machine
    fleet = machine.fleet
    committed = _committed(parts)
    offsets = fleet.table.offsets()
    members = []
    for name, engine in fleet.engines.items():
        url = parts.wanted_engines.url(name) or ""
        members.append(
            FleetMember(
                **engine.row().model_dump(),
                url=url,
                tensor_size=engine.tensor_size,
                rank_offset=offsets.get(name),
                routed=url in parts.workers.routed,
                sglang_version=engine.status.sglang_version if engine.status is not None else None,
                nccl=engine.status.nccl if engine.status is not None else None,
                updates_refused=engine.updates_refused,
                staged=engine.status.staged if engine.status is not None else [],
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
        committed=committed,
        serving=sum(map(parts.is_served, fleet.engines)),
        members=members,
        groups=[group.shown() for group in fleet.groups.values()],
        phase=machine.phase.value,
        last_update=fleet.last_update,
        adapters=lora.rows(fleet),
        state=fleet.applied_state,
        held=fleet.why_not_generating,
        pause_deferred=fleet.defers_pause,
        transport=fleet.policy.transport.value,
        update=fleet.update.staged.id if fleet.update is not None and fleet.update.staged is not None else None,
        store=_store_row(fleet),
        sampling_params=list_sampling_params(engine.sampling_params for engine in fleet.engines.values()),
        urls={"control": parts.public_url, "data": parts.generate_url},
    )


def list_sampling_params(engines: Iterable[Collection[str]]) -> list[str]:
    """Return the names that a request may set in ``sampling_params``; none if no engine reports its names.

    A request may reach any engine, so that a name must be known to every engine of those that report.

    Args:
        engines: Names that each engine knows; empty: it does not report them.
    """
    known = [set(names) for names in engines if names]
    return sorted(CARRIED_SAMPLING_PARAMETERS.intersection(*known)) if known else []


def _store_row(fleet: Fleet) -> StoreRow | None:
    store = fleet.store
    if store is None:
        return None
    copies, snapshots = (store.status.copies, store.status.snapshots) if store.status is not None else ([], None)
    message = " ".join(filter(None, [store.note, why_lost(fleet)]))
    return StoreRow(up=store.is_up, instance=store.instance, copies=copies, snapshots=snapshots, message=message)


async def make_server_info(parts: Parts) -> dict[str, Any]:
    """Return the fleet as one large server (``GET /server_info``). All fields give trainers the same number of ranks."""
    machine = parts.machine
    info = await _cached_info(parts, SERVER_INFO)
    for secret in SECRETS:
        if info.get(secret):
            info[secret] = "[redacted]"
    table = machine.fleet.table
    is_uniform = len(set(table.sizes)) == 1
    sizes = {"tp_size": table.sizes[0], "dp_size": len(table.sizes)} if is_uniform else {"tp_size": table.gpus, "dp_size": 1}
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
            "serving": sum(map(parts.is_served, machine.fleet.engines)),
        },
    }


async def fleet_health(request: web.Request) -> web.Response:
    """Return 200: the coordinator runs. The answer says nothing about engines."""
    return web.json_response({"status": "ok", "term": request.app[PARTS].driver.term})


async def health(request: web.Request) -> web.Response:
    """Return 200 if the fleet can take weights, also while no engine serves."""
    reason = why_incomplete(request.app[PARTS].machine.fleet)
    return refuse(503, reason) if reason else web.Response()


async def get_held(request: web.Request) -> web.Response:
    """Return 200 if an interruption keeps all engines from serving. The front then sends data requests to the batch server."""
    reason = request.app[PARTS].machine.fleet.why_not_generating
    return web.json_response({"held": reason}) if reason else refuse(404, "No interruption keeps the fleet from serving.")


async def get_serving(request: web.Request) -> web.Response:
    """Return what the batch server needs to know of the fleet."""
    parts = request.app[PARTS]
    _committed(parts)  # a coordinator that has just started does not know engines and adapters yet
    fleet = parts.machine.fleet
    urls = (parts.wanted_engines.url(name) for name, engine in fleet.engines.items() if engine.serving)
    found = Serving(
        held=fleet.why_not_generating,
        keeps_requests=fleet.applied_state is FleetState.PAUSED,
        engines=tuple(url for url in urls if url is not None),
        adapters=tuple(lora.wanted_adapters(fleet)),
    )
    return web.json_response(found.model_dump(mode="json"))


async def check_data_caller(request: web.Request) -> web.Response:
    """Return 204 if the caller that the batch server names may send data requests, or else the refusal in the shape of data errors."""
    if CALLER_HEADER in request.headers:
        return refuse(404, f"{request.path}: only the batch server asks here.")
    address = normalize_address(request.headers.get(RELAYED_CALLER_HEADER, ""))
    verdict = await request.app[PARTS].callers.check_kind(PathKind.DATA, address, request.headers.get("Authorization"))
    if not isinstance(verdict, Refusal):
        return web.Response(status=204)
    message = f"{request.query.get('path', '')}: {verdict.message}"
    return refusal_response(verdict, message, {"error": {"code": verdict.code, "type": "invalid_request_error", "message": message}})


async def get_document(request: web.Request) -> web.Response:
    """``GET /fleet``."""
    found = make_document(request.app[PARTS])
    return web.json_response(found.model_dump(mode="json"))


async def get_tensors(request: web.Request) -> web.Response:
    """Return names and shapes of the engines' model, so that a trainer can compare before it pushes."""
    parts = request.app[PARTS]
    asked = CheckpointRequest(path="", names=True, deadline=TENSORS_DEADLINE_SECONDS)
    reason = describe_none_up(parts.machine.fleet)
    for name in parts.machine.fleet.up()[:1]:
        result = await parts.agents.call(name, AGENT_CHECKPOINT, asked.model_dump(mode="json"), TENSORS_DEADLINE_SECONDS + 5)
        if result.shapes is not None:
            return web.json_response(ModelTensors(engine=name, shapes=dict(result.shapes)).model_dump(mode="json"))
        reason = result.message or f"engine {name}: {result.why_unchecked or 'its agent does not report them'}."
    return refuse(404, f"The tensors of the engines' model are not known: {reason}")


async def get_server_info(request: web.Request) -> web.Response:
    """``GET /server_info``."""
    return web.json_response(await make_server_info(request.app[PARTS]))


async def get_model_info(request: web.Request) -> web.Response:
    """Return the first engine's answer with the committed version."""
    parts = request.app[PARTS]
    info = await _cached_info(parts, MODEL_INFO)
    label = _committed(parts).label
    return web.json_response({**info, "weight_version": label}, headers={VERSION_HEADER: reason_phrase(label)})


async def get_weight_version(request: web.Request) -> web.Response:
    """Return the committed version. SGLang has removed this path; trainers still use it."""
    label = _committed(request.app[PARTS]).label
    return web.json_response({"weight_version": label}, headers={VERSION_HEADER: reason_phrase(label)})


async def get_world_size(request: web.Request) -> web.Response:
    """Return the number of ranks of all engines, without the trainer's own."""
    return web.json_response({"world_size": request.app[PARTS].machine.fleet.table.gpus})


async def get_models(request: web.Request) -> web.Response:
    """Return the first engine's list of models."""
    return web.json_response(await _cached_info(request.app[PARTS], MODELS))


async def get_model(request: web.Request) -> web.Response:
    """Return one entry of the list of models; an unknown name gets SGLang's answer."""
    wanted = request.match_info["model"]
    cards = (await _cached_info(request.app[PARTS], MODELS)).get("data", [])
    card = next((card for card in cards if card.get("id") == wanted), None)
    if card is not None:
        return web.json_response(card)
    error = {
        "message": f"The model '{wanted}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return web.json_response({"error": error}, status=404)


async def ready(request: web.Request) -> web.Response:
    """Return 200 if requests at the URL reach at least one engine."""
    parts = request.app[PARTS]
    fleet = parts.machine.fleet
    if fleet.why_not_generating:
        return refuse(503, fleet.why_not_generating)
    if not fleet.engines:
        return refuse(503, describe_none_up(fleet))
    if not any(engine.serving for engine in fleet.engines.values()):
        return refuse(503, "No engine serves now: none holds the committed weights. GET /fleet shows the state of each.")
    if not any(map(parts.is_served, fleet.engines)):
        return refuse(503, "No engine gets requests yet: smg, the SGLang router, has not taken up any. The logs of router and smg say why.")
    return web.Response()


async def get_weights_by_name(request: web.Request) -> web.Response:
    """Return rows of one tensor from a serving engine: all serving engines hold the committed version."""
    body = weights_by_name(dict(request.query), parse(await request.read()))
    parts = request.app[PARTS]
    name = next((name for name, engine in parts.machine.fleet.engines.items() if engine.serving), None)
    if name is None:
        raise RefusedError(
            "No engine serves now, so no engine holds the committed weights for certain. GET /fleet shows the state of each.", status=503
        )
    status, found = await parts.agents.ask(name, "/get_weights_by_name", body, WEIGHTS_DEADLINE_SECONDS)
    if status == 0:
        raise RefusedError(f"engine {name} does not answer: {str(found).rstrip('.')}. Try again.", status=502)
    label = _committed(parts).label
    answer = json.dumps(found, separators=(",", ":")).encode()  # compact like SGLang's: there may be a million numbers
    headers = {VERSION_HEADER: reason_phrase(label)}
    return web.Response(body=answer, status=status, headers=headers, content_type="application/json")


async def get_loads(request: web.Request) -> web.Response:
    """Return ``/v1/loads`` of all engines in one list."""
    loads = await _loads(request.app[PARTS])
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return web.json_response({"timestamp": now, "version": "fleet", "loads": loads})


async def get_load(request: web.Request) -> web.Response:
    """Return the loads in the shape of SGLang before 0.5.21. Trainers sum them up to see whether the fleet has drained."""
    loads = await _loads(request.app[PARTS])
    entries = []
    for rank, load in enumerate(loads):
        running, waiting = int(load.get("num_running_reqs") or 0), int(load.get("num_waiting_reqs") or 0)
        entries.append(
            {
                "dp_rank": rank,
                "num_reqs": running + waiting,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "num_tokens": int(load.get("num_used_tokens") or 0),
                "engine": load["engine"],
            }
        )
    return web.json_response(entries)


async def get_workers(request: web.Request) -> web.Response:
    """Return the fleet's URL as the only worker of a router.

    Trainers abort requests at each worker, and read its load. The gates of engines refuse such calls; this URL sends them to all engines.
    """
    parts = request.app[PARTS]
    is_healthy = any(map(parts.is_served, parts.machine.fleet.engines))
    status = "ready" if is_healthy else "not_ready"
    worker = {"id": parts.name, "url": parts.public_url, "worker_type": "regular", "is_healthy": is_healthy, "status": status}
    return web.json_response({"workers": [worker], "total": 1})


async def list_workers(request: web.Request) -> web.Response:
    """Return the same in the shape of older routers."""
    return web.json_response({"urls": [request.app[PARTS].public_url]})


async def _loads(parts: Parts) -> list[dict[str, Any]]:
    """Return the loads of all engines. Refuse if an engine does not answer, because a silent engine must not look idle."""
    names = parts.machine.fleet.up()
    replies = await asyncio.gather(*(parts.agents.get(name, "/v1/loads", LOADS_DEADLINE_SECONDS) for name in names))
    loads: list[dict[str, Any]] = []
    for name, (status, body) in zip(names, replies, strict=True):
        if status != 200 or not isinstance(body, dict) or not isinstance(body.get("loads"), list):
            reason = body if isinstance(body, str) else f"HTTP {status}"
            raise RefusedError(f"engine {name} does not report its load: {reason.rstrip('.')}. It may be busy; try again.", status=503)
        load_now = {"num_running_reqs": 0} if parts.machine.fleet.defers_pause else {}
        loads += [{**load, **load_now, "dp_rank": len(loads) + index, "engine": name} for index, load in enumerate(body["loads"])]
    return loads


async def _cached_info(parts: Parts, path: str) -> dict[str, Any]:
    info = await parts.infos.first(parts.machine, path)
    if info is None:
        has_engines = bool(parts.machine.fleet.engines)
        message = f"No engine of this fleet has answered {path} yet. Try again." if has_engines else describe_none_up(parts.machine.fleet)
        raise RefusedError(message, status=503)
    return info


def _committed(parts: Parts) -> Version:
    committed = parts.machine.fleet.committed
    if committed is None:
        raise RefusedError("The coordinator has just started and asks the engines for their weights. Try again.", status=503)
    return committed


routes = [
    web.get(FLEET_HEALTH, fleet_health),
    web.get(FLEET_HELD, get_held),
    web.get(FLEET_SERVING, get_serving),
    web.get(FLEET_CALLER, check_data_caller),
    web.get(FLEET, get_document),
    web.get(FLEET_TENSORS, get_tensors),
    web.get("/health", health),
    web.get("/health_generate", health),
    web.get("/server_info", get_server_info),
    web.get("/get_server_info", get_server_info),
    web.get("/model_info", get_model_info),
    web.get("/get_model_info", get_model_info),
    web.get("/get_weight_version", get_weight_version),
    web.get("/get_world_size", get_world_size),
    web.get("/v1/models", get_models),
    web.get("/v1/models/{model:.+}", get_model),
    web.get("/ready", ready),
    web.get("/ping", health),
    web.get("/get_weights_by_name", get_weights_by_name),
    web.post("/get_weights_by_name", get_weights_by_name),
    web.get("/v1/loads", get_loads),
    web.get("/get_load", get_load),
    web.get("/workers", get_workers),
    web.get("/list_workers", list_workers),
]
