"""Find damage in a capture, and take damaged blocks back, so that ``--resume`` computes them again."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimicap import records
from kimicap.arrays import coordinates_of, read_coordinate, read_root, set_attributes
from kimicap.errors import KimicapError, MismatchError
from kimicap.layout import ArrayLayout
from kimicap.metadata import metadata_problems, restore_metadata
from kimicap.records import local, os_code, storage_error
from kimicap.shards import size_bytes
from kimicap.store import Store, entries_of, resume, unnamed


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is not as it was written.

    Attributes:
        value: Path of the array, ``"mlp/router_logits"``; empty if it is a block's record.
        layers: Numbers, in the model, of the layers that cannot be read; empty if the array has none.
        block: The block it belongs to, which `repair` takes back; None if to none. `restore` mends metadata.
        problem: What was found, in words.
        shard: The file, relative to the capture.
    """

    value: str
    layers: tuple[int, ...]
    block: int | None
    problem: str
    shard: str


def verify(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
    """Read every committed shard back, all checksums checked, and compare records, arrays and plan.

    Blocks not committed yet are no damage while the capture is unfinished; `kimicap.store.info` has them.

    Args:
        path: The capture.
        progress: Called after each committed block with the blocks done and the blocks to do.

    Returns:
        Every damage found, by block.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: The run record is broken, or newer than this kimicap.
        KimicapError: A file cannot be read, whatever is in it: nothing is known of its bytes then.
    """
    damages = metadata_damages(path)
    broken = {damage.value for damage in damages}
    try:
        store = resume(path)
    except MismatchError:
        if damages:
            return damages  # which hide all others
        raise
    coordinates = _coordinate_damages(store, set(coordinates_of(store.made)) - broken)
    damages += coordinates
    broken |= {damage.value for damage in coordinates}
    committed, unreadable = records.read_blocks(store.path)
    damages += _record_damages(store, sorted(committed), unreadable)
    owners: dict[tuple[str, tuple[int, ...]], int] = {}
    for done, (block, record) in enumerate(sorted(committed.items()), start=1):
        for array in unnamed(store, record):
            problem = "the record names no file of this array"
            damages.append(Damage(value=array, layers=(), block=block, problem=problem, shard=""))
        for array, entry in entries_of(record):
            owner = owners.setdefault((array, tuple(entry["index"])), block)
            if owner != block:
                problem = f"blocks {owner} and {block} both claim this shard"
                file = str(store.shard_file(array, entry["index"]).relative_to(store.path))
                damages.append(Damage(value=array, layers=(), block=block, problem=problem, shard=file))
            if array not in broken:
                damages += _shard_damages(store, array, entry, block, broken)
        if progress is not None:
            progress(done, len(committed))
    return damages


def metadata_damages(path: Path | str) -> list[Damage]:
    """What `restore` mends; such damage may hide other.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: The run record is broken, or newer than this kimicap.
        KimicapError: A file may not be read.
    """
    folder = local(path)
    return [
        Damage(value=name, layers=(), block=None, problem=problem, shard=file)
        for name, file, problem in metadata_problems(folder, records.read_run(folder)[1])
    ]


def standing(path: Path | str) -> tuple[list[int], bool]:
    """Blocks that are not committed, and whether the capture says that it is complete; a broken root does not.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: The run record is broken.
    """
    folder = local(path)
    blocks, committed = records.read_run(folder)[0]["blocks"], records.read_blocks(folder)[0]
    try:
        complete = read_root(folder)["attributes"]["complete"]
    except MismatchError:
        complete = False
    return [block for block in range(blocks) if block not in committed], complete


def restore(path: Path | str) -> list[str]:
    """Write metadata again that are not as they were made, from the copy in the run record.

    Returns:
        The files written, relative to the capture.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: The run record is broken.
        KimicapError: A file may not be read or written.
    """
    folder = local(path)
    return restore_metadata(folder, records.read_run(folder)[1])


def repair(path: Path | str, damages: Sequence[Damage]) -> list[int]:
    """Take back the blocks that ``damages`` belong to: the capture is unfinished then, and resumes with them.

    Returns:
        The blocks taken back, in order. Damages without a block stay.

    Raises:
        KimicapError: The records cannot be changed.
    """
    store = resume(path)
    blocks = sorted({damage.block for damage in damages if damage.block is not None})
    if not blocks:
        return []
    # In this order: a crash in between leaves records that verify finds damaged again.
    set_attributes(store.path, {"complete": False})
    store.hide(block for block in blocks if block < store.record["blocks"])
    try:
        records.drop_blocks(store.path, blocks)
    except OSError as error:
        raise records.storage_error(error, store.path / records.FOLDER) from error
    return blocks


def _coordinate_damages(store: Store, names: Collection[str]) -> list[Damage]:
    """Coordinates that cannot be read."""
    damages = []
    for name in sorted(names):
        try:
            read_coordinate(store.path, name)
            continue
        except FileNotFoundError:
            problem = "the file of this coordinate is missing"
        except OSError as error:
            raise storage_error(error, store.path / name) from error
        except ValueError as error:
            problem = f"this coordinate is damaged: {error}"
        damages.append(Damage(value=name, layers=(), block=None, problem=problem, shard=name))
    return damages


def _record_damages(store: Store, committed: Sequence[int], unreadable: Sequence[int]) -> list[Damage]:
    """Blocks without a record though the capture says complete, unreadable records, and unplanned ones."""
    planned = range(store.record["blocks"])
    problems = {block: "the record of this block is damaged" for block in unreadable}
    problems |= {block: "this block is not in the plan" for block in committed if block not in planned}
    if store.complete:
        absent = set(planned) - set(committed) - set(unreadable)
        problems |= {block: "the capture says complete, but this block has no record" for block in absent}
    return [
        Damage(
            value="",
            layers=(),
            block=block,
            problem=problem,
            shard=str(records.block_file(store.path, block).relative_to(store.path)),
        )
        for block, problem in sorted(problems.items())
    ]


def _shard_damages(store: Store, array: str, entry: dict[str, Any], block: int, broken: set[str]) -> list[Damage]:
    """Damage of one shard: its file against the record, and every byte of it against its checksums."""
    index = entry["index"]
    layout = store.layouts.get(array)
    if layout is None or not _in_grid(layout, index):
        # Records are as they were written, so it is the metadata that are not: computing again mends nothing.
        problem = "the record names a shard that the capture's arrays do not have"
        file = str(store.shard_file(array, index).relative_to(store.path))
        return [Damage(value=array, layers=(), block=None, problem=problem, shard=file)]
    found, expected = size_bytes(store.shard_file(array, index)), entry["bytes"]
    if found == expected:
        return _read_damages(store, layout, index, block, broken) if found is not None else []
    if found is None:
        problem = f"the file is missing; it had {expected} bytes"
    elif expected is None:
        problem = f"the file has {found} bytes, but all of it was fill and no file was written"
    else:
        problem = f"the file has {found} bytes, not {expected}"
    return [_damage(store, array, index, block, problem, broken)]


def _in_grid(layout: ArrayLayout, index: Sequence[int]) -> bool:
    """Whether the array has a shard at ``index``."""
    if len(index) != len(layout.shape):
        return False
    axes = zip(index, layout.shard, layout.shape, strict=True)
    return all(at >= 0 and at * shard < whole for at, shard, whole in axes)


def _read_damages(
    store: Store, layout: ArrayLayout, index: Sequence[int], block: int, broken: set[str]
) -> list[Damage]:
    """Read one shard; if that fails, again chunk by chunk along the first axis, to tell the layers."""
    start = [i * size for i, size in zip(index, layout.shard, strict=True)]
    stop = [min(at + size, n) for at, size, n in zip(start, layout.shard, layout.shape, strict=True)]
    problem = _read_problem(store, layout.path, start, stop)
    if problem is None:
        return []
    step = layout.chunk[0]
    bad = [
        row
        for first in range(start[0], stop[0], step)
        if _read_problem(store, layout.path, [first, *start[1:]], [min(first + step, stop[0]), *stop[1:]])
        for row in range(first, min(first + step, stop[0]))
    ]
    return [_damage(store, layout.path, index, block, f"the file is damaged: {problem}", broken, bad)]


def _read_problem(store: Store, array: str, start: Sequence[int], stop: Sequence[int]) -> str | None:
    """Why the bytes of a region cannot be made sense of, if they cannot."""
    try:
        store.read(array, start, stop)
    except (KimicapError, MemoryError, TypeError):
        raise
    except Exception as error:
        # Depending on which bit is wrong, tensorstore raises ValueError, NotImplementedError and more.
        if os_code(error) is not None:
            raise storage_error(error, store.path / array) from error
        return str(error)
    return None


def _damage(
    store: Store,
    array: str,
    index: Sequence[int],
    block: int,
    problem: str,
    broken: set[str],
    rows: Sequence[int] | None = None,
) -> Damage:
    """The damage of one shard; ``rows`` of the first axis, or else all that the shard has."""
    layout = store.layouts[array]
    layers: tuple[int, ...] = ()
    if layout.dims[0].endswith("layer"):
        group = array.rpartition("/")[0]
        coordinate = f"{group}/{layout.dims[0]}" if group else layout.dims[0]
        first = index[0] * layout.shard[0]
        rows = range(first, min(first + layout.shard[0], layout.shape[0])) if rows is None else rows
        if coordinate not in broken and (store.path / coordinate).is_dir():
            numbers = read_coordinate(store.path, coordinate)
            layers = tuple(int(numbers[row]) for row in rows)
    file = str(store.shard_file(array, index).relative_to(store.path))
    return Damage(value=array, layers=layers, block=block, problem=problem, shard=file)
