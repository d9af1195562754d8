"""The lab's cgroups: ``sgr<i>`` for a node's pods and ``sgr<i>-d`` for its programs, in version 1 and version 2 layouts."""

import contextlib
import re
import time
from pathlib import Path

_OURS = re.compile(r"sgr\d+(-d)?")


def _mounts(kind: str) -> list[Path]:
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(words[1]) for words in lines if words[2] == kind]


def enter(name: str) -> None:
    """Create ``name`` and ``name``-d in every hierarchy, and move this process into ``name``-d."""
    version_1 = _mounts("cgroup")
    for root in version_1 or _mounts("cgroup2"):
        if not version_1:
            _delegate(root)
        for group in (root / f"{name}-d", root / name):
            group.mkdir(exist_ok=True)
            if (root / "cpuset.cpus").exists() and version_1:  # version 1 refuses processes while these are empty
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (group / file).write_text((root / file).read_text())
        (root / f"{name}-d" / "cgroup.procs").write_text("0")


def _delegate(root: Path) -> None:
    for controller in (root / "cgroup.controllers").read_text().split():
        # Enabled separately, because another user of the machine may hold a single controller back.
        with contextlib.suppress(OSError):
            (root / "cgroup.subtree_control").write_text(f"+{controller}")


def existing() -> list[Path]:
    """Return the lab's cgroups on this machine."""
    roots = _mounts("cgroup") + _mounts("cgroup2")
    return [p for root in roots for p in sorted(root.glob("sgr*")) if p.is_dir() and _OURS.fullmatch(p.name)]


def remove(seconds: float = 10.0) -> None:
    """Remove the lab's cgroups. They stay busy for a moment after their last process has ended."""
    deadline = time.monotonic() + seconds
    while (groups := existing()) and time.monotonic() < deadline:
        for group in groups:
            for folder in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):  # children first
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                group.rmdir()
        time.sleep(0.05)
