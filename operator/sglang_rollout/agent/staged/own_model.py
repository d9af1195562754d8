"""The tensors of the engine's own model, for loads of staged versions."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sglang_rollout.agent.checkpoint import CheckpointCheck
from sglang_rollout.agent.engine import Engine
from sglang_rollout.agent.engine_model import EngineModel
from sglang_rollout.wire.agent import CheckpointRequest

log = logging.getLogger(__name__)

_MODEL_SECONDS = 10.0
"""Time to read the headers of the engine's model. A version is not compared with a model that takes longer."""

Shapes = Mapping[str, list[int] | None]
"""Shape of each tensor of a model by name; None: its values are packed."""


class OwnModel:
    """Reads the tensors of the engine's model, once for each model.

    Args:
        engine: The engine.
        model_path: Model that the engine was started with; None if only the engine knows it.
    """

    def __init__(self, engine: Engine, model_path: str | None) -> None:
        self._engine = engine
        self._model_path = model_path
        self._check = CheckpointCheck()
        self._known: tuple[EngineModel, Shapes] | None = None

    async def read_shapes(self) -> Shapes | None:
        """Return the shapes of the engine's model; None if this pod cannot read it."""
        model = EngineModel.reported(self._model_path, self._engine.info, self._engine.model_info)
        if self._known is not None and self._known[0] == model:
            return self._known[1]
        reply = await self._check.run(CheckpointRequest(path="", deadline=_MODEL_SECONDS), model)
        if reply.shapes is None:
            why = reply.refusal.message if reply.refusal is not None else f"{reply.why_unchecked}."
            log.info("The version is not compared with the engine's model: %s", why)
            return None
        self._known = (model, reply.shapes)
        return reply.shapes
