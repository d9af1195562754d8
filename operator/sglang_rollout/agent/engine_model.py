"""The model that the engine runs: facts that the engine reports, and its files where this pod can read them.

Called by :mod:`.checkpoint`, which compares a checkpoint with this model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rollout.checkpoints.folder import CancelCheck, Model, ProblemsError, read_model
from sglang_rollout.sglang.api import HUB_NAME

_MAIN = "main"
_ROOTS_CACHE = Path("/root/.cache/huggingface/hub")
"""Cache in SGLang's images, which run as root. The agent does not run as root."""
_RENAMED = frozenset(
    {
        "Cosmos3EdgeForConditionalGeneration",
        "DeepseekOCRForCausalLM",
        "DeepseekV4ForCausalLM",
        "DeepseekVL2ForCausalLM",
        "DotsVLMForCausalLM",
        "MambaForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
    }
)
"""Architectures that SGLang (0.5.23) also reports for models whose ``config.json`` has another architecture or none (``srt/configs``)."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Facts about an engine's model that need no file."""

    path: str | None = None
    """``--model-path``: a folder, or a name on the Hugging Face hub. None if it is not known."""
    revision: str | None = None
    """``--revision``: branch, tag or commit on the hub; None: ``main``."""
    download_dir: str | None = None
    """``--download-dir``: SGLang's Hugging Face cache, if not the usual one."""
    architectures: tuple[str, ...] = ()
    """As the engine reports; empty if not known, or not comparable with a ``config.json``."""

    @classmethod
    def reported(cls, path: str | None, server_info: Mapping[str, Any], model_info: Mapping[str, Any]) -> EngineModel:
        """Return the model of an engine with these answers. ``path`` is ``--model-path``, if known from elsewhere."""
        reported = model_info.get("architectures")
        architectures = tuple(map(str, reported)) if isinstance(reported, list) else ()
        overridden = "architectures" in str(server_info.get("json_model_override_args") or "")
        return cls(
            path=path or _text(server_info.get("model_path")),
            revision=_text(server_info.get("revision")),
            download_dir=_text(server_info.get("download_dir")),
            architectures=() if overridden or _RENAMED.intersection(architectures) else architectures,
        )


def read_engine_model(model: EngineModel, check_cancelled: CancelCheck) -> tuple[Model | None, str]:
    """Return the engine's model, or None and the reason why this pod cannot read it, as a clause."""
    if model.path is None:
        return None, "the engine has not reported its model"
    folder = Path(model.path) if os.path.isabs(model.path) else hub_folder(model, os.environ)
    if folder is None:
        return None, f"no Hugging Face cache that its pod can read holds the engine's model {model.path}"
    try:
        return read_model(folder, check_cancelled=check_cancelled), ""
    except (ProblemsError, OSError) as error:
        why = error.problems[0].rstrip(".") if isinstance(error, ProblemsError) else error.strerror or str(error)
        return None, f"its pod cannot read the engine's model {folder} ({why})"


def hub_folder(model: EngineModel, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of a hub model's revision in the first cache that holds it; None if no readable cache does."""
    name, revision = str(model.path), model.revision or _MAIN
    if not HUB_NAME.fullmatch(name) or ".." in revision.split("/"):
        return None
    for cache in _caches(model, environ):
        repository = cache / f"models--{name.replace('/', '--')}"
        try:
            commit = (repository / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            commit = revision  # a commit has no file of its own
        folder = repository / "snapshots" / commit
        if os.path.isdir(folder):
            return folder
    return None


def _caches(model: EngineModel, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders that huggingface_hub searches, in its order. The agent has the engine's environment variables."""
    home = environ.get("XDG_CACHE_HOME") or "~/.cache"
    usual = Path(environ.get("HF_HOME") or f"{home}/huggingface") / "hub"
    places = [environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or usual, _ROOTS_CACHE]
    return [Path(os.path.expanduser(place)) for place in (model.download_dir, *places) if place]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
