"""The arrays of a capture on disk: create, write whole shards, commit a block, resume, seal, open.

A shard is one file, of one block, written by one process. Nothing is read back, locked or shared
between processes, so any number of ranks may write and commit different blocks at once.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts

from kimicap import records
from kimicap.arrays import build, open_tree, read_layouts, read_root, set_attributes
from kimicap.errors import MismatchError
from kimicap.layout import ArrayLayout, Coordinate
from kimicap.records import local, storage_error
from kimicap.shards import Array, Write, shard_index, size_bytes

if TYPE_CHECKING:
    from xarray import DataTree


# No cache: shards are written whole and never read again. No locks: a shard has one writer, and
# many cluster filesystems have no working locks; tensorstore then writes a uniquely named temp
# file. Sync: a finished write is fsynced, renamed, and its folder fsynced (seen with strace).
_CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},
    "file_io_locking": {"mode": "none"},
    "file_io_sync": True,
}
_TEMP_SUFFIX = ".__lock"


class Store:
    """A capture opened for writing; made by `create` and `resume`. Safe to use from several threads.

    Attributes:
        path: The capture's folder.
        made: The root's ``zarr.json`` as `create` made it, whatever it is now.
        layouts: Every array that is written block by block, by its path.
        record: What the caller of `create` gave as ``record``.
    """

    def __init__(self, path: Path, made: dict[str, Any], record: dict[str, Any]) -> None:
        self.path = path
        self.made = made
        self.layouts = read_layouts(made)
        self.record = record
        self._context = ts.Context({**_CONTEXT, "data_copy_concurrency": {"limit": _processors()}})
        self._handles: dict[str, Any] = {}
        self._opening = threading.Lock()
        self._writes: dict[tuple[str, tuple[int, ...]], Write] = {}
        self._identity = records.run_identity(path)

    @property
    def complete(self) -> bool:
        """Whether the capture is sealed, by this process or another."""
        return self.attributes()["complete"] is True

    def attributes(self) -> dict[str, Any]:
        """The attributes of the root, as they are on disk now."""
        return dict(read_root(self.path)["attributes"])

    def write(self, array: str, origin: Sequence[int], data: Array) -> Write:
        """Start to write one whole shard; no copy is made.

        Args:
            array: Path of the array, ``"mlp/router_logits"``.
            origin: Element the shard starts at; on every axis a multiple of the shard.
            data: The shard, clipped to the array, of the array's dtype. On axes other than
                ``sequence`` it may end early: the rest reads as fill. Must stay as it is
                until the write is done.

        Raises:
            MismatchError: Another run has replaced the capture.
            KimicapError: A file in the way cannot be removed. All else comes through the write's result.
        """
        self._check_identity()
        layout = self.layouts[array]
        index = shard_index(layout, tuple(origin), data)
        file = self.shard_file(array, index)
        try:
            # A block that was cut off may have left a shard. A clipped or trimmed shard would be
            # merged with it, and fail if it is damaged.
            file.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, file) from error
        region = tuple(slice(start, start + size) for start, size in zip(origin, data.shape, strict=True))
        target = self._handle(array)[region]
        write = Write(target.write(data, can_reference_source_data_indefinitely=True).commit, file)
        self._writes[array, index] = write
        return write

    def commit(self, block: int, body: Mapping[str, Any]) -> None:
        """Record that every shard of ``block`` is on disk. From then on the block counts.

        Args:
            block: Its number, from 0.
            body: JSON values; ``body["shards"]`` maps each array to the grid indices of the block's
                shards, all written through this store: ``{"mlp/router_logits": [[0, 3, 0, 0]]}``. The
                record has them as ``{"index": [0, 3, 0, 0], "bytes": 812}``, the size of the file, or
                null where all of it is fill, for which no file is written.

        Raises:
            MismatchError: Another run has replaced the capture.
            KimicapError: A shard, or the record, could not be written; the block does not count.
        """
        self._check_identity()
        shards = {}
        for array, indices in body["shards"].items():
            for index in indices:
                assert (array, tuple(index)) in self._writes, f"{array} {index} was not written"
                self._writes.pop((array, tuple(index))).result()
            shards[array] = [self._entry(array, tuple(index)) for index in indices]
        try:
            records.write_block(self.path, block, {**body, "shards": shards})
        except OSError as error:
            raise storage_error(error, records.block_file(self.path, block)) from error

    def hide(self, blocks: Iterable[int]) -> None:
        """Removes the lengths of ``blocks``, by which readers know that a sequence is there.

        A block has them without a record where a run was cut off between the two, or a record was lost.

        Raises:
            KimicapError: They cannot be removed.
        """
        layout, sequences = self.layouts["length"], self.record["block_sequences"]
        removed = False
        try:
            for block in blocks:
                first, last = block * sequences, min((block + 1) * sequences, layout.shape[0])
                for sequence in range(first, last, layout.shard[0]):
                    file = self.shard_file("length", [sequence // layout.shard[0]])
                    if file.exists():
                        file.unlink(missing_ok=True)
                        removed = True
            if removed:
                records.sync_folder(self.path / "length")
        except OSError as error:
            raise storage_error(error, self.path / "length") from error

    def committed(self) -> dict[int, dict[str, Any]]:
        """The record of every committed block; one that cannot be read is not committed."""
        return records.read_blocks(self.path)[0]

    def seal(self, blocks: int, attributes: Mapping[str, Any]) -> None:
        """Declare the capture complete, after a check that it is; may be done again, or by two at once.

        Args:
            blocks: The number of blocks, as planned.
            attributes: Further attributes of the root.

        Raises:
            MismatchError: Blocks or shard files are missing, or have another size than recorded.
        """
        assert blocks == self.record["blocks"], "the number of blocks is part of the plan"
        self.check_whole()
        for array in self.layouts:
            # Temp files of killed runs; nobody writes any more.
            for stray in (self.path / array).glob(f"*{_TEMP_SUFFIX}"):
                stray.unlink(missing_ok=True)
        set_attributes(self.path, {**attributes, "complete": True})

    def check_whole(self) -> None:
        """Checks that all blocks are committed, and their files there.

        Raises:
            MismatchError: Blocks or shard files are missing, or have another size than recorded.
        """
        lacks = _lacks(self, self.record["blocks"])
        if not lacks:
            return
        shown = "; ".join(lacks[:5]) + (f"; and {len(lacks) - 5} more" if len(lacks) > 5 else "")
        if self.complete:
            raise MismatchError(
                f"{self.path} was complete, but {shown}. Take such blocks back with kimicap verify --repair, and go on "
                "with --resume."
            )
        raise MismatchError(f"{self.path} is not complete: {shown}. Go on with --resume, or look with kimicap verify.")

    def shard_file(self, array: str, index: Sequence[int]) -> Path:
        """The file of the shard at grid ``index``; absent if nothing, or only fill, was written."""
        return self.path / array / ".".join(["c", *map(str, index)])

    def read(self, array: str, start: Sequence[int], stop: Sequence[int]) -> Array:
        """Elements ``start`` to ``stop``, every checksum on the way checked.

        Raises:
            Exception: The bytes are damaged; of what class depends on where.
        """
        region = tuple(slice(first, last) for first, last in zip(start, stop, strict=True))
        return np.asarray(self._handle(array)[region].read().result())

    def _check_identity(self) -> None:
        """Refuses to write into a capture that another run has begun here meanwhile, with ``--overwrite``."""
        if records.run_identity(self.path) != self._identity:
            raise MismatchError(f"{self.path} was replaced or removed by another run; this one can write nothing more.")

    def _handle(self, array: str) -> Any:
        """Tensorstore's handle of ``array``, opened when first asked for."""
        with self._opening:
            if array not in self._handles:
                kvstore = {"driver": "file", "path": str(self.path / array)}
                opening = ts.open(
                    {"driver": "zarr3", "kvstore": kvstore},
                    context=self._context,
                    open=True,
                    read=True,
                    write=True,
                )
                try:
                    self._handles[array] = opening.result()
                except (ValueError, OSError, RuntimeError) as error:
                    raise storage_error(error, self.path / array) from error
            return self._handles[array]

    def _entry(self, array: str, index: tuple[int, ...]) -> dict[str, Any]:
        """How a block's record tells of one shard."""
        return {"index": list(index), "bytes": size_bytes(self.shard_file(array, index))}


