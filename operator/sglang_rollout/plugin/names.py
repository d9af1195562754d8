"""Record the tensors that the engine reads at its start: the names, shapes and types that a complete push has.

SGLang's models ignore unknown names and merge known ones, so the parameters do not tell. A disk update and a draft model call the same
function of the loader; only the first load of the main model counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .process import Hook, find_place, report
from .reports import names_file

log = logging.getLogger(__name__)


@dataclass
class Found:
    """What the hooks of this process know about the tensors of the checkpoint."""

    seen: bool = False
    """True if the load of the main model went through the hooks."""
    file: str = ""
    """Report with the tensors; empty if there is none."""
    unchecked: str = "the plug-in did not see the load of the model"
    """Why there is no list: a clause that names the loader; empty if there is a list."""


@dataclass
class _Load:
    """The load of the main model, while it runs."""

    rows: list[list[Any]] = field(default_factory=list)
    watched: bool = False
    complete: bool = False


class _State:
    found = Found()
    load: _Load | None = None


def find_names() -> Found:
    """Return what this process knows about the tensors of the checkpoint."""
    return _State.found


def watch_load(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the first load of the main model in this process (around ``ModelRunner.load_model``)."""
    if getattr(runner, "is_draft_worker", False) or _State.found.seen:
        return original(runner, *args, **kwargs)
    load = _State.load = _Load()
    try:
        result = original(runner, *args, **kwargs)
    finally:
        _State.load = None
    try:
        _State.found = _finish(load, runner)
    except Exception:
        log.exception("The tensors of the checkpoint cannot be reported.")
        _State.found = Found(unchecked="the plug-in failed to report the tensors of the checkpoint; the engine's log has the error")
    return result


def _finish(load: _Load, runner: Any) -> Found:
    """Write the list of tensors, or say why there is none."""
    form = getattr(runner.load_config.load_format, "value", runner.load_config.load_format)
    if not load.complete:
        loader = type(runner.loader).__name__
        reason = "reads no checkpoint" if form == "dummy" else f"reads the checkpoint with {loader}, which does not show its tensors"
        return Found(seen=True, unchecked=f"the load format {form} {reason}")
    name = names_file(find_place(runner).label)
    content = {
        "load_format": str(form),
        "model": type(runner.model).__name__,
        "tensors": load.rows,
        "complete": True,
        "tied": _is_tied(runner),
    }
    if not report(name, content):
        return Found(seen=True, unchecked="the list of tensors could not be written")
    return Found(seen=True, file=name, unchecked="")


def _is_tied(runner: Any) -> bool:
    """Return whether the model's output layer is its embedding."""
    config = getattr(runner.model_config, "hf_text_config", None) or getattr(runner.model_config, "hf_config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def watch_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Pass the tensors of the checkpoint through a recorder (around ``load_weights_and_postprocess`` of a loader).

    SGLang calls it with ``(model, weights, target_device)``, on a subclass with the loader before them.
    """
    load = _State.load
    if load is None or load.watched or len(args) < 3:
        return original(*args, **kwargs)
    load.watched = True
    place = len(args) - 2
    return original(*args[:place], _record(args[place], load), args[-1], **kwargs)


def _record(weights: Iterable[tuple[str, Any]], load: _Load) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights:
        load.rows.append([str(name), [int(size) for size in tensor.shape], str(tensor.dtype).removeprefix("torch.")])
        yield name, tensor
    load.complete = True


_LOADERS = "sglang.srt.model_loader.loader"
HOOKS = (
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", "AROUND", watch_load),
    Hook(f"{_LOADERS}.DefaultModelLoader.load_weights_and_postprocess", "AROUND", watch_weights),
    Hook(f"{_LOADERS}.QuantizedRLModelLoader.load_weights_and_postprocess", "AROUND", watch_weights),
)
