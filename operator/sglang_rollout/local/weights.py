"""Options of ``sglang-rollout local`` that are fields of ``spec.weights``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from sglang_rollout.api.weights_spec import ActivationStrategy, SnapshotVolume, Staging, Store, StoreSnapshots, VersionPolicy, Weights
from sglang_rollout.json_text import load_json


def parse_weights(
    text: str,
    defaults: Mapping[str, Any],
    *,
    size_limit: str | None,
    snapshots: Path | None,
    activation: str | None,
) -> Weights:
    """Return the settings of the options. Those besides ``--weights`` apply unless its text sets the same field.

    Args:
        text: ``--weights``, as JSON.
        defaults: Fields of the settings.
        size_limit: ``--staging-size-limit``.
        snapshots: ``--snapshots``.
        activation: ``--activation``.

    Raises:
        click.UsageError: The options contradict each other, or an option is malformed.
    """
    try:
        weights = Weights.model_validate_json(_add_size_limit(text, size_limit))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise click.BadParameter(f"{where + ': ' if where else ''}{first['msg']}", param_hint="--weights") from None
    weights = weights.model_copy(update={key: value for key, value in defaults.items() if key not in weights.model_fields_set})
    return _with_activation(_with_snapshots(_with_staging(weights, size_limit), snapshots), activation)


def _add_size_limit(text: str, size_limit: str | None) -> str:
    """Return the text of ``--weights`` with ``staging.sizeLimit``, if it has ``staging`` without the field that the spec demands."""
    try:
        values = load_json(text)
    except ValueError:
        return text  # the check of the whole text says where it is wrong
    staging = values.get("staging") if isinstance(values, dict) else None
    if size_limit is None or not isinstance(staging, dict):
        return text
    return json.dumps({**values, "staging": {"sizeLimit": size_limit, **staging}})


def _with_staging(weights: Weights, size_limit: str | None) -> Weights:
    """Return the settings with ``--staging-size-limit``. The rules are those of the custom resource."""
    staging = weights.staging
    if size_limit is not None and staging is None:
        try:
            staging = Staging(size_limit=size_limit)
        except ValidationError as error:
            raise click.BadParameter(f"{error.errors()[0]['msg']}: write 20Gi or 500M", param_hint="--staging-size-limit") from None
    if not weights.is_staged and (staging or weights.store):
        raise click.UsageError("--staging-size-limit and weights.store belong to --transport Staged: set the transport, or leave them out")
    if weights.is_staged and staging is None:
        raise click.UsageError("--transport Staged needs --staging-size-limit, the maximum bytes of one version, such as 20Gi")
    if weights.is_staged and weights.catch_up.disk:
        raise click.UsageError(
            "--transport Staged needs no catchUp.disk: an engine that restarts loads a copy of the version. Leave it out"
        )
    return weights.model_copy(update={"staging": staging})


def _with_snapshots(weights: Weights, folder: Path | None) -> Weights:
    """Return the settings with ``--snapshots``."""
    store = weights.store or Store()
    if folder is not None and not weights.is_staged:
        raise click.UsageError("--snapshots belongs to --transport Staged: set the transport, or leave it out")
    if folder is not None:
        volume = SnapshotVolume(host_path=str(folder.absolute()))
        known = store.snapshots
        kept = StoreSnapshots(volume=volume) if known is None else known.model_copy(update={"volume": volume})
        return weights.model_copy(update={"store": store.model_copy(update={"snapshots": kept})})
    if store.snapshots is not None and store.snapshots.volume.host_path is None:
        raise click.UsageError("weights.store.snapshots.volume needs hostPath without Kubernetes, or pass --snapshots DIR")
    return weights


def _with_activation(weights: Weights, strategy: str | None) -> Weights:
    """Return the settings with ``--activation``, which ``--weights`` overrides. The rules are those of the custom resource."""
    chosen = weights.activation
    if strategy is not None and "strategy" not in chosen.model_fields_set:
        chosen = chosen.model_copy(update={"strategy": ActivationStrategy(strategy)})
    if chosen.strategy is not ActivationStrategy.ROLLING:
        return weights
    if not weights.is_staged:
        raise click.UsageError("--activation Rolling belongs to --transport Staged: set the transport, or leave it out")
    policy = {"version_policy": VersionPolicy.MAX_STALENESS, "max_staleness": weights.max_staleness or 1}
    if weights.version_policy is not VersionPolicy.MAX_STALENESS and "version_policy" in weights.model_fields_set:
        raise click.UsageError(
            "--activation Rolling needs versionPolicy MaxStaleness: engines that wait serve the version before. Leave versionPolicy out"
        )
    return weights.model_copy(update={"activation": chosen, **policy})
