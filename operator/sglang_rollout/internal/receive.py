"""Write what arrives over HTTP to a file."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path


async def save_parts(parts: AsyncIterator[bytes], file: Path, limit: int) -> str:
    """Write the parts to a new file that only its owner may read, and return their SHA-256.

    Args:
        parts: The parts.
        file: The file.
        limit: Most bytes.

    Raises:
        ValueError: There are more bytes.
        OSError: The file exists, or cannot be written.
    """
    size, digest = 0, hashlib.sha256()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        async for part in parts:
            size += len(part)
            if size > limit:
                raise ValueError(f"more than {limit} bytes arrive")
            digest.update(part)
            await asyncio.to_thread(opened.write, part)
    return digest.hexdigest()
