"""The server programs, built from Go modules into the cache: Kubernetes (one binary, many names), etcd, CoreDNS, Helm."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from e2e.cluster.paths import CLUSTER, cache_root, content_key, files_below
from e2e.cluster.say import LabError, say, step

KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
_DEFAULT = CLUSTER / "go.mod"
_NEWEST = CLUSTER / "newest.mod"
"""Pins Kubernetes and Helm only; the other programs are those of the default."""
_NEEDED_GB = 9  # module cache 2 GB, compiler cache 4 GB, results 0.3 GB, and room for the linker


def sources() -> list[Path]:
    """Return the source files of all programs."""
    selected = _module_file()
    common = files_below(CLUSTER / "go.mod", CLUSTER / "go.sum", CLUSTER / "tools.go", CLUSTER / "cmd")
    return common if selected == _DEFAULT else [*common, selected, selected.with_suffix(".sum")]


def folder() -> Path:
    """Return the cache folder for the programs of the current sources, built or not."""
    return cache_root() / "bin" / content_key(sources(), os.uname().machine)


def built() -> bool:
    """Return whether the programs of the current sources are in the cache."""
    return (folder() / ".complete").exists()


def find() -> Path:
    """Return the folder of the built programs. Raises LabError if they are missing."""
    where = folder()
    if not (where / ".complete").exists():
        raise LabError(f"The cluster's programs are not built yet (looked in {where}). Run: make cluster-binaries")
    return where


def _module_file() -> Path:
    """Return the module file that pins the Kubernetes of ``KUBERNETES_VERSION``, for example 1.34."""
    known = {_kubernetes_version(module).rpartition(".")[0]: module for module in (_DEFAULT, _NEWEST)}
    wanted = os.environ.get("KUBERNETES_VERSION") or next(iter(known))
    if wanted not in known:
        raise LabError(f"KUBERNETES_VERSION={wanted} is unknown; use {' or '.join(known)}")
    return known[wanted]


def _kubernetes_version(module: Path) -> str:
    found = re.search(r"^\s*k8s\.io/kubernetes v(\S+)$", module.read_text(), re.MULTILINE)
    if not found:
        raise LabError(f"{module} does not require k8s.io/kubernetes; restore it from version control")
    return found[1]


def _go_build(output: Path, package: str, flags: str, module: Path) -> None:
    env = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    command = ["go", "build", f"-modfile={module.name}", "-trimpath", "-ldflags", f"-s -w {flags}", "-o", str(output), package]
    done = subprocess.run(command, cwd=CLUSTER, env=env, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise LabError(f"go build {package} failed:\n{done.stderr.strip()[-2000:]}")


def _check_can_build(cache: Path, module: Path) -> None:
    if not shutil.which("go"):
        wanted = re.search(r"^go (\S+)", module.read_text(), re.MULTILINE)
        raise LabError(
            f"Go {wanted[1] if wanted else ''} or newer is needed to build Kubernetes from source and is not on PATH. "
            "Get it from https://go.dev/dl (or your package manager), or use a cluster you have: CLUSTER=current"
        )
    free = shutil.disk_usage(cache).free / 1e9
    if free < _NEEDED_GB:
        raise LabError(f"Building Kubernetes needs about {_NEEDED_GB} GB of disk; {cache} has {free:.1f} GB free")


def build() -> Path:
    """Build the missing programs and return their folder. The first build takes about 10 minutes on two cores."""
    where = folder()
    if (where / ".complete").exists():
        return where
    where.mkdir(parents=True, exist_ok=True)
    module = _module_file()
    _check_can_build(where, module)
    version = _kubernetes_version(module)
    major, minor = version.split(".")[:2]
    base = "k8s.io/component-base/version"
    stamp = f"-X {base}.gitVersion=v{version} -X {base}.gitMajor={major} -X {base}.gitMinor={minor}"
    say(f"Building Kubernetes v{version}, etcd, CoreDNS and Helm into {where}; the first time takes minutes")
    plan = [
        ("etcd", "go.etcd.io/etcd/server/v3", "", _DEFAULT),
        ("kube", "./cmd/kube", stamp, module),
        ("coredns", "./cmd/coredns", "", _DEFAULT),
        ("pause", "./cmd/pause", "", _DEFAULT),
        ("helm", f"helm.sh/helm/{'v3' if module == _DEFAULT else 'v4'}/cmd/helm", "", module),
    ]
    for name, package, flags, pins in plan:
        if not (where / name).exists():
            with step(f"go build {name}"):
                _go_build(where / f"{name}.part", package, flags, pins)
                (where / f"{name}.part").rename(where / name)
    for name in KUBERNETES_PROGRAMS:
        link = where / name
        link.unlink(missing_ok=True)
        link.symlink_to("kube")
    (where / ".complete").touch()
    return where
