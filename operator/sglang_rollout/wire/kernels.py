"""Archives of compiled kernels, which agents send to the weight store, and new pods fetch from it (``engine.cache.shared``).

An archive is a tar file of regular files. Its key is a hash of everything that the kernels depend on.
"""

from __future__ import annotations

MAX_ARCHIVE_BYTES = 4 * 2**30
"""Most bytes of an archive, and of all files in it."""
MAX_FILES = 200_000
"""Most files of an archive."""
KEY_PATTERN = "^[0-9a-f]{64}$"
