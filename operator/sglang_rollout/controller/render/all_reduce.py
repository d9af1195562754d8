"""The part of an engine's start that measures how fast its ranks talk to one another (``engine.preflight.allReduce``).

Within each pod, not over the pods of an engine: what is slow then is this node and no other. It runs before the pod tells the others
that it is there, so they wait for it as they wait for a pod that is pulling its image.
"""

from __future__ import annotations

import itertools
import shlex
from importlib import resources

from sglang_rollout.api.engine_spec import NODE_NAME_ENV
from sglang_rollout.api.sharing_spec import Mode
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.api.weights_spec import Backend
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object

SECONDS = 300
"""How long it may take: torch is loaded for the first time on this node, once per rank, and NCCL looks at all devices and links."""

_PROGRAM = (resources.files("sglang_rollout.controller.render") / "programs" / "all_reduce.py").read_text()


def all_reduce(rollout: SGLangRollout) -> str:
    """Return the part of the start script; empty if nobody asked for it."""
    engine = rollout.spec.engine
    if engine.preflight is None:
        return ""
    wanted = engine.preflight.all_reduce
    arguments = [
        *("--backend", _backend(rollout).value),
        *("--ranks", str(engine.pod_gpus)),
        *("--megabytes", str(wanted.megabytes)),
        *("--floor", str(wanted.floor or 0)),
        *("--seconds", str(SECONDS)),
        *("--file", names.ALL_REDUCE_FILE),
    ]
    # In the background: a shell hears of a signal between two commands only. Without the boot file of the life before, for whose
    # ranks the other pods would wait all the time.
    return f"""\
rm -f {names.BOOT_FILE}
python3 -c {shlex.quote(_PROGRAM)} {" ".join(arguments)} --node "${NODE_NAME_ENV}" &
wait $! || exit $?
"""


def _backend(rollout: SGLangRollout) -> Backend:
    """NCCL where the engine computes on GPUs: its own, or the trainer's, of which no resource tells."""
    spec = rollout.spec
    if spec.engine.gpu_resource:
        return Backend.NCCL
    words = spec.engine.args
    on_cpu = "--device=cpu" in words or ("--device", "cpu") in itertools.pairwise(words)
    return Backend.GLOO if spec.mode is Mode.STANDALONE or on_cpu else spec.weights.backend


def node_env(rollout: SGLangRollout) -> list[Object]:
    """Return the variable with the name of the node."""
    if rollout.spec.engine.preflight is None:
        return []
    return [{"name": NODE_NAME_ENV, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}}}]
