"""Rules on images, audio and video: their size, and where they come from. Pure.

SGLang opens paths in the engine's container, and fetches URLs from the engine's network, where a server without a gate may listen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .request import Request
from .sampling import count_bytes

FIELDS = ("image_data", "video_data", "audio_data")
_NO_MEDIA = frozenset(("type", "format", "detail", "content_hash", "modality"))
"""Keys of texts that are no image, audio or video themselves."""
_LONGEST_PATH = 4096
"""Linux opens no longer path."""
_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "AAAA", "GkXfo", "T2dnU", "ZkxhQ", "SUQz")
"""How files begin in base64: PNG, JPEG, GIF, RIFF (WebP, WAV, AVI), MP4 (also HEIC and AVIF), WebM, Ogg, FLAC, MP3."""
_DATA, _URL = re.compile("data:"), re.compile("https?://")


def _walk(value: Any) -> Iterator[str | bytes]:
    """Yield all texts and bytes inside of a value: lists, objects, and SGLang's objects with a URL."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str | bytes):
            yield one
        elif isinstance(one, dict):
            rest.extend(item for key, item in one.items() if key not in _NO_MEDIA)
        elif isinstance(one, list | tuple):
            rest.extend(reversed(one))
        elif hasattr(one, "url"):
            rest.append(one.url)


def find_large_media(request: Request) -> tuple[str, int, str, str] | None:
    """Find images, audio and video that are larger than the limit together."""
    most, found = request.limits.media_bytes, 0
    for name in FIELDS:
        for one in _walk(request.get(name)):
            found += len(one) if isinstance(one, bytes) else count_bytes(one)
            if found > most:
                return f"The media up to {name}", most, "bytes", "mediaBytes"
    return None


def find_file(request: Request) -> tuple[str] | None:
    """Find the path of a file."""
    return next(((name,) for name in FIELDS for one in _walk(request.get(name)) if isinstance(one, str) and _is_path(one)), None)


def find_url(request: Request) -> tuple[str] | None:
    """Find a URL that the engine would fetch, if the settings do not allow it."""
    if request.limits.media_urls == "Allowed":
        return None
    return next(((name,) for name in FIELDS for one in _walk(request.get(name)) if isinstance(one, str) and _URL.match(one)), None)


def _is_path(text: str) -> bool:
    """Return true if SGLang may open a text as a file: it is no URL, and it looks like a path or is too short for content in base64."""
    if not text or _DATA.match(text) or _URL.match(text):
        return False
    start = text[: 2 * _LONGEST_PATH]
    if re.search(r"[:.\\]", start):
        return True
    return not start.startswith(_STARTS) and (start.startswith("/") or len(text) < _LONGEST_PATH)
