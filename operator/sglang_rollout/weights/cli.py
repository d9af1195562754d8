"""``sglang-rollout weights``: list, verify and export versions, over the fleet's URL or where the snapshots' volume is mounted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from sglang_rollout.checkpoints.folder import ProblemsError
from sglang_rollout.checkpoints.snapshots import find_changes
from sglang_rollout.staging.copies import Copy
from sglang_rollout.staging.index import StagedError
from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.credentials import find_credentials
from sglang_rollout.trainer.errors import FleetError
from sglang_rollout.weights.choose import NoSuchVersionError, choose_version
from sglang_rollout.weights.fleet import FleetWeights, Row, list_rows
from sglang_rollout.weights.folder import ExportError, copy_snapshot, find_snapshot, list_folder, new_folder, write_index

URL_VARIABLE = "SGLANG_ROLLOUT_URL"
_F = TypeVar("_F", bound=Callable[..., Any])


def _of_fleet(command: _F) -> _F:
    """Add the options of a call to a fleet."""
    for option in (
        click.option("--ca", type=click.Path(path_type=Path), metavar="FILE", help="Authorities that are trusted for an https URL."),
        click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="File with the token of the calls."),
        click.option("--url", envvar=URL_VARIABLE, show_envvar=True, metavar="URL", help="The fleet's URL: http://demo-router:30000."),
    ):
        command = option(command)
    return command


def _of_folder(command: _F) -> _F:
    """Add the option of a folder of snapshots."""
    text = "Folder of the snapshots, where their volume is mounted. In place of --url."
    return click.option("--snapshots", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR", help=text)(command)


@click.group(name="weights", short_help="List, verify and export the weight versions of a fleet.")
def command() -> None:
    """List, verify and export the versions of a fleet with weights.transport Staged.

    VERSION is a label, run/step, or the ID of an update. Calls to a fleet are control calls: they need the rights of a trainer.
    The token is that of --token-file, or of the variable SGLANG_ROLLOUT_TOKEN_FILE or SGLANG_ROLLOUT_TOKEN.
    """


@command.command("ls")
@_of_folder
@_of_fleet
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Format of the list.")
def ls(*, url: str | None, token_file: Path | None, ca: Path | None, snapshots: Path | None, output: str) -> None:
    """List the versions in the fleet, and its snapshots."""
    is_old = False
    with _errors():
        if snapshots is not None and _only_folder(url):
            rows = [row for row, _ in list_folder(snapshots)]
        else:
            document = _fleet(url, token_file, ca).document()
            rows, is_old = list_rows(document), document.store is not None and not document.store.up
    if is_old:
        click.echo("The weight store does not answer: the list shows what it had when it answered last.", err=True)
    if output == "json":
        click.echo(json.dumps([_as_json(row) for row in rows], indent=2))
        return
    _print_table(rows)


@command.command("verify")
@click.argument("version", required=False)
@_of_folder
@_of_fleet
def verify(*, version: str | None, url: str | None, token_file: Path | None, ca: Path | None, snapshots: Path | None) -> None:
    """Compare snapshots with their digests.

    VERSION is a label, run/step, or the ID of an update. Without VERSION all snapshots are read. The exit code is 1 if one differs.
    """
    damaged = False
    with _errors():
        if snapshots is not None and _only_folder(url):
            chosen = [find_snapshot(snapshots, version)] if version else [each for _, each in list_folder(snapshots)]
            checks = [(each.path.name, find_changes(each)) for each in chosen]
        else:
            fleet = _fleet(url, token_file, ca)
            known = dict(fleet.snapshots())
            wanted = [choose_version(version, known)] if version else list(known)
            checks = [(f"{known[update]} ({known[update].label})", fleet.verify(update)) for update in wanted]
    for name, problems in checks:
        damaged = damaged or bool(problems)
        click.echo(f"{name}: {' '.join(problems) or 'OK'}")
    if not checks:
        click.echo("There are no snapshots.")
    if damaged:
        raise SystemExit(1)


@command.command("export")
@click.argument("version")
@click.option("--to", "target", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to create.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of the model, from which config and tokenizer are copied.",
)
@_of_folder
@_of_fleet
def export(
    *, version: str, target: Path, model: Path | None, url: str | None, token_file: Path | None, ca: Path | None, snapshots: Path | None
) -> None:
    """Write a version as safetensors files into a new folder. With --model SGLang and from_pretrained() load the folder.

    VERSION is a label, run/step, or the ID of an update.
    """
    with _errors(), click.progressbar(length=100, label=f"Version {version}") as bar:
        if snapshots is not None and _only_folder(url):
            found = find_snapshot(snapshots, version)
            with new_folder(target, model) as folder:
                copy_snapshot(found, folder, _progress(bar, found.manifest.bytes))
        else:
            fleet = _fleet(url, token_file, ca)
            row = fleet.find(version)
            with new_folder(target, model) as folder:
                copy = Copy(row.update, folder, "", row.bytes)
                fleet.download(row.update, copy, _progress(bar, row.bytes))
                write_index(copy)
    click.echo(f"{target} has version {version}.")
    if model is None and not (target / "config.json").exists():
        click.echo("It has no config and no tokenizer, because no trainer sends them: copy them from the model, or use --model.")


def _only_folder(url: str | None) -> bool:
    """Return True. Raises UsageError if a URL was given beside a folder, unless the variable named it."""
    context = click.get_current_context()
    if url is not None and context.get_parameter_source("url") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("Give --url or --snapshots, not both.")
    return True


def _fleet(url: str | None, token_file: Path | None, ca: Path | None) -> FleetWeights:
    if not url:
        raise click.UsageError(f"Give the fleet's URL with --url or in the variable {URL_VARIABLE}, or a folder with --snapshots.")
    return FleetWeights(Http(url, find_credentials(None, token_file, ca)))


@contextmanager
def _errors() -> Iterator[None]:
    """Report errors as one line."""
    try:
        yield
    except (FleetError, StagedError, NoSuchVersionError, ExportError) as error:
        raise click.ClickException(str(error)) from None
    except ProblemsError as error:
        raise click.ClickException(" ".join(error.problems)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'A file'}: {error.strerror or error}.") from None


def _progress(bar: Any, total: int) -> Callable[[int], None]:
    """Return a function that shows how many bytes are done."""

    def show(done: int) -> None:
        bar.update(min(100, 100 * done // max(1, total)) - bar.pos)

    return show


def _as_json(row: Row) -> dict[str, Any]:
    return {**asdict(row), "version": row.version.model_dump(mode="json") if row.version is not None else None}


def _print_table(rows: list[Row]) -> None:
    """Print one line per version."""
    header = ("VERSION", "LABEL", "DIGEST", "BYTES", "AUTHOR", "WHERE", "UPDATE")
    lines = [
        (
            str(row.version) if row.version else "-", row.version.label if row.version else "-", row.digest[:12] or "-", str(row.bytes),
            row.author or "-", ", ".join(row.places), row.update,
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    for line in [header, *lines]:
        click.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
