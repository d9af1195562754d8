"""The tensors of the engine's own model: as the plug-in saw them at the engine's start, or else read from the model's files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from sglang_rollout.agent.checkpoint import CheckpointCheck, listed_tensors
from sglang_rollout.agent.engine import Engine, fingerprint
from sglang_rollout.agent.engine_model import EngineModel
from sglang_rollout.agent.plugin_reports import PluginReports
from sglang_rollout.wire.agent import CheckpointReply, CheckpointRequest

log = logging.getLogger(__name__)

_MODEL_SECONDS = 10.0
"""Time to read the headers of the engine's model. A version is not compared with a model that takes longer."""
_RANDOM = "dummy"
"""Load format with which SGLang fills the weights at random."""

Shapes = Mapping[str, list[int] | None]
"""Shape of each tensor of a model by name; None: its values are packed."""


class OwnModel:
    """Lists the tensors of the engine's model, and keeps the list of the plug-in for each engine process.

    Args:
        engine: The engine.
        model_path: Model that the engine was started with; None if only the engine knows it.
        reports: Reports of the plug-in; None if the agent has no folder of reports.
    """

    def __init__(self, engine: Engine, model_path: str | None, reports: PluginReports | None = None) -> None:
        self._engine = engine
        self._model_path = model_path
        self._reports = reports
        self._check = CheckpointCheck()
        self._lock = asyncio.Lock()
        self._listed: tuple[str, CheckpointReply] | None = None
        """Boot ID of an engine process, and its tensors."""
        self._known: tuple[EngineModel, Shapes] | None = None

    async def read(self, request: CheckpointRequest) -> CheckpointReply:
        """Return the tensors of the engine's model, or of ``request.model_path``; without ``shapes`` if they are not known."""
        engine = self._engine
        is_other = request.model_path is not None
        listed = None if is_other else await self._read_listed()
        if listed is None or listed.shapes is None:
            model = EngineModel(request.model_path) if is_other else self._model()
            # Trainers may list the model's tensors at any time, which must not delay the check of a checkpoint.
            async with self._lock:
                reply = await self._check.run(request, model)
            reasons = [listed.why_unchecked if listed is not None else "", reply.why_unchecked]
            reply = reply if reply.shapes is not None else reply.model_copy(update={"why_unchecked": "; ".join(filter(None, reasons))})
        else:
            reply = listed
        return reply.model_copy(update={"is_random": not is_other and engine.info.get("load_format") == _RANDOM})

    async def read_shapes(self) -> Shapes | None:
        """Return the shapes of the engine's model; None if they are not known."""
        listed = await self._read_listed()
        if listed is not None and listed.shapes is not None:
            return listed.shapes
        model = self._model()
        if self._known is not None and self._known[0] == model:
            return self._known[1]
        reply = await self._check.run(CheckpointRequest(path="", deadline=_MODEL_SECONDS), model)
        if reply.shapes is None:
            why = reply.refusal.message if reply.refusal is not None else f"{reply.why_unchecked}."
            log.info("The version is not compared with the engine's model: %s", why)
            return None
        self._known = (model, reply.shapes)
        return reply.shapes

    def _model(self) -> EngineModel:
        return EngineModel.reported(self._model_path, self._engine.info, self._engine.model_info)

    async def _read_listed(self) -> CheckpointReply | None:
        """Return the tensors that the plug-in lists; without ``shapes`` if it has no list, and None without a folder of reports."""
        reports = self._reports
        if reports is None:
            return None
        container, info = self._engine.container_boot_id(), self._engine.info
        boot_id = container or fingerprint(info)
        if self._listed is None or self._listed[0] != boot_id:
            found = await asyncio.to_thread(lambda: listed_tensors(reports.read(container, info).names()))
            if found.shapes is None:
                return found  # the reports may not be complete yet
            self._listed = (boot_id, found)
        return self._listed[1]
