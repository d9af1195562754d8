"""Transport Staged from a trainer to the tokens of an engine with two data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
from e2e.engine import LabError, environment
from e2e.kube import eventually

from sglang_rollout.sglang.checksums import CHECKSUM, Checksums, parse_checksums
from tests.contract.fleet.test_dialects import close_groups, session
from tests.contract.fleet.test_staged import SECONDS, next_version, uploader
from tests.contract.support.trainer_dialects import Fleet, fleet, trainer

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["staged-data", "sglang-staged-data"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with fleet(request.param, tmp_path_factory.mktemp("staged"), 1) as made:
        yield made


def checksums(lab: Fleet) -> Checksums:
    """Return the checksums of both replicas, which must be equal."""
    reply = requests.post(f"{lab.engines[0].url}/weights_checker", json=CHECKSUM, timeout=60)
    found = parse_checksums(reply.json())
    assert found is not None
    assert (len(found), len(set(found))) == (2, 1), found
    return found


def check_held(lab: Fleet, scale: float, version: str) -> None:
    """Assert that the fleet serves a version with both replicas, which take requests in turn, and under the name of the start."""
    lab.serving(1, SECONDS)
    assert [lab.generate() for _ in range(4)] == [(lab.expected[scale], version)] * 4
    model = requests.get(f"{lab.url}/server_info", timeout=10).json()["model_path"]
    found = requests.get(f"{lab.url}/model_info", timeout=10).json()
    assert (found["model_path"], found["weight_version"]) == (model, version)


def test_uploads_and_process_groups_reach_both_replicas(lab: Fleet) -> None:
    with uploader(lab) as uploads, trainer(lab) as made:
        assert made.world() == 2, "the trainer and the weight store"
        first, second = lab.others()
        version = next_version(lab)
        assert uploads.push(first, version)["state"] == "committed"
        check_held(lab, first, version)
        before = checksums(lab)
        version = next_version(lab)
        session(made, second, version)
        check_held(lab, second, version)
        assert checksums(lab) != before
        close_groups(lab)


def test_a_restarted_engine_serves_the_committed_version_without_a_push(lab: Fleet) -> None:
    scale, version, engine = lab.others()[0], next_version(lab), lab.engines[0]
    with uploader(lab) as uploads:
        assert uploads.push(scale, version)["state"] == "committed"
    before = checksums(lab)
    engine.kill()
    eventually("no engine serves", lambda: lab.document().get("serving") == 0, within=SECONDS)
    engine.start()
    engine.wait()
    check_held(lab, scale, version)
    assert checksums(lab) == before
