"""The command line of smg, the SGLang router. Pure.

Why these flags: engines pause for whole weight updates. smg's own guards take a paused engine for a broken one, its default time-outs
are shorter than a long rollout, and its health checks would generate tokens.
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
"""Policy names of the custom resource and what smg calls them."""
_NOT_AT_START = ("PowerOfTwo",)
"""smg ends at start with such a policy, because its list of engines is still empty. The engines name it when they are added."""

_FOUR_HOURS = 4 * 3600
_HOLD_SECONDS = 60
"""So long a request is tried again while every gate is closed, which they are during the transfer of an update."""
_BACKOFF_MS = 250
_RETRY_BODY_BYTES = 64 * 1024 * 1024


def engine_labels(policy: str | None) -> dict[str, str]:
    """Labels for each engine in smg's list. The label ``policy`` decides for the model that the engine serves."""
    return {"policy": POLICIES[policy]} if policy in _NOT_AT_START else {}


def smg_args(*, listen: str, metrics_listen: str, policy: str, served_name: str | None = None, extra: Sequence[str] = ()) -> list[str]:
    """Arguments of ``python -m smg.launch_router``. ``extra`` comes last and so wins over ours.

    Raises ValueError with a sentence for an unknown policy or an address that is none.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no router policy {policy!r}: choose one of {', '.join(POLICIES)}")
    serve, metrics = Address.parse(listen), Address.parse(metrics_listen)
    args = [
        *("--host", serve.host, "--port", str(serve.port)),
        *("--prometheus-host", metrics.host, "--prometheus-port", str(metrics.port)),
        *("--policy", POLICIES["Random" if policy in _NOT_AT_START else policy]),
        *("--routing-key-override", "--routing-key-headers", "x-smg-routing-key", "x-session-id"),
        # /model_info answers during a pause; the default, /health, may generate a token, which a paused engine cannot.
        *("--health-check-endpoint", "/model_info", "--health-check-interval-secs", "5", "--health-check-timeout-secs", "5"),
        *("--disable-circuit-breaker", "--disable-worker-overload-protection", "--worker-wedge-secs", "86400"),
        # The coordinator alone decides which engines are listed.
        "--no-remove-unhealthy-workers",
        # A time-out makes smg send the request again, to a second engine, while the first still works on it.
        *("--request-timeout-secs", str(_FOUR_HOURS)),
        *("--retry-max-retries", str(_HOLD_SECONDS * 1000 // _BACKOFF_MS), "--retry-initial-backoff-ms", "50"),
        *("--retry-max-backoff-ms", str(_BACKOFF_MS), "--retry-backoff-multiplier", "1.5"),
        *("--max-buffered-request-bytes", str(_RETRY_BODY_BYTES)),
        # The front bounds how much is open; a second, lower bound here would answer 429 during an update.
        *("--max-concurrent-requests", "0"),
        "--disable-tokenizer-autoload",
        *("--log-level", "warn"),
    ]
    if served_name is not None:
        args += ["--model-alias", f"default={served_name}"]
    return [*args, *extra]
