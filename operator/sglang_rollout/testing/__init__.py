"""A stand-in for SGLang servers, for your own tests.

It answers SGLang's HTTP API, joins process groups, ends where SGLang ends, and injects faults on demand.

    from sglang_rollout.testing import StandInFleet, expected_tokens

    with StandInFleet(engines=4) as fleet:
        ...                                                       # your trainer, against fleet.urls
        fleet[2].faults.add("die", "received")                    # the third engine dies at the next update
        fleet[2].restart()

It generates no language. The next token is a hash of the engine's tensors and of the previous tokens, so ``expected_tokens`` shows which
weights answered. Only process groups need torch.
"""

from sglang_rollout.testing.engine import StandIn, StandInFleet
from sglang_rollout.testing.faults import Fault, Hit, Kind, Phase
from sglang_rollout.testing.policy import VOCABULARY, Held, decode, encode, expected_tokens

__all__ = [
    "VOCABULARY",
    "Fault",
    "Held",
    "Hit",
    "Kind",
    "Phase",
    "StandIn",
    "StandInFleet",
    "decode",
    "encode",
    "expected_tokens",
]
