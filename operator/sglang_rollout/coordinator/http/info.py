"""Routes that only read. None of them waits for an update: what a busy engine cannot say now was remembered."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import web

from sglang_rollout.coordinator.http.dialects import parse, reason_phrase, weights_by_name
from sglang_rollout.coordinator.http.discovery import document, server_info
from sglang_rollout.coordinator.http.parts import PARTS, Parts, refuse
from sglang_rollout.coordinator.update.membership import why_incomplete
from sglang_rollout.coordinator.update.ranks import Refusal
from sglang_rollout.wire.agent import CheckpointRequest
from sglang_rollout.wire.ports import AGENT_CHECKPOINT, FLEET, FLEET_HEALTH, FLEET_HELD, FLEET_METRICS, FLEET_TENSORS, VERSION_HEADER
from sglang_rollout.wire.trainer import ModelTensors

LOADS_DEADLINE = 5.0
TENSORS_DEADLINE = 30.0
"""For the headers of some hundred files on a slow volume."""
WEIGHTS_DEADLINE = 30.0
"""The engine answers between two batches of requests."""


async def fleet_health(request: web.Request) -> web.Response:
    """The coordinator runs; says nothing of engines."""
    return web.json_response({"status": "ok", "term": request.app[PARTS].driver.term})


async def health(request: web.Request) -> web.Response:
    """Control health: weights can be taken, also while no engine may serve."""
    reason = why_incomplete(request.app[PARTS].machine.fleet)
    return refuse(503, reason) if reason else web.Response()


async def get_held(request: web.Request) -> web.Response:
    """Asked by the front: does the coordinator answer requests for tokens now, because something holds the fleet?"""
    sentence = request.app[PARTS].machine.fleet.why_not_generating
    return web.json_response({"held": sentence}) if sentence else refuse(404, "Nothing holds the fleet.")


async def get_document(request: web.Request) -> web.Response:
    """The discovery document."""
    found = document(request.app[PARTS])
    return web.json_response(found.model_dump(mode="json"))


async def get_tensors(request: web.Request) -> web.Response:
    """Names and shapes of the model that the engines were started with, so that a trainer can compare before it pushes."""
    parts = request.app[PARTS]
    asked = CheckpointRequest(path="", names=True, deadline=TENSORS_DEADLINE)
    reason = "no engine is up."
    for name in parts.machine.fleet.up()[:1]:
        result = await parts.agents.call(name, AGENT_CHECKPOINT, asked.model_dump(mode="json"), TENSORS_DEADLINE + 5)
        if result.shapes is not None:
            return web.json_response(ModelTensors(engine=name, shapes=dict(result.shapes)).model_dump(mode="json"))
        reason = result.message or f"engine {name}: {result.why_unchecked or 'its agent does not tell them'}."
    return refuse(404, f"The tensors of the engines' model are not known: {reason}")


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text."""
    parts = request.app[PARTS]
    body = parts.metrics.text(parts.driver.machine)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def get_server_info(request: web.Request) -> web.Response:
    """The fleet as one big server."""
    return web.json_response(server_info(request.app[PARTS]))


async def get_model_info(request: web.Request) -> web.Response:
    """The first engine's, with the committed version: only that is served."""
    parts = request.app[PARTS]
    info = _known(parts, "/model_info")
    label = _label(parts)
    return web.json_response({**info, "weight_version": label}, headers={VERSION_HEADER: reason_phrase(label)})


async def get_weight_version(request: web.Request) -> web.Response:
    """The committed version; SGLang itself has dropped this path, trainers have not."""
    label = _label(request.app[PARTS])
    return web.json_response({"weight_version": label}, headers={VERSION_HEADER: reason_phrase(label)})


async def get_world_size(request: web.Request) -> web.Response:
    """All ranks of all engines, without the trainer's own."""
    return web.json_response({"world_size": request.app[PARTS].machine.fleet.table.gpus})


async def get_models(request: web.Request) -> web.Response:
    """The first engine's list of models."""
    return web.json_response(_known(request.app[PARTS], "/v1/models"))


