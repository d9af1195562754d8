"""``spec.engine.limits``: the largest requests that engines get."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from sglang_rollout.api.schema import ApiModel, rule, with_rules

CUSTOM_LOGIT_PROCESSOR = "--enable-custom-logit-processor"
"""Flag with which engines run code from requests. ``engine.acceptFlags`` has to list it."""
_MEGABYTE = 2**20
_LARGEST_BODY = 512 * _MEGABYTE
"""smg's own limit (`--max-payload-size`)."""


class MediaUrls(StrEnum):
    """Images, audio and video that a request names by an http or https URL."""

    REFUSED = "Refused"
    ALLOWED = "Allowed"


class Limits(ApiModel):
    """Largest values of a request. SGLang has no such limits, and one request with larger values can end an engine."""

    model_config = with_rules(
        rule(
            # has(), because the API server checks the default of limits, {}, before it fills in the fields.
            "!has(self.samplesPerRequest) || self.samplesPerPrompt <= self.samplesPerRequest",
            "engine.limits.samplesPerRequest must be at least samplesPerPrompt: a request with one prompt has as many samples.",
            field=".samplesPerRequest",
        )
    )

    samples_per_prompt: int = Field(default=1024, ge=1, le=65536)
    """Samples of one prompt (`n`, `best_of`, `beam_width`)."""
    prompts_per_request: int = Field(default=16384, ge=1, le=262_144)
    """Prompts in one request."""
    samples_per_request: int = Field(default=65536, ge=1, le=1_000_000)
    """Samples of all prompts of one request."""
    values_per_request: int = Field(default=20_000, ge=16, le=100_000_000)
    """Keys and items of lists in one request, without token IDs, embeddings and objects of numbers (`logit_bias`). SGLang writes two
    messages about each value of a wrong type, and converts each tool, and answers no other request meanwhile."""
    logprobs_per_token: int = Field(default=1024, ge=1, le=1_000_000)
    """Log-probabilities of each token (`top_logprobs_num`, `logprobs`, `top_logprobs`), and token IDs in `token_ids_logprob` and
    `label_token_ids`."""
    grammar_bytes: int = Field(default=128 * 1024, ge=1, le=64 * _MEGABYTE)
    """Bytes of the grammars of one request (`json_schema`, `regex`, `ebnf`, `structural_tag`, `choice`, `response_format`, and
    `tools` of chats)."""
    stop_regex_repetitions: int = Field(default=1, ge=0, le=256)
    """Repetitions (`*`, `+`, `?`, `{}`) in one pattern of `stop_regex`. The engine does nothing while it matches a pattern, and each
    further repetition multiplies the time by the number of characters."""
    media_bytes: int = Field(default=64 * _MEGABYTE, ge=1, le=_LARGEST_BODY)
    """Bytes of images, audio and video in one request, as they are written (base64)."""
    media_urls: MediaUrls = MediaUrls.REFUSED
    """Images, audio and video by URL: `Refused` or `Allowed`. The engine would fetch a URL from its own network, where it also reaches its
    SGLang server without the gate. With `Allowed`, restrict the hosts by `--allowed-media-domains` in `engine.args`. Paths of files are
    always refused."""
    request_bytes: int = Field(default=128 * _MEGABYTE, ge=1024, le=_LARGEST_BODY)
    """Bytes of the body of one request. A batch of prompts has at most 64 MiB in any case."""


def written_limits(limits: Limits) -> dict[str, Any]:
    """Return the limits that differ from their defaults, as in JSON."""
    return limits.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def limits_options(limits: Limits) -> list[str]:
    """Return the option ``--limits`` of gate, front and batch server; none for the defaults."""
    return ["--limits", limits.model_dump_json(by_alias=True, exclude_defaults=True)] if limits != Limits() else []
