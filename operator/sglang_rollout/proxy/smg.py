"""Command line of smg, the SGLang router. Pure.

Engines pause during weight updates. With its defaults smg would treat a paused engine as broken, time out before a long request ends, and
generate tokens for health checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_rollout.proxy.address import Address

POLICIES = {
    "CacheAware": "cache_aware",
    "RoundRobin": "round_robin",
    "PowerOfTwo": "power_of_two",
    "ConsistentHash": "consistent_hashing",
    "Random": "random",
}
"""smg's names of the custom resource's policies."""
_NOT_AT_START = ("PowerOfTwo",)
"""Policies with which smg ends at start, because it has no engines yet. The engines name the policy when they are added."""

_FOUR_HOURS = 4 * 3600
_HOLD_SECONDS = 60
"""Time for which smg retries a request while every gate is closed, as during the transfer of an update."""
_BACKOFF_MS = 250
_IDLE_SECONDS = 3600
"""Time for which smg remembers the engine of a conversation without requests. Without a session header, smg also remembers each ``rid``,
about 320 bytes for one: 1000 requests a second take 1.2 GB in this time."""
_RETRY_BODY_BYTES = 64 * 1024 * 1024
_ANSWER_BYTES = 128 * 1024 * 1024
"""Largest answer that smg takes, unless bodies of requests may be larger: one flag limits both. smg reads an answer that is no stream into
memory, and needs twice its size for a moment."""


def engine_labels(policy: str | None) -> dict[str, str]:
    """Return the labels of each engine in smg's list of workers. The label ``policy`` sets the policy of the engine's model."""
    return {"policy": POLICIES[policy]} if policy in _NOT_AT_START else {}


def smg_args(
    *,
    listen: Address,
    metrics_listen: Address,
    policy: str,
    served_name: str | None = None,
    request_bytes: int = 0,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the arguments of ``python -m smg.launch_router``. ``extra`` comes last, so it overrides the other arguments.

    Args:
        listen: Address at which smg accepts requests.
        metrics_listen: Address of smg's metrics.
        policy: Policy by which smg chooses an engine.
        served_name: Name of the model, also for requests for the model ``default``.
        request_bytes: Largest body of a request (``engine.limits.requestBytes``).
        extra: Further arguments.
    """
    args = [
        *("--host", listen.host, "--port", str(listen.port)),
        *("--prometheus-host", metrics_listen.host, "--prometheus-port", str(metrics_listen.port)),
        *("--policy", POLICIES["Random" if policy in _NOT_AT_START else policy]),
        *("--routing-key-override", "--routing-key-headers", "x-smg-routing-key", "x-session-id", "--max-idle-secs", str(_IDLE_SECONDS)),
        # /model_info answers during a pause. The default, /health, may generate a token, and a paused engine generates none.
        *("--health-check-endpoint", "/model_info", "--health-check-interval-secs", "5", "--health-check-timeout-secs", "5"),
        *("--disable-circuit-breaker", "--disable-worker-overload-protection", "--worker-wedge-secs", "86400"),
        # The coordinator alone decides which engines are listed.
        "--no-remove-unhealthy-workers",
        # After a timeout smg would send the request to a second engine while the first engine still works on it.
        *("--request-timeout-secs", str(_FOUR_HOURS)),
        *("--retry-max-retries", str(_HOLD_SECONDS * 1000 // _BACKOFF_MS), "--retry-initial-backoff-ms", "50"),
        *("--retry-max-backoff-ms", str(_BACKOFF_MS), "--retry-backoff-multiplier", "1.5"),
        *("--max-buffered-request-bytes", str(_RETRY_BODY_BYTES)),
        *("--max-payload-size", str(max(request_bytes, _ANSWER_BYTES))),
        # The front limits open requests; a second, lower limit here would answer 429 during an update.
        *("--max-concurrent-requests", "0"),
        "--disable-tokenizer-autoload",
        *("--log-level", "warn"),
    ]
    if served_name is not None:
        args += ["--model-alias", f"default={served_name}"]
    return [*args, *extra]
