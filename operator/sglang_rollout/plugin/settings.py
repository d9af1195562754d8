"""Settings of the plug-in: one JSON object in an environment variable of the engine. Pure.

The process that starts an engine writes the variable with ``dump_settings``; the plug-in reads it once in each process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SETTINGS_VARIABLE = "SGLANG_ROLLOUT_PLUGIN"
"""Environment variable with the settings."""
RUN_VARIABLE = "SGLANG_ROLLOUT_RUN"
"""Environment variable with the ID of this run of the engine: one file name, the same in all its processes."""
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MEGABYTE = 2**20


@dataclass(frozen=True)
class Limits:
    """Largest values of a request. The names in JSON are those of ``spec.engine.limits``, where each has its description."""

    samples_per_prompt: int = 1024
    prompts_per_request: int = 16384
    samples_per_request: int = 65536
    values_per_request: int = 20_000
    logprobs_per_token: int = 1024
    grammar_bytes: int = 128 * 1024
    stop_regex_repetitions: int = 1
    media_bytes: int = 64 * _MEGABYTE
    media_urls: str = "Refused"
    request_bytes: int = 128 * _MEGABYTE


@dataclass(frozen=True)
class Settings:
    """What the plug-in does in one engine."""

    reports: str = ""
    """Folder of the reports; empty: no reports, so the plug-in proves nothing."""
    limits: Limits = field(default_factory=Limits)
    """Largest values of a request."""
    cache_key: bool = True
    """True if each version of the weights has a prefix cache of its own."""
    custom_logit_processors: bool = False
    """True if the engine runs code from requests."""


def name_in_json(name: str) -> str:
    """Return the name of a field in JSON: ``samples_per_prompt`` is ``samplesPerPrompt``."""
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


def dump_settings(
    *, reports: str, limits: Mapping[str, Any] | None = None, cache_key: bool = True, custom_logit_processors: bool = False
) -> str:
    """Return the value of the variable.

    Args:
        reports: Folder of the reports, as the engine's processes see it.
        limits: Limits by their names in ``spec.engine.limits``; missing ones have their defaults.
        cache_key: False if versions share one prefix cache.
        custom_logit_processors: True if the engine runs code from requests.
    """
    found = {"reports": reports, "limits": dict(limits or {}), "cacheKey": cache_key, "customLogitProcessors": custom_logit_processors}
    return json.dumps(found, separators=(",", ":"))


def parse_settings(text: str) -> Settings:
    """Return the settings in the variable's value. Raises ValueError if the value cannot be read. Unknown keys are ignored."""
    found = json.loads(text)
    limits = found.get("limits", {}) if isinstance(found, dict) else None
    if not isinstance(limits, dict):
        raise ValueError("it is no JSON object, or its limits are none")  # noqa: TRY004 - a wrong value of the variable, no wrong call
    values = {name: _read(Settings(), name, found) for name in ("reports", "cache_key", "custom_logit_processors")}
    return Settings(limits=Limits(**{one.name: _read(Limits(), one.name, limits) for one in fields(Limits)}), **values)


def read_settings(environment: Mapping[str, str]) -> tuple[Settings, str]:
    """Return the settings and a sentence about a variable that cannot be read; then the settings are the defaults, without reports."""
    text = environment.get(SETTINGS_VARIABLE)
    if text is None:
        return Settings(), ""
    try:
        return parse_settings(text), ""
    except (ValueError, RecursionError) as error:
        return Settings(), f"The variable {SETTINGS_VARIABLE} cannot be read: {error}."


def read_run(environment: Mapping[str, str]) -> str:
    """Return the ID of this run; empty if there is none, or if it is no file name."""
    run = environment.get(RUN_VARIABLE, "")
    return run if _RUN.fullmatch(run) else ""


def _read(defaults: Any, name: str, found: Mapping[str, Any]) -> Any:
    """Return the value of a field, which has the type of its default."""
    default, key = getattr(defaults, name), name_in_json(name)
    value = found.get(key, default)
    if type(value) is not type(default) or (isinstance(value, int) and value < 0):
        raise ValueError(f"{key} is {value!r}, not like {default!r}")
    return value
