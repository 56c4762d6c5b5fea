"""One shard: which piece of an array it is, its file, and its way to the disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kimicap.layout import ArrayLayout
from kimicap.records import storage_error

Array = np.ndarray[Any, Any]


class Write:
    """A shard on its way to the disk.

    The data handed to `Store.write` must stay as it is until `done`.
    """

    def __init__(self, future: Any, file: Path) -> None:
        self._future = future
        self._file = file

    def done(self) -> bool:
        """Whether the bytes are durable, or the write has failed."""
        return bool(self._future.done())

    def result(self, timeout_s: float | None = None) -> None:
        """Wait until the bytes are durable.

        Raises:
            KimicapError: The write failed; see `storage_error`.
            TimeoutError: ``timeout_s`` seconds have passed.
        """
        try:
            self._future.result(timeout=timeout_s)
        except TimeoutError:
            raise
        except (ValueError, OSError, RuntimeError) as error:
            raise storage_error(error, self._file) from error

    def add_done_callback(self, call: Callable[["Write"], None]) -> None:
        """Call ``call`` with this write, from one of tensorstore's threads, when it is `done`."""
        self._future.add_done_callback(lambda _: call(self))


def shard_index(layout: ArrayLayout, origin: tuple[int, ...], data: Array) -> tuple[int, ...]:
    """Grid index of the shard at ``origin``, after a check that ``data`` is that shard."""
    told = f"{layout.path}: {data.dtype}{list(data.shape)} at {list(origin)}"
    assert data.dtype == np.dtype(layout.dtype), f"{told} is not {layout.dtype}"
    assert len(origin) == data.ndim == len(layout.dims), f"{told} has not the dimensions {layout.dims}"
    axes = zip(layout.dims, layout.shape, layout.shard, origin, data.shape, strict=True)
    for dim, whole, shard, start, size in axes:
        assert start % shard == 0, f"{told} starts amid a shard ({dim})"
        assert 0 <= start < whole, f"{told} starts outside the array ({dim})"
        most = min(shard, whole - start)
        assert size == most or (dim != "sequence" and 0 < size < most), f"{told} is not a shard ({dim})"
    return tuple(start // shard for start, shard in zip(origin, layout.shard, strict=True))


def size_bytes(file: Path) -> int | None:
    """Size of ``file``, None if there is none.

    Raises:
        KimicapError: Its folder may not be looked into.
    """
    try:
        return os.stat(file).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(error, file) from error
