"""Causal attention probabilities on CUDA: one Triton kernel that writes each of them once.

A program has the queries of one head, ``BLOCK_QUERIES`` of them. It goes over the keys they may see twice: first for
each query's largest score and sum of exponentials, then for the probabilities, which products computed anew cost less
than scores written, masked, read and written again.

The module imports without triton; only `probabilities_on_cuda` needs it. CUDA builds of torch bring it along.
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # a CPU build of torch: nothing here is called
    triton = None
    constexpr = Any

BLOCK_QUERIES, BLOCK_KEYS = 128, 64
MOST_CHANNELS = 256
"""Channels of a query that a program can hold."""


def _scores_body(block, keys, at, keys_k, channel_in, total, position, scaling):  # type: ignore[no-untyped-def]
    """Scores of a block of queries with the keys ``at`` some positions, minus infinity after each query's own."""
    key_in = channel_in[:, None] & (at < total)[None, :]
    key_block = tl.load(keys + at[None, :].to(tl.int64) * keys_k, mask=key_in, other=0.0)
    scores = tl.dot(block, key_block) * scaling
    return tl.where(at[None, :] <= position[:, None], scores, float("-inf"))


_scores: Any = None if triton is None else triton.jit(_scores_body)


def _body(  # type: ignore[no-untyped-def]
    queries,
    keys,
    found,
    number,
    total,
    first,
    step,
    channels,
    scaling,
    queries_h,
    queries_q,
    queries_c,
    keys_h,
    keys_k,
    keys_c,
    found_h,
    BLOCK_Q: constexpr,
    BLOCK_K: constexpr,
    BLOCK_C: constexpr,
):
    """Write one block of queries of one head. ``x_h`` is x's stride along heads, in elements."""
    # 64-bit from here on: the probabilities of a long row pass 2**31 elements.
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    key = tl.arange(0, BLOCK_K)
    channel = tl.arange(0, BLOCK_C)
    query_in, channel_in = query < number, channel < channels
    position = first + query * step
    last = first + tl.minimum(tl.program_id(0) * BLOCK_Q + BLOCK_Q, number) * step - step
    seen = tl.minimum(total, last + 1)

    query_at = queries + head * queries_h + query[:, None].to(tl.int64) * queries_q + channel[None, :] * queries_c
    block = tl.load(query_at, mask=query_in[:, None] & channel_in[None, :], other=0.0)
    keys += head * keys_h + channel[:, None] * keys_c
    found += head * found_h + query[:, None].to(tl.int64) * total

    largest = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    summed = tl.zeros([BLOCK_Q], dtype=tl.float32)
    for start in tl.range(0, seen, BLOCK_K):
        at = start + key
        scores = _scores(block, keys, at, keys_k, channel_in, total, position, scaling)
        before = largest
        largest = tl.maximum(largest, tl.max(scores, axis=1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # while no score is finite, nothing is summed
        summed = summed * tl.exp(before - shift) + tl.sum(tl.exp(scores - shift[:, None]), axis=1)

    for start in tl.range(0, seen, BLOCK_K):
        at = start + key
        scores = _scores(block, keys, at, keys_k, channel_in, total, position, scaling)
        shares = tl.exp(scores - largest[:, None]) / summed[:, None]
        tl.store(found + at[None, :], shares, mask=query_in[:, None] & (at < total)[None, :])

    none = tl.zeros([BLOCK_Q, BLOCK_K], dtype=tl.float32) + (0.0 / summed)[:, None]  # NaN where the others are
    for start in tl.range((seen + BLOCK_K - 1) // BLOCK_K * BLOCK_K, total, BLOCK_K):
        at = start + key
        tl.store(found + at[None, :], none, mask=query_in[:, None] & (at < total)[None, :])


_kernel: Any = None if triton is None else triton.jit(_body)


def fits(queries: Tensor) -> bool:
    """Whether the kernel takes these queries: of 16 bits and not too wide, on CUDA, with triton there."""
    sixteen_bits = queries.dtype in (torch.bfloat16, torch.float16)
    return _kernel is not None and queries.is_cuda and sixteen_bits and queries.shape[-1] <= MOST_CHANNELS


def probabilities_on_cuda(queries: Tensor, keys: Tensor, *, first: int, step: int, scaling: float) -> Tensor:
    """Softmax over the keys up to each query's own position of ``scaling * queries . keys``, all of it in float32.

    Args:
        queries: ``[H, Q, C]``, bfloat16 or float16, with any strides; at the positions ``first``, ``first + step``, ….
        keys: ``[H, K, C]`` likewise, at the positions 0, 1, …, of which at least one is no later than ``first``.
        first: Position of the first query.
        step: Positions from one query to the next.
        scaling: Factor of the products.

    Returns:
        ``[H, Q, K]`` float32; 0 at keys after the query.
    """
    heads, number, channels = queries.shape
    total = keys.shape[1]
    found = torch.empty(heads, number, total, dtype=torch.float32, device=queries.device)
    with torch.cuda.device(queries.device):
        _kernel[-(-number // BLOCK_QUERIES), heads](
            *(queries, keys, found, number, total, first, step, channels, scaling),
            *(*queries.stride(), *keys.stride(), found.stride(0)),
            BLOCK_Q=BLOCK_QUERIES,
            BLOCK_K=BLOCK_KEYS,
            BLOCK_C=max(16, 1 << (channels - 1).bit_length()),
            num_warps=8,
            num_stages=2,
        )
    return found
