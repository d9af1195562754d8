"""``sglang-rollout stand-in`` and ``python -m sglang_rollout.testing``: stand-in engines as a process that tests can kill."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from sglang_rollout.plugin.install import reports_folder
from sglang_rollout.plugin.settings import SETTINGS_VARIABLE, dump_settings
from sglang_rollout.testing.engine import StandInFleet
from sglang_rollout.testing.faults import Fault, append_to_file
from sglang_rollout.testing.updates import load_groups


@click.command(name="stand-in")
@click.option("--port", type=int, default=30000, show_default=True, help="Port of the first engine; further engines use the next ports.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--engines", type=click.IntRange(1), default=1, show_default=True, help="Engines in this process.")
@click.option("--tensor", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks of each engine.")
@click.option("--pipeline", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages of each engine.")
@click.option("--data", type=click.IntRange(1), default=1, show_default=True, help="Replicas of the model in each engine.")
@click.option("--custom-weight-loader", "loaders", multiple=True, metavar="NAME", help="Name of the loader of staged versions; repeatable.")
@click.option("--model", type=click.Path(path_type=Path), help="Folder with safetensors files; default: a tiny model of five tensors.")
@click.option("--old", is_flag=True, help="Behave as SGLang 0.5.20 and older, without begin_weight_update and end_weight_update.")
@click.option("--weight-version", default="default", show_default=True, help="Version that the engine reports after a start.")
@click.option("--token-ms", type=click.FloatRange(0), default=0.0, show_default=True, help="Milliseconds per generated token.")
@click.option("--lora", is_flag=True, help="Accept adapters, as with --enable-lora.")
@click.option("--memory-saver", is_flag=True, help="Lose released weights, as with SGLang's --enable-memory-saver.")
@click.option("--no-plugin", "plugin", is_flag=True, flag_value=False, default=True, help="Imitate SGLang without the plug-in.")
@click.option("--updates-refused", default="", metavar="REASON", help="Refuse updates of the weights with this reason, and report it.")
@click.option("--weights-backup", is_flag=True, help="With --memory-saver: restore released weights, as with --enable-weights-cpu-backup.")
@click.option("--fault", "faults", multiple=True, metavar="KIND:PHASE[:TIMES]", help="Fault that every engine starts with; repeatable.")
@click.option("--hits", type=click.Path(path_type=Path), help="File that gets a line of JSON for each fault that hits.")
def command(*, port: int, engines: int, old: bool, token_ms: float, faults: tuple[str, ...], hits: Path | None, **options: Any) -> None:
    """Run stand-in engines until SIGTERM. With a single engine, the process kills itself with SIGKILL where SGLang would die."""
    os.environ.setdefault(SETTINGS_VARIABLE, dump_settings(reports=str(reports_folder(os.environ))))
    # Copying a few tensors needs no pool of threads per process; torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with suppress(ModuleNotFoundError):  # without torch, only process groups do not work
        load_groups()  # before the engine listens, because the import takes seconds
    try:
        wanted = [Fault.parse(text) for text in faults]
        fleet = StandInFleet(
            engines,
            ports=range(port, port + engines),
            sessions=not old,
            token_seconds=token_ms / 1000,
            on_death=_kill_myself if engines == 1 else None,
            **options,
        )
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    for engine in fleet.engines:
        engine.faults.on_hit = append_to_file(hits) if hits else None
        for fault in wanted:
            engine.faults.arm(fault)
    ended = _end_signal()  # before the engines are visible, because a client may then send SIGTERM
    try:
        fleet.start()
    except OSError as error:
        raise click.ClickException(f"cannot listen on {options['host']}, port {port} and following: {error.strerror or error}") from None
    click.echo(f"{engines} stand-in engine{'s' if engines > 1 else ''} at {', '.join(fleet.urls)}")
    ended.wait()
    fleet.close()


def _end_signal() -> threading.Event:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    return ended


def _kill_myself(why: str) -> None:
    """End without a reply, as SGLang does: connections break, and the exit status is that of SIGKILL."""
    click.echo(f"dies as SGLang would: {why}", err=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    command()
