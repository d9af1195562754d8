"""Check this machine for what the lab cluster needs, and install missing programs where possible."""

import os
import shutil
import subprocess
from pathlib import Path

from e2e import promtool
from e2e.cluster import network, nodeconf
from e2e.cluster.paths import cache_root
from e2e.cluster.say import LabError, say, step

# Program -> Debian package. The last ones are for building images, for the router and for the checks.
_PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ipset": "ipset",
    "ebtables": "ebtables",
    "ethtool": "ethtool",
    "socat": "socat",
    "tini": "tini",
    "openssl": "openssl",
    "curl": "curl",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "haproxy": "haproxy",
    "jq": "jq",
    "shellcheck": "shellcheck",
}
_WITHOUT_LAB = {"curl", "haproxy", "shellcheck"}
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_GB_DISK, _GB_DISK_DEMO = 5.0, 25.0
_GB_MEMORY, _GB_MEMORY_DEMO = 2.0, 8.0
_NO_OVERLAY = {"overlayfs", "overlay", "tmpfs", "ramfs", "nfs", "fuseblk"}


def _have(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}") is not None


def missing_packages(*, lab: bool = True) -> list[str]:
    """Return the Debian packages of missing programs. Without ``lab``: only of programs that plain processes need."""
    packages = {package for program, package in _PROGRAMS.items() if not _have(program) and (lab or program in _WITHOUT_LAB)}
    if lab and not nodeconf.plugin_folder():
        packages.add("containernetworking-plugins")
    return sorted(packages)


def _apt(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(["apt-get", "-qq", *words], env=env, capture_output=True, text=True, check=False, timeout=900)


def install(*, lab: bool = True) -> None:
    """Install missing programs as root on Debian or Ubuntu. Elsewhere, raise LabError with the names of the packages."""
    _install_packages(lab=lab)
    if not _have("promtool"):
        promtool.fetch()


def _install_packages(*, lab: bool) -> None:
    packages = missing_packages(lab=lab)
    if not packages:
        return
    names = " ".join(packages)
    if os.geteuid() != 0 or not Path("/etc/debian_version").exists() or not _have("apt-get"):
        raise LabError(f"These programs are missing: {names} (names of Debian packages). Install them, then try again")
    with step(f"apt-get install {names}"):
        command = ("install", "-y", "--no-install-recommends", *packages)
        if _apt(*command).returncode:
            _apt("update")
            done = _apt(*command)
            if done.returncode:
                raise LabError(f"apt-get install {names} failed: {done.stderr.strip()[-800:]}")
    still = missing_packages(lab=lab)
    if still:
        raise LabError(f"After apt-get install these are still not found: {' '.join(still)}")


def _memory_gb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1e6
    raise LabError("/proc/meminfo has no line MemAvailable; the lab needs Linux 3.14 or newer")


def check_machine() -> None:
    """Raise LabError if the lab cannot run on this machine, and print a note if disk or memory are scarce."""
    if os.uname().sysname != "Linux":
        raise LabError("The lab cluster runs on Linux only. To use your own cluster: CLUSTER=current; without a cluster: CLUSTER=none")
    if os.geteuid() != 0:
        raise LabError(
            "The lab cluster needs root, for namespaces and a bridge. Run it as root, "
            "use a cluster you have (CLUSTER=current), or plain processes (CLUSTER=none)"
        )
    cache = cache_root()
    cache.mkdir(parents=True, exist_ok=True)
    free, memory = shutil.disk_usage(cache).free / 1e9, _memory_gb()
    if free < _GB_DISK:
        raise LabError(
            f"The lab needs {_GB_DISK:.0f} GB of disk at {cache}, {free:.1f} GB are free. "
            "Make room, or set SGLANG_ROLLOUT_CACHE to a folder on a larger disk"
        )
    if memory < _GB_MEMORY:
        raise LabError(f"The lab needs {_GB_MEMORY:.0f} GB of memory, {memory:.1f} GB are available")
    if free < _GB_DISK_DEMO:
        say(f"          note: {free:.0f} GB of disk are free at {cache}; images and engines of the demo take {_GB_DISK_DEMO:.0f} GB")
    if memory < _GB_MEMORY_DEMO:
        say(f"          note: {memory:.1f} GB of memory are available; the demo with two engines needs {_GB_MEMORY_DEMO:.0f} GB")


def check_storage() -> None:
    """Raise LabError if the cache's file system cannot hold containers, or if the lab's addresses are in use."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(cache_root())], capture_output=True, text=True, check=True).stdout.strip()
    if kind in _NO_OVERLAY:
        raise LabError(f"{cache_root()} is on {kind}, which cannot hold container images. Set SGLANG_ROLLOUT_CACHE to a folder on a disk")
    if not any(line.split()[-1] == "overlay" for line in Path("/proc/filesystems").read_text().splitlines()):
        subprocess.run(["modprobe", "overlay"], capture_output=True, check=False)
    route = network.taken()
    if route:
        raise LabError(
            f"This machine has a route {route}; the lab uses 10.88.0.0/16 and 10.96.0.0/16. Use a machine without it, or CLUSTER=current"
        )


def check() -> None:
    """Run all checks. ``up`` and ``make preflight`` call this function first."""
    check_machine()
    install()
    check_storage()
