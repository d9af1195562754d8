"""Compare the parallel sizes that engines report with the command line, before any process starts.

Called by :mod:`sglang_rollout.local.cli`. Never waits for an engine that does not answer: its agent checks the size later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from sglang_rollout.agent.plugin_reports import PluginReports
from sglang_rollout.api.weights_spec import Transport, Weights
from sglang_rollout.bounded import MESSAGE_BYTES, open_session, read_json
from sglang_rollout.local.plan import EngineArg
from sglang_rollout.local.plugin import ADVICE
from sglang_rollout.plugin.install import LOADER
from sglang_rollout.sglang.sizes import count_schedulers, loads_folders, read_replicas, read_size

LOADER_OPTION = f"--custom-weight-loader {LOADER}"
"""Option with which an engine of transport Staged must be started."""
_TIMEOUT_SECONDS = 5.0
"""An engine answers at once, unless its scheduler is busy. A busy engine is treated like an engine that is not up."""
_NO_SGLANG = "does not answer /server_info as an SGLang server does: name the address of an SGLang server, 0.5.20 or newer"


class SizesError(Exception):
    """The fleet must not start with this engine. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes that a running engine reports."""

    tensor: int
    pipeline: int = 1
    data: int = 1
    """Replicas of the model in one engine, not the width of attention data parallelism."""
    loaders: tuple[str, ...] = ()
    """Functions of ``--custom-weight-loader``."""
    unproved: str = ""
    """Which part of the plug-in's proof is missing, as a sentence; empty if the plug-in is active."""


async def read_sizes(engines: Sequence[EngineArg], reports: PluginReports) -> dict[EngineArg, Sizes]:
    """Return the sizes of the engines that answer now. All engines are called at once.

    Args:
        engines: The engines.
        reports: The reports of the plug-in in engines of this machine.

    Raises:
        SizesError: A server is not SGLang, is too old, or needs an API key.
    """
    async with open_session(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)) as http:
        found = await asyncio.gather(*(_read_engine_sizes(http, engine, reports) for engine in engines))
    return {engine: sizes for engine, sizes in zip(engines, found, strict=True) if sizes is not None}


def check_sizes(sizes: Mapping[EngineArg, Sizes], weights: Weights) -> None:
    """Compare the reported sizes with the command line.

    Raises:
        SizesError: An engine has another tensor parallel size than the command line says, or cannot take weights over a process group.
    """
    for engine, found in sizes.items():
        if engine.tensor_size not in (None, found.tensor):
            raise SizesError(
                f"engine {engine.url} runs with tensor parallel size {found.tensor}, and the command line says {engine.tensor_size}:"
                f" leave the size out, or start the engine with --tp-size {engine.tensor_size}"
            )
        if weights.transport in (Transport.DISK, Transport.STAGED):
            continue
        for what, size, flag in (("pipeline", found.pipeline, "--pp-size"), ("data", found.data, "--dp-size")):
            if size > 1:
                raise SizesError(
                    f"engine {engine.url} runs with {what} parallel size {size}: SGLang cannot take weights over a process group then."
                    f" Start the engine with {flag} 1, or add"
                    """ --weights '{"transport": "Disk"}' and send checkpoints with /update_weights_from_disk"""
                )


def check_plugins(sizes: Mapping[EngineArg, Sizes]) -> None:
    """Check that the plug-in is active in the engines.

    Raises:
        SizesError: An engine was started without the plug-in.
    """
    for engine, found in sizes.items():
        if found.unproved:
            raise SizesError(
                f"engine {engine.url} runs without the plug-in, so that one request could end it: {found.unproved} {ADVICE.capitalize()};"
                " or accept it with --plugin Optional"
            )


def check_loaders(sizes: Mapping[EngineArg, Sizes]) -> None:
    """Check that engines can load staged versions.

    Raises:
        SizesError: An engine that needs the loader was started without it.
    """
    for engine, found in sizes.items():
        if LOADER not in found.loaders and not loads_folders(found.data):
            raise SizesError(
                f"engine {engine.url} was started without the loader of staged versions: {ADVICE}, with the option {LOADER_OPTION}"
            )


def with_reported_sizes(engines: Sequence[EngineArg], sizes: Mapping[EngineArg, Sizes]) -> tuple[EngineArg, ...]:
    """Return the engines with the stages and replicas that they report. Engines that do not answer keep those of the command line."""
    known = {engine: replace(engine, pipeline_size=found.pipeline, data_size=found.data) for engine, found in sizes.items()}
    return tuple(known.get(engine, engine) for engine in engines)


async def _read_engine_sizes(http: aiohttp.ClientSession, engine: EngineArg, reports: PluginReports) -> Sizes | None:
    try:
        async with http.get(f"{engine.url}/server_info") as answer:
            if answer.status in (401, 403):
                raise SizesError(
                    f"engine {engine.url} answers /server_info with HTTP {answer.status}: a local fleet sends no API key."
                    " Start the engine without --api-key"
                )
            if answer.status >= 500:
                return None  # the engine is starting or ending
            info = await read_json(answer, MESSAGE_BYTES) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    except ValueError:
        raise SizesError(f"{engine.url} {_NO_SGLANG}") from None
    if not isinstance(info, dict) or read_size(info, "tp_size") is None:
        raise SizesError(f"{engine.url} {_NO_SGLANG}")
    loaders = info.get("custom_weight_loader")
    names = tuple(map(str, loaders)) if isinstance(loaders, list) else ()
    unproved = await asyncio.to_thread(_find_unproved, reports, info)
    return Sizes(read_size(info, "tp_size") or 1, read_size(info, "pp_size") or 1, read_replicas(info), names, unproved)


def _find_unproved(reports: PluginReports, info: Mapping[str, Any]) -> str:
    """Return which part of the plug-in's proof is missing, as a sentence; empty if none. Blocks."""
    return reports.read(None, info).missing(count_schedulers(info), cache_key=reports.cache_key) or ""
