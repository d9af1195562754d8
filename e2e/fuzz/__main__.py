"""``python -m e2e.fuzz``: send cases to real engines for some minutes, and print each request that ends or hangs one."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import click

from e2e.engine import environment
from e2e.fuzz.cases import Case, cases, long_cases, sampling_cases
from e2e.fuzz.fields import body_fields, sglang_source
from e2e.fuzz.fleet import KINDS, RestartableFleet, restartable_fleet
from e2e.fuzz.run import GROUP, Target, run
from sglang_rollout.sglang.api import GENERATE

PORT = 27900


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="Determines the cases.")
@click.option("--minutes", type=float, default=10.0, show_default=True, help="Time for which cases are sent.")
@click.option("--engines", type=click.IntRange(1, 8), default=1, show_default=True, help="Number of real engines.")
@click.option("--kind", type=click.Choice(KINDS), default="plain", show_default=True, help="What the engines are started for.")
@click.option("--path", "paths", multiple=True, help="Send cases to this path only; repeatable.")
@click.option("--replay", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Send the case of this file, and no others.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/fuzz"), show_default=True, help="Write findings here."
)
def main(*, seed: int, minutes: float, engines: int, kind: str, paths: tuple[str, ...], replay: Path | None, out: Path) -> None:
    """Send cases, and end with 1 if one of them ended or hung a process."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    click.echo(f"Logs: {folder}", err=True)
    fields = body_fields(sglang_source(environment.python(make=False)))
    if replay is not None:
        wanted: Iterator[Case] = iter([Case(**json.loads(replay.read_text()))])
    else:
        systematic: Iterable[Case] = [] if paths or kind == "reward" else chain(long_cases(), sampling_cases(fields[GENERATE]))
        wanted = chain(systematic, cases(seed, {path: names for path, names in fields.items() if not paths or path in paths}))
    with restartable_fleet(folder, PORT, engines, kind) as fleet:
        found = list(findings(fleet, until(wanted, time.monotonic() + minutes * 60), out))
    sys.exit(bool(found))


def until(wanted: Iterator[Case], end: float) -> Iterator[Case]:
    """Yield cases until a time."""
    for case in wanted:
        if time.monotonic() > end:
            return
        yield case


def findings(fleet: RestartableFleet, wanted: Iterator[Case], out: Path) -> Iterator[Case]:
    """Yield each case that ends or hangs an engine, in its simplest form. Prints and writes it, and skips cases that contain it."""
    known: list[Case] = []
    target = Target(fleet.url, fleet.probe)
    fresh = (case for case in wanted if not any(contains(case, each) for each in known))
    while failure := run(target, fresh):
        click.echo(f"{failure.problem}; looking for the case in {[dict(case.changes) for case in failure.cases]}", err=True)
        fleet.restart()
        target.refresh()
        case = next((case for case in failure.cases if fails(fleet, target, case)), None)
        if case is None:
            click.echo(f"none of these alone: {[vars(case) for case in failure.cases]}", err=True)
            continue
        while simpler := next((each for each in case.simpler() if fails(fleet, target, each)), None):
            case = simpler
        known.append(case)
        report(case, out / str(len(known)), fleet.url)
        yield case
    click.echo(f"answers by status: {dict(sorted(target.statuses.items()))}; {len(known)} cases ended or hung an engine", err=True)


def fails(fleet: RestartableFleet, target: Target, case: Case) -> bool:
    """Return whether a case alone, sent to each place, ends or hangs an engine. The engines are restarted then."""
    if run(target, [case] * GROUP) is None:
        return False
    fleet.restart()
    target.refresh()
    return True


def contains(case: Case, known: Case) -> bool:
    """Return whether a case has all changes of a known one."""
    return case.path == known.path and known.changes.items() <= case.changes.items() and known.form in ("plain", case.form)


def report(case: Case, name: Path, url: str) -> None:
    """Write a case and its body, and print how to send it again."""
    name.parent.mkdir(parents=True, exist_ok=True)
    name.with_suffix(".json").write_text(json.dumps(vars(case)))
    name.with_suffix(".body").write_bytes(case.body())
    print(f"ends or hangs an engine: {vars(case)}")
    print(f"  curl {url}{case.path} -H 'Content-Type: application/json' --data-binary @{name.with_suffix('.body')}")
    print(f"  python -m e2e.fuzz --replay {name.with_suffix('.json')}", flush=True)


if __name__ == "__main__":
    main()
