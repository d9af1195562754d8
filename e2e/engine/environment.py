"""The CPU engine's Python environment and its tiny models, created once in the cache.

    python3 -m e2e.engine prepare          # creates both, prints the environment's Python and the model's folder

PyPI's torch is the CUDA build (a 2.7 GB download); set TORCH_INDEX to another package index to take torch from there.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.paths import IMAGES, REPOSITORY, cache_root, content_key
from e2e.cluster.say import LabError, say, step
from sglang_rollout.plugin import install
from sglang_rollout.plugin.install import install_plugin, reports_folder
from sglang_rollout.plugin.settings import SETTINGS_VARIABLE, dump_settings

STAND_INS = IMAGES / "engine-cpu" / "stand-ins"
_TRIM = IMAGES / "engine-cpu" / "trim.py"
_MAKE_MODEL = IMAGES / "engine-cpu" / "make_model.py"
_TORCH = REPOSITORY / "requirements" / "engine-torch.lock"
_REST = REPOSITORY / "requirements" / "engine-cpu.lock"
_OLD = REPOSITORY / "requirements" / "engine-old.lock"
_PYTHON = "3.11"
_NEEDED_GB = 9  # download 2.7 GB, unpacked 5 GB before the trim


SEVERAL_RANKS = {"SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so"}
"""More variables of engines with several tensor-parallel ranks. Otherwise a CUDA build of torch tries NCCL."""


def environment_variables(*, old: bool = False) -> dict[str, str]:
    """Return the environment of an SGLang server on a CPU, with the plug-in. ``old``: for the oldest release."""
    folders = [str(_plugin_folder()), str(old_release()) if old else "", str(STAND_INS), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    return os.environ | {
        SETTINGS_VARIABLE: os.environ.get(SETTINGS_VARIABLE) or dump_settings(reports=str(reports_folder(os.environ))),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "OMP_NUM_THREADS": "1",  # 13 times faster than the default when several engines share two cores
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the trimmed torch has no headers, and a request with a repetition_penalty would compile a function
        "PYTHONPATH": path,
        "NO_PROXY": "*",
        "no_proxy": "*",
    }


def _plugin_folder() -> Path:
    """Return a folder with this checkout's plug-in, for ``PYTHONPATH``."""
    code = Path(install.__file__).parent
    folder = cache_root() / "plugin" / content_key(sorted(code.glob("*.py")))
    if not folder.exists():
        with _only_one(folder):
            install_plugin(folder)
    return folder


def _run(command: Sequence[str], what: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise LabError(f"{what} failed: {(done.stderr or done.stdout).strip()[-1500:]}")
    return done.stdout.strip()


def uv() -> list[str]:
    """Return the command that runs uv. Without uv on this machine, uv is installed into the project's .venv."""
    project = REPOSITORY / ".venv" / "bin" / "python"
    for command in (["uv"], [sys.executable, "-m", "uv"], [str(project), "-m", "uv"]):
        known = shutil.which(command[0])
        if known and subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
            return command
    if not project.exists():
        _run([sys.executable, "-m", "venv", str(REPOSITORY / ".venv")], "python3 -m venv .venv (Debian: apt install python3-venv)")
    _run([str(project), "-m", "pip", "install", "--quiet", "uv"], "pip install uv")
    return [str(project), "-m", "uv"]


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a lock, so that two test runs do not create ``folder`` at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def python(*, make: bool = True) -> Path:
    """Return the interpreter of the engine environment. With ``make``, a missing environment is created."""
    index = os.environ.get("TORCH_INDEX", "")
    folder = cache_root() / "engine" / content_key([_TORCH, _REST, _TRIM], index, _PYTHON)
    interpreter = folder / "bin" / "python"
    if (folder / ".complete").exists():
        return interpreter
    if not make:
        raise LabError(f"The engine environment is missing (looked in {folder}). Run: make engine-venv")
    with _only_one(folder):
        if not (folder / ".complete").exists():
            _make_environment(folder, index)
    return interpreter


def _make_environment(folder: Path, index: str) -> None:
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < _NEEDED_GB:
        raise LabError(f"The engine environment needs about {_NEEDED_GB} GB of disk; {folder.parent} has {free:.1f} GB free")
    command = uv()
    interpreter = str(folder / "bin" / "python")
    packages = folder / "lib" / f"python{_PYTHON}" / "site-packages"
    install = [*command, "pip", "install", "--quiet", "--python", interpreter, "--no-deps"]
    with step(f"engine environment: Python {_PYTHON}"):
        _run([*command, "venv", "--quiet", "--clear", "--python", _PYTHON, str(folder)], "uv venv")
    with step("engine environment: torch" + (f" from {index}" if index else " (2.7 GB from PyPI the first time)")):
        if index:
            pin = next(line for line in _TORCH.read_text().splitlines() if line.startswith("torch==")).split()[0]
            _run([*install[:-1], "--index-url", index, pin], f"uv pip install {pin} from {index}")
        else:
            _run([*install, "--require-hashes", "-r", str(_TORCH)], f"uv pip install -r {_TORCH}")
    with step("engine environment: sglang and the rest"):
        _run([*install, "--require-hashes", "-r", str(_REST)], f"uv pip install -r {_REST}")
    with step("engine environment: trim what a CPU engine never loads"):
        say("          " + _run([interpreter, str(_TRIM), str(packages)], "trim.py"))
    with step("engine environment: compile"):  # a start compiles 10000 files otherwise: 60 s instead of 25
        subprocess.run([interpreter, "-m", "compileall", "-q", "-j", "0", str(packages)], capture_output=True, check=False)
    (folder / ".complete").touch()


def old_release(*, make: bool = False) -> Path:
    """Return the folder with SGLang 0.5.20 alone, to be put before the newer one on ``PYTHONPATH``: all else it needs is the same."""
    folder = cache_root() / "engine" / f"old-{content_key([_OLD], _PYTHON)}"
    if (folder / ".complete").exists():
        return folder
    if not make:
        raise LabError(f"SGLang 0.5.20 is not there (looked in {folder}). Run: make engine-venv")
    with _only_one(folder), step("engine environment: SGLang 0.5.20 beside it"):
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            into = ["--python", str(python()), "--target", str(folder), "--no-deps", "--require-hashes"]
            _run([*uv(), "pip", "install", "--quiet", *into, "-r", str(_OLD)], f"uv pip install -r {_OLD}")
            subprocess.run([str(python()), "-m", "compileall", "-q", "-j", "0", str(folder)], capture_output=True, check=False)
            (folder / ".complete").touch()
    return folder


def model(*options: str) -> Path:
    """Return the folder of the tiny model that ``images/engine-cpu/make_model.py`` creates with ``options``."""
    folder = cache_root() / "models" / content_key([_MAKE_MODEL, _TORCH, _REST], *options)
    if (folder / ".complete").exists():
        return folder
    interpreter = str(python())
    with _only_one(folder), step("tiny model" + (f" {' '.join(options)}" if options else "")):
        if not (folder / ".complete").exists():
            _run([interpreter, str(_MAKE_MODEL), str(folder), *options], "make_model.py", environment_variables())
            (folder / ".complete").touch()
    return folder
