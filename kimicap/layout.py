"""How one zarr array of a capture is laid out: plain data shared by the planner and the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """One array: names, sizes and the grid of its shards.

    Attributes:
        path: Group and name, ``"mlp/router_logits"``; a name alone lies at the root.
        dims: Dimension names, one an axis.
        shape: Elements an axis.
        dtype: numpy name of the stored dtype: ``float32``, ``float16``, ``int16``, ``int32``, ``int64``, ``bool``.
        chunk: Elements an axis of one chunk, the smallest piece that is read alone.
        shard: Elements an axis of one shard, the smallest piece that is written, and one file.
            A multiple of ``chunk`` on every axis; the array's shape need not be a multiple of it.
        fill: What is read where nothing was written: NaN for floats, -1 for indices, False for masks.
        attributes: JSON values stored with the array.
    """

    path: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    fill: float | int | bool
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one stored element."""
        return np.dtype(self.dtype).itemsize

    @property
    def shards(self) -> int:
        """Number of shards."""
        return prod(ceil(size / extent) for size, extent in zip(self.shape, self.shard, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, uncompressed."""
        return prod(self.shape) * self.itemsize_bytes

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one whole shard, uncompressed."""
        return prod(self.shard) * self.itemsize_bytes


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """A small array known before the run and written once, when the capture is created."""

    path: str
    dims: tuple[str, ...]
    data: np.ndarray[Any, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def groups_of(paths: Sequence[str]) -> list[str]:
    """Names of the groups that ``paths`` lie in, without the root, in order of first use."""
    return list(dict.fromkeys(path.rpartition("/")[0] for path in paths if "/" in path))
