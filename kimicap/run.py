"""One run from a plan to a sealed capture: create or resume, load, loop, seal."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimicap import records, store
from kimicap._version import __version__
from kimicap.arrays import check_target
from kimicap.cluster import Rank, find_rank, wait_for
from kimicap.config import Settings, digest
from kimicap.errors import MismatchError, UsageError
from kimicap.metadata import metadata_problems
from kimicap.models import load_model, model_digest, versions
from kimicap.outcome import merged
from kimicap.prepare import Prepared, check_room, on_existing
from kimicap.records import local

if TYPE_CHECKING:
    from kimicap.events import Event


def run(
    prepared: Prepared, *, resume: bool = False, overwrite: bool = False, rank: Rank | None = None
) -> "Iterator[Event]":
    """Captures what was prepared, yielding the loop's events; the capture is sealed when all blocks are there.

    Raises:
        KimicapError: See its classes; all committed blocks are kept.
    """
    rank = rank or find_rank()
    settings = prepared.settings
    existing = _open_existing(prepared, resume=resume, overwrite=overwrite, rank=rank)
    if existing is not None and existing.complete:
        existing.check_whole()
        return
    if existing is not None:
        prepared = on_existing(prepared, existing.layouts)
    done = committed_at(settings, resume=resume or rank.rank > 0)  # rank 0 may have begun already
    check_disk(prepared, done, overwrite=overwrite)
    todo = rank.blocks(prepared.plan.blocks, done)
    from kimicap.session import Session

    session = Session(prepared, load_model(_on_rank(settings, rank), prepared.architecture)) if todo else None
    kernels, dtypes = session.probe() if session else ({}, {})
    opened = existing or _create(prepared, kernels, dtypes, overwrite=overwrite, rank=rank)
    if session is not None:
        # Again, since another rank may have found a capture of an earlier run: its blocks are done.
        todo = rank.blocks(prepared.plan.blocks, opened.committed())
        opened.hide(todo)
        yield from session.capture(opened, todo, rank=rank)
    if len(opened.committed()) == prepared.plan.blocks:
        seal(settings.out)


def seal(path: Path | str) -> None:
    """Declares a capture complete after a check that it is; a sealed one is left as it is.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: Blocks or shard files are missing, or have another size than recorded.
    """
    opened = store.resume(path)
    committed = opened.committed()
    stages: dict[str, float] = {}
    for _, record in sorted(committed.items()):
        for stage, seconds in record.get("seconds", {}).items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    attributes = {
        "checks": merged(committed),
        "stages": {stage: round(seconds, 3) for stage, seconds in stages.items()},
    }
    opened.seal(opened.record["blocks"], {} if opened.complete else attributes)


def check_place(settings: Settings, *, resume: bool, overwrite: bool, rank: Rank) -> None:
    """Refuses a run for what lies at its path already, before anything is read for it.

    Raises:
        UsageError: There is a capture and neither flag, or something that is no capture.
    """
    out = local(settings.out)
    if rank.world > 1 and overwrite:
        raise UsageError("--overwrite is for one process; remove the old capture first, then start them all.")
    if resume and overwrite:
        raise UsageError("--resume goes on with a capture and --overwrite replaces it; give one of them.")
    if overwrite or not records.is_capture(out):
        if not rank.rank:
            check_target(out, overwrite=overwrite)
    elif not resume and not rank.rank:  # rank 0 may just have created it, or tells
        raise UsageError(f"{out} holds a capture already; go on with it by --resume, or replace it by --overwrite.")


def committed_at(settings: Settings, *, resume: bool) -> Mapping[int, Any]:
    """Records of the blocks that are done where ``resume`` goes on, by block; none where there is no capture."""
    out = local(settings.out)
    return records.read_blocks(out)[0] if resume and records.is_capture(out) else {}


def check_disk(prepared: Prepared, done: Collection[int], *, overwrite: bool) -> None:
    """Refuses a run if the disk does not hold what is still to come, with what ``overwrite`` deletes first.

    Raises:
        RoomError: It does not fit.
    """
    out = local(prepared.settings.out)
    freed = store.tree_bytes(out) if overwrite and records.is_capture(out) else 0
    check_room(prepared, blocks_done=len(done), freed_bytes=freed)


def _open_existing(prepared: Prepared, *, resume: bool, overwrite: bool, rank: Rank) -> store.Store | None:
    """The capture to go on with; None where one is to be created."""
    check_place(prepared.settings, resume=resume, overwrite=overwrite, rank=rank)
    if not resume or not records.is_capture(local(prepared.settings.out)):
        return None
    opened = store.resume(prepared.settings.out)
    _compare(prepared, opened)
    return opened


def _create(
    prepared: Prepared, kernels: Mapping[str, str], dtypes: Mapping[str, str], *, overwrite: bool, rank: Rank
) -> store.Store:
    out = Path(prepared.settings.out)
    if rank.rank:
        wait_for(lambda: records.is_capture(out), what=f"rank 0 to create {out}")
        opened = store.resume(out)
        _compare(prepared, opened)
        return opened
    if prepared.settings.states == "fast":
        dtypes = {**dtypes, "linear_attn.states": "bfloat16"}  # the probe is too short for the end of a chunk
    plan = prepared.plan.with_source_dtypes(dtypes)
    return store.create(
        out,
        plan.arrays,
        plan.coordinates,
        attributes=_attributes(prepared, kernels),
        record=_record(prepared, prepared.settings.data()),
        codec=prepared.settings.codec,
        overwrite=overwrite,
    )


def _record(prepared: Prepared, data: dict[str, Any]) -> dict[str, Any]:
    schema = prepared.settings.schema_file
    return {
        "blocks": prepared.plan.blocks,
        "block_sequences": prepared.plan.block_sequences,
        "sequences": len(prepared.plan.lengths),
        "settings": data,
        "settings_digest": digest(data),
        "tokens_digest": prepared.sequences.digest,
        "model_digest": model_digest(prepared.settings),
        "schema_digest": "" if schema is None else hashlib.sha256(schema.read_bytes()).hexdigest(),
    }


def _told(value: Any) -> str:
    """A setting's value for people."""
    return "not given" if value is None else repr(value)


