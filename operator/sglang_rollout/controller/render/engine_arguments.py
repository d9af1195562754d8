"""Arguments and environment variables of an engine's processes: SGLang and the agent."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sglang_rollout.api.engine_flags import FLAGS, EngineKnobs
from sglang_rollout.api.engine_spec import NODE_RANK_ENV
from sglang_rollout.api.network_spec import CACHE_VARIABLES, MEMORY_CHECK, NETWORK_VARIABLES, OFFLINE_VARIABLES
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object
from sglang_rollout.controller.render.names import OF_POD, EnginePorts
from sglang_rollout.controller.render.storage import CACHE_DIR
from sglang_rollout.wire.states import BASE_LABEL


def server_args(rollout: SGLangRollout, ranks: Sequence[str] = (), ports: EnginePorts = OF_POD) -> list[str]:
    """What the operator owns comes first; the API server has refused user arguments that would override it.

    ``ranks``: where the pod stands in its engine, if that has several.
    """
    model, engine = rollout.spec.model, rollout.spec.engine
    sizes = engine.parallelism
    args = [
        *("--host", "127.0.0.1", "--port", str(ports.engine)),
        *("--model-path", model.path),
        *("--load-format", model.load_format),
        *("--tp-size", str(sizes.tensor)),
        *("--weight-version", BASE_LABEL),
        *ranks,
    ]
    if model.served_name:
        args += ["--served-model-name", model.served_name]
    if model.trust_remote_code:
        args.append("--trust-remote-code")
    if sizes.pipeline > 1:
        args += ["--pp-size", str(sizes.pipeline)]
    if sizes.data > 1:
        args += ["--dp-size", str(sizes.data)]
    if sizes.expert > 1:
        args += ["--ep-size", str(sizes.expert)]
    if sizes.attention_data > 1:
        args += ["--attn-dp-size", str(sizes.attention_data)]
    lora = engine.lora.arguments() if engine.lora is not None else []
    return [*args, *_knobs(engine), *lora, *engine.args]


def _knobs(knobs: EngineKnobs) -> list[str]:
    """Flags of the fields that are set."""
    args = []
    for field, flag in FLAGS.items():
        value = getattr(knobs, field)
        if value is None or value is False:
            continue
        args += [flag] if value is True else [flag, _text(field, value)]
    return args


def _text(field: str, value: int | str) -> str:
    if field.endswith("_percent"):
        return f"{int(value) / 100:g}"
    # Enums are written as Kubernetes does, SGLang wants them in lower case.
    return value.lower() if isinstance(value, StrEnum) else str(value)


_RANK = f"$({NODE_RANK_ENV})"
"""Kubernetes puts the variable's value in."""
_IP_ENV = "POD_IP"
"""In brackets where a port follows: it may be an IPv6 address, and around one of IPv4 they do no harm."""

WAIT_SECONDS = 24 * 3600
"""How long a pod may wait for the others of its engine: one of them may pull its image for hours, or wait for a node. How long the engine
itself may take to start is watched by the agents, which know when it began."""


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


def engine_variables(rollout: SGLangRollout) -> list[Object]:
    """Return those of the fields that are set; the API server has refused the same names in ``engine.env``."""
    engine = rollout.spec.engine
    made: dict[str, str] = {}
    for field, variables in NETWORK_VARIABLES.items():
        value = getattr(engine.network, field) if engine.network else None
        if value is not None:
            made |= dict.fromkeys(variables, _variable_text(value))
    if not engine.check_memory_balance:
        made[MEMORY_CHECK] = "false"
    if engine.cache:
        made |= {name: CACHE_DIR + below for name, below in CACHE_VARIABLES.items()}
    if rollout.spec.model.offline:
        made |= dict.fromkeys(OFFLINE_VARIABLES, "1")
    return [{"name": name, "value": value} for name, value in made.items()]


def capabilities(rollout: SGLangRollout) -> Object:
    """Return what the container may do beyond others: RDMA pins memory, more than an unprivileged process may."""
    return {"capabilities": {"add": ["IPC_LOCK"]}} if rollout.spec.engine.rdma else {}


def _variable_text(value: str | int | StrEnum) -> str:
    """NCCL's switches are 0 and 1, its levels of logging are in capitals."""
    if isinstance(value, bool):
        return str(int(value))
    return value.upper() if isinstance(value, StrEnum) else str(value)
