"""Families of the flags of SGLang and smg: which of them ``engine.args`` and ``router.args`` may have, and which need ``acceptFlags``.

From the parsers of SGLang 0.5.23 and smg 1.13.0. A flag of no family is new or rare, so that its effect on a fleet is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sglang_rollout.api.schema import rule

MAX_ACCEPTED = 32


@dataclass(frozen=True, slots=True)
class Family:
    """Flags about one subject."""

    subject: str
    """The subject, as documentation and messages name it."""
    beginnings: str
    """Beginnings of the flags without the two hyphens, separated by blanks."""
    risk: str = ""
    """Reason for which a flag needs an entry in ``acceptFlags``, as a clause; empty if it needs none."""

    @property
    def flags(self) -> list[str]:
        """The beginnings with their hyphens."""
        return [f"--{beginning}" for beginning in self.beginnings.split()]


ENGINE_FAMILIES = (
    Family(
        "kernels and precision",
        """
        attention- decode-attention- prefill-attention- mm-attention- sampling-backend grammar-backend fp8- fp4- bf16- dsa- dsv4- qsa-
        triton- flashinfer- mamba- int8-mamba- linear-attn- linear-replayssm- cuda-graph- torch-compile- dtype quantization kv-cache-dtype
        prefill-kv-cache-dequant-dtype modelopt-quant rl-on-policy-target rl-quant-profile kt- dllm- boundary-reduction pre-warm-nccl
        enable-fp32-lm-head enable-tf32-matmul enable-lean-attention enable-nvidia-megakernel enable-amd-monokernel
        enable-fused-qk-norm-rope enable-precise-embedding-interpolation enable-deepseek-v4-fp4-indexer enable-dsa-fused-indexer
        enable-mamba-cache-stochastic-rounding enable-int8-mamba-checkpoint enable-linear-replayssm enable-profile-cuda-graph
        enable-cudagraph-gc enable-torch-compile enable-nccl-nvls enable-symm-mem enable-torch-symm-mem enable-mscclpp
        enable-scattered-sconv enable-quant-communications enable-flashinfer-allreduce-fusion enable-aiter-allreduce-fusion
        enable-fused-moe-sum-all-reduce enable-w4a4-mxfp4-megamoe enable-deterministic-inference enable-mis
        enable-encoder-swa-bounded-replay enable-decoder-swa-bounded-replay enable-layerwise-nvtx-marker
        """,
    ),
    Family(
        "experts",
        """
        moe- deepep- fuseep- ep-num-redundant-experts ep-dispatch-algorithm init-expert-location eplb- expert- experts- shared-experts-
        paged-experts- tbo- enforce- enable-eplb enable-waterfill enable-paged-experts enable-two-batch-overlap enable-single-batch-overlap
        enable-shared-experts-attn-tp
        """,
    ),
    Family(
        "layout of ranks",
        """
        device base-gpu-id gpu-id-step numa-node dist-timeout load-balance-method pp-max-micro-batch-size pp-async-batch-depth attn-cp-size
        dcp- cp-strategy enable-prefill-cp enable-cp- enable-dsa-cache-layer-split enable-kv-cache-sharding enable-dp-attention-local
        enable-dp-lm-head enable-tp-lm-head enable-attn-tp- enable-dense-mlp-attn-tp enable-layernorm-sp enable-megamoe-for-layernorm-sp
        enable-p2p-check mm-enable-dp-encoder
        """,
    ),
    Family(
        "memory and caches",
        """
        mem-fraction-static page-size c128-page-size swa- radix- hicache- hisparse- cpu-offload-gb offload- ple-offload-
        max-mamba-cache-size enable-memory-saver enable-weights-cpu-backup enable-draft-weights-cpu-backup enable-page-major-kv-layout
        enable-unified-memory enable-session-radix-cache enable-hierarchical-cache enable-hicache enable-linker-mla-dedup enable-hisparse
        """,
    ),
    Family(
        "scheduling and limits",
        """
        max-running-requests max-queued-requests max-total-tokens max-prefill-tokens context-length chunked-prefill-size
        prefill-decode-interval prefill-max-requests prefill-delayer- prefill-only- schedule- scheduler- default-priority-value
        abort-on-priority-when-disabled priority-scheduling- retraction-policy num-continuous-decode-steps num-reserved-decode-tokens
        min-free-slots-delay stream-interval batch-notify-size sleep-on-idle watchdog-timeout soft-watchdog-timeout gc- random-seed
        limit-mm-data-per-request media-url-max-file-size-mb allowed-media-domains enable-dynamic-chunking enable-priority-scheduling
        enable-mixed-chunk enable-prefill-delayer
        """,
    ),
    Family(
        "model and tokenizer",
        """
        is-embedding revision model-impl model-loader-extra-config json-model-override-args download-dir weight-loader- tokenizer-path
        tokenizer-mode tokenizer-backend skip-tokenizer-init skip-server-warmup chat-template hf-chat-template-name completion-template
        default-chat-template-kwargs language-model-only mm-process mm-io-worker-num mm-preprocess- mm-feature-transport image-processor-
        dynamic-batch-tokenizer- enable-multimodal enable-broadcast-mm-inputs-process enable-prefix-mm-cache enable-dynamic-batch-tokenizer
        enable-tokenizer-batch-encode
        """,
    ),
    Family("adapters", "lora- max-lora- max-loras- max-loaded-loras uno-lora-path enable-lora"),
    Family("speculative decoding", "speculative- spec-trace-dir enable-multi-layer-eagle"),
    Family(
        "answers",
        """
        reasoning-parser tool-call-parser return- sampling-defaults sampling-mask-max-tokens preferred-sampling-params allow-auto-truncate
        stream-response-default-include-usage incremental-streaming-output constrained-json- strip-thinking-cache aux-hidden-state-capture
        watermark- enable-watermark enable-return- enable-cache-report enable-strict-thinking
        """,
    ),
    Family(
        "logs and metrics",
        """
        log- decode-log-interval show-time-cost bucket- prompt-tokens-buckets generation-tokens-buckets extra-metric-labels
        tokenizer-metrics- uvicorn-access-log- load-snapshot-publish-interval crash-dump-folder debug-cuda-graph enable-metrics
        enable-mfu-metrics enable-request-time-stats-logging enable-trace trace-modules otlp-
        """,
    ),
    Family("switched-off features", "disable-"),
    Family(
        "code from requests",
        "enable-custom-logit-processor trust-request-chat-template trust-mm-content-hashes tool-server",
        "requests can then run code in the engine, change what other requests get, or call other servers from it",
    ),
    Family(
        "further listeners",
        """
        nccl-port grpc-port grpc-http-sidecar-port smg-http-sidecar-port sidecar gated-launch-port engine-info-bootstrap-port encoder-
        load-publish-endpoint decoupled-spec- kv-events-config enable-forward-pass-metrics
        """,
        "SGLang then exchanges data beside the gate, with any pod that reaches the port and without a credential",
    ),
    Family(
        "other sources of weights",
        """
        remote-instance-weight-loader- modelexpress-config startup-weight-load-mode checkpoint-engine- custom-weight-loader
        enable-elastic-expert-backup elastic-ep- ep-join-
        """,
        "engines can then hold weights or ranks that no weight update has committed",
    ),
)
"""Families of the flags of ``sglang.launch_server``."""

ROUTER_FAMILIES = (
    Family(
        "balancing",
        """
        cache- prefix- least-load- power-of-two- balance- selection- overlap-decay overload- bucket-adjust-interval-secs
        eviction-interval-secs max-tree-size block-size max-idle-secs assignment-mode spill- sticky- kv-index routing-key- dp-aware
        dp-minimum-tokens-scheduler load-monitor-interval disable-load-monitoring job-queue-
        """,
    ),
    Family(
        "limits, time-outs and retries",
        """
        max-payload-size max-buffered-request-bytes max-concurrent-requests max-background-responses queue- rate-limit- request-timeout-secs
        shutdown-grace-period-secs header-read-timeout-secs idle-connection-timeout-secs stream-body-stall-timeout-secs sse-keepalive-secs
        retry- cb- disable-circuit-breaker upstream- priority-scheduler-
        """,
    ),
    Family(
        "health of workers",
        """
        health- disable-health-check remove-unhealthy-workers no- worker-overload- disable-worker-overload-protection worker-stall-secs
        worker-wedge-secs worker-stale-secs worker-warmup- worker-startup- worker-auto-recovery engine-metrics
        """,
    ),
    Family("model and tokenizer", "model-path tokenizer- chat-template disable-tokenizer-autoload reasoning-parser tool-call-parser"),
    Family("images", "multimodal- mm- limit-mm-per-prompt"),
    Family("logs and metrics", "log- prometheus-duration-buckets request-id-headers jemalloc-prof-dir"),
    Family("WebAssembly", "enable-wasm storage-hook-wasm-path", "smg then runs code that callers upload"),
    Family("tools", "mcp-config-path", "requests can then call other servers from the router's pod"),
    Family("mesh", "enable-mesh mesh-", "smg then listens on a further port and takes state from other routers without the coordinator"),
    Family(
        "other control planes",
        """
        enable-igw enable-rl rl- backend zmq- pd- epd- prefill decode encode router-selector rdma- model-id-from kv-connector- kv-engine-id-
        """,
        "smg then changes the list of engines or calls them itself, which only the coordinator may do",
    ),
    Family(
        "credentials of smg",
        "api-key tenant- trust-tenant-header control-plane- jwt- tls- client-cert-path client-key-path ca-cert-paths cors-",
        "the front and the coordinator call smg without credentials, within the pod",
    ),
)
"""Families of the flags of ``smg``."""

AcceptedFlag = Annotated[str, Field(min_length=3, max_length=128, pattern=r"^--[a-z0-9][a-z0-9-]*$")]


def rules_of_families(where: str, families: Iterable[Family], owned: Iterable[str]) -> list[dict[str, str]]:
    """Return the rules of an object with ``args`` and ``acceptFlags`` about flags that need to be accepted.

    Args:
        where: The object's name in messages.
        families: The families of its program's flags.
        owned: Flags that another rule refuses.
    """
    known = [flag for family in families for flag in family.flags]
    refused = [_refusal(where, family) for family in families if family.risk]
    what = (
        f"of no family that this release knows, or an abbreviated flag. Write it in full; if the fleet's engines may change as its help"
        f" says, name it in {where}.acceptFlags, too."
    )
    return [*refused, _rule(where, f"!{_begins(known)} && !(a.split('=')[0] in {list(owned)})", what)]


def _refusal(where: str, family: Family) -> dict[str, str]:
    what = f"of the family '{family.subject}' ({', '.join(family.flags)}): {family.risk}. Leave it out, or name it in {where}.acceptFlags."
    return _rule(where, _begins(family.flags), what)


def _rule(where: str, is_refused: str, what: str) -> dict[str, str]:
    """Return the rule that no flag is refused. Its message names the first refused flag, and continues with ``what``."""
    refused = f"a.startsWith('--') && {is_refused} && !(has(self.acceptFlags) && a.split('=')[0] in self.acceptFlags)"
    named = f"{json.dumps(f'{where}.args has ')} + a.split('=')[0] + {json.dumps(f', a flag {what}')}"
    return rule(
        f"!has(self.args) || !self.args.exists(a, {refused})",
        f"{where}.args has a flag {what}",
        field=".args",
        message_expression=f"self.args.map(a, {refused}, {named})[0]",
    )


def _begins(beginnings: Iterable[str]) -> str:
    return f"{list(beginnings)}.exists(f, a.startsWith(f))"


def family_rows(families: Iterable[Family]) -> Iterator[tuple[str, str, str]]:
    """Yield subject, flags, and risk of each family, for the documentation. The risk is empty for a family that needs no entry."""
    for family in families:
        yield family.subject, " ".join(f"`{flag}{'…' if flag.endswith('-') else ''}`" for flag in family.flags), family.risk
