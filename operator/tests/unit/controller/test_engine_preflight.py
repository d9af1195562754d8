"""The checks before SGLang starts, run by a real shell on folders that replace /dev and /proc."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.decide.pods import Pod
from sglang_rollout.controller.render import names, render_all
from sglang_rollout.controller.render.names import engine_ports
from sglang_rollout.controller.render.preflight import FAILED, preflight
from sglang_rollout.wire.ports import ENGINE_PORT, RENDEZVOUS_PORT
from tests.support.paths import GOLDEN_INPUTS
from tests.unit.controller.support.worlds import SETTINGS, cr, crashed, pod

LISTENS = f"  0: 0100007F:{ENGINE_PORT:04X} 00000000:0000 0A 00000000:00000000\n"
CONNECTED = f"  0: 0100007F:{ENGINE_PORT:04X} 0100007F:C350 01 00000000:00000000\n"
WITH_IPC_LOCK, WITHOUT = "00000000a80465fb", "00000000a80425fb"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A container of an engine on 8 GPUs in which everything is right."""
    for folder in ("dev/shm", "dev/infiniband", "proc/net", "proc/self"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("tcp", "tcp6"):
        (tmp_path / "proc/net" / name).write_text(CONNECTED)
    for name in (*(f"nvidia{number}" for number in range(8)), "nvidiactl", "nvidia-uvm", "infiniband/uverbs0"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/self/status").write_text(f"Name:\tsh\nCapEff:\t{WITH_IPC_LOCK}\nSeccomp:\t2\n")
    return tmp_path


def low_limits() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 4096))


def run(root: Path, *, gpus: int = 8, start: Sequence[str] = ("echo", "started"), files: str = "65535", **engine: Any) -> tuple[int, str]:
    """Return exit code and output of the checks and of ``start``. ``files``: the simulated limit; empty: the real one."""
    spec = {"image": "e:1", "parallelism": {"tensor": 8}, "shm": "1Mi", **engine}
    rollout = SGLangRollout.model_validate(cr(engine=spec))
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    script = preflight(rollout, limits, engine_ports(rollout, 0), root=str(root)) + 'exec "$@"'
    played = f'ulimit() {{ test "$1" = -Hn && echo {files} || command ulimit "$@"; }}\n' if files else ""
    command = ["/bin/sh", "-c", played + script, "engine", *start]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, preexec_fn=low_limits)
    assert not done.returncode or "started" not in done.stdout
    return done.returncode, done.stdout.strip() + done.stderr.strip()


def test_engine_starts_if_all_checks_pass(root: Path) -> None:
    assert run(root, rdma={"resource": "rdma/hca"}) == (0, "started")


def test_missing_gpu_is_shown_in_status(root: Path) -> None:
    (root / "dev/nvidia3").unlink()
    code, said = run(root)
    assert (code, "8 nvidia.com/gpu were asked for, and 7 devices" in said) == (FAILED, True)
    trouble = Pod(pod(0, ready=False, status=crashed(code=code, message=f"some line before\n{said}\n"))).find_trouble()
    assert trouble is not None
    assert trouble.text.startswith(f"container engine exited with code 78: {said}")


def test_missing_gpus_are_counted(root: Path) -> None:
    for device in (root / "dev").glob("nvidia[0-9]"):
        device.unlink()
    assert "and 0 devices" in run(root)[1]


def test_surplus_gpus_of_a_privileged_container_are_accepted(root: Path) -> None:
    assert run(root, gpus=4)[0] == 0


@pytest.mark.parametrize("engine", [{"gpuResource": ""}, {"gpuResource": "nvidia.com/mig-1g.10gb"}, {"gpuResource": "amd.com/gpu"}])
def test_devices_of_other_resources_are_not_counted(root: Path, engine: dict[str, str]) -> None:
    for device in (root / "dev").glob("nvidia*"):
        device.unlink()
    assert run(root, gpus=0, **engine)[0] == 0