def _processors() -> int:
    """Processors that this process may use, of which a batch job has a few: as many threads encode.

    Tensorstore would take all of the machine's, and crowd out the thread that drives the model.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def create(
    path: Path | str,
    arrays: Sequence[ArrayLayout],
    coordinates: Sequence[Coordinate],
    *,
    attributes: Mapping[str, Any],
    record: Mapping[str, Any],
    codec: str = "lz4",
    overwrite: bool = False,
) -> Store:
    """Make an empty capture, wholly or not at all, with its coordinates written.

    Args:
        path: Folder to make; its parents are made too. An empty folder may be there.
        arrays: What will be written block by block.
        coordinates: What is known already.
        attributes: JSON values of the root; ``format`` and ``complete`` are added.
        record: JSON values for the run record, found again by `resume`; ``record["blocks"]`` is the
            number of blocks planned, ``record["block_sequences"]`` how many sequences each but the last has.
        codec: ``lz4``, ``zstd`` or ``none``. Chunks have checksums in any case.
        overwrite: Replace a capture that is there.

    Raises:
        UsageError: Something is at ``path`` already, or ``path`` is a URL or not writable.
        RoomError: The disk is full.
    """
    folder = local(path)
    build(folder, arrays, coordinates, attributes=attributes, record=record, codec=codec, overwrite=overwrite)
    return resume(folder)


def resume(path: Path | str) -> Store:
    """Open a capture for writing; `Store.complete` tells whether it is sealed already.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: The capture's own metadata are broken or newer than this kimicap.
    """
    folder = local(path)
    record, made = records.read_run(folder)
    read_root(folder)
    return Store(folder, made, record)


def open_capture(path: Path | str) -> "DataTree":
    """A capture, complete or not, as an xarray tree; arrays are read when they are used.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: The capture's own metadata are broken or newer than this kimicap.
    """
    folder = local(path)
    records.check_format(folder)
    read_root(folder)
    return open_tree(folder)


def info(path: Path | str) -> dict[str, Any]:
    """What a capture holds and how far it is.

    Returns:
        ``attributes`` and ``record`` as given to `create`; ``arrays``: for each its ``dims``, ``shape``,
        ``dtype``, ``bytes`` uncompressed and ``stored_bytes`` on disk; ``blocks`` planned, ``committed``
        and ``missing`` block numbers; ``stored_bytes`` of the whole capture; ``complete``.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: The capture's own metadata are broken or newer than this kimicap.
    """
    store = resume(path)
    committed = store.committed()
    arrays = {
        name: {
            "dims": list(layout.dims),
            "shape": list(layout.shape),
            "dtype": layout.dtype,
            "bytes": layout.nbytes,
            "stored_bytes": tree_bytes(store.path / name),
        }
        for name, layout in store.layouts.items()
    }
    return {
        "attributes": store.attributes(),
        "record": store.record,
        "arrays": arrays,
        "blocks": store.record["blocks"],
        "committed": sorted(committed),
        "missing": [block for block in range(store.record["blocks"]) if block not in committed],
        "stored_bytes": tree_bytes(store.path),
        "complete": store.complete,
    }


def entries_of(record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every shard that a block's record tells of: the array, and ``{"index": …, "bytes": …}``."""
    for array, entries in record["shards"].items():
        for entry in entries:
            yield array, entry


def unnamed(store: Store, record: Mapping[str, Any]) -> list[str]:
    """Arrays of the capture of which a block's record names no shard."""
    return sorted(array for array in store.layouts if not record["shards"].get(array))


def tree_bytes(root: Path) -> int:
    """Bytes of all files under ``root``; files that vanish meanwhile count nothing."""
    names = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    return sum(size_bytes(Path(name)) or 0 for name in names)


def _lacks(store: Store, blocks: int) -> list[str]:
    """What keeps the capture from being complete, in words."""
    committed = store.committed()
    lacks = [f"block {block} is not committed" for block in range(blocks) if block not in committed]
    for block, record in committed.items():
        lacks += [f"block {block} names no file of {array}" for array in unnamed(store, record)]
        for array, entry in entries_of(record):
            found = size_bytes(store.shard_file(array, entry["index"]))
            if found != entry["bytes"]:
                file = store.shard_file(array, entry["index"]).relative_to(store.path)
                lacks.append(f"{file} of block {block} has {found} bytes, not {entry['bytes']}")
    return lacks
