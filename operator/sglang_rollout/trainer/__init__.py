"""The trainer's side of a rollout fleet: one URL to generate with and to push policy weights through.

    from sglang_rollout.trainer import connect

    with connect("http://demo-router:30000", timeout=600) as fleet:
        samples = fleet.generate(["2 + 2 ="], sampling_params={"max_new_tokens": 8}, return_logprob=True)
        ...                                     # your training step
        result = fleet.push(model.state_dict(), version=1)

``import sglang_rollout.trainer`` needs no torch; the first group that is opened does.
"""

from sglang_rollout.trainer.connection import connect, connect_engine
from sglang_rollout.trainer.errors import (
    FailedPrompt,
    FleetError,
    FleetRefused,
    FleetUnreachable,
    FleetUntrusted,
    GenerateFailed,
    GroupFailed,
    PushFailed,
    SnapshotFailed,
)
from sglang_rollout.trainer.fleet import Fleet
from sglang_rollout.trainer.generate import MAX_SAMPLES_PER_PROMPT, Sample, VersionSpan
from sglang_rollout.trainer.push import DEFAULT_BUCKET_BYTES, PushResult
from sglang_rollout.trainer.snapshots import Snapshots

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "MAX_SAMPLES_PER_PROMPT",
    "FailedPrompt",
    "Fleet",
    "FleetError",
    "FleetRefused",
    "FleetUnreachable",
    "FleetUntrusted",
    "GenerateFailed",
    "GroupFailed",
    "PushFailed",
    "PushResult",
    "Sample",
    "SnapshotFailed",
    "Snapshots",
    "VersionSpan",
    "connect",
    "connect_engine",
]
