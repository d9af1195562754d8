"""Batched ``/generate`` bodies, which are split into single requests, and the join of their answers. Pure.

SGLang accepts lists of prompts with lists of nearly every other field. smg accepts few of these fields, and sends a whole batch to one
engine. The rules here are those of SGLang's ``GenerateReqInput.normalize_batch_and_arguments`` (0.5.23), with its error messages.

Engines see single requests, so the limits of a whole batch are checked here, with the codes of the plug-in, which checks each request.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from sglang_rollout.api.limits_spec import Limits
from sglang_rollout.json_text import load_json

Item = dict[str, Any]

_PER_ITEM = ("lora_path", "lora_id", "video_data", "audio_data", "positional_embed_overrides")
"""A list holds one value for each prompt; any other value is for all prompts."""
_COUNTED = ("watermark", "return_hidden_states", "extra_key", "cache_salt", "kv_hints")
"""As ``_PER_ITEM``, and SGLang refuses a list of another length."""
_NOT_SAMPLED = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask", "sampling_logprobs_mode")
"""As ``_PER_ITEM``, but SGLang refuses a list together with several samples of each prompt."""
_PLACEMENT = ("bootstrap_host", "bootstrap_port", "bootstrap_pair_key", "decode_tp_size")
_NESTED = ("multi_item_delimiter_indices", "token_indices_to_pool")
_HASHES = ("mm_hashes", "mm_content_hashes")
"""One hash, or a list of them, for each prompt."""

_OMITTED = ("text", "input_ids", "input_embeds", "modalities")
"""Fields that an item does not inherit. SGLang uses one form of the prompt, and derives modalities from the images."""
_SAMPLE_FIELDS = ("n", "best_of", "beam_width")
"""Sampling parameters that count the samples of each prompt."""
_LARGEST_COUNT = 10**18
"""Larger numbers of samples count as this number, because Python cannot format every integer as a float."""
_OBJECT = re.compile(rb'\s*\{\s*["}]')
"""Start of a JSON object in UTF-8. Python also reads other encodings and a byte order mark."""


class BatchError(Exception):
    """SGLang or a limit refuses this request. The message is SGLang's where it has one.

    Args:
        message: The reason.
        code: Code of the plug-in's rule; None for the refusals of SGLang.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Same:
    """One value for all prompts."""

    value: Any


Column = Sequence[Any] | _Same
"""A field of a batch: a value for each prompt, or one for all of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, whose single requests are made only when they are sent, in order."""

    size: int
    """Number of prompts."""
    samples: int
    """Completions of each prompt (``n``)."""
    stream: bool
    common: dict[str, Any]
    """Fields that are the same for all prompts."""
    columns: dict[str, Sequence[Any]]
    """Fields with a value for each prompt."""

    def item(self, index: int) -> Item:
        """Return the request of one prompt."""
        return {**self.common, **{key: column[index] for key, column in self.columns.items() if column[index] is not None}}

    def drop_fields(self) -> None:
        """Free the memory of all fields when no further request will be made."""
        self.common.clear()
        self.columns.clear()


def parse(data: bytes) -> dict[str, Any]:
    """Return the fields of a request. Raises BatchError."""
    if not _OBJECT.match(data):
        raise BatchError("The body is not a JSON object in UTF-8.", "unreadable_body")
    try:
        found: dict[str, Any] = load_json(data)
    except ValueError as error:
        raise BatchError(f"The body is not a JSON object in UTF-8: {error}.", "unreadable_body") from None
    return found


def split(body: Mapping[str, Any], limits: Limits) -> Batch | None:
    """Return the single requests of a batch; None if the body holds one prompt or none. Raises BatchError."""
    prompts = _prompts(body)
    if prompts is None:
        return None
    key, rows = next(iter(prompts.items()))
    size = len(rows)
    _check_limits(body, key, size, limits)
    sampling = _sampling(body.get("sampling_params"), size)
    samples = _samples(sampling)
    columns: dict[str, Column] = {**prompts, "sampling_params": sampling, "rid": _rids(body.get("rid"), size)}
    for key in _PER_ITEM + _PLACEMENT:
        columns[key] = _column(body, key, size)
    for key in _COUNTED:
        columns[key] = _column(body, key, size, length_error=f"The length of {key} should be equal to the batch size.")
    for key in (*_NOT_SAMPLED, "custom_logit_processor"):
        if samples > 1 and isinstance(body.get(key), list):
            raise BatchError(f"Cannot use list {key} with parallel_sample_num > 1")
        columns[key] = _column(body, key, size)
    columns["token_ids_logprob"] = _token_ids(body.get("token_ids_logprob"), size, samples)
    columns["image_data"] = _images(body.get("image_data"), size)
    for key in _HASHES:
        column = _column(body, key, size, length_error=f"The length of {key} should equal the batch size")
        columns[key] = _Same(_as_list(column.value)) if isinstance(column, _Same) else [_as_list(value) for value in column]
    for key in _NESTED:
        columns[key] = _column(body, key, size, takes=_is_nested)
    room = body.get("bootstrap_room")
    columns["bootstrap_room"] = [room + i for i in range(size)] if isinstance(room, int) else _column(body, "bootstrap_room", size)
    common = {key: value for key, value in body.items() if key not in columns and key not in _OMITTED}
    common |= {key: column.value for key, column in columns.items() if isinstance(column, _Same) and column.value is not None}
    varying = {key: column for key, column in columns.items() if not isinstance(column, _Same)}
    return Batch(size, samples, bool(body.get("stream")), common, varying)


