"""Is the way to another pod cut? Only silence says so: whoever refuses or resets a connection is alive."""

from __future__ import annotations

import asyncio
import errno

from sglang_rollout.proxy.address import Address

_SECONDS = 2.0
_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})


async def is_cut(address: Address) -> bool:
    """Try to connect once; ``address`` holds an IP, so that no name server has a say."""
    try:
        async with asyncio.timeout(_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return True
    except OSError as error:
        return error.errno in _NO_WAY
    writer.close()
    return False
