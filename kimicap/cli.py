"""The command line: parse, call one function, map errors to exit codes."""

import functools
import inspect
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimicap._version import __version__
from kimicap.config import load_settings
from kimicap.errors import KimicapError, Stopped, lack_of_memory
from kimicap.flags import option, setting_options
from kimicap.streams import open_streams

if TYPE_CHECKING:
    from kimicap.prepare import Prepared

app = typer.Typer(
    name="kimicap",
    help="Capture what happens inside Kimi-Linear and Kimi-K3 to labelled zarr arrays.",
    epilog="Exit codes: 0 done; 1 unexpected failure, or a check did not pass; 2 wrong usage or settings; "
    "3 the capture on disk is damaged, or does not fit; 4 not enough disk or memory; "
    "75 stopped by a signal, to be resumed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
Capture = Annotated[Path, typer.Argument(help="Folder of the capture.", metavar="CAPTURE")]

# What `plan` and `check` take for --out where none is given: they write nothing there.
_OUT = "capture.zarr"


def main() -> None:
    """Entry point of the ``kimicap`` program."""
    open_streams()
    try:
        app(prog_name="kimicap")
    except (KimicapError, KeyboardInterrupt) as error:  # of what no command does, as --help
        found = told(error)
        typer.echo(found, err=True)
        sys.exit(found.exit_code)
    finally:
        _ignore_signals()  # the exit code is known


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def told(error: BaseException) -> KimicapError:
    """What a person is told of an error, with the exit code that it becomes."""
    if isinstance(error, KeyboardInterrupt):
        return Stopped("Stopped; what was committed is kept, and --resume goes on.")
    if (room := lack_of_memory(error)) is not None:
        return room
    if isinstance(error, KimicapError):
        return error
    return KimicapError(
        f"Unexpected {type(error).__name__}: {error}. This is a fault of kimicap; run again with --debug to see where."
    )


def _command(name: str, *, settings: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command that tells its errors and exits with their codes.

    Args:
        name: Of the command.
        settings: It takes every setting as a flag; the function gets those given as ``flags``.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "flags"]
        names = [parameter.name for parameter in own]
        debug = option("debug", bool, False, "Show the traceback of an error.", "--debug")
        parameters = [*own, *(setting_options() if settings else ()), debug]

        @functools.wraps(function)
        def command(**given: Any) -> None:
            shown = given.pop("debug")
            flags = {key: given.pop(key) for key in list(given) if key not in names}
            try:
                function(**given, **({"flags": flags} if settings else {}))
                sys.stdout.flush()
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, (typer.Exit, typer.Abort)):
                    raise
                if shown:
                    traceback.print_exc()
                found = told(error)
                typer.echo(f"{_prefix()}{found}", err=True)
                raise typer.Exit(found.exit_code) from None

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name)(command)
        return command

    return register


def _prefix() -> str:
    """Which process speaks, where there are several."""
    from kimicap.cluster import find_rank

    try:
        rank = find_rank()
    except KimicapError:
        return ""
    return f"[rank {rank.rank}] " if rank.rank else ""


def _prepared(config: Path | None, flags: Mapping[str, Any], *, out: str | None = None) -> "Prepared":
    """The run that a config file and flags describe; ``out`` where neither names one."""
    from kimicap.prepare import prepare

    settings = load_settings(config, flags, defaults={} if out is None else {"out": out})
    return prepare(settings)


Config = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; flags override it.")]


@_command("run", settings=True)
def run_command(
    *,
    config: Config = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished capture.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a capture that is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop, as `kimicap plan`.")] = False,
    flags: Mapping[str, Any],
) -> None:
    """Capture values of a model over a dataset."""
    from kimicap import report
    from kimicap.cluster import find_rank
    from kimicap.documents import plan_document

    rank = find_rank()
    with _stoppable() as until_asked:
        from kimicap.run import check_disk, check_place, committed_at, run

        if not dry_run:
            check_place(load_settings(config, flags), resume=resume, overwrite=overwrite, rank=rank)
        prepared = _prepared(config, flags)
        if not rank.rank:
            report.show_plan(plan_document(prepared), err=not dry_run)
        if dry_run:
            return check_disk(prepared, committed_at(prepared.settings, resume=resume), overwrite=overwrite)
        events = until_asked(run(prepared, resume=resume, overwrite=overwrite, rank=rank))
        report.follow(events, prepared, rank, resume=resume)
    if not rank.rank:
        typer.echo(prepared.settings.out)


class _Interrupt(KeyboardInterrupt):
    """A signal's. Where a plain KeyboardInterrupt left an exec(), CPython under -m ends by SIGINT, though caught."""


@contextmanager
def _stoppable() -> Iterator[Callable[[Iterator[Any]], Iterator[Any]]]:
    """SIGTERM and SIGINT outside the loop, which handles them itself, stop a run as Ctrl-C does.

    Once the run has stopped, both are ignored to the end of the program, so that its exit code says so.

    Yields:
        What a run's events go through. Where the signal's exception was lost, as it is in a destructor, they end at
        the next one.
    """
    asked = []

    def interrupt(number: int, frame: Any) -> None:
        asked.append(number)
        raise _Interrupt

    def until_asked(events: Iterator[Any]) -> Iterator[Any]:
        for event in events:
            if asked:
                raise _Interrupt
            yield event

    after: dict[int, Any] = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield until_asked
    except (KeyboardInterrupt, Stopped):
        after = dict.fromkeys(after, signal.SIG_IGN)
        raise
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)


