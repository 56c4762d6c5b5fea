"""Events, plans and captures for human eyes. Results go to stdout, talk to stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kimicap.architecture import ranges
from kimicap.config import size_text

if TYPE_CHECKING:
    from kimicap.cluster import Rank
    from kimicap.events import Event
    from kimicap.events import Progress as Step
    from kimicap.prepare import Prepared

LINE_EVERY_S = 30.0
"""Between two lines of progress where there is no terminal."""
FILE_COLUMNS = 160
"""Width of tables that do not go to a terminal."""
_MADE_WITH = ("kimicap_version", "model", "revision", "random_weights", "family", "dataset", "empty_rows", "cut_rows")
"""Attributes of a capture that `kimicap info` shows as they are."""
_DISK_SHARE = 0.1
"""Share of the time that the loop waits for the disk, from which on the disk is what the run waits for."""


def show_plan(document: Mapping[str, Any], *, err: bool = False) -> None:
    """The arrays and totals of `documents.plan_document`."""
    console = _console(err)
    table = _table("array", "dimensions", "shape", "dtype", "size", "chunk", "shard", "files")
    for array in document["arrays"]:
        table.add_row(
            array["path"],
            ", ".join(array["dims"]),
            _shape(array["shape"]),
            array["dtype"],
            size_text(array["bytes"]),
            _shape(array["chunk"]),
            _shape(array["shard"]),
            str(array["files"]),
        )
    _print_table(console, table)
    decoded = f", up to {document['decoded_tokens']} of them decoded" if document["decoded_tokens"] else ""
    console.print(
        f"{_count(document['sequences'], 'sequence')}, {_count(document['tokens'], 'token')}{decoded}, in "
        f"{_count(document['blocks'], 'block')} of {document['block_sequences']}; at most "
        f"{_count(document['files'], 'file')}"
    )
    memory = size_text(document["memory_bytes"])
    console.print(
        f"{size_text(document['bytes'])} uncompressed, about {size_text(document['disk_bytes'])} expected on disk, "
        f"{size_text(document['free_bytes'])} free; host memory for shards at most {memory} (--memory)"
    )
    for note in document["notes"]:
        console.print(note)


def show_values(document: Mapping[str, Any]) -> None:
    """The values of `documents.values_document`, a table a host."""
    console = _console()
    known = document["model"] is not None
    if known:
        console.print(f"{document['model']}: {document['family']}, {document['layers']} blocks")
        console.print("Sizes are as stored, before compression.")
    for host in dict.fromkeys(value["host"] for value in document["values"]):
        rows = [value for value in document["values"] if value["host"] == host]
        names = ("size of one", "of all blocks", "blocks") if known else ()
        table = _table("value", "layout", "dtype", *names, "what it is", title=host)
        for value in rows:
            short = f" ({value['short_name']})" if value["short_name"] else ""
            about = value["about"] if not known or value["missing"] is None else f"not here: {value['missing']}"
            table.add_row(
                value["name"] + short,
                ", ".join(value["layout"]),
                value["dtype"],
                *(_value_sizes(value) if known else ()),
                about,
            )
        _print_table(console, table)


def _value_sizes(value: Mapping[str, Any]) -> tuple[str, str, str]:
    if value["missing"] is not None:
        return "-", "-", "-"
    blocks = value["blocks"]
    size = f"{size_text(value['bytes'])} a {value['unit']}"
    if not blocks:
        return size, size_text(value["all_bytes"]), "-"
    return size, size_text(value["all_bytes"]), f"{len(blocks)}: {ranges(blocks)}"


def show_info(path: str, found: Mapping[str, Any]) -> None:
    """What `kimicap.store.info` found."""
    console, attributes = _console(), found["attributes"]
    state = "complete" if found["complete"] else "not complete"
    console.print(f"{path}: {len(found['committed'])} of {_count(found['blocks'], 'block')} committed, {state}")
    if found["complete"] and found["missing"]:
        lost = ranges(found["missing"])
        console.print(
            f"records of blocks {lost} are lost; `kimicap verify --repair` and `kimicap run --resume` mend that"
        )
    elif not found["complete"] and not found["missing"]:
        console.print("Every block is there; `kimicap seal` completes it.")
    elif found["missing"]:
        console.print(f"blocks missing: {ranges(found['missing'])}; `kimicap run --resume` goes on with them")
    table = _table("array", "dimensions", "shape", "dtype", "size", "on disk")
    for name, array in found["arrays"].items():
        table.add_row(
            name,
            ", ".join(array["dims"]),
            _shape(array["shape"]),
            array["dtype"],
            size_text(array["bytes"]),
            size_text(array["stored_bytes"]),
        )
    _print_table(console, table)
    console.print(f"{size_text(found['stored_bytes'])} on disk in all")
    made = _table("made with", "")
    for name in _MADE_WITH:
        made.add_row(name, str(attributes.get(name)))
    for name in ("versions", "kernels", "stages", "settings"):
        told = {key: value for key, value in attributes.get(name, {}).items() if value not in (None, "", False)}
        made.add_row(name, ", ".join(f"{key}={value}" for key, value in told.items()))
    _print_table(console, made)


def show_verify(document: Mapping[str, Any]) -> None:
    """The damages of `documents.verify_document`."""
    console = _console()
    if document["damages"]:
        table = _table("file", "block", "layers", "problem")
        for damage in document["damages"]:
            block = "-" if damage["block"] is None else str(damage["block"])
            table.add_row(damage["shard"], block, ranges(damage["layers"]), damage["problem"])
        _print_table(console, table)
    if document["rewritten"]:
        console.print(f"metadata written again: {', '.join(document['rewritten'])}")
        if not document["missing"] and not document["complete"]:
            console.print("all blocks are there; `kimicap seal` completes the capture")
    if document["taken_back"]:
        console.print(
            f"blocks taken back: {ranges(document['taken_back'])}; `kimicap run --resume` computes them again"
        )
    elif document["missing"]:
        console.print(f"blocks not committed yet: {ranges(document['missing'])}; `kimicap run --resume` goes on")
        if not document["damages"]:
            console.print(f"the committed blocks of {document['path']} are whole")
    if document["whole"]:
        console.print(f"{document['path']} is whole")


def show_checks(checks: Iterable[Mapping[str, Any]]) -> None:
    """A row a check: what was compared, the block where it is worst, how far off it is, and whether it passed."""
    table = _table("", "check", "value", "block", "error", "tolerance", "what is compared")
    for check in checks:
        block = "-" if check["block"] is None else str(check["block"])
        error = "no number" if check["error"] is None else f"{check['error']:.1e}"
        passed = "pass" if check["passed"] else "FAIL"
        tolerance = f"{check['tolerance']:.1e}"
        table.add_row(passed, check["name"], check["value"], block, error, tolerance, check["about"])
    _print_table(_console(), table)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A callback of blocks done and blocks to do, drawn on a terminal; None elsewhere."""
    console = _console(err=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(
        TextColumn(what), BarColumn(), TextColumn("{task.completed} of {task.total}"), console=console
    ) as bar:
        task = bar.add_task(what, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress


def follow(events: "Iterable[Event]", prepared: "Prepared", rank: "Rank", *, resume: bool) -> None:
    """Goes through a run's events and shows how far it is: live on a terminal, a line now and then elsewhere."""
    from kimicap.run import committed_at

    console, plan = _console(err=True), prepared.plan
    done = committed_at(prepared.settings, resume=resume)
    total = sum(len(plan.block(block)) for block in rank.blocks(plan.blocks, done))
    if resume and not rank.rank:
        there = sum(block in done for block in range(plan.blocks))
        _line(f"{there} of {_count(plan.blocks, 'block')} committed, {plan.blocks - there} to go")
    prefix = f"[rank {rank.rank}] " if rank.rank else ""
    steps = _steps(events, prefix)
    if console.is_terminal and not rank.rank:
        last = _follow_live(steps, total, console)
    else:
        last = _follow_lines(steps, total, prefix=prefix)
    if last is None and not rank.rank:
        left = "this process had no block to do" if rank.world > 1 else f"{prepared.settings.out} has every block"
        _line(f"Nothing was left to capture: {left}.")
    if last is not None and not rank.rank:
        told = f"{size_text(last.written_bytes)} in {last.elapsed_s:.1f} s, {_rate(last):.0f} tokens/s"
        who = "this process " if rank.world > 1 else ""
        _line(f"{who}captured {_count(last.sequences, 'sequence')}, {_count(last.tokens, 'token')}, {told}")
    if rank.world > 1 and not rank.rank:
        _line("The blocks of this process are done; the last process to finish completes the capture.")


def _steps(events: "Iterable[Event]", prefix: str) -> "Iterator[Step]":
    """The steps among the events. A value that is not finite is told of once, when it is first seen."""
    told: set[str] = set()
    for event in events:
        if hasattr(event, "written_bytes"):
            yield cast("Step", event)
            continue
        for value, blocks in event.nonfinite.items():
            if value not in told:
                told.add(value)
                where = "" if "model" in blocks else f" in the model's block(s) {ranges(sorted(map(int, blocks)))}"
                _line(
                    f"{prefix}warning: {sum(blocks.values())} elements of {value} are NaN or infinite{where}; they are "
                    "stored as they are, and counted in each block's record"
                )


def _follow_lines(steps: "Iterable[Step]", total: int, *, prefix: str) -> "Step | None":
    last, told, waited = None, 0.0, Bottleneck()
    for last in steps:
        stage = waited(last)
        if last.elapsed_s - told >= LINE_EVERY_S:
            told = last.elapsed_s
            left = last.elapsed_s / last.sequences * (total - last.sequences)
            _line(
                f"{prefix}{last.sequences} of {_count(total, 'sequence')}, {_rate(last):.0f} tokens/s, "
                f"{size_text(last.written_bytes)} written, {left:.0f} s left, waiting for: {stage}"
            )
    return last


def _follow_live(steps: "Iterable[Step]", total: int, console: Console) -> "Step | None":
    last, waited = None, Bottleneck()
    columns = (  # in 80 columns
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total} sequences"),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left, waiting for: {task.fields[stage]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, told="loading", stage="model")
        for last in steps:
            told = f"{_rate(last):.0f} tokens/s {size_text(last.written_bytes)}"
            bar.update(task, completed=last.sequences, told=told, stage=waited(last))
    return last


class Bottleneck:
    """Tells which stage a run waits for, from how its waiting grew since it was last asked."""

    def __init__(self) -> None:
        self._elapsed_s = self._disk_s = self._device_s = 0.0

    def __call__(self, step: "Step") -> str:
        """``disk`` or ``device`` where a good part of the time since the last step went there, else ``model``."""
        device_s = step.seconds.get("device", 0.0)
        least_s = _DISK_SHARE * (step.elapsed_s - self._elapsed_s)
        disk, device = step.waited_s - self._disk_s > least_s, device_s - self._device_s > least_s
        self._elapsed_s, self._disk_s, self._device_s = step.elapsed_s, step.waited_s, device_s
        return "disk" if disk else "device" if device else "model"


def _rate(step: "Step") -> float:
    return step.tokens / max(step.elapsed_s, 1e-9)


def _count(number: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _line(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _console(err: bool = False) -> Console:
    console = Console(stderr=err, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    return console


def _print_table(console: Console, table: Table) -> None:
    """A table as it is on a terminal; elsewhere without the blanks that fill its last column."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        console.file.write(f"{line.rstrip()}\n")


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(
        box=None, title=title, title_justify="left", header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "-"
