"""Info replies of a stand-in: the fields of SGLang's replies that clients read, with the same types."""

from __future__ import annotations

import hashlib
import json
import time
from datetime import UTC, datetime
from typing import Any

from sglang_rollout.testing.boot import Boot
from sglang_rollout.testing.policy import overall_checksum

_TOKENS = 16384
"""Reported size of the cache."""
_REQUESTS = 16
"""Reported limit of running requests; not enforced."""
_RESERVED = 6
"""SGLang accepts inputs of at most the context length minus this number of tokens."""


def model_info(boot: Boot) -> dict[str, Any]:
    """``/model_info``: the live weight version, and the name that the last update from disk gave."""
    return {
        "model_path": boot.model_path,
        "served_model_name": boot.model_path,
        "tokenizer_path": boot.setup.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": boot.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


def server_info(boot: Boot) -> dict[str, Any]:
    """``/server_info``: what the engine was started with. ``random_seed`` and ``startup_time`` differ at every boot."""
    launched = _launched(boot)
    startup = {"load_weight": 0.01, "scheduler_e2e": boot.startup_seconds, "tokenizer_e2e": boot.startup_seconds + 1}
    state = launched | {
        "weight_version": boot.scheduler_version,
        "world_size": boot.setup.tensor_size,
        "startup_time": startup,
        "effective_max_running_requests_per_dp": _REQUESTS,
        "last_gen_throughput": 0.0,
        "memory_usage": {"weight": 0.0, "kvcache": 0.0, "token_capacity": _TOKENS},
    }
    return launched | {
        "launch_command": f"--model-path {boot.setup.model_path} --port {boot.port} --tp-size {boot.setup.tensor_size}",
        "status": "ready",
        "max_total_num_tokens": _TOKENS,
        "max_req_input_len": boot.setup.context_length - _RESERVED,
        "startup_time": startup,
        "kv_events": None,
        "internal_states": [state],
        "version": boot.setup.version,
        "frontend": "python",
    }


def _launched(boot: Boot) -> dict[str, Any]:
    return {
        "model_path": boot.setup.model_path,
        "tokenizer_path": boot.setup.model_path,
        "served_model_name": boot.setup.model_path,
        "load_format": "auto",
        "context_length": boot.setup.context_length,
        "dtype": "float32",
        "device": "cpu",
        "host": "127.0.0.1",
        "port": boot.port,
        "weight_version": boot.setup.weight_version,
        "random_seed": boot.seed,
        "nccl_port": None,
        "dist_init_addr": None,
        "nnodes": 1,
        "node_rank": 0,
        "tp_size": boot.setup.tensor_size,
        "pp_size": boot.setup.pipeline_size,
        "dp_size": boot.setup.data_size,
        "attn_dp_size": 1,
        "ep_size": 1,
        "enable_dp_attention": False,
        "max_running_requests": _REQUESTS,
        "max_total_tokens": _TOKENS,
        "api_key": None,
        "admin_api_key": None,
        "enable_memory_saver": boot.setup.memory_saver,
        "enable_weights_cpu_backup": boot.setup.weights_backup,
        "custom_weight_loader": list(boot.setup.loaders),
        "enable_lora": boot.setup.lora or None,
        "disaggregation_mode": "null",
    }


def models(boot: Boot) -> dict[str, Any]:
    """``/v1/models``."""
    name = boot.model_path
    row = {
        "id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": name, "parent": None,
        "max_model_len": boot.setup.context_length,
    }  # fmt: skip
    adapters = [{**row, "id": adapter, "root": path, "parent": name} for adapter, path in boot.adapters.items()]
    return {"object": "list", "data": [row, *adapters]}


def loads(boot: Boot) -> dict[str, Any]:
    """``/v1/loads``. Live; SGLang's own numbers are a snapshot that may be seconds old."""
    running, waiting, tokens = _counts(boot)
    row = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": tokens,
        "num_total_tokens": tokens,
        "num_active_tokens": tokens,
        "max_total_num_tokens": _TOKENS,
        "max_running_requests": _REQUESTS,
        "token_usage": tokens / _TOKENS,
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": boot.setup.version,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [row],
    }


def metrics(boot: Boot) -> bytes:
    """Return ``/metrics`` as with ``--enable-metrics``: the samples that show whether an engine works, of about eighty."""
    running, waiting, _ = _counts(boot)
    samples = (
        ("sglang:num_running_reqs", "gauge", running),
        ("sglang:num_queue_reqs", "gauge", waiting),
        ("sglang:generation_tokens_total", "counter", boot.generated),
    )
    model = json.dumps(boot.model_path)  # quoted as a label's value is
    lines = (f"# TYPE {name.removesuffix('_total')} {kind}\n{name}{{model_name={model}}} {value:.1f}\n" for name, kind, value in samples)
    return "".join(lines).encode()


def old_load(boot: Boot) -> list[dict[str, Any]]:
    """``/get_load``, which ended with 0.5.20. Its last form, made of what /v1/loads tells."""
    running, waiting, tokens = _counts(boot)
    row = {"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": tokens}
    return [row | {"num_pending_tokens": 0, "ts_tic": time.monotonic()}]


def checksums(boot: Boot) -> dict[str, Any]:
    """``/weights_checker {"action": "checksum"}``: per rank, per tensor. Ranks differ in nothing here: tensors are not sharded."""
    found = boot.weights.checksums()
    ranks = [
        {"checksums": found, "per_gpu_checksum": overall_checksum(found), "parallelism_info": _place(boot, rank, replica)}
        for replica in range(boot.setup.data_size)
        for rank in range(boot.setup.tensor_size)
    ]
    return {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": engine_checksum(ranks)}


def _place(boot: Boot, rank: int, replica: int) -> Any:
    """Where a rank stands: a list of places with roles since 0.5.21, one place before."""
    size = boot.setup.tensor_size
    place = {"tp_rank": rank, "tp_size": size, "dp_rank": replica, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": rank, "size": size}
    return [{"role": "target", **place}] if boot.setup.sessions else place


def engine_checksum(ranks: list[dict[str, Any]]) -> str:
    """SHA-256 over the ranks' checksums, as SGLang computes it."""
    return hashlib.sha256("".join(str(rank["per_gpu_checksum"]) for rank in ranks).encode()).hexdigest()


def _counts(boot: Boot) -> tuple[int, int, int]:
    requests = list(boot.requests.values())
    waiting = sum(request.waiting for request in requests)
    return len(requests) - waiting, waiting, sum(len(r.prompt) + len(r.tokens) for r in requests)
