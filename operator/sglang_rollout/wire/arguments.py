"""Rules for what a trainer sends: labels, tensors, checksums, numbers. Pure. Client, coordinator, agents and stores apply the same rules.

Each function returns a sentence about a wrong value, which begins with the name of the argument; None if the value is right.
"""

from __future__ import annotations

import math
import operator
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sglang_rollout.wire import find_lone_surrogate
from sglang_rollout.wire.reasons import quote_value

MAX_LABEL_CHARACTERS = 256
MAX_TENSOR_NAME_CHARACTERS = 1024
MAX_DIMENSIONS = 64
MAX_PATH_CHARACTERS = 4096
MAX_SIZE = 2**53
"""Above any size of a tensor, and exact in every JSON parser."""
MAX_TENSOR_PARALLEL_DIGITS = 6
"""Digits of an engine's tensor parallel size. Python refuses to parse thousands of digits."""
MAX_SECONDS = 2_000_000.0
"""Longest timeout, 23 days: sockets count milliseconds in 32 bits."""
_MAX_LABEL_BITS = 850
"""A larger integer has more digits than a label may have characters. Python refuses to print thousands of digits."""
_LINE_BREAKING = frozenset({"Cc", "Zl", "Zp"})
"""Unicode categories of control characters, and of separators of lines and paragraphs."""


def find_label_problem(value: object, name: str) -> str | None:
    """Check the label of a version: a text that is not empty, or a whole number that is not negative."""
    number = as_integer(value)
    if number is not None:
        wrong = "negative" if number < 0 else "too large" if number.bit_length() > _MAX_LABEL_BITS else ""
        return f"{name} is {wrong}: use a whole number from 0, with at most {MAX_LABEL_CHARACTERS} digits, or a string." if wrong else None
    if not isinstance(value, str):
        return f"{name} {quote_value(value)} is not a version: use a string or a whole number."
    if not value:
        return f"{name} is empty: use a string or a whole number."
    if len(value) > MAX_LABEL_CHARACTERS:
        return f"{name} is {len(value)} characters long: use at most {MAX_LABEL_CHARACTERS}."
    # Logs, headers and status show labels, and readers of these split them into lines.
    return _find_character_problem(value, name)


def find_tensor_name_problem(value: object, name: str) -> str | None:
    """Check the name of a tensor."""
    if not isinstance(value, str) or not value:
        return f"{name} {quote_value(value)} is not the name of a tensor: use a string that is not empty."
    if len(value) > MAX_TENSOR_NAME_CHARACTERS:
        return f"{name} is {len(value)} characters long: a tensor's name has at most {MAX_TENSOR_NAME_CHARACTERS}."
    return _find_character_problem(value, name)


def find_shape_problem(value: object, name: str) -> str | None:
    """Check the shape of a tensor: a list of whole numbers."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) > MAX_DIMENSIONS:
        return f"{name} {quote_value(value)} is not a shape: use a list of at most {MAX_DIMENSIONS} sizes."
    wrong = [size for size in value if not 0 <= _integer_or(size, -1) < MAX_SIZE]
    return f"{name} has the size {quote_value(wrong[0])}: use whole numbers from 0." if wrong else None


def is_shape(value: object) -> bool:
    """Return True for the shape of a tensor."""
    return find_shape_problem(value, "shape") is None


def find_names_problem(value: object, name: str) -> str | None:
    """Check the names of the tensors of a call."""
    if not isinstance(value, list):
        return f"{name} {quote_value(value)} is no list of names."
    for number, one in enumerate(value):
        if problem := find_tensor_name_problem(one, f"{name}[{number}]"):
            return problem
    twice = next((one for one, times in Counter(value).items() if times > 1), None)
    return f"{name} has {quote_value(twice)} twice: send each tensor once." if twice is not None else None


def find_shapes_problem(value: object, name: str) -> str | None:
    """Check the shapes of the tensors of a call."""
    if not isinstance(value, list):
        return f"{name} {quote_value(value)} is no list of shapes."
    return next(filter(None, (find_shape_problem(shape, f"{name}[{number}]") for number, shape in enumerate(value))), None)


def find_selector_problem(value: object, name: str) -> str | None:
    """Check which models of an engine an update reaches."""
    if value in ("target", "all"):
        return None
    return f"{name} {quote_value(value)} is not offered: use target or all, or leave it out. A version is the model's weights."


def find_folder_problem(value: object, name: str) -> str | None:
    """Check the path of a folder."""
    if not isinstance(value, str) or not value.strip():
        return f"{name} is missing: name the checkpoint's folder, as the engines see it."
    if len(value) > MAX_PATH_CHARACTERS:
        return f"{name} is {len(value)} characters long: use at most {MAX_PATH_CHARACTERS}."
    return _find_character_problem(value, name)


def find_switch_problem(value: object, name: str) -> str | None:
    """Check a field that is true or false."""
    return None if isinstance(value, bool) else f"{name} {quote_value(value)} is neither true nor false."


_SWITCHES = ("flush_cache", "abort_all_requests", "torch_empty_cache", "recapture_cuda_graph")
UPDATE_FIELDS: Mapping[str, Callable[[object, str], str | None]] = {
    "weight_version": find_label_problem,
    "new_version": find_label_problem,
    "names": find_names_problem,
    "shapes": find_shapes_problem,
    "selector": find_selector_problem,
    "model_path": find_folder_problem,
    **dict.fromkeys(_SWITCHES, find_switch_problem),
}
"""The rule of each field of SGLang's calls that bring or name weights."""


