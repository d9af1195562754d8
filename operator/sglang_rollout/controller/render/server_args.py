"""The arguments of ``sglang.launch_server``, from the fields of the custom resource."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sglang_rollout.api.engine_knobs import FLAGS, EngineKnobs
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render.ports import OF_POD, EnginePorts
from sglang_rollout.wire.weights import BASE_LABEL


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