def _compare(prepared: Prepared, opened: store.Store) -> None:
    """Refuses to go on with other data than the capture was begun with.

    Raises:
        MismatchError: Something differs; all of it is listed.
    """
    theirs, mine = opened.record, prepared.settings.data()
    its = theirs.get("settings", {})
    if its.get("revision") is None and mine["revision"] == theirs["model_digest"]:
        mine["revision"] = None  # the commit that was the newest then
    ours = _record(prepared, mine)
    differ = [
        f"{name} is {_told(mine.get(name))}, was {_told(its.get(name))}"
        for name in sorted({*mine, *its})
        if mine.get(name) != its.get(name)
    ]
    if not differ and ours["tokens_digest"] != theirs.get("tokens_digest"):
        differ = ["the dataset or tokenizer gives other tokens than it did"]
    if not differ and ours["model_digest"] != theirs.get("model_digest"):
        moved = mine["revision"] is None and not Path(mine["model"]).is_dir()
        remedy = f": its newest commit was {theirs['model_digest']}, which --revision takes" if moved else ""
        differ = [f"the model's config, code or weights have changed{remedy}"]
    if not differ and ours["schema_digest"] != theirs.get("schema_digest"):
        differ = ["the schema file has changed"]
    if not differ and ours != theirs:
        differ = [
            f"{name} is {ours[name]!r}, was {theirs.get(name)!r}" for name in ours if ours[name] != theirs.get(name)
        ]
    if differ:
        raise MismatchError(
            f"{opened.path} was begun with other settings: {'; '.join(differ)}. Resume with the same ones, or begin "
            "another capture."
        )
    planned = {array.path: (array.dims, array.shape, array.dtype) for array in prepared.plan.arrays}
    found = {path: (array.dims, array.shape, array.dtype) for path, array in opened.layouts.items()}
    for path in sorted({*planned, *found}):
        if planned.get(path) != found.get(path):
            raise MismatchError(
                f"The array {path} of {opened.path} is {found.get(path)}, but {planned.get(path)} is planned; resume "
                "with the version of kimicap that began the capture, or begin another."
            )
    problems = metadata_problems(opened.path, opened.made)
    if problems:
        _, file, problem = problems[0]
        raise MismatchError(
            f"{opened.path / file} is damaged ({problem}). Write it again with kimicap verify --repair."
        )


def _attributes(prepared: Prepared, kernels: Mapping[str, str]) -> dict[str, Any]:
    settings, sequences = prepared.settings, prepared.sequences
    return {
        "kimicap_version": __version__,
        "model": settings.model,
        "revision": settings.revision,
        "random_weights": settings.random_weights,
        "family": prepared.architecture.family.name,
        "model_config": dict(prepared.architecture.config),
        "dataset": settings.dataset,
        "empty_rows": sequences.empty_rows,
        "cut_rows": sequences.cut_rows,
        "versions": versions(),
        "kernels": dict(kernels),
        "settings": settings.data(),
    }


def _on_rank(settings: Settings, rank: Rank) -> Settings:
    """The settings with the device of this rank, where none is named and there are several GPUs."""
    import torch

    if settings.device is not None or rank.world == 1 or not torch.cuda.is_available():
        return settings
    return settings.model_copy(update={"device": f"cuda:{rank.local % torch.cuda.device_count()}"})
