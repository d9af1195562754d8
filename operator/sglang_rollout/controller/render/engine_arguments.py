"""Arguments and environment variables of an engine's processes: SGLang and the agent."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sglang_rollout.api.engine_flags import FLAGS, EngineFlags
from sglang_rollout.api.engine_spec import NODE_RANK_ENV
from sglang_rollout.api.network_spec import CACHE_VARIABLES, MEMORY_CHECK, NETWORK_VARIABLES, OFFLINE_VARIABLES
from sglang_rollout.api.sharing_spec import Mode
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names, plugin, staging, tls
from sglang_rollout.controller.render.common import HOME_ENV, Object
from sglang_rollout.controller.render.names import OF_POD, EnginePorts
from sglang_rollout.controller.render.storage import CACHE_DIR
from sglang_rollout.wire.states import BASE_LABEL

_RANK = f"$({NODE_RANK_ENV})"
"""Index of the pod in its engine; Kubernetes inserts the variable's value."""
_IP_ENV = "POD_IP"


def server_args(rollout: SGLangRollout, ranks: Sequence[str] = (), ports: EnginePorts = OF_POD) -> list[str]:
    """Return the arguments of ``sglang.launch_server``.

    The user's arguments come last. The CRD refuses arguments that would override the operator's.

    Args:
        rollout: The rollout.
        ranks: Result of :func:`server_ranks`.
        ports: Ports of the engine.
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
    for flag, size in (
        ("--pp-size", sizes.pipeline),
        ("--dp-size", sizes.data),
        ("--ep-size", sizes.expert),
        ("--attn-dp-size", sizes.attention_data),
    ):
        if size > 1:
            args += [flag, str(size)]
    lora = engine.lora.arguments() if engine.lora is not None else []
    return [*args, *staging.engine_arguments(rollout), *_flags(engine), *lora, *engine.args]


def server_ranks(rollout: SGLangRollout, engine: str, ports: EnginePorts) -> list[str]:
    """Return the arguments of SGLang about the pods of an engine: which pod this is, and where all ranks meet."""
    pods = rollout.spec.engine.pods
    nccl = ["--nccl-port", str(ports.nccl)] if ports.on_node else []
    if pods > 1:
        address = f"{_head_pod_host(rollout, engine)}:{ports.rendezvous}"
        return [names.NODES_FLAG, str(pods), "--node-rank", _RANK, "--dist-init-addr", address, *nccl]
    if ports.on_node and rollout.spec.engine.parallelism.attention_data > 1:
        # Without it SGLang uses ports for attention groups from --port + 233 on, in the blocks of other engines.
        return ["--dist-init-addr", f"127.0.0.1:{ports.rendezvous}", *nccl]
    return nccl


def agent_args(rollout: SGLangRollout, engine: str, ports: EnginePorts) -> list[str]:
    """Return the arguments of the agent."""
    args = [
        *("--name", engine),
        *("--engine-url", f"http://127.0.0.1:{ports.engine}"),
        *("--listen", f"unix@{names.AGENT_SOCKET}"),
        *("--gate-socket", names.GATE_SOCKET),
        *("--state-dir", names.AGENT_STATE_DIR),
        *("--token-file", names.TOKEN_FILE),
        *("--boot-file", names.BOOT_FILE),
        *("--tensor-size", str(rollout.spec.engine.parallelism.tensor)),
        *("--model-path", rollout.spec.model.path),
    ]
    pods = rollout.spec.engine.pods
    if pods > 1:
        head = f"{_head_pod_host(rollout, engine)}:{ports.gate}"
        # Brackets, because the address may be IPv6. Around IPv4 they are ignored.
        args += ["--nodes", str(pods), "--node-rank", _RANK, "--leader", head, "--advertise", f"[$({_IP_ENV})]:{ports.gate}"]
        args += ["--start-seconds", str(rollout.spec.engine.start_seconds)]
    if rollout.spec.mode is Mode.HYBRID:
        args.append("--takes-tensors")
    args += plugin.agent_arguments(rollout)
    # A co-located trainer calls each engine by itself. The agent forwards such calls to the coordinator.
    return [*args, *staging.agent_arguments(rollout), *tls.agent_arguments(rollout)]


def engine_environment(rollout: SGLangRollout) -> list[Object]:
    """Return all environment variables of the engine's container, the user's last."""
    # A health check that generates tokens would fail during every weight update, because the engine is paused.
    health: Object = {"name": "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "value": "false"}
    own = [variable.model_dump(mode="json", by_alias=True, exclude_none=True) for variable in rollout.spec.engine.env]
    return [health, plugin.engine_variable(rollout), *_rank_variables(rollout), *engine_variables(rollout), *own]


def agent_environment(rollout: SGLangRollout) -> list[Object]:
    """Return all environment variables of the agent's container."""
    ranks = _rank_variables(rollout)
    return [HOME_ENV, *ranks, _field_variable(_IP_ENV, "status.podIP")] if ranks else [HOME_ENV]


def engine_variables(rollout: SGLangRollout) -> list[Object]:
    """Return the variables that fields of the spec set. The CRD refuses the same names in ``engine.env``."""
    engine = rollout.spec.engine
    values: dict[str, str] = {}
    for field, variables in NETWORK_VARIABLES.items():
        value = getattr(engine.network, field) if engine.network else None
        if value is not None:
            values |= dict.fromkeys(variables, _nccl_value(value))
    if not engine.check_memory_balance:
        values[MEMORY_CHECK] = "false"
    if engine.cache:
        values |= {name: CACHE_DIR + folder for name, folder in CACHE_VARIABLES.items()}
    if rollout.spec.model.offline:
        values |= dict.fromkeys(OFFLINE_VARIABLES, "1")
    return [{"name": name, "value": value} for name, value in values.items()]


def _rank_variables(rollout: SGLangRollout) -> list[Object]:
    label = f"metadata.labels['{names.LABEL_POD_INDEX}']"
    return [_field_variable(NODE_RANK_ENV, label)] if rollout.spec.engine.pods > 1 else []


def _field_variable(name: str, path: str) -> Object:
    """Return a variable with a field of the pod. ``apiVersion`` is what the API server would fill in."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _head_pod_host(rollout: SGLangRollout, engine: str) -> str:
    """Return the host name of an engine's head pod, which resolves also while the pod is not ready."""
    return f"{names.engine_pod(engine)}.{names.engines_service(rollout.name)}"


def _flags(engine: EngineFlags) -> list[str]:
    """Return the flags of the fields that are set. SGLang writes values of enums in lower case."""
    args = []
    for field, flag in FLAGS.items():
        value = getattr(engine, field)
        if value is None or value is False:
            continue
        if value is True:
            args.append(flag)
        elif field.endswith("_percent"):
            args += [flag, f"{value / 100:g}"]
        else:
            args += [flag, value.lower() if isinstance(value, StrEnum) else str(value)]
    return args


def _nccl_value(value: str | int | StrEnum) -> str:
    """Return a value as NCCL reads it: switches are 0 and 1, log levels are in capitals."""
    if isinstance(value, bool):
        return str(int(value))
    return value.upper() if isinstance(value, StrEnum) else str(value)