def find_update_problem(fields: Mapping[str, object]) -> str | None:
    """Check the fields that a call has and that :data:`UPDATE_FIELDS` names. A label, list or path that is null or empty is left out."""
    given = {name for name in UPDATE_FIELDS.keys() & fields.keys() if name in _SWITCHES or fields[name] not in (None, "")}
    rules = ((find, name) for name, find in UPDATE_FIELDS.items() if name in given)
    return next(filter(None, (find(fields[name], name) for find, name in rules)), None)


def find_checksums_problem(value: object, name: str) -> str | None:
    """Check the checksums of an engine's ranks, by its tensor parallel size as a number or as digits."""
    shape = f'{name} must map an engine\'s tensor parallel size to the checksums of all its ranks: {{"2": ["ab12…", "cd34…"]}}.'
    if not isinstance(value, Mapping):
        return shape
    for size, ranks in value.items():
        digits = size if isinstance(size, str) else str(_integer_or(size, -1))
        is_number = digits.isascii() and digits.isdigit() and len(digits) <= MAX_TENSOR_PARALLEL_DIGITS and int(digits) > 0
        is_list = isinstance(ranks, Sequence) and not isinstance(ranks, str | bytes)
        if not is_number or not is_list or not all(isinstance(rank, str) and rank for rank in ranks):
            return shape
        if len(ranks) != int(digits):
            return f"{name}: an engine of tensor parallel size {digits} needs {digits} checksums, not {len(ranks)}."
        if problem := next(filter(None, (_find_character_problem(rank, name) for rank in ranks)), None):
            return problem
    return None


def find_count_problem(value: object, name: str) -> str | None:
    """Check a whole number of at least 1."""
    number = as_integer(value)
    if number is None:
        return f"{name} is {quote_value(value)} ({type(value).__name__}); expected an integer."
    return None if number >= 1 else f"{name} is {quote_value(number)}; expected at least 1."


def find_number_problem(value: object, name: str) -> str | None:
    """Check a whole number from 0."""
    number = as_integer(value)
    if number is None:
        return f"{name} is {quote_value(value)} ({type(value).__name__}); expected an integer."
    return None if number >= 0 else f"{name} is {quote_value(number)}; expected 0 or more."


def find_seconds_problem(value: object, name: str) -> str | None:
    """Check a timeout: a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} is {quote_value(value)} ({type(value).__name__}); expected a number of seconds."
    if isinstance(value, float) and math.isnan(value):
        return f"{name} is not a number; expected seconds."
    return None if 0 < value <= MAX_SECONDS else f"{name} is out of range; expected more than 0 and at most {MAX_SECONDS:.0f} seconds."


def find_flag_problem(value: object, name: str) -> str | None:
    """Check a value that is true or false."""
    return None if isinstance(value, bool) else f"{name} is {quote_value(value)} ({type(value).__name__}); expected True or False."


def find_text_problem(value: object, name: str) -> str | None:
    """Check a text of printable characters."""
    if not isinstance(value, str) or not value:
        return f"{name} is {quote_value(value)} ({type(value).__name__}); expected a string that is not empty."
    return _find_character_problem(value, name)


def as_integer(value: object) -> int | None:
    """Return a whole number, also one of NumPy; None for anything else, and for true and false."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _integer_or(value: object, otherwise: int) -> int:
    number = as_integer(value)
    return otherwise if number is None else number


def _find_character_problem(value: str, name: str) -> str | None:
    if value.isprintable():
        return None
    if why := find_lone_surrogate({name: value}):
        return why
    if any(unicodedata.category(character) in _LINE_BREAKING for character in value):
        return f"{name} {quote_value(value)} contains a control character, for example a line end: use printable characters."
    return None
