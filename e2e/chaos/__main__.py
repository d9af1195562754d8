"""``python -m e2e.chaos``: run the fault matrix on this machine, print it, and write it down."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from e2e.chaos.matrix import FAULTS, PHASES, Cell, Matrix
from e2e.chaos.stack import Stack
from e2e.chaos.trainer_protocol import PROMPT, TOKENS
from e2e.chaos.watch import Watch
from sglang_rollout.trainer.testing import StandIn, expected_tokens


@click.command()
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(FAULTS)), help="Only these; repeatable.")
@click.option("--phase", "phases", multiple=True, type=click.Choice(PHASES), help="Only these; repeatable.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the cells as JSON here.")
def main(faults: tuple[str, ...], phases: tuple[str, ...], out: Path | None) -> None:
    """Kill, stop or cut each part in each phase of an update, under a client that judges every answer."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    click.echo(f"Logs: {folder}", err=True)
    cells, watch = run(folder, faults or tuple(FAULTS), phases or PHASES)
    show(cells, watch)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps([vars(cell) for cell in cells], indent=1) + "\n")
    sys.exit(any(cell.problem or not cell.hit for cell in cells))


def run(folder: Path, faults: tuple[str, ...], phases: tuple[str, ...], port: int = 26100) -> tuple[list[Cell], Watch]:
    """Run the cells; each line as it ends."""
    cells: list[Cell] = []
    with Stack(folder, port) as stack:
        with StandIn() as base:
            watch = Watch(stack.url, {"default": expected_tokens(base.tensors(), PROMPT, TOKENS)})
        matrix = Matrix(stack, watch)
        matrix.begin()
        try:
            for name in faults:
                for phase in phases:
                    began = time.monotonic()
                    cell = matrix.run(FAULTS[name], phase)
                    cells.append(cell)
                    told = f", trainer told after {cell.told_seconds:.1f} s: {cell.outcome}" if cell.told_seconds is not None else ""
                    click.echo(f"{time.monotonic() - began:6.1f} s  {name} in {phase}: {cell.text}{told} {cell.problem}", err=True)
        finally:
            watch.stop()
    return cells, watch


def show(cells: list[Cell], watch: Watch) -> None:
    """Print the matrix."""
    phases = [phase for phase in PHASES if any(cell.phase == phase for cell in cells)]
    table = Table("fault", *phases, title="Fault matrix: hit = it landed in that phase; seconds until all engines served the next version")
    for name in dict.fromkeys(cell.fault for cell in cells):
        row = {cell.phase: cell.text for cell in cells if cell.fault == name}
        table.add_row(name, *(row.get(phase, "") for phase in phases))
    Console().print(table)
    failed = [cell for cell in cells if cell.problem]
    print(
        f"{len(cells)} cells, {sum(cell.hit for cell in cells)} hit, {len(failed)} failed; "
        f"{watch.answers} answers judged, {len(watch.violations)} wrong, {watch.errors} requests without an answer"
    )
    for cell in failed:
        print(f"{cell.fault} in {cell.phase}: {cell.problem}")


if __name__ == "__main__":
    main()