@_command("plan", settings=True)
def plan_command(*, config: Config = None, as_json: Json = False, flags: Mapping[str, Any]) -> None:
    """Shapes, bytes, files, memory and free disk of a run; loads no weights."""
    from kimicap import report
    from kimicap.documents import plan_document
    from kimicap.prepare import check_room

    prepared = _prepared(config, flags, out=_OUT)
    document = plan_document(prepared)
    if as_json:
        _print_json(document)
    else:
        report.show_plan(document)
    check_room(prepared)


@_command("check", settings=True)
def check_command(*, config: Config = None, as_json: Json = False, flags: Mapping[str, Any]) -> None:
    """Run the first tokens, 70 at most, of four sequences and test every invariant of the values asked for."""
    from kimicap import report
    from kimicap.check import run_checks

    checks = [check.data() for check in run_checks(_prepared(config, flags, out=_OUT))]
    if as_json:
        _print_json({"checks": checks, "passed": all(check["passed"] for check in checks)})
    else:
        report.show_checks(checks)
    if not all(check["passed"] for check in checks):
        raise typer.Exit(1)


@_command("values")
def values_command(
    *,
    model: Annotated[
        str | None, typer.Option("--model", help="Hub id or local folder; the schema alone without.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Revision of the model on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="The modelling code that the checkpoint carries is meant.")
    ] = False,
    schema: Annotated[Path | None, typer.Option("--schema", help="Schema file laid over the built-in one.")] = None,
    as_json: Json = False,
) -> None:
    """List every value by host: layout, bytes, blocks that have it, or why the model lacks it."""
    from kimicap import report
    from kimicap.documents import values_document
    from kimicap.schema import load_schema

    rows = load_schema(schema)
    architecture = None
    if model is not None:
        from kimicap.models import architecture_of

        flags = {"model": model, "revision": revision, "trust_remote_code": trust_remote_code}
        # A model is described by settings of a run; what else a run needs plays no part here.
        settings = load_settings(None, flags, defaults={"dataset": "-", "values": ["-"], "out": "-"})
        architecture = architecture_of(settings, rows)
    document = values_document(rows, architecture, model)
    if as_json:
        _print_json(document)
    else:
        report.show_values(document)


@_command("info")
def info_command(*, capture: Capture, as_json: Json = False) -> None:
    """What a capture holds, how far it is, and how it was made."""
    from kimicap import report, store

    found = store.info(capture)
    if as_json:
        _print_json(found)
    else:
        report.show_info(str(capture), found)


@_command("verify")
def verify_command(
    *,
    capture: Capture,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Write metadata again, and take damaged blocks back for `run --resume`."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every committed shard back and check its checksums; exit 3 if anything is damaged."""
    from kimicap import report
    from kimicap import verify as verifying
    from kimicap.documents import verify_document
    from kimicap.errors import MismatchError

    # First, as broken metadata hide what else there is.
    mended = verifying.metadata_damages(capture) if repair else []
    files = verifying.restore(capture) if repair else []
    with report.counting("verified blocks") as progress:
        damages = [*mended, *verifying.verify(capture, progress=progress)]
    taken = verifying.repair(capture, damages) if repair else []
    missing, complete = verifying.standing(capture)
    document = verify_document(str(capture), damages, missing, complete=complete, taken=taken, rewritten=files)
    if as_json:
        _print_json(document)
    else:
        report.show_verify(document)
    unmended = [damage for damage in damages if damage.block not in taken and damage.shard not in files]
    if unmended:
        if repair:
            remedy = "of coordinates, which cannot be computed again; begin another capture"
        else:
            remedy = "--repair writes metadata again, and takes blocks back for `kimicap run --resume`"
        raise MismatchError(f"{capture} is damaged in {len(unmended)} place{'s'[: len(unmended) > 1]}; {remedy}.")


@_command("seal")
def seal_command(*, capture: Capture) -> None:
    """Declare a capture complete whose blocks are all committed, by several processes say."""
    from kimicap.run import seal

    seal(capture)
    typer.echo(str(capture))


@_command("plot")
def plot_command(
    *,
    capture: Capture,
    value: Annotated[str, typer.Option("--value", help="Name of the value, bare or dotted.")],
    out: Annotated[Path, typer.Option("--out", help="Picture to write: png, svg or pdf.")],
    layer: Annotated[int | None, typer.Option("--layer", help="Block of the model; the first captured one.")] = None,
    head: Annotated[
        int | None, typer.Option("--head", help="Head, where the value has heads; the first captured one.")
    ] = None,
    sequence: Annotated[int, typer.Option("--sequence", help="Sequence.")] = 0,
) -> None:
    """Draw one value of one sequence."""
    from kimicap.plots import plot

    plot(capture, value, out=out, layer=layer, head=head, sequence=sequence)
    typer.echo(str(out))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))
