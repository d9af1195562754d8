"""What is said to a pod of an engine that has several: which one it is, and where pod 0 is. Nothing of it for engines of one pod,
but where their ranks meet if the ports are the node's."""

from __future__ import annotations

from sglang_rollout.api.engine_spec import NODE_RANK_ENV
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object
from sglang_rollout.controller.render.ports import EnginePorts
from sglang_rollout.controller.render.start import GROUP_START_SCRIPT, HANDLER, START_SCRIPT

_RANK = f"$({NODE_RANK_ENV})"
"""Kubernetes puts the variable's value in."""
_IP_ENV = "POD_IP"
"""In brackets where a port follows: it may be an IPv6 address, and around one of IPv4 they do no harm."""

WAIT_SECONDS = 24 * 3600
"""How long a pod may wait for the others of its engine: one of them may pull its image for hours, or wait for a node. How long the engine
itself may take to start is watched by the agents, which know when it began."""


def start_script(rollout: SGLangRollout, checks: str) -> str:
    """Return the first process of an engine's container. ``checks``: shell that runs before anything else."""
    return HANDLER + checks + (GROUP_START_SCRIPT if rollout.spec.engine.pods > 1 else START_SCRIPT)


def server_ranks(rollout: SGLangRollout, engine: str, ports: EnginePorts) -> list[str]:
    """Return the arguments of SGLang that say which pod this is, and where its ranks meet."""
    pods = rollout.spec.engine.pods
    meet = ["--nccl-port", str(ports.nccl)] if ports.on_node else []
    if pods > 1:
        host = leader_host(rollout, engine)
        return [names.NODES_FLAG, str(pods), "--node-rank", _RANK, "--dist-init-addr", f"{host}:{ports.rendezvous}", *meet]
    if ports.on_node and rollout.spec.engine.parallelism.attention_data > 1:
        # Else SGLang would count its ports for attention groups from --port + 233 on, into the blocks of other engines.
        return ["--dist-init-addr", f"127.0.0.1:{ports.rendezvous}", *meet]
    return meet


def agent_ranks(rollout: SGLangRollout, engine: str, ports: EnginePorts) -> list[str]:
    """Return the arguments of the agent that say the same."""
    pods = rollout.spec.engine.pods
    if pods == 1:
        return []
    leader = f"{leader_host(rollout, engine)}:{ports.gate}"
    return ["--nodes", str(pods), "--node-rank", _RANK, "--leader", leader, "--advertise", f"[$({_IP_ENV})]:{ports.gate}"]


def rank_env(rollout: SGLangRollout) -> list[Object]:
    """Return the variable with the pod's place in its engine."""
    if rollout.spec.engine.pods == 1:
        return []
    return [_field(NODE_RANK_ENV, f"metadata.labels['{names.LABEL_POD_INDEX}']")]


def agent_env(rollout: SGLangRollout) -> list[Object]:
    """Return the variables that :func:`agent_ranks` refers to."""
    ranks = rank_env(rollout)
    return [*ranks, _field(_IP_ENV, "status.podIP")] if ranks else []


def leader_host(rollout: SGLangRollout, engine: str) -> str:
    """Return the name by which the other pods find pod 0, ready or not."""
    return f"{names.engine_pod(engine)}.{names.engines_service(rollout.name)}"


def _field(name: str, path: str) -> Object:
    # With apiVersion: the API server would fill it in.
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
