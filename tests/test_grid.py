"""Chunks and shards of any array: whole blocks of sequences, whole chunks, every element once, sizes within bounds."""

from math import ceil, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicap.grid import BLOCK_TOKENS, CHUNK_BYTES, LARGEST_SHARD_BYTES, Row, block_sequences, plan_grid

MIB = 2**20
AXES = ["position", "head", "hidden", "key"]


@st.composite
def rows(draw, most=5000):
    dims = tuple(draw(st.permutations(AXES))[: draw(st.integers(0, 4))])
    limits = [40 if dim == "head" else most for dim in dims]
    shape = tuple(draw(st.integers(1, limit)) for limit in limits)
    return Row(dims=dims, shape=shape, itemsize_bytes=draw(st.sampled_from([1, 2, 4, 8])))


@given(
    row=rows(),
    layers=st.integers(1, 93),
    block=st.integers(1, 3000),
    together=st.integers(1, 3000),
    target=st.sampled_from([2**10, MIB, 256 * MIB]),
)
def test_any_grid_is_whole(row, layers, block, together, target):
    grid = plan_grid(row, layers=layers, block=block, together=min(together, block), target_bytes=target)
    assert block % grid.sequences == 0
    assert grid.sequences % grid.chunk_sequences == 0
    assert 1 <= grid.layers <= layers
    for dim, size, shard, chunk in zip(row.dims, row.shape, grid.shard_row, grid.chunk_row, strict=True):
        assert 1 <= chunk <= size
        assert shard % chunk == 0
        # only heads are shared out over shards; any other axis lies in one shard, with less than a chunk to spare
        assert shard < size + chunk
        assert dim == "head" or shard >= size
    assert prod(grid.chunk_row) * row.itemsize_bytes <= CHUNK_BYTES
    shard_bytes = prod(grid.shard_row) * row.itemsize_bytes * grid.sequences
    if row.nbytes <= LARGEST_SHARD_BYTES:  # a larger row is one layer of one sequence, cut at its heads if it has any
        assert shard_bytes <= 2 * LARGEST_SHARD_BYTES
    else:
        assert grid.sequences == 1


@given(row=rows(most=9), layers=st.integers(1, 4), block=st.integers(1, 12), blocks=st.integers(1, 3), data=st.data())
def test_every_element_lies_in_one_shard_of_one_block(row, layers, block, blocks, data):
    grid = plan_grid(row, layers=layers, block=block, together=data.draw(st.integers(1, block)), target_bytes=64)
    shape, shard = (layers, block * blocks, *row.shape), (grid.layers, grid.sequences, *grid.shard_row)
    counts = [ceil(size / extent) for size, extent in zip(shape, shard, strict=True)]
    for size, extent, count in zip(shape, shard, counts, strict=True):
        covered = [element for at in range(count) for element in range(at * extent, min(size, (at + 1) * extent))]
        assert covered == list(range(size))
    for at in range(counts[1]):
        first, last = at * grid.sequences, (at + 1) * grid.sequences - 1
        assert first // block == last // block


@given(longest=st.integers(1, 2**20), sequences=st.integers(1, 10**6))
def test_blocks_are_seconds_of_work(longest, sequences):
    block = block_sequences(longest, sequences)
    assert block & (block - 1) == 0
    assert block == 1 or block * longest <= BLOCK_TOKENS
    assert block < 2 * sequences
    assert block >= sequences or 2 * block * longest > BLOCK_TOKENS


@pytest.mark.parametrize(
    ("dims", "shape", "itemsize", "layers"),
    [
        (("position", "hidden"), (2048, 2304), 4, 27),
        (("position", "expert"), (2048, 256), 4, 26),
        (("position", "slot"), (2048, 8), 2, 26),
        (("head", "key_dim", "value_dim"), (32, 128, 128), 4, 20),
        (("position", "head", "key_dim", "value_dim"), (32, 32, 128, 128), 4, 20),
        (("head", "query", "key"), (32, 2048, 2048), 4, 7),
        (("position", "slot", "hidden"), (2048, 8, 2304), 4, 26),
        (("position", "head", "key_dim"), (2048, 32, 128), 4, 20),
        (("head", "position", "qk_dim"), (2048, 32, 192), 4, 7),
        (("position", "neuron"), (2048, 9216), 4, 1),
        (("position", "hidden"), (131072, 7168), 4, 93),
        (("head", "query", "key"), (96, 8192, 8192), 4, 24),
    ],
)
def test_shards_at_real_sizes_are_of_64_to_512_mib(dims, shape, itemsize, layers):
    row = Row(dims=dims, shape=shape, itemsize_bytes=itemsize)
    block = block_sequences(2048, 10**6)
    grid = plan_grid(row, layers=layers, block=block, together=8)
    whole = prod(grid.shard_row) * itemsize * grid.sequences * grid.layers
    least = min(64 * MIB, row.nbytes * layers * block)
    assert whole >= least
    assert whole <= 512 * MIB or (grid.sequences == grid.layers == 1 and "head" not in dims)
    chunk = prod(grid.chunk_row) * itemsize * grid.chunk_sequences
    assert min(64 * 2**10, row.nbytes) <= chunk <= 2 * MIB
