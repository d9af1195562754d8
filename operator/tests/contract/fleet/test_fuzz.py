"""No request ends or hangs a real engine. ``make fuzz`` sends more cases than this test."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from e2e.engine import environment
from e2e.fuzz.cases import cases
from e2e.fuzz.fields import body_fields, sglang_source
from e2e.fuzz.fleet import restartable_fleet
from e2e.fuzz.run import Target, run

from tests.contract.support.local_fleet import Urls
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

SEED = 1
CASES = 1200
"""20 s on two cores."""


def test_no_request_ends_an_engine(urls: Urls, tmp_path: Path) -> None:
    send_cases(Target(urls.fleet), tmp_path, accepted=CASES // 40)


def test_no_request_ends_an_engine_with_a_reward_model(engine_environment: None, tmp_path: Path) -> None:
    with restartable_fleet(tmp_path, free_port(2), 1, "reward") as fleet:
        # Two thirds of the cases are for paths that generate, which this fleet refuses.
        send_cases(Target(fleet.url, fleet.probe), tmp_path, accepted=CASES // 120)


def send_cases(target: Target, tmp_path: Path, *, accepted: int) -> None:
    fields = body_fields(sglang_source(environment.python(make=False)))
    failure = run(target, islice(cases(SEED, fields), CASES))
    for number, case in enumerate(failure.cases if failure else ()):
        (tmp_path / f"{number}.json").write_text(json.dumps(vars(case)))
    assert failure is None, f"{failure.problem}; python -m e2e.fuzz --replay FILE sends one of the cases in {tmp_path}"
    assert target.statuses[200] > accepted, f"an engine should accept some of the cases: {target.statuses}"
