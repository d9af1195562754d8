"""SGLang's paths that the fleet's URL does not serve, and why. Pure. The coordinator answers them with 501 and the reason.

``docs/reference/http-api.md`` has the table for users; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

_ONE_ENGINE = "it works on one engine's process, and its effect is lost when that engine restarts. {instead}"
_PROFILE = _ONE_ENGINE.format(instead="Call it inside that engine's pod, at SGLang's own port.")
_ARGUMENTS = _ONE_ENGINE.format(instead="Set the flag in engine.args of the rollout instead.")
_CORPUS = _ONE_ENGINE.format(instead="Name the corpus in engine.args of the rollout instead.")
_SESSION = (
    "the session would live in the memory of one engine, and weight updates clear it. "
    "Send whole prompts with the header x-session-id: one engine then gets them all and reuses its prefix cache."
)
_OPENAI_DIALECT = "bodies of this API are not checked for values that end an engine. Use /v1/chat/completions or /generate."
_DECISIONS = "bodies of this API are not checked for values that end an engine. Use /v1/score."
_AUDIO = "bodies of this API are not checked for values that end an engine. Send audio as audio_data to /generate."
_PARSER = "it needs no engine. Import sglang.srt.function_call or sglang.srt.parser in the trainer."
_PEER = "engines get weights from the trainer, the checkpoint or a snapshot. A peer that fails can block a serving engine."
_DISAGGREGATION = "engines of a rollout do not split prefill and decode."
_RANKS = "the number of ranks of an engine is engine.parallelism of the rollout."

REASONS: Mapping[str, str] = {
    **dict.fromkeys(("/start_profile", "/stop_profile", "/set_trace_level", "/freeze_gc", "/configure_logging", "/slow_down"), _PROFILE),
    **dict.fromkeys([f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump")], _PROFILE),
    **dict.fromkeys(("/set_internal_state", "/get_hicache_l3_cache_layout", "/dumper", "/hicache"), _ARGUMENTS),
    **dict.fromkeys(("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"), _CORPUS),
    **dict.fromkeys(("/open_session", "/close_session"), _SESSION),
    **dict.fromkeys(("/v1/responses", "/v1/messages", "/api", "/invocations", "/vertex_generate"), _OPENAI_DIALECT),
    **dict.fromkeys(("/v1/decisions", "/v1/systemone"), _DECISIONS),
    **dict.fromkeys(("/v1/audio", "/v1/realtime"), _AUDIO),
    **dict.fromkeys(("/parse_function_call", "/separate_reasoning"), _PARSER),
    **dict.fromkeys(("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"), _PEER),
    **dict.fromkeys(("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info"), _PEER),
    "/pd_role_switch": _DISAGGREGATION,
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _RANKS),
    "/weights_checker": "the fleet compares the engines' checksums itself before a commit (weights.verify). GET /fleet shows the result.",
    "/metrics": "GET /fleet/metrics has the fleet's numbers; each engine's own are at /metrics on the port `metrics` of its pod.",
}
"""Reason by path. A path also stands for every path below it. Each reason is the end of a sentence."""


def find_refusal(path: str) -> str | None:
    """Return the message for a path that the fleet's URL refuses; None for every other path."""
    reason = next((reason for known, reason in REASONS.items() if path == known or path.startswith(f"{known}/")), None)
    return None if reason is None else f"{path} is not offered at the fleet's URL: {reason}"
