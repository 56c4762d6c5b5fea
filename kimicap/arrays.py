"""The zarr metadata of a capture: building the empty group, reading its layouts, setting attributes.

The root's ``zarr.json`` carries consolidated metadata from the start, so that readers never list the
folders: they would find ``.kimicap`` there, and warn.
"""

import json
import math
import os
import shutil
import threading
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core import codec_pipeline
from zarr.errors import ZarrUserWarning

from kimicap import records
from kimicap.errors import MismatchError, UsageError
from kimicap.layout import ArrayLayout, Coordinate, groups_of
from kimicap.records import storage_error

if TYPE_CHECKING:
    from xarray import DataTree

_OPENING = threading.Lock()
"""Held while zarr's settings, which are those of the whole process, are not as they were."""
_BESIDE_BYTES = 46
"""What `_beside` adds to a name."""


def build(
    path: Path,
    arrays: Sequence[ArrayLayout],
    coordinates: Sequence[Coordinate],
    *,
    attributes: Mapping[str, Any],
    record: Mapping[str, Any],
    codec: str,
    overwrite: bool,
) -> None:
    """Make the empty capture at ``path``, wholly or not at all; see `kimicap.store.create`."""
    check_target(path, overwrite=overwrite)
    # NaN is no JSON: better refused now than when the capture is sealed.
    told = [item.attributes for item in arrays] + [item.attributes for item in coordinates]
    json.dumps([attributes, record, told], allow_nan=False)
    fresh = _beside(path, "new")
    root_attributes = {**attributes, "format": records.FORMAT, "complete": False}
    try:
        new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in new:
            records.sync_folder(folder.parent)
        _clear_leftovers(path)
        _build_zarr(fresh, arrays, coordinates, root_attributes, codec)
        records.write_run(fresh, record, read_root(fresh))
        records.sync_tree(fresh)
        _put_in_place(fresh, path)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_layouts(made: Mapping[str, Any]) -> dict[str, ArrayLayout]:
    """The arrays that are written block by block, as `build` was given them.

    Args:
        made: The root's ``zarr.json`` as `build` made it. What somebody added to the capture since is not in it.
    """
    members = made["consolidated_metadata"]["metadata"]
    return {name: _layout(name, member) for name, member in members.items() if _is_sharded(member)}


def coordinates_of(made: Mapping[str, Any]) -> list[str]:
    """The arrays that are whole from the beginning."""
    members = made["consolidated_metadata"]["metadata"]
    return [name for name, member in members.items() if member["node_type"] == "array" and not _is_sharded(member)]


def open_tree(path: Path) -> "DataTree":
    """A capture as an xarray tree; arrays are read when they are used.

    zarr's FusedCodecPipeline, where there is one (since 3.3), reads several shards at once; the usual one reads a chunk
    after the other. Another that zarr was told to use stays.
    """
    import xarray

    usual, fused = (f"{codec_pipeline.__name__}.{name}CodecPipeline" for name in ("Batched", "Fused"))
    with _OPENING:
        wanted = hasattr(codec_pipeline, "FusedCodecPipeline") and zarr.config.get("codec_pipeline.path") == usual
        with zarr.config.set({"codec_pipeline.path": fused} if wanted else {}):
            return xarray.open_datatree(path, engine="zarr")


def read_coordinate(path: Path, name: str) -> np.ndarray[Any, Any]:
    """The coordinate ``name``, its checksum checked.

    Raises:
        ValueError: The bytes or the metadata are damaged.
        FileNotFoundError: The file is gone; zarr would read that as fill.
    """
    array = zarr.open_array(path / name, mode="r")
    (path / name / ".".join(["c", *["0"] * array.ndim])).stat()
    try:
        return np.asarray(array[...])
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def read_root(path: Path) -> dict[str, Any]:
    """The root's ``zarr.json``: attributes, and the metadata of all arrays.

    Raises:
        MismatchError: It is missing, broken or without what `build` wrote.
        KimicapError: It cannot be read, whatever is in it.
    """
    root = records.read_json(path / "zarr.json") or {}
    try:
        whole = isinstance(root["attributes"]["complete"], bool)
        whole = whole and isinstance(root["consolidated_metadata"]["metadata"], dict)
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise MismatchError(
            f"{path / 'zarr.json'} is missing or broken, so what arrays the capture has is unknown."
            " Write it again with kimicap verify --repair."
        )
    return root


def set_attributes(path: Path, attributes: Mapping[str, Any]) -> None:
    """Add to the root's attributes; a reader sees all of them or none.

    The metadata of the arrays, consolidated in the same file, hold nothing of the root's own.
    """
    root = read_root(path)
    wanted = {**root["attributes"], **attributes}
    if wanted == root["attributes"]:
        return
    try:
        records.write_json(path / "zarr.json", {**root, "attributes": wanted}, scratch=path / records.FOLDER)
    except OSError as error:
        raise storage_error(error, path / "zarr.json") from error


