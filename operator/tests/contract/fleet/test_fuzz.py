"""No request ends or hangs a real engine. ``make fuzz`` sends more cases than this test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
from e2e.engine import environment
from e2e.fuzz.cases import Case, cases, long_cases, sampling_cases
from e2e.fuzz.fields import body_fields, sglang_source
from e2e.fuzz.fleet import restartable_fleet
from e2e.fuzz.run import GROUP, Target, run

from sglang_rollout.plugin.sampling import INTERNAL_PARAMS, SAMPLING_TYPES
from sglang_rollout.sglang.api import GENERATE
from sglang_rollout.testing import StandInFleet
from tests.contract.fleet.test_sessions_while_draining import all_routed
from tests.contract.support.complete_fleet import complete_fleet
from tests.contract.support.local_fleet import Urls
from tests.support.ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.engine, pytest.mark.timeout(420)]

SEED = 1
CASES = 1200
"""20 s on two cores."""


COMBINED_EVERY = 3
"""Of the sampling parameters with companions, so that the cases take less than a minute."""
FIELDS = "sampling_params."


def test_no_request_ends_an_engine(urls: Urls, tmp_path: Path) -> None:
    send_cases(Target(urls.fleet), islice(cases(SEED, all_fields()), CASES), tmp_path, accepted=CASES // 40)


def test_no_long_value_ends_or_busies_a_process(urls: Urls, tmp_path: Path) -> None:
    send_cases(Target(urls.fleet, gates_only=True), long_cases(), tmp_path, accepted=0, size=1)
    send_cases(Target(urls.fleet), long_cases(), tmp_path, accepted=0, size=1)


def test_no_sampling_parameter_ends_an_engine(urls: Urls, tmp_path: Path) -> None:
    wanted = sampling_cases(all_fields()[GENERATE], COMBINED_EVERY)
    send_cases(Target(urls.fleet, gates_only=True), wanted, tmp_path, accepted=200, size=32)


def test_the_type_of_every_sampling_parameter_is_known(engine_environment: None) -> None:
    names = {name.removeprefix(FIELDS) for name in all_fields()[GENERATE] if name.startswith(FIELDS)}
    assert names == SAMPLING_TYPES.keys() | set(INTERNAL_PARAMS)


def test_no_request_ends_an_engine_with_a_reward_model(engine_environment: None, tmp_path: Path) -> None:
    with restartable_fleet(tmp_path, free_port(2), 1, "reward") as fleet:
        # Two thirds of the cases are for paths that generate, which this fleet refuses.
        send_cases(Target(fleet.url, fleet.probe), islice(cases(SEED, all_fields()), CASES), tmp_path, accepted=CASES // 120)


def all_fields() -> dict[str, list[str]]:
    return body_fields(sglang_source(environment.python(make=False)))


def send_cases(target: Target, wanted: Iterable[Case], tmp_path: Path, *, accepted: int, size: int = GROUP) -> None:
    failure = run(target, wanted, size)
    for number, case in enumerate(failure.cases if failure else ()):
        (tmp_path / f"{number}.json").write_text(json.dumps(vars(case)))
    assert failure is None, f"{failure.problem}; python -m e2e.fuzz --replay FILE sends one of the cases in {tmp_path}"
    assert target.statuses[200] > accepted, f"an engine should accept some of the cases: {target.statuses}"


async def test_no_long_value_ends_or_busies_a_process_around_a_stand_in(tmp_path: Path) -> None:
    with StandInFleet(engines=2, weight_version="base") as engines:
        async with complete_fleet(tmp_path, engines.urls) as fleet:
            await fleet.serving(2)
            await all_routed(fleet)
            target = await asyncio.to_thread(Target, fleet.url)
            failure = await asyncio.to_thread(run, target, long_cases(), 1)
            assert failure is None, (failure.problem, [dict(case.changes) for case in failure.cases])