def test_too_small_shared_memory_fails(root: Path) -> None:
    code, said = run(root, shm="4096Ti")
    assert code == FAILED
    assert "engine.shm asks for 4096Ti" in said


def test_port_taken_by_another_container_fails(root: Path) -> None:
    (root / "proc/net/tcp6").write_text(LISTENS)
    code, said = run(root, gpuResource="", gpus=0)
    assert (code, f"port {ENGINE_PORT}" in said) == (FAILED, True)


@pytest.mark.parametrize("port", [ENGINE_PORT, RENDEZVOUS_PORT, RENDEZVOUS_PORT + 13])
def test_rendezvous_ports_of_several_pods_are_checked(root: Path, port: int) -> None:
    cpu: dict[str, Any] = {"gpuResource": "", "gpus": 0}
    (root / "proc/net/tcp").write_text(LISTENS.replace(f"{ENGINE_PORT:04X}", f"{port:04X}"))
    code, said = run(root, nodes=2, **cpu)
    assert (code, f"port {port}, which the engine needs, is taken by another container of this pod" in said) == (FAILED, True)
    assert run(root, **cpu)[0] == (FAILED if port == ENGINE_PORT else 0), "an engine of one pod needs no more than its own"


def test_low_limit_on_open_files_is_reported_and_used(root: Path) -> None:
    """SGLang does not raise the soft limit if the hard limit is below 65535."""
    code, said = run(root, files="", start=("/bin/sh", "-c", "ulimit -Sn"))
    assert code == 0
    assert said.startswith("4096preflight: this container may open 4096 files, SGLang asks for 65535")


@pytest.mark.parametrize("files", ["65535", "1048576", "unlimited"])
def test_sufficient_limit_on_open_files_is_not_changed(root: Path, files: str) -> None:
    assert run(root, files=files) == (0, "started")


@pytest.mark.parametrize("port", [20001, 20003, 20004, 20010, 20017])
def test_port_of_the_node_taken_by_another_program_fails(root: Path, port: int) -> None:
    node: dict[str, Any] = {"gpuResource": "", "gpus": 0, "network": {"hostNetwork": True}}
    # Its own gate and agent listen already, and so does the next engine.
    for theirs in (20000, 20002, 20021, 30001):
        (root / "proc/net/tcp").write_text(LISTENS.replace(f"{ENGINE_PORT:04X}", f"{theirs:04X}"))
        assert run(root, **node)[0] == 0
    (root / "proc/net/tcp").write_text(LISTENS.replace(f"{ENGINE_PORT:04X}", f"{port:04X}"))
    code, said = run(root, **node)
    assert (code, f"port {port} of the node" in said) == (FAILED, True)


def test_rdma_requires_pinnable_memory(root: Path) -> None:
    (root / "proc/self/status").write_text(f"CapEff:\t{WITHOUT}\n")
    assert run(root)[0] == 0
    code, said = run(root, rdma={"resource": "rdma/hca"})
    assert (code, "may lock 64 KiB only" in said) == (FAILED, True)


def test_rdma_requires_devices(root: Path) -> None:
    (root / "dev/infiniband/uverbs0").unlink()
    assert run(root)[0] == 0
    code, said = run(root, rdma={"resource": "rdma/hca"})
    assert (code, "no device /dev/infiniband/uverbs*" in said) == (FAILED, True)


def test_every_golden_input_has_the_checks() -> None:
    for path in GOLDEN_INPUTS.glob("*.yaml"):
        for made in render_all(SGLangRollout.model_validate(yaml.safe_load(path.read_text())), SETTINGS):
            if made["kind"] == "StatefulSet" and made["metadata"]["labels"][names.LABEL_COMPONENT] == names.COMPONENT_ENGINE:
                script = made["spec"]["template"]["spec"]["containers"][0]["command"][2]
                assert "preflight failed" in script.split('"$@" &')[0], path.name
