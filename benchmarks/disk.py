"""Rows that need no GPU: kimicap's writing over tensorstore's, reading back, bytes and files."""

import json
import os
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import numpy as np
import tensorstore
import xarray

import kimicap
from benchmarks.harness import Result, alternate, over
from benchmarks.subject import Shards, Subject, clear, config_of, create, noise_shards, planned, scratch, write_directly
from kimicap.assembly import Assembler
from kimicap.layout import ArrayLayout
from kimicap.pieces import Piece
from kimicap.prepare import Prepared
from kimicap.slots import Slots


def writing(subject: Subject, *, batches: int, repeats: int) -> Iterator[Result]:
    """Kimicap's way of given rows to the disk, over tensorstore told to write the same whole shards."""
    prepared = subject.prepared(["residuals"], batches=batches * 128)
    shards = noise_shards(prepared)
    rows, slots = rows_of(prepared), Slots(2**32, pinned=False)
    with scratch() as folder:
        taken = alternate(
            {
                "direct": lambda: _tensorstore_alone(prepared, folder / "direct.zarr", shards),
                "kimicap": lambda: assemble(prepared, folder / "kimicap.zarr", rows, slots),
            },
            repeats=repeats,
            before=lambda: clear(folder),
        )
        ratio, spread = over(taken["kimicap"], taken["direct"])
        yield Result(
            name="kimicap's writing of given arrays over direct tensorstore writing",
            target="<= 1.15",
            measured=ratio,
            spread=spread,
            detail={**taken, "bytes": prepared.plan.nbytes},
        )
        assemble(prepared, folder / "kimicap.zarr", rows, slots)
        yield _bytes_on_disk(prepared, folder)


def files(folder: Path) -> Iterator[Result]:
    """Files a terabyte, of the plan of usual values at the 48B shape, 512 rows of 2048 tokens; no model is needed."""
    plan = _at_48b(folder, ["residuals", "router_logits", "expert_indices"], rows=512).plan
    per_terabyte = plan.files / plan.nbytes * 1e12
    yield Result(
        name="files a terabyte, as planned at the 48B shape",
        target="<= 16000",
        measured=per_terabyte,
        spread=(per_terabyte, per_terabyte),
        detail={"files": plan.files, "bytes": plan.nbytes},
    )


def reading(folder: Path, *, repeats: int) -> Iterator[Result]:
    """One layer of a value at the 48B shape read with xarray, over numpy reading as many decompressed bytes."""
    prepared = _at_48b(folder, ["layer_output@layers:0-2"], rows=32)
    path = folder / "reading"
    path.mkdir()
    opened = create(prepared, path / "capture.zarr")
    write_directly(opened, noise_shards(prepared))
    ways: dict[str, Callable[[], xarray.DataTree]] = {
        "kimicap.open": lambda: kimicap.open(opened.path),
        "xarray.open_datatree": lambda: xarray.open_datatree(opened.path, engine="zarr"),
    }
    reads: dict[str, Callable[[], np.ndarray]] = {
        name: lambda way=way: way()["layers/layer_output"].isel(layer=1).values  # type: ignore[misc]
        for name, way in ways.items()
    }
    layer = reads["kimicap.open"]()
    np.save(path / "layer.npy", layer)
    reads["numpy"] = lambda: np.load(path / "layer.npy")
    for whence, before in (("the page cache", lambda: None), ("the disk", lambda: _forget(path))):
        taken = alternate(reads, repeats=repeats, before=before)
        for name in ways:
            ratio, spread = over(taken[name], taken["numpy"])
            yield Result(
                name=f"one layer by {name}, over numpy reading it decompressed, from {whence}",
                target="<= 2",
                measured=ratio,
                spread=spread,
                detail={**taken, "bytes": layer.nbytes},
            )


def _forget(folder: Path) -> None:
    """Has the page cache let go of the files in a folder."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _at_48b(folder: Path, values: list[str], *, rows: int) -> Prepared:
    """A plan for rows of 2048 tokens at the 48B shape."""
    shape = folder / "shape-48b"
    config_of("48b").save_pretrained(shape)
    file = folder / f"rows-{rows}-2048.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": [7] * 2048}) for _ in range(rows)))
    return planned(shape, file, values, folder / "none.zarr")


def rows_of(prepared: Prepared) -> dict[str, np.ndarray]:
    """Noise for the layers of a sequence, of a plan's first value."""
    import torch

    value = prepared.plan.values[0]
    rows = torch.randn(len(value.layers), *value.row_shape).bfloat16().float()
    return {value.key: rows.numpy()}


def assemble(prepared: Prepared, path: Path, rows: dict[str, np.ndarray], slots: Slots) -> None:
    """Kimicap's way of rows to a fresh capture, the same for every sequence, without a model."""
    import torch

    plan, opened = prepared.plan, create(prepared, path)
    assembler = Assembler(plan, opened, slots)
    value = plan.values[0]
    tensors = [torch.from_numpy(row) for row in rows[value.key]]
    for number in range(plan.blocks):
        for sequence in plan.block(number):
            for layer, tensor in zip(value.layers, tensors, strict=True):
                assembler.put(value.key, layer, sequence, Piece(row=0, tensor=tensor))
        pending = assembler.take_pending()
        assembler.writers.wait_handed_over(pending)
        pending.wait()
    assembler.close()


def _tensorstore_alone(prepared: Prepared, path: Path, shards: Shards) -> None:
    create(prepared, path)
    name = prepared.plan.values[0].array.path
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / name)}}
    array = tensorstore.open(spec, open=True, read=True, write=True).result()
    futures = []
    for at, origin, data in shards:
        if at == name:
            region = tuple(slice(o, o + size) for o, size in zip(origin, data.shape, strict=True))
            futures.append(array[region].write(data, can_reference_source_data_indefinitely=True))
    for future in futures:
        future.result()


def _bytes_on_disk(prepared: Prepared, folder: Path) -> Result:
    array: ArrayLayout = prepared.plan.values[0].array
    stored = sum(file.stat().st_size for file in (folder / "kimicap.zarr" / array.path).iterdir())
    ratio = stored / (prod(array.shape) * 2)
    return Result(
        name="bytes on disk of bfloat16 values over bfloat16",
        target="<= 1.00",
        measured=ratio,
        spread=(ratio, ratio),
        detail={"stored": stored, "codec": "lz4"},
    )
