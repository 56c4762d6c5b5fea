"""Chunk and shard shapes: pure arithmetic from row sizes to files.

A row is one value of one block of one sequence. A shard is one file, written whole and once; a chunk is the
smallest piece read alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

SHARD_BYTES = 256 * 2**20
"""Size that shards aim for, uncompressed: thousands of files a terabyte."""
LARGEST_SHARD_BYTES = 512 * 2**20
CHUNK_BYTES = 2 * 2**20
"""Largest chunk where the row can be cut: small enough for a processor's cache while it is compressed."""
SMALL_CHUNK_BYTES = 64 * 2**10
"""Rows smaller than this share chunks over sequences: below it the cost a chunk outweighs its bytes."""
BLOCK_TOKENS = 2**18
"""Tokens of a block: seconds of work on a GPU, so little is lost with one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row's axes.

    Attributes:
        dims: Dimension names, as in the value's layout.
        shape: Elements an axis.
        itemsize_bytes: Bytes of a stored element.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return prod(self.shape) * self.itemsize_bytes


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Extents of a shard and of a chunk.

    Attributes:
        sequences: Sequences of a shard; divides the block's.
        layers: Blocks of the model in a shard.
        shard_row: Elements an axis of the row in a shard; only the head axis may be cut.
        chunk_sequences: Sequences of a chunk.
        chunk_row: Elements an axis of the row in a chunk.
    """

    sequences: int
    layers: int
    shard_row: tuple[int, ...]
    chunk_sequences: int
    chunk_row: tuple[int, ...]


def block_sequences(longest_tokens: int, sequences: int) -> int:
    """Sequences of a block: a power of two of about BLOCK_TOKENS tokens, no more than there are."""
    size = 1
    while size * 2 * longest_tokens <= BLOCK_TOKENS and size < sequences:
        size *= 2
    return size


def plan_grid(row: Row, *, layers: int, block: int, together: int, target_bytes: int = SHARD_BYTES) -> Grid:
    """The grid of one array.

    Args:
        row: One row of the array.
        layers: Blocks of the model that the array holds.
        block: Sequences of a block; a shard never spans two.
        together: Sequences that one forward takes; a large value's shard should not need more.
        target_bytes: Size that shards aim for.
    """
    row_bytes = max(1, row.nbytes)
    if row_bytes * layers * block <= target_bytes:
        sequences, per_shard = block, layers
    elif row_bytes * layers * together <= target_bytes:
        sequences, per_shard = _divisor(block, target_bytes // (row_bytes * layers)), layers
    else:
        sequences = _divisor(block, max(1, min(together, LARGEST_SHARD_BYTES // row_bytes)))
        shards = ceil(layers * row_bytes * sequences / target_bytes)
        per_shard = ceil(layers / min(shards, layers))
    chunk_row = _chunk_row(row)
    shard_row = _shard_row(row, chunk_row, sequences * row_bytes)
    chunk_bytes = prod(chunk_row) * row.itemsize_bytes
    chunk_sequences = 1
    if chunk_row == row.shape and chunk_bytes * 2 <= SMALL_CHUNK_BYTES:
        chunk_sequences = _divisor(sequences, SMALL_CHUNK_BYTES // max(1, chunk_bytes))
    return Grid(
        sequences=sequences,
        layers=per_shard,
        shard_row=shard_row,
        chunk_sequences=chunk_sequences,
        chunk_row=chunk_row,
    )


def _chunk_row(row: Row) -> tuple[int, ...]:
    """Cuts the head axis first, then tokens, then whatever is left, until a chunk is small enough."""
    chunk = list(row.shape)
    order = sorted(range(len(chunk)), key=lambda axis: (row.dims[axis] != "head", axis))
    for axis in order:
        while chunk[axis] > 1 and prod(chunk) * row.itemsize_bytes > CHUNK_BYTES:
            pieces = ceil(row.shape[axis] / chunk[axis]) * 2
            chunk[axis] = max(1, ceil(row.shape[axis] / pieces))
    return tuple(chunk)


def _shard_row(row: Row, chunk: Sequence[int], bytes_of_layer: int) -> tuple[int, ...]:
    """The row rounded up to whole chunks; heads are shared out over shards where one layer is too large."""
    shard = [ceil(size / piece) * piece for size, piece in zip(row.shape, chunk, strict=True)]
    if "head" in row.dims and bytes_of_layer > LARGEST_SHARD_BYTES:
        axis = row.dims.index("head")
        shards = ceil(bytes_of_layer / SHARD_BYTES)
        shard[axis] = max(1, ceil(shard[axis] / chunk[axis] / shards)) * chunk[axis]
    return tuple(shard)


def _divisor(number: int, at_most: int) -> int:
    """The largest divisor of ``number`` that is no larger than ``at_most``, at least 1."""
    return next(size for size in range(max(1, min(number, at_most)), 0, -1) if number % size == 0)
