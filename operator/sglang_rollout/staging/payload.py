"""Body of ``/update_weights_from_tensor`` that names a staged version for the plug-in's loader.

SGLang unpickles the body's entries. Their bytes are written here without torch, which agents do not have.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_rollout.staging.copies import Copy


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _storage() -> bytes:
    """Return a storage of one byte as ``torch.save`` writes it in its first format, which every release reads."""
    magic, protocol = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02M\xe9\x03."
    sizes = b"}(" + _text("short") + b"K\x02" + _text("int") + b"K\x04" + _text("long") + b"K\x04u"
    system = (
        b"\x80\x02}(" + _text("protocol_version") + b"M\xe9\x03" + _text("little_endian") + b"\x88" + _text("type_sizes") + sizes + b"u."
    )
    reference = b"\x80\x02(" + _text("storage") + b"ctorch\nByteStorage\n" + _text("0") + _text("cpu") + b"K\x01NtQ."
    keys = b"\x80\x02](" + _text("0") + b"e."
    return magic + protocol + system + reference + keys + struct.pack("<Q", 1) + b"\x00"


def _tail() -> bytes:
    """Return the pickle behind the name: the tensor, the end of the pair, and the end of the list."""
    storage = _storage()
    rebuilt = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", len(storage)) + storage + b"\x85R"
    )
    return rebuilt + b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR\x86a."


_HEAD = b"\x80\x03]"
_TAIL = _tail()


def loader_payload(request: Mapping[str, Any]) -> str:
    """Return one entry of ``serialized_named_tensors``: base64 of a pickled list with one pair of the request as JSON and a tensor."""
    return base64.b64encode(_HEAD + _text(json.dumps(request, separators=(",", ":"))) + _TAIL).decode("ascii")


def loader_request(copy: Copy, verdicts: Path, attempt: str = "") -> dict[str, Any]:
    """Return the request that makes the loader load a complete copy.

    Args:
        copy: The copy. The engine must mount its volume at the same path.
        verdicts: Folder into which each rank writes ``rank-<n>.json``.
        attempt: Text that the verdicts repeat, so that a verdict of an earlier attempt is not mistaken for one of this attempt.
    """
    folder = {"folder": str(copy.folder), "shards": copy.files, "sizes": copy.file_sizes}
    return {**folder, "verdicts": str(verdicts), "id": attempt}
