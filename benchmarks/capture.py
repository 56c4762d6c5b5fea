"""Rows of captures: into nothing, to disk, to memory, each over the bare forward or direct writing."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Result, alternate, over
from benchmarks.subject import Subject, clear, create, noise_shards, scratch, write_directly

USUAL = ["residuals", "router_logits", "expert_indices"]
ROUTING = ["router_logits", "expert_indices", "state_output"]
MEMORY = "/dev/shm"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: what is captured, where to, and how long a run must be that its start and end weigh little.

    Attributes:
        name: What the row says.
        target: As the row demands it.
        values: As for ``--values``.
        settings: Further settings.
        times: Forwards of a run, in units of ``--batches``.
        parent: Folder to write under; None is the disk.
    """

    name: str
    target: str
    values: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    times: int = 6
    parent: str | None = None


INTO_NOTHING = {
    "sink": Case(name="residuals, router logits, indices into a sink", target="<= 1.02", values=USUAL),
    "fast": Case(
        name="states@every:64 at the kernel's precision into a sink",
        target="<= 1.05",
        values=["states@every:64"],
        settings={"states": "fast"},
    ),
    "exact": Case(name="exact float32 states@every:64 into a sink", target="<= 1.5", values=["states@every:64"]),
    "patterns": Case(name="patterns of all MLA blocks into a sink", target="<= 1.25", values=["patterns"]),
}
TO_DISK = {
    "disk": Case(name="residuals, router logits, indices to disk", target="<= 1.05", values=USUAL, times=4),
    "tmpfs": Case(name="residuals, router logits, indices to memory", target="<= 1.10", values=USUAL, parent=MEMORY),
    "routing": Case(name="router logits, indices, state_output to disk", target="<= 1.10", values=ROUTING),
}


def into_nothing(subject: Subject, case: Case, *, batches: int, repeats: int) -> Iterator[Result]:
    """A capture into a sink that discards, over the bare forward."""
    batches *= case.times
    prepared = subject.prepared(case.values, batches=batches, **case.settings)
    slots = subject.slots(prepared)
    taken = alternate(
        {"bare": lambda: subject.forwards(batches), "capture": lambda: subject.capture(prepared, slots)},
        repeats=repeats,
    )
    slots.close()
    yield _result(case, "the bare forward", taken, bytes=prepared.plan.nbytes, batches=batches)


def to_disk(subject: Subject, case: Case, *, batches: int, repeats: int) -> Iterator[Result]:
    """A capture end to end, over the slower of the bare forward and direct writing of the same bytes."""
    batches *= case.times
    prepared = subject.prepared(case.values, batches=batches, **case.settings)
    slots = subject.slots(prepared)
    shards = subject.shards(prepared, slots)
    with scratch(case.parent) as folder:
        taken = alternate(
            {
                "bare": lambda: subject.forwards(batches),
                "direct": lambda: write_directly(create(prepared, folder / "direct.zarr"), shards),
                "capture": lambda: subject.capture(prepared, slots, create(prepared, folder / "capture.zarr")),
            },
            repeats=repeats,
            before=lambda: clear(folder),  # gigabytes take a while to delete
        )
    slots.close()
    yield _result(case, "the slower of forward and direct writing", taken, bytes=prepared.plan.nbytes, batches=batches)


def _result(case: Case, below: str, taken: dict[str, list[float]], **detail: int) -> Result:
    """The row: the capture's seconds over the slowest of the others'."""
    others = [taken_s for name, taken_s in taken.items() if name != "capture"]
    ratio, spread = over(taken["capture"], *others)
    return Result(
        name=f"{case.name}, over {below}",
        target=case.target,
        measured=ratio,
        spread=spread,
        detail={**taken, **detail},
    )


def encoding(subject: Subject, *, batches: int, repeats: int) -> Iterator[Result]:
    """Encoding and writing residuals to memory, in GB/s of bfloat16; they are noise."""
    prepared = subject.prepared(["residuals"], batches=batches * 4)
    shards = noise_shards(prepared)
    nbytes = sum(data.nbytes // 2 for path, _, data in shards if path.startswith("layers/"))
    with scratch(MEMORY) as folder:
        taken = alternate(
            {"direct": lambda: write_directly(create(prepared, folder / "direct.zarr"), shards)},
            repeats=repeats,
            before=lambda: clear(folder),
        )
    rates = [nbytes / taken_s / 1e9 for taken_s in taken["direct"]]
    yield Result(
        name="encoding and writing residuals to memory, GB/s of bfloat16",
        target=">= 4.5",
        measured=statistics.median(rates),
        spread=(min(rates), max(rates)),
        detail={"bytes": nbytes, "codec": "lz4"},
    )