async def get_model(request: web.Request) -> web.Response:
    """One entry of the list of models; an unknown name is answered as SGLang does."""
    wanted = request.match_info["model"]
    cards = _known(request.app[PARTS], "/v1/models").get("data", [])
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
    """Data health: an engine serves."""
    fleet = request.app[PARTS].machine.fleet
    if fleet.why_not_generating:
        return refuse(503, fleet.why_not_generating)
    if not any(engine.serving for engine in fleet.engines.values()):
        return refuse(503, "No engine serves now: none holds the weights that the fleet has committed. GET /fleet tells the state of each.")
    return web.Response()


async def get_weights_by_name(request: web.Request) -> web.Response:
    """Rows of one tensor, from an engine that serves: all of these hold the committed version."""
    body = weights_by_name(dict(request.query), parse(await request.read()))
    parts = request.app[PARTS]
    name = next((name for name, engine in parts.machine.fleet.engines.items() if engine.serving), None)
    if name is None:
        raise Refusal(
            "No engine serves now, so no engine holds the committed weights for certain. GET /fleet tells the state of each.", status=503
        )
    status, found = await parts.agents.ask(name, "/get_weights_by_name", body, WEIGHTS_DEADLINE)
    if status == 0:
        raise Refusal(f"engine {name} does not answer: {str(found).rstrip('.')}. Try again.", status=502)
    label = _label(parts)
    answer = json.dumps(found, separators=(",", ":")).encode()  # as short as SGLang writes it: there may be a million numbers
    headers = {VERSION_HEADER: reason_phrase(label)}
    return web.Response(body=answer, status=status, headers=headers, content_type="application/json")


async def get_loads(request: web.Request) -> web.Response:
    """``/v1/loads`` of all engines in one list."""
    loads = await _loads(request.app[PARTS])
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return web.json_response({"timestamp": now, "version": "fleet", "loads": loads})


async def get_load(request: web.Request) -> web.Response:
    """The list that SGLang before 0.5.21 answered; trainers add it up to see whether the fleet has drained."""
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
    """The engines, as routers list their workers; trainers abort and poll each of them directly."""
    parts = request.app[PARTS]
    workers = [
        {
            "id": member.name,
            "url": member.url,
            "worker_type": "regular",
            "is_healthy": member.gate_open,
            "status": "ready" if member.gate_open else "not_ready",
        }
        for member in document(parts).members
        if member.url
    ]
    return web.json_response({"workers": workers, "total": len(workers)})


async def _loads(parts: Parts) -> list[dict[str, Any]]:
    """An engine that is up and does not answer must not read as idle: then there is no answer at all."""
    names = parts.machine.fleet.up()
    replies = await asyncio.gather(*(parts.agents.get(name, "/v1/loads", LOADS_DEADLINE) for name in names))
    loads: list[dict[str, Any]] = []
    for name, (status, body) in zip(names, replies, strict=True):
        if status != 200 or not isinstance(body, dict) or not isinstance(body.get("loads"), list):
            reason = body if isinstance(body, str) else f"HTTP {status}"
            raise Refusal(f"engine {name} does not say its load: {reason.rstrip('.')}. It may be busy; try again.", status=503)
        loads += [{**load, "dp_rank": len(loads) + index, "engine": name} for index, load in enumerate(body["loads"])]
    return loads


def _known(parts: Parts, path: str) -> dict[str, Any]:
    info = parts.infos.first(parts.machine, path)
    if info is None:
        raise Refusal("No engine of this fleet has been up yet: nothing is known of its model. Try again.", status=503)
    return info


def _label(parts: Parts) -> str:
    committed = parts.machine.fleet.committed
    if committed is None:
        raise Refusal("The committed version is not proved yet: the coordinator has just started.", status=503)
    return committed.label


routes = [
    web.get(FLEET_HEALTH, fleet_health),
    web.get(FLEET_METRICS, metrics),
    web.get(FLEET_HELD, get_held),
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
]
