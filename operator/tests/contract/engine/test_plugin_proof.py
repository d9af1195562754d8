"""The plug-in in real engines: it proves itself, also in engines of several processes, and it does not where it is not active."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from e2e.engine import environment, make_engine

from sglang_rollout.checkpoints.folder import read_model
from sglang_rollout.plugin.reports import CACHE_KEY, NAMES, NamesReport
from tests.contract.support.plugin_engines import PluginEngine, plugin_environment, start_plugin_engine
from tests.support.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TWO_RANKS = environment.SEVERAL_RANKS | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def check_names(found: NamesReport) -> None:
    """Compare the tensors with those of the model's files."""
    assert found.unchecked == ""
    expected = {name: tuple(entry.shape) for name, (_, entry) in read_model(environment.model()).tensors.items()}
    assert {tensor.name: tensor.shape for tensor in found.tensors} == expected
    assert {tensor.dtype for tensor in found.tensors} == {"float32"}


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        pytest.param([(0, 0, 0), (0, 0, 1)], ["--tp-size", "2"], id="tp2"),
        pytest.param([(0, 0, 0), (1, 0, 0)], ["--dp-size", "2"], id="dp2", marks=pytest.mark.long),
        pytest.param([(0, 0, 0), (0, 1, 0)], ["--pp-size", "2"], id="pp2", marks=pytest.mark.long),
    ],
)
def test_every_scheduler_proves_its_part(
    engine_environment: None, tmp_path: Path, ranks: list[tuple[int, int, int]], args: list[str]
) -> None:
    with start_plugin_engine(tmp_path, args=args, env=TWO_RANKS) as engine:
        found = engine.wait_for_proof(2)
        assert [(one.dp, one.pp, one.tp) for one in found.schedulers] == ranks
        assert {one.hooks for one in found.schedulers} == {(CACHE_KEY, NAMES)}
        assert found.requests is not None
        assert found.requests.port == engine.engine.port
        check_names(found.names())
        check_cache(engine)


def check_cache(engine: PluginEngine) -> None:
    """Check that a prompt is found in the cache until the version changes, in every replica."""
    prompt = list(range(100, 300))
    for _ in range(4):
        engine.generate(input_ids=prompt)
    assert engine.generate(input_ids=prompt)["meta_info"]["cached_tokens"] == 199
    assert engine.post("/update_weight_version", {"new_version": "next", "abort_all_requests": False})[0] == 200
    assert engine.generate(input_ids=prompt)["meta_info"]["cached_tokens"] == 0


@contextmanager
def start_two_nodes(folder: Path) -> Iterator[tuple[PluginEngine, PluginEngine]]:
    """Run an engine of two nodes. Each node has reports of its own, as each pod has."""
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        nodes = []
        for rank in range(2):
            place = folder / f"node-{rank}"
            args = ["--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address]
            variables = plugin_environment(place, run=f"boot-{rank}") | TWO_RANKS
            engine = make_engine(free_port(), args=args, log=place / "engine.log", env=variables)
            engine.start()
            stack.callback(engine.kill)
            nodes.append(PluginEngine(engine, place, run=f"boot-{rank}"))
        nodes[0].engine.wait()
        yield nodes[0], nodes[1]


@pytest.mark.long
def test_every_node_proves_its_part(engine_environment: None, tmp_path: Path) -> None:
    with start_two_nodes(tmp_path) as (head, other):
        first, second = head.wait_for_proof(1), other.wait_for_proof(1, requests=False)
        assert second.requests is None
        assert [one.tp for one in (*first.schedulers, *second.schedulers)] == [0, 1]
        for found in (first, second):
            check_names(found.names())
        check_cache(head)


def test_an_engine_of_the_oldest_release_proves_itself(engine_environment: None, tmp_path: Path) -> None:
    with start_plugin_engine(tmp_path, old=True) as engine:
        found = engine.wait_for_proof(1)
        assert {one.release for one in found.schedulers} == {"0.5.20"}
        check_names(found.names())
        check_cache(engine)


@pytest.mark.long
def test_a_load_format_without_a_checkpoint_is_named(engine_environment: None, tmp_path: Path) -> None:
    with start_plugin_engine(tmp_path, args=["--load-format", "dummy"]) as engine:
        found = engine.wait_for_proof(1)
        assert found.names() == NamesReport(unchecked="the load format dummy reads no checkpoint")


@pytest.mark.long
def test_several_tokenizer_workers_have_no_proof(engine_environment: None, tmp_path: Path) -> None:
    with start_plugin_engine(tmp_path, args=["--tokenizer-worker-num", "2"]) as engine:
        engine.generate(input_ids=[5, 6])
        assert "answers requests" in str(engine.reports().missing(1))
