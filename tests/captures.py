"""Small captures for the tests of store and verify: 3 blocks of 2 sequences (the last of 1), 5 layers."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kimicap import store
from kimicap.layout import ArrayLayout, Coordinate

BLOCKS = 3
LAYERS = [0, 1, 2, 4, 5]
SEED = 7


def layouts() -> list[ArrayLayout]:
    logits = ArrayLayout(
        path="mlp/router_logits",
        dims=("layer", "sequence", "position", "expert"),
        shape=(5, 5, 6, 8),
        dtype="float32",
        chunk=(1, 1, 6, 8),
        shard=(2, 2, 6, 8),
        fill=math.nan,
        attributes={"long_name": "logits", "layout": ["sequence", "position", "expert"]},
    )
    indices = ArrayLayout(
        path="mlp/expert_indices",
        dims=("layer", "sequence", "position", "slot"),
        shape=(5, 5, 6, 2),
        dtype="int16",
        chunk=(1, 1, 3, 2),
        shard=(5, 2, 6, 2),
        fill=-1,
    )
    mask = ArrayLayout(
        path="attention_mask",
        dims=("sequence", "position"),
        shape=(5, 6),
        dtype="bool",
        chunk=(1, 6),
        shard=(2, 6),
        fill=False,
    )
    length = ArrayLayout(path="length", dims=("sequence",), shape=(5,), dtype="int32", chunk=(2,), shard=(2,), fill=-1)
    return [logits, indices, mask, length]


def coordinates() -> list[Coordinate]:
    position = np.arange(6, dtype=np.int32)
    return [
        Coordinate(path="position", dims=("position",), data=position),
        Coordinate(path="mlp/position", dims=("position",), data=position),
        Coordinate(path="mlp/layer", dims=("layer",), data=np.array(LAYERS, np.int32)),
    ]


def contents() -> dict[str, np.ndarray]:
    """The whole arrays, from which the blocks are cut."""
    random = np.random.default_rng(SEED)
    return {
        "mlp/router_logits": random.standard_normal((5, 5, 6, 8)).astype(np.float32),
        "mlp/expert_indices": random.integers(0, 8, (5, 5, 6, 2)).astype(np.int16),
        "attention_mask": random.random((5, 6)) < 0.8,
        "length": random.integers(1, 7, 5).astype(np.int32),
    }


def new(path: Path, **more) -> store.Store:
    return store.create(
        path,
        layouts(),
        coordinates(),
        attributes={"model": "tiny"},
        record={"blocks": BLOCKS, "block_sequences": 2, "seed": 1},
        **more,
    )


def write_block(capture: store.Store, block: int) -> dict[str, list[list[int]]]:
    """Write every shard of ``block`` and return the body's shards."""
    shards: dict[str, list[list[int]]] = {}
    for path, whole in contents().items():
        layout = capture.layouts[path]
        axis = layout.dims.index("sequence")
        for first in range(0, layout.shape[0], layout.shard[0]) if axis else [None]:
            region = [slice(None)] * whole.ndim
            region[axis] = slice(2 * block, 2 * block + 2)
            origin = [0] * whole.ndim
            origin[axis] = 2 * block
            if first is not None:
                region[0] = slice(first, first + layout.shard[0])
                origin[0] = first
            capture.write(path, tuple(origin), np.ascontiguousarray(whole[tuple(region)]))
            index = [at // size for at, size in zip(origin, layout.shard, strict=True)]
            shards.setdefault(path, []).append(index)
    return shards


def finished(path: Path) -> store.Store:
    capture = new(path)
    for block in range(BLOCKS):
        capture.commit(block, {"shards": write_block(capture, block), "sequences": 2})
    capture.seal(BLOCKS, {"wall_s": 1.5})
    return capture


def run_script(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python code that imports this module as ``captures``; a warning is an error."""
    root = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{root.parent}{os.pathsep}{root}"}
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def leftovers(folder: Path) -> list[str]:
    """What a capture that was being made, or replaced, left beside itself."""
    return [name for name in os.listdir(folder) if "kimicap-" in name]
