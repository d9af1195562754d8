"""The connections of one gloo device, to be closed under their peers as a SIGKILL does. Linux, like the operator's engines.

gloo gives no way to end a collective from outside: ``abort`` does nothing, and a thread inside it keeps its connections open. But each
device runs an epoll of its own, and /proc tells which sockets that epoll watches. So the device is made under a lock, the epoll is the one
that appeared meanwhile, and ``shut`` shuts down its connections; gloo sees an ordinary end of the connection on both sides.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

_FDS = Path("/proc/self/fd")
_INFO = Path("/proc/self/fdinfo")
_MAKING = threading.Lock()


class SocketsOfDevice:
    """What the epolls of one device watch."""

    def __init__(self, epolls: list[int]) -> None:
        self._epolls = epolls

    @classmethod
    def of(cls, make: Callable[[], Any]) -> tuple[Self, Any]:
        """Make a device, and tell its sockets by what is new after it."""
        with _MAKING:
            before = _open()
            device = make()
            new = {fd: what for fd, what in _open().items() if before.get(fd) != what}
        # Another thread may have made an epoll too: the device's is the one that watches a listening socket which is new as well.
        epolls = [fd for fd, what in new.items() if "eventpoll" in what and any(each in new for each in _watched(fd))]
        return cls(epolls), device

    def shut(self) -> None:
        """Shut down all connections. The listening socket stays: gloo ends the whole process when accept() fails."""
        # What is no socket wakes the device's own thread: as a socket it could not be opened, and its copy would stay open.
        for fd in {fd for epoll in self._epolls for fd in _watched(epoll) if _is_socket(fd)}:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    sock.shutdown(socket.SHUT_RDWR)


def _open() -> dict[int, str]:
    found = {}
    with suppress(OSError):
        for entry in _FDS.iterdir():
            with suppress(OSError):  # closed meanwhile
                found[int(entry.name)] = str(entry.readlink())
    return found


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _watched(epoll: int) -> list[int]:
    try:
        text = (_INFO / str(epoll)).read_text()
    except OSError:
        return []
    return [int(number) for number in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]
