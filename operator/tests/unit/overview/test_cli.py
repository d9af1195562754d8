"""``sglang-rollout status`` when there is nothing to show: the message says why, and what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from sglang_rollout.cli import main
from sglang_rollout.kube.credentials import find_namespace
from sglang_rollout.kube.errors import KubeError, NoCredentials
from sglang_rollout.overview.observe import AbsentError, observe
from tests.unit.kube.support.scripted_api import ok, scripted, status, write_kubeconfig

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refuse(code: int, message: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return status(code, message)

    return answer


def found(*places: str) -> Answer:
    """Return a list of rollouts, each given as namespace/name."""

    async def answer(_: web.Request) -> web.StreamResponse:
        items = [{"metadata": dict(zip(("namespace", "name"), place.split("/"), strict=True))} for place in places]
        return ok({"kind": "List", "items": items, "metadata": {}})

    return answer


ABSENT = refuse(404, 'sglangrollouts.rollout.sglang.io "demo" not found')
UNKNOWN_KIND = refuse(404, "the server could not find the requested resource")
FORBIDDEN = refuse(403, 'sglangrollouts.rollout.sglang.io is forbidden: User "ann" cannot')
LOGGED_OUT = refuse(401, "Unauthorized")


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([ABSENT, found("other/demo", "ml/demo")], "SGLangRollout demo in namespace n of http.* It is in namespace ml, other: use -n ml"),
        ([ABSENT, found("n/demmo", "ml/x")], r"There are: demmo\.$"),
        ([ABSENT, found()], r"There is none in this namespace\.$"),
        ([ABSENT, FORBIDDEN, found("n/demmo")], r"There are: demmo\.$"),
        ([ABSENT, FORBIDDEN, FORBIDDEN], r"There is no SGLangRollout demo in namespace n of http://\S+\.$"),
        ([UNKNOWN_KIND, UNKNOWN_KIND], "knows no SGLangRollout: install the operator there, or use the context of another cluster"),
        ([FORBIDDEN], "You may not get sglangrollouts demo in namespace n: .* kubectl -n n auth can-i get sglangrollouts/demo"),
        ([LOGGED_OUT, LOGGED_OUT], "Unauthorized"),
        ([refuse(503, "etcd is away")], "etcd is away"),
    ],
    ids=["elsewhere", "misspelt", "none", "one namespace", "no right to list", "no operator", "no right", "expired login", "away"],
)  # fmt: skip
async def test_a_rollout_that_cannot_be_shown(tmp_path: Path, replies: list[Answer], message: str) -> None:
    async with scripted(tmp_path, *replies) as (_, kube):
        with pytest.raises((KubeError, AbsentError), match=message):
            await observe(kube, "n", "demo")


async def test_missing_right_for_config_maps_is_named(tmp_path: Path) -> None:
    async with scripted(tmp_path, ok({"metadata": {"name": "demo", "namespace": "n"}, "spec": {}}), FORBIDDEN, FORBIDDEN) as (_, kube):
        gaps = (await observe(kube, "n", "demo")).gaps
    assert any(gap.startswith("Not known: the update in progress. You may not get configmaps demo-weights in namespace n") for gap in gaps)
    assert any("kubectl -n n auth can-i get configmaps/demo-intent" in gap for gap in gaps)


async def test_missing_config_maps_are_no_gap(tmp_path: Path) -> None:
    """The operator creates them after the rollout, and the conditions say why it does not."""
    async with scripted(tmp_path, ok({"metadata": {"name": "demo", "namespace": "n"}, "spec": {}}), ABSENT, ABSENT) as (_, kube):
        assert (await observe(kube, "n", "demo")).gaps == ()


def test_without_kubeconfig(tmp_path: Path) -> None:
    environment = {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    done = CliRunner().invoke(main, ["status", "demo"], env=environment)
    assert done.exit_code == 1
    assert done.output == f"Error: no kubeconfig at {tmp_path}/none, and not in a cluster: name one with --kubeconfig or KUBECONFIG\n"


def test_namespace_is_that_of_the_context(tmp_path: Path) -> None:
    path = Path(write_kubeconfig(tmp_path / "config", "http://x"))
    assert find_namespace(str(path)) == "default"
    path.write_text(path.read_text().replace("cluster: c\n", "cluster: c\n    namespace: ml\n", 1))
    assert find_namespace(str(path)) == "ml"
    path.write_text("no: kubeconfig")
    with pytest.raises(NoCredentials, match="cannot be used"):
        find_namespace(str(path))


def test_command_needs_no_kopf() -> None:
    code = "import sys; import sglang_rollout.overview.cli; print({'kopf', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
