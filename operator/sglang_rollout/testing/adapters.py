"""SGLang's calls about adapters (LoRA), with its replies. An adapter changes no tokens here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_rollout.testing.life import Life

_MAX_LORAS_PER_BATCH = 8
"""SGLang's default of ``--max-loras-per-batch``."""
_TOO_MANY_PINNED = (
    "Failed to load LoRA adapter {name} as a pinned adapter. It is not allowed to pin all slots in the LoRA memory pool to avoid"
    " starvation for unpinned adapters and base models. Please increase your `--max-loras-per-batch` or load it as unpinned LoRA adapters."
)


def load(life: Life, body: Mapping[str, Any]) -> dict[str, Any]:
    """``/load_lora_adapter``."""
    name, path = str(body["lora_name"]), str(body["lora_path"])
    if not life.setup.lora:
        return _reply(life, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
    if name in life.adapters:
        return _reply(life, f"Failed to load LoRA adapter {name} from {path}: it is already loaded.")
    if "missing" in path:
        return _reply(
            life, f"Failed to load LoRA adapter {name}: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'."
        )
    if body.get("pinned"):
        if len(life.pinned) >= _MAX_LORAS_PER_BATCH - 1:
            return _reply(life, _TOO_MANY_PINNED.format(name=name))
        life.pinned.add(name)
    life.adapters[name] = path
    life.ever_loaded.add(name)
    return _reply(life, "")


def unload(life: Life, body: Mapping[str, Any]) -> dict[str, Any]:
    """``/unload_lora_adapter``."""
    name = str(body["lora_name"])
    if name not in life.adapters:
        return _reply(life, f"LoRA adapter {name} does not exist. Loaded LoRAs: {list(life.adapters)}")
    del life.adapters[name]
    life.pinned.discard(name)
    return _reply(life, "")


def _reply(life: Life, error: str) -> dict[str, Any]:
    return {"success": not error, "error_message": error, "loaded_adapters": dict(life.adapters)}
