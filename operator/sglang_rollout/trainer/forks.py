"""State of one process: after ``os.fork()`` the child begins with state of its own, and leaves that of its parent alone.

A child has copies of the sockets, locks and process groups of its parent, but none of the threads that use them: two processes would read
each other's answers, and a lock that another thread held is never released.
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol
from weakref import WeakSet


class OfOneProcess(Protocol):
    """An object with state that a forked child must not use."""

    def renew(self) -> None:
        """Replace the state that belongs to the parent process. Runs in a forked child, before any other code."""


_objects: WeakSet[OfOneProcess] = WeakSet()


def renew_after_fork(owner: OfOneProcess) -> None:
    """Let forked children renew this object."""
    _objects.add(owner)


def keep_forever(value: object) -> None:
    """Never free an object of the parent process, not even when the child ends.

    The destructors of process groups wait for threads that a child does not have, and those of pools take their locks.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _renew_all() -> None:
    for each in list(_objects):
        each.renew()


os.register_at_fork(after_in_child=_renew_all)
