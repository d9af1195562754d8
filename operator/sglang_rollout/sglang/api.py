"""SGLang's HTTP API as this project uses it: control calls, data paths, memory tags, formats and versions. Pure.

Facts of SGLang 0.5.20 to 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

Version = tuple[int, int, int]

OLDEST_SUPPORTED: Version = (0, 5, 20)
"""First version with ``/ready``. In earlier versions only a health check that generates tokens shows that an engine has finished its
warm-up, and a paused engine cannot answer it. Since 0.5.19 replies name the version that made each token. smg reads ``/v1/loads``."""
FIRST_WITH_SESSIONS: Version = (0, 5, 21)
"""First version with ``/begin_weight_update`` and ``/end_weight_update``."""
FIRST_WITH_PING: Version = (0, 5, 23)
"""First version in which ``/ping`` answers 200 only after the warm-up."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Values of ``--model-path`` that name a model on Hugging Face: ``name`` or ``organisation/name``."""


class ControlCall(StrEnum):
    """SGLang's control calls by name. Each call is a POST to :attr:`path`."""

    INIT_GROUP = "init_weights_update_group"
    DESTROY_GROUP = "destroy_weights_update_group"
    BEGIN_UPDATE = "begin_weight_update"
    UPDATE_DISTRIBUTED = "update_weights_from_distributed"
    UPDATE_TENSOR = "update_weights_from_tensor"
    UPDATE_DISK = "update_weights_from_disk"
    UPDATE_IPC = "update_weights_from_ipc"
    END_UPDATE = "end_weight_update"
    SET_VERSION = "update_weight_version"
    PAUSE = "pause_generation"
    CONTINUE = "continue_generation"
    FLUSH_CACHE = "flush_cache"
    ABORT_REQUEST = "abort_request"
    RELEASE_MEMORY = "release_memory_occupation"
    RESUME_MEMORY = "resume_memory_occupation"
    LOAD_ADAPTER = "load_lora_adapter"
    LOAD_ADAPTER_FROM_TENSORS = "load_lora_adapter_from_tensors"
    UNLOAD_ADAPTER = "unload_lora_adapter"
    CHECK_WEIGHTS = "weights_checker"
    GET_WEIGHTS = "get_weights_by_name"
    INIT_SEND_GROUP = "init_weights_send_group_for_remote_instance"
    SEND_WEIGHTS = "send_weights_to_remote_instance"

    @property
    def path(self) -> str:
        """HTTP path of the call."""
        return f"/{self.value}"


SERVER_INFO = "/server_info"
MODEL_INFO = "/model_info"
MODELS = "/v1/models"
HEALTH_PATHS = ("/health", "/health_generate", "/ready", "/ping")
LOADS = "/v1/loads"

GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
GENERATING_PATHS = (GENERATE, CHAT_COMPLETIONS, COMPLETIONS)
"""Data paths that generate tokens. The front sends them to smg."""
DIRECT_PATHS = (
    *("/classify", "/encode", "/v1/classify", "/v1/embeddings", "/v1/rerank", "/v1/score"),
    *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
)
"""Data paths that smg does not know or would change. The front sends them to the batch server, which asks a serving engine."""
DATA_PATHS = GENERATING_PATHS + DIRECT_PATHS
"""The gate passes these only while the engine holds the committed version. Every other path is a control path: the gate sends it to the
agent, the front to the coordinator."""


class PauseMode(StrEnum):
    """Modes of ``/pause_generation``: what happens to running requests. The values are those of ``spec.weights.pauseMode``."""

    RETRACT = "Retract"
    ABORT = "Abort"
    IN_PLACE = "InPlace"

    @property
    def sglang(self) -> str:
        """SGLang's name of the mode."""
        return self.name.lower()


PAUSE_MODES = tuple(mode.sglang for mode in PauseMode)
"""SGLang's names of all modes."""
DEFAULT_PAUSE_MODE = PauseMode.ABORT.sglang
"""Mode of a pause call that names no mode."""


class MemoryTag(StrEnum):
    """Kinds of GPU memory that an engine can release."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"


MEMORY_TAGS = tuple(tag.value for tag in MemoryTag)
"""All memory tags. A call without tags means all of them."""

DEFAULT_GROUP = "weight_update_group"
"""Process group of a call that names no group."""

DISK_LOAD_FORMATS = ("auto", "safetensors")
"""Accepted values of ``load_format`` in ``/update_weights_from_disk``. A loader that SGLang does not know, or cannot use here, ends its
process."""
FLATTENED = "flattened_bucket"
"""``load_format`` of a bucket that comes in one broadcast."""
GROUP_LOAD_FORMATS = (None, FLATTENED)
"""Accepted values of ``load_format`` in ``/update_weights_from_distributed``. With any other value SGLang waits for single tensors."""
TENSOR_LOAD_FORMATS = (None, "direct", FLATTENED)
"""Accepted values of ``load_format`` in ``/update_weights_from_tensor``. SGLang imports any other value as the name of a function."""


def has_external_draft(info: Mapping[str, Any]) -> bool:
    """Return whether an engine with this ``/server_info`` has a draft model with a checkpoint of its own.

    For draft layers in the model's checkpoint SGLang names the model's path.
    """
    return info.get("speculative_draft_model_path") not in (None, "", info.get("model_path"))