def join(answers: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of one JSON list of the single answers in order. An answer with several samples is a list itself and is flattened.

    Works on bytes: with logprobs an answer has megabytes, and parsing them would block the event loop.
    """
    before = b"["
    for answer in answers:
        if items := _list_items(answer):
            yield before
            yield items
            before = b","
    yield b"]" if before == b"," else b"[]"


def add_index(event: bytes, item: int, samples: int) -> bytes:
    """Return an event (JSON) of one item's stream with its index in the batch, as SGLang numbers it."""
    fields = load_json(event)
    own = fields.get("index")
    fields["index"] = item * samples + (own if isinstance(own, int) else 0)
    return encode(fields)


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return compact JSON. A lone surrogate, which UTF-8 cannot encode, stays an escape, and the receiver refuses it. Raises BatchError."""
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(fields, separators=(",", ":")).encode()
    except RecursionError:
        raise BatchError("The body nests too deep.", "unreadable_body") from None


def _list_items(answer: bytes) -> bytes:
    answer = answer.strip()
    return answer[1:-1].strip() if answer.startswith(b"[") and answer.endswith(b"]") else answer


def _prompts(body: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """Return the columns that make a body a batch. ``text`` wins over ``input_ids``, and both win over ``input_embeds``."""
    text, ids, embeds = body.get("text"), body.get("input_ids"), body.get("input_embeds")
    if text is not None:
        if not isinstance(text, list):
            return None
        both = isinstance(ids, list) and len(ids) == len(text)
        return {"text": text, "input_ids": ids} if both and ids is not None else {"text": text}
    if ids is not None:
        return {"input_ids": ids} if isinstance(ids, list) and ids and isinstance(ids[0], list) else None
    deep = isinstance(embeds, list) and embeds and _is_nested(embeds) and embeds[0] and isinstance(embeds[0][0], list)
    return {"input_embeds": embeds} if deep and isinstance(embeds, list) else None


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _column(
    body: Mapping[str, Any],
    key: str,
    size: int,
    *,
    length_error: str | None = None,
    takes: Callable[[Any], TypeGuard[list[Any]]] = _is_list,
) -> Column:
    value = body.get(key)
    if not takes(value):
        return _Same(value)
    if len(value) < size or (length_error and len(value) != size):
        raise BatchError(length_error or f"{key} has {len(value)} entries for {size} prompts.")
    return value


def _sampling(value: Any, size: int) -> Column:
    if isinstance(value, list) and len(value) != size:
        raise BatchError(f"sampling_params has {len(value)} entries for {size} prompts.")
    return value if isinstance(value, list) else _Same(value)


def _samples(sampling: Column) -> int:
    """Return the number of completions of each prompt. Raises BatchError if it differs."""
    values = [sampling.value] if isinstance(sampling, _Same) else sampling
    counts = [params.get("n", 1) if isinstance(params, Mapping) else 1 for params in values]
    if any(count != counts[0] for count in counts):
        raise BatchError("The parallel_sample_num should be the same for all samples in sample params.")
    count = next(iter(counts), 1)
    return count if isinstance(count, int) and count > 1 else 1


def _rids(value: Any, size: int) -> Column:
    if value is None:
        return _Same(None)
    if isinstance(value, str):
        return [f"{value}_{i}" for i in range(size)]
    if not isinstance(value, list):
        raise BatchError("The rid should be a string or a list of strings.")
    if len(value) != size:
        raise BatchError("The specified rids length mismatch with the batch_size for batch processing.")
    duplicates = [rid for rid, count in Counter(map(str, value)).items() if count > 1]
    if duplicates:
        raise BatchError(f"Duplicate request IDs detected within the request: {duplicates}")
    return value


def _token_ids(value: Any, size: int, samples: int) -> Column:
    if not value:
        return _Same(None)
    if not _is_nested(value):
        return _Same(_as_list(value))
    if samples > 1:
        raise BatchError("Cannot use list token_ids_logprob with parallel_sample_num > 1")
    return _column({"token_ids_logprob": value}, "token_ids_logprob", size)


def _images(value: Any, size: int) -> Column:
    if not isinstance(value, list):
        return _Same(value)
    if value and len(value) != size:
        raise BatchError("The length of image_data should be equal to the batch size.")
    return [None if images == [None] else images for images in value] or _Same(None)


def _as_list(value: Any) -> Any:
    return value if value is None or isinstance(value, list) else [value]


def _is_nested(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _sampling_params(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the sampling parameters of all prompts, or those for each prompt."""
    given = body.get("sampling_params")
    return [params for params in (given if isinstance(given, list) else [given]) if isinstance(params, Mapping)]


def _check_limits(body: Mapping[str, Any], key: str, size: int, limits: Limits) -> None:
    if size > limits.prompts_per_request:
        raise _above_limit(f"The number of prompts in {key}", size, limits.prompts_per_request, "promptsPerRequest")
    values = (params.get(name) for params in _sampling_params(body) for name in _SAMPLE_FIELDS)
    samples = size * min(max((value for value in values if isinstance(value, int | float)), default=1), _LARGEST_COUNT)
    if samples > limits.samples_per_request:
        raise _above_limit("The number of samples of all prompts", samples, limits.samples_per_request, "samplesPerRequest")


def _above_limit(subject: str, number: float, limit: int, name: str) -> BatchError:
    return BatchError(f"{subject} is {number:.14g}, above the limit of {limit}; engine.limits.{name} raises it.", "above_limit")
