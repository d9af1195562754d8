"""``python -m e2e.chaos``: run the fault matrix on this machine, and print or write the results."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from e2e.chaos import lab_faults, staged_faults
from e2e.chaos.engines import RealEngines, StandIns
from e2e.chaos.lab import LabStack
from e2e.chaos.matrix import FAULTS, PHASES, Cell, Fault, Matrix
from e2e.chaos.stack import Stack
from e2e.chaos.staged_matrix import StagedMatrix
from e2e.chaos.staged_stack import StagedStack
from e2e.chaos.target import FaultTarget
from e2e.chaos.watch import Watch

_FAULTS = [*FAULTS, *lab_faults.FAULTS, *staged_faults.FAULTS]
_PHASES = list(dict.fromkeys([*PHASES, *staged_faults.PHASES]))


@click.command()
@click.option(
    "--cluster", is_flag=True, help="Run the faults of a cluster (API server, node, link) on the running lab cluster of two nodes."
)
@click.option("--real", is_flag=True, help="Use two real SGLang engines on the CPU instead of three stand-ins.")
@click.option("--transport", type=click.Choice(["distributed", "staged"]), default="distributed", help="Transport of the fleet.")
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(dict.fromkeys(_FAULTS))), help="Run only this one; repeatable.")
@click.option("--phase", "phases", multiple=True, type=click.Choice(_PHASES), help="Run only this one; repeatable.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the cells as JSON here.")
def main(*, cluster: bool, real: bool, transport: str, faults: tuple[str, ...], phases: tuple[str, ...], out: Path | None) -> None:
    """Kill, stop or cut each part in each phase of an update, while clients check every answer."""
    if cluster and real:
        raise click.UsageError("--real cannot be combined with --cluster: e2e/cases use real engines on a cluster.")
    staged = transport == "staged"
    if cluster and staged:
        raise click.UsageError("--transport staged cannot be combined with --cluster.")
    known = staged_faults.FAULTS if staged else lab_faults.FAULTS if cluster else FAULTS
    possible = staged_faults.PHASES if staged else PHASES
    if wrong := [name for name in faults if name not in known] + [name for name in phases if name not in possible]:
        raise click.UsageError(f"not in this matrix: {', '.join(wrong)}.")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    click.echo(f"Logs: {folder}", err=True)
    wanted = [known[name] for name in faults or known]
    kind = RealEngines if real else StandIns
    with LabStack(folder) if cluster else StagedStack(folder, kind=kind) if staged else Stack(folder, kind=kind) as stack:
        cells, watch = run(stack, wanted, phases or possible)
    show(cells, watch)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps([vars(cell) | {"result": cell.text} for cell in cells], indent=1) + "\n")
    sys.exit(not all(cell.passed for cell in cells))


def run(stack: FaultTarget, faults: list[Fault], phases: tuple[str, ...]) -> tuple[list[Cell], Watch]:
    """Run the cells and print a line for each."""
    cells: list[Cell] = []
    base = stack.new_trainer().base
    # The initial weights have the label "default" in a stand-in and "base" in the operator.
    watch = Watch(stack.url, {"default": base, "base": base})
    matrix = StagedMatrix(stack, watch) if isinstance(stack, StagedStack) else Matrix(stack, watch)
    matrix.begin()
    try:
        for fault in faults:
            for phase in phases:
                began = time.monotonic()
                reason = skip_reason(stack, fault, phase)
                cell = Cell(fault.name, phase, skipped=reason) if reason else matrix.run(fault, phase)
                cells.append(cell)
                outcome = f", outcome {cell.outcome} after {cell.outcome_seconds:.1f} s" if cell.outcome_seconds is not None else ""
                without = f", push without the lost part after {cell.without_seconds:.1f} s" if cell.without_seconds is not None else ""
                by = f" by {cell.trainer}" if cell.trainer else ""
                line = f"{cell.text}{by}{outcome}{without} {cell.problem}{cell.skipped}"
                click.echo(f"{time.monotonic() - began:6.1f} s  {fault.name} in {phase}: {line}", err=True)
                for number, miss in enumerate(cell.misses, 1):
                    click.echo(f"          try {number} missed the phase: {miss}", err=True)
    finally:
        watch.stop()
    return cells, watch


def skip_reason(stack: FaultTarget, fault: Fault, phase: str) -> str:
    """Return why a cell is not run; empty if it is run."""
    if isinstance(stack, StagedStack):
        return staged_faults.skip_reason(fault, phase, stack)
    return lab_faults.SKIPPED.get((fault.name, phase), "")


def show(cells: list[Cell], watch: Watch) -> None:
    """Print the matrix."""
    phases = list(dict.fromkeys(cell.phase for cell in cells))
    table = Table("fault", *phases, title="Fault matrix: hit = in that phase; seconds until all engines served the next version")
    for name in dict.fromkeys(cell.fault for cell in cells):
        row = {cell.phase: cell.text for cell in cells if cell.fault == name}
        table.add_row(name, *(row.get(phase, "") for phase in phases))
    Console().print(table)
    failed = [cell for cell in cells if cell.problem]
    missed = [cell for cell in cells if cell.text == "missed"]
    hit, skipped = sum(cell.hit for cell in cells), sum(bool(cell.skipped) for cell in cells)
    print(
        f"{len(cells)} cells, {hit} hit, {len(missed)} missed, {skipped} skipped, {len(failed)} failed; "
        f"{watch.answers} answers checked, {watch.spanning} of them over an update, {len(watch.violations)} wrong, "
        f"{watch.errors} requests without an answer"
    )
    slowest = max((cell for cell in cells if cell.released_seconds is not None), key=lambda cell: cell.released_seconds or 0, default=None)
    if slowest is not None:
        print(f"pauses ended without a push within {slowest.released_seconds:.1f} s ({slowest.fault} in {slowest.phase})")
    for cell in failed:
        print(f"{cell.fault} in {cell.phase}: {cell.problem}")
    for cell in missed:
        print(f"{cell.fault} in {cell.phase}: missed the phase {len(cell.misses)} times, the last time because {cell.misses[-1]}")


if __name__ == "__main__":
    main()
