"""Rows of captures: into nothing, to disk, to memory, each over the bare forward or direct writing."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Result, alternate, over, seconds
from benchmarks.subject import Subject, create, scratch, whole_shards, write_directly

USUAL = ["residuals", "router_logits", "expert_indices"]
ROUTING = ["router_logits", "expert_indices", "state_output"]
MEMORY = "/dev/shm"


def into_nothing(subject: Subject, *, batches: int, repeats: int) -> Iterator[Result]:
    """Captures into a sink that discards, over the bare forward; enough batches that start and end weigh little."""
    batches *= 3
    on_gpu = next(subject.model.parameters()).device.type == "cuda"
    cases = [
        ("residuals, router logits, indices into a sink", "<= 1.02", USUAL, {}),
        ("states@every:64 at the kernel's precision into a sink", "<= 1.05", ["states@every:64"], {"states": "fast"}),
        ("exact float32 states@every:64 into a sink", "<= 1.5" if on_gpu else "<= 1.3", ["states@every:64"], {}),
        ("patterns of all MLA blocks into a sink", "<= 1.25", ["patterns"], {}),
    ]
    for name, target, values, settings in cases:
        if settings.get("states") == "fast" and not on_gpu:
            continue
        prepared = subject.prepared(values, batches=batches, **settings)
        slots = subject.slots(prepared)
        taken = alternate(
            {
                "bare": lambda: subject.forwards(batches),
                "capture": lambda p=prepared, s=slots: subject.capture(p, s),
            },
            repeats=repeats,
        )
        slots.close()
        ratio, spread = over(taken["capture"], taken["bare"])
        detail = {**taken, "bytes": prepared.plan.nbytes, "batches": batches}
        yield Result(name=f"{name}, over the bare forward", target=target, measured=ratio, spread=spread, detail=detail)


def to_disk(subject: Subject, *, batches: int, repeats: int) -> Iterator[Result]:
    """Captures end to end, over the slower of the bare forward and direct writing of the same bytes."""
    cases = [
        ("residuals, router logits, indices to disk", "<= 1.05", USUAL, None, 2),
        ("residuals, router logits, indices to memory", "<= 1.10", USUAL, MEMORY, 2),
        ("router logits, indices, state_output to disk", "<= 1.10", ROUTING, None, 6),
    ]
    for name, target, values, parent, times in cases:
        with scratch(parent) as folder:
            yield _to(subject, name, target, values, folder, batches=batches * times, repeats=repeats)


def _to(
    subject: Subject, name: str, target: str, values: list[str], folder: Path, *, batches: int, repeats: int
) -> Result:
    prepared = subject.prepared(values, batches=batches)
    shards, slots = whole_shards(prepared), subject.slots(prepared)
    taken = alternate(
        {
            "bare": lambda: subject.forwards(batches),
            "direct": lambda: write_directly(create(prepared, folder / "direct.zarr"), shards),
            "capture": lambda: subject.capture(prepared, slots, create(prepared, folder / "capture.zarr")),
        },
        repeats=repeats,
    )
    slots.close()
    ratio, spread = over(taken["capture"], taken["bare"], taken["direct"])
    detail = {**taken, "bytes": prepared.plan.nbytes, "batches": batches}
    return Result(
        name=f"{name}, over the slower of forward and direct writing",
        target=target,
        measured=ratio,
        spread=spread,
        detail=detail,
    )


def encoding(subject: Subject, *, batches: int, repeats: int) -> Iterator[Result]:
    """Encoding and writing residuals to memory, in GB/s of bfloat16."""
    prepared = subject.prepared(["residuals"], batches=batches)
    shards = whole_shards(prepared)
    nbytes = sum(data.nbytes // 2 for path, _, data in shards if path.startswith("layers/"))
    with scratch(MEMORY) as folder:
        rates = [
            nbytes / seconds(lambda: write_directly(create(prepared, folder / "direct.zarr"), shards)) / 1e9
            for _ in range(repeats)
        ]
    yield Result(
        name="encoding and writing residuals to memory, GB/s of bfloat16",
        target=">= 4.5",
        measured=sorted(rates)[len(rates) // 2],
        spread=(min(rates), max(rates)),
        detail={"bytes": nbytes, "codec": "lz4"},
    )
