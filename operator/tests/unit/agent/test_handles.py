"""Pickles of trainers: handles of tensors pass, and nothing that runs code does."""

from __future__ import annotations

import base64
import json
import operator
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.agent.guards import handles_refusal
from sglang_rollout.agent.handles import find_problem

HANDLES: dict[str, str] = json.loads(Path(__file__).with_name("handles.json").read_text())
"""Written by torch and SGLang (``tests/contract/support/trainers/handles.py``)."""
RANKS = "one pickle for each rank"


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: object, state: object = None) -> None:
        self.reduced = (function, arguments, *([] if state is None else [state]))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def nest(payload: bytes | str) -> str:
    """Return the pickle of one rank, replaced in what SGLang's weight_sync writes."""
    kind = b"\x80\x04" + text("sglang.srt.model_executor.model_runner") + text("LocalSerializedTensor") + b"\x93)\x81}" + text("values")
    data = payload.encode() if isinstance(payload, str) else payload
    constant = (b"X" if isinstance(payload, str) else b"B") + len(data).to_bytes(4, "little") + data
    return encode(kind + b"](" + constant + b"esb.")


@pytest.mark.parametrize("kind", HANDLES)
def test_handles_of_torch_and_sglang_are_accepted(kind: str) -> None:
    assert find_problem(HANDLES[kind]) == ""


def test_every_truncation_is_refused() -> None:
    data = base64.b64decode(HANDLES[RANKS])
    assert all("no complete pickle" in find_problem(encode(data[:end])) for end in range(len(data)))


SYSTEM = Calls(os.system, "id")
PARTIAL = name("torch", "Size")
ATTACKS: dict[str, tuple[bytes, str]] = {
    "os.system, protocol 0": (pickle.dumps(SYSTEM, 0), "has the operation GLOBAL"),
    "os.system, protocol 2": (pickle.dumps(SYSTEM, 2), "has the operation GLOBAL"),
    "os.system, protocol 4": (pickle.dumps(SYSTEM, 4), "names posix.system"),
    "os.system, protocol 5": (pickle.dumps(SYSTEM, 5), "names posix.system"),
    "builtins.eval": (pickle.dumps(Calls(eval, "1"), 4), "names builtins.eval"),
    "builtins.getattr": (pickle.dumps(Calls(getattr, 1, "real"), 4), "names builtins.getattr"),
    "builtins.__import__": (pickle.dumps(Calls(__import__, "os"), 4), "names builtins.__import__"),
    "operator.attrgetter": (pickle.dumps(Calls(operator.attrgetter, "a.b"), 4), "names operator.attrgetter"),
    "subprocess.Popen": (pickle.dumps(Calls(subprocess.Popen, ["id"]), 4), "names subprocess.Popen"),
    "names through the memo": (
        b"\x80\x04" + text("posix") + b"\x94" + text("system") + b"\x94" + b"00h\x00h\x01\x93" + text("id") + b"\x85R.",
        "has the operation POP",
    ),
    "names through the memo, left on the stack": (
        b"\x80\x04" + text("posix") + b"\x94" + text("system") + b"\x94" + b"h\x00h\x01\x93" + text("id") + b"\x85R.",
        "names posix.system",
    ),
    "a computed name": (b"\x80\x04" + PARTIAL + b")R" + text("system") + b"\x93.", "computes a name"),
    "torch.load": (b"\x80\x04" + name("torch", "load") + b".", "names torch.load"),
    "a nested torch.load": (b"\x80\x04" + name("torch.storage", "_load_from_bytes") + b".", "names torch.storage._load_from_bytes"),
    "a name below an allowed one": (b"\x80\x04" + name("torch", "Tensor.__class__") + b".", "names torch.Tensor.__class__"),
    "a call of a class": (
        b"\x80\x04" + name("torch.storage", "UntypedStorage") + b"K\x01\x85R.",
        "calls torch.storage",
    ),
    "a value called": (b"\x80\x04" + text("a") + b")R.", "calls a value"),
    "an object of a function": (b"\x80\x04" + PARTIAL + b")\x81.", "makes objects of torch.Size"),
    "attributes of a class": (
        b"\x80\x04" + name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorBucket") + b"N}" + text("a") + PARTIAL + b"s\x86b.",
        "sets attributes",
    ),
    "a class by INST": (b"(ios\nsystem\n.", "has the operation INST"),
    "an extension": (b"\x80\x04\x82\x01.", "has the operation EXT1"),
    "a persistent ID": (b"\x80\x04K\x01Q.", "has the operation BINPERSID"),
    "a buffer": (b"\x80\x05\x97.", "has the operation NEXT_BUFFER"),
    "an unknown operation": (b"\x80\x04\xff.", "no complete pickle"),
    "an empty stack": (b"\x80\x04R.", "no complete pickle"),
    "an empty memo": (b"\x80\x04h\x05.", "no complete pickle"),
    "not a pickle": (b"hello", "no complete pickle"),
    "nothing": (b"", "no complete pickle"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_other_pickles_are_refused(attack: str) -> None:
    data, sentence = ATTACKS[attack]
    assert sentence in find_problem(encode(data))


@pytest.mark.parametrize("attack", ATTACKS)
def test_pickles_inside_of_pickles_are_refused_alike(attack: str) -> None:
    data, sentence = ATTACKS[attack]
    assert sentence in find_problem(nest(data))
    if len(encode(data)) > 8:
        assert sentence in find_problem(nest(encode(data)))


def test_only_one_pickle_lies_inside_of_another() -> None:
    inner = base64.b64decode(HANDLES["tensors on a GPU"])
    assert find_problem(nest(inner)) == find_problem(nest(encode(inner))) == ""
    assert "LocalSerializedTensor inside of" in find_problem(nest(base64.b64decode(HANDLES[RANKS])))


@pytest.mark.parametrize("item", [None, 5, b"AAAA", "no base64!", "AAA", "AAAA\n", "AB==", "\u00e9\u00e9\u00e9\u00e9"], ids=repr)
def test_items_that_are_no_base64_are_refused(item: object) -> None:
    assert "base64" in find_problem(item) or "no string" in find_problem(item)


def test_the_refusal_names_the_call_and_what_is_wrong() -> None:
    good = HANDLES[RANKS]
    assert handles_refusal({"serialized_named_tensors": [good, good]}) is None
    refused = handles_refusal({"serialized_named_tensors": [good, encode(pickle.dumps(SYSTEM, 4))]})
    assert refused is not None
    assert refused.message == (
        "update_weights_from_tensor: serialized_named_tensors names posix.system. It may hold handles of tensors only."
    )