def check_target(path: Path, *, overwrite: bool) -> None:
    """Refuses a ``path`` where something is that must not be lost, or where nothing can be made.

    Raises:
        UsageError: So it is.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file. Give a folder that does not exist yet as --out.")
    parent = path.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{path} cannot be made, since {parent} is a file. Give another --out.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be made: {parent} may not be written to. Give another --out.")
    longest = os.pathconf(parent, "PC_NAME_MAX") - _BESIDE_BYTES
    if len(os.fsencode(path.name)) > longest:
        raise UsageError(f"The name {path.name} is longer than {longest} bytes. Give a shorter --out.")
    if path.exists() and not os.access(path, os.R_OK | os.X_OK):
        raise UsageError(f"{path} may not be looked into. Mend its permissions, or give another --out.")
    if path.exists() and any(path.iterdir()):
        if not records.is_capture(path):
            raise UsageError(
                f"{path} is not empty and not a capture, so it is left alone, even by --overwrite. Give another --out."
            )
        if not overwrite:
            raise UsageError(
                f"{path} already holds a capture. Go on with it by --resume, or replace it by --overwrite."
            )
    if os.path.ismount(path):
        raise UsageError(f"{path} is a mount point, which nothing can be renamed to. Give a folder inside it as --out.")
    try:
        inside = Path.cwd().is_relative_to(path)
    except FileNotFoundError:
        raise UsageError("The working directory was removed. Run it from one that is there.") from None
    if inside:
        raise UsageError(
            f"{path} would be replaced by the capture, and the working directory lies in it. Run it from elsewhere, or "
            "give another --out."
        )


def _put_in_place(fresh: Path, path: Path) -> None:
    """Rename ``fresh`` to ``path``, and delete the capture that was there, if any."""
    old = _beside(path, "old")
    if records.is_capture(path):
        # Moved aside first: deleting terabytes takes minutes, and half a capture must not be found.
        os.rename(path, old)
    try:
        os.rename(fresh, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    records.sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, what: str) -> Path:
    """Where a capture that is new, or old, lies for a while beside ``path``."""
    return path.parent / f".{path.name}.kimicap-{what}-{uuid.uuid4().hex}"


def _clear_leftovers(path: Path) -> None:
    """Remove what a crash within `build` left beside ``path``."""
    for entry in list(path.parent.iterdir()):
        if entry.name.startswith((f".{path.name}.kimicap-new-", f".{path.name}.kimicap-old-")):
            shutil.rmtree(entry, ignore_errors=True)


def _build_zarr(
    path: Path,
    arrays: Sequence[ArrayLayout],
    coordinates: Sequence[Coordinate],
    attributes: Mapping[str, Any],
    codec: str,
) -> None:
    """Write the group's metadata and the coordinates' data."""
    root = zarr.create_group(path, zarr_format=3, attributes=dict(attributes))
    paths = [layout.path for layout in arrays] + [coordinate.path for coordinate in coordinates]
    for name in groups_of(paths):
        root.create_group(name)
    for layout in arrays:
        root.create_array(
            layout.path,
            shape=layout.shape,
            dtype=layout.dtype,
            chunks=layout.chunk,
            shards=layout.shard,
            fill_value=layout.fill,
            compressors=_compressors(codec, layout.itemsize_bytes),
            dimension_names=layout.dims,
            attributes=dict(layout.attributes),
            # Shards beside each other in one folder: no folder has to be made, or made durable, a shard.
            chunk_key_encoding={"name": "default", "separator": "."},
        )
    for coordinate in coordinates:
        _write_coordinate(root, coordinate)
    with warnings.catch_warnings():
        # zarr warns that consolidated metadata are not in the v3 specification; its readers all know them.
        warnings.simplefilter("ignore", ZarrUserWarning)
        zarr.consolidate_metadata(root.store)


def _write_coordinate(root: zarr.Group, coordinate: Coordinate) -> None:
    """Write one coordinate, unsharded and in one chunk; that tells it from the other arrays."""
    data = coordinate.data
    assert data.dtype.kind in "biuf", f"{coordinate.path}: coordinates are numbers, not {data.dtype}"
    array = root.create_array(
        coordinate.path,
        shape=data.shape,
        dtype=data.dtype,
        chunks=tuple(max(1, size) for size in data.shape),
        fill_value={"b": False, "f": math.nan, "u": 0}.get(data.dtype.kind, -1),
        compressors=[Crc32cCodec()],
        dimension_names=coordinate.dims,
        attributes=dict(coordinate.attributes),
        chunk_key_encoding={"name": "default", "separator": "."},
        # A chunk of fill is written too: then a missing file is always damage.
        config={"write_empty_chunks": True},
    )
    array[...] = data


def _compressors(codec: str, itemsize_bytes: int) -> list[BloscCodec | Crc32cCodec]:
    """The codecs of one chunk, in order of writing.

    The shuffle puts bits or bytes of equal rank together, so that the empty half of a widened bfloat16 vanishes.
    Behind bits lz4 is 1.9 times as fast as behind bytes and packs to 0.82 of bfloat16 instead of 0.91; for zstd bytes
    are as good. The checksum comes last and covers what is on disk.
    """
    blosc = {
        "lz4": [BloscCodec(cname="lz4", clevel=1, shuffle="bitshuffle", typesize=itemsize_bytes)],
        "zstd": [BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=itemsize_bytes)],
        "none": [],
    }
    return [*blosc[codec], Crc32cCodec()]


def _is_sharded(member: Mapping[str, Any]) -> bool:
    return bool(member["node_type"] == "array" and member["codecs"][0]["name"] == "sharding_indexed")


def _layout(name: str, member: Mapping[str, Any]) -> ArrayLayout:
    """The layout that an array was created from, by its metadata."""
    fill = member["fill_value"]
    return ArrayLayout(
        path=name,
        dims=tuple(member["dimension_names"]),
        shape=tuple(member["shape"]),
        dtype=member["data_type"],
        chunk=tuple(member["codecs"][0]["configuration"]["chunk_shape"]),
        shard=tuple(member["chunk_grid"]["configuration"]["chunk_shape"]),
        fill=math.nan if fill == "NaN" else fill,
        attributes=member["attributes"],
    )
