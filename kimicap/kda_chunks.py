"""The delta rule in chunks, for the CPU: everything that needs no state is done for all chunks at once.

Within a chunk (the WY form, Kimi Linear, arXiv:2510.26692, section 3), let ``c[i, j]`` be key j as it has
decayed by token i, ``e[i]`` what is left at token i of the state S that entered the chunk, and
``L[i, j] = beta_i <k_i, c[i, j]>`` for j < i. What each token writes is then ``w = (1 + L)^-1 diag(beta)
(v - (k * e) S)``, and the state after token i is ``e[i] * S + sum_{j <= i} c[i, j] w_j^T``.

Decays are multiplied up token by token, never taken as differences of sums: nothing can overflow, and no
digits are lost where a strong decay stands beside a weak one.

Shapes: B rows, T tokens, H heads, K and V channels; a segment's rows and heads are laid side by side as G,
its N chunks have C tokens.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

NORM_EPS = 1e-6
"""Added to the squared length under the root, as fla and transformers do."""

SLICE_BYTES = 32 * 2**20
"""What the temporaries of one slice of rows and heads may take; small enough to stay near the caches."""

SEGMENT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """One segment's factors, all but the state; float32.

    Attributes:
        recalls: ``[G, N, C, K]``, ``k * e``: what reads the entering state.
        values: ``[G, N, C, V]``.
        solves: ``[G, N, C, C]``, ``(1 + L)^-1 diag(beta)``.
        leaving: ``[G, N, C, K]``, keys as decayed by the chunk's last token.
        left: ``[G, N, C, K]``, ``e``.
        wanted: ``[G, P, C, K]``, keys as decayed by each wanted token, zero after it.
        offsets: of each wanted token, ascending: (chunk, token within it).
    """

    recalls: Tensor
    values: Tensor
    solves: Tensor
    leaving: Tensor
    left: Tensor
    wanted: Tensor
    offsets: list[tuple[int, int]]


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors along the last axis to unit length, the way the delta rule's kernels do."""
    return vectors / torch.sqrt((vectors * vectors).sum(-1, keepdim=True) + NORM_EPS)


def states_by_chunks(
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    at: list[int],
    initial: Tensor,
    lengths: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Give the states at ascending positions below T; the arguments of `kimicap.kda.states_at` otherwise.

    Returns:
        ``[B, P, H, K, V]`` and ``[B, H, K, V]``, float32. Temporaries take about `SLICE_BYTES`, or what one
        head of one segment needs if that is more.
    """
    rows, tokens, heads, channels = keys.shape
    chunk = max(1, min(chunk, tokens))
    states = torch.empty(rows, len(at), heads, channels, values.shape[-1], device=keys.device)
    final = torch.empty_like(initial, memory_format=torch.contiguous_format)
    real = None
    if lengths is not None and bool((lengths < tokens).any()):
        real = torch.arange(tokens, device=keys.device) < lengths.to(keys.device)[:, None]
    share = len(at) / max(1, tokens)
    head_bytes = _head_bytes(min(tokens, SEGMENT_TOKENS), chunk, channels, values.shape[-1], share)
    for part in _parts(rows, heads, head_bytes):
        mine = [tensor[part[0], :, part[1]] for tensor in (keys, values, decays, betas)]
        mine_real = None if real is None else real[part[0]]
        target = states[part[0], :, part[1]]
        final[part] = _one_part(mine, at, initial[part], mine_real, chunk, target)
    if real is not None and at:
        beyond = ~real[:, at]
        states[beyond] = torch.nan
    return states, final


def _one_part(
    inputs: list[Tensor], at: list[int], initial: Tensor, real: Tensor | None, chunk: int, target: Tensor
) -> Tensor:
    """Carry some rows and heads through all segments; fill ``target`` [b, P, h, K, V].

    Returns the final state, ``[b, h, K, V]``.
    """
    tokens = inputs[0].shape[1]
    state = initial.reshape(-1, *initial.shape[2:]).clone()
    size = max(1, SEGMENT_TOKENS // chunk) * chunk
    done = 0
    for start in range(0, tokens, size):
        span = slice(start, min(start + size, tokens))
        count = sum(1 for position in itertools.islice(at, done, None) if position < span.stop)
        offsets = [divmod(position - start, chunk) for position in at[done : done + count]]
        lasting = None if real is None else real[:, span]
        laid = [_lay(tensor[:, span], lasting, chunk) for tensor in inputs]
        segment = _factors(laid[0], laid[1], laid[2], laid[3][..., 0], offsets)
        _carry(segment, state, target[:, done : done + count])
        done += count
    return state.reshape(initial.shape)


def _lay(tensor: Tensor, real: Tensor | None, chunk: int) -> Tensor:
    """Lay ``[b, t, h, ...]`` out as chunks ``[G, N, C, ...]`` float32, zeros in place of what is not real.

    A token of zeros leaves the state as it is: its log decay and its beta are 0.
    """
    if tensor.dim() == 3:
        tensor = tensor[..., None]
    rows, tokens, heads, width = tensor.shape
    padded = -(-tokens // chunk) * chunk
    laid = torch.empty(rows, heads, padded, width, device=tensor.device)
    laid[:, :, :tokens] = tensor.transpose(1, 2)
    laid[:, :, tokens:] = 0
    if real is not None:
        laid[:, :, :tokens].masked_fill_(~real[:, None, :, None], 0)
    return laid.reshape(rows * heads, padded // chunk, chunk, width)


def _factors(keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor, offsets: list[tuple[int, int]]) -> _Segment:
    """Work out, for all chunks at once, everything that needs no state."""
    keys = unit(keys)
    groups, chunks, chunk, channels = keys.shape
    kept = decays.exp_()
    left = kept.cumprod(-2)
    decayed = torch.zeros_like(keys)
    overlaps = keys.new_zeros(groups, chunks, chunk, chunk)
    wanted = keys.new_empty(groups, len(offsets), chunk, channels)
    flat_keys, flat_kept, flat = keys.flatten(0, 1), kept.flatten(0, 1), decayed.flatten(0, 1)
    flat_overlaps = overlaps.flatten(0, 1)
    for token in range(chunk):
        if token:
            flat[:, :token] *= flat_kept[:, token, None]
            overlap = torch.bmm(flat[:, :token], flat_keys[:, token, :, None])
            flat_overlaps[:, token, :token] = overlap[..., 0]
        flat[:, token] = flat_keys[:, token]
        slots = [slot for slot, (_, offset) in enumerate(offsets) if offset == token]
        if slots:
            wanted[:, slots] = decayed[:, [offsets[slot][0] for slot in slots]]
    solves = torch.linalg.solve_triangular(
        overlaps * betas[..., None], torch.diag_embed(betas), upper=False, unitriangular=True
    )
    return _Segment(
        recalls=keys * left,
        values=values,
        solves=solves,
        leaving=decayed,
        left=left,
        wanted=wanted,
        offsets=offsets,
    )


def _carry(segment: _Segment, state: Tensor, target: Tensor) -> None:
    """Carry ``state`` [G, K, V] through a segment, in place; fill ``target`` [b, P, h, K, V]."""
    rows, _, heads = target.shape[:3]
    first = 0
    for chunk in range(segment.values.shape[1]):
        unread = torch.baddbmm(segment.values[:, chunk], segment.recalls[:, chunk], state, alpha=-1)
        written = torch.bmm(segment.solves[:, chunk], unread)
        last = first
        while last < len(segment.offsets) and segment.offsets[last][0] == chunk:
            last += 1
        if last > first:
            tokens = [token for _, token in segment.offsets[first:last]]
            added = torch.matmul(segment.wanted[:, first:last].mT, written[:, None])
            added.addcmul_(segment.left[:, chunk, tokens][..., None], state[:, None])
            target[:, first:last] = added.reshape(rows, heads, *added.shape[1:]).transpose(1, 2)
            first = last
        state *= segment.left[:, chunk, -1, :, None]
        state.baddbmm_(segment.leaving[:, chunk].mT, written)


def _head_bytes(tokens: int, chunk: int, channels: int, width: int, share: float) -> int:
    """Say what one head of one row takes in temporaries while a segment is worked on, in bytes."""
    factors = tokens * (6 * channels + 2 * width + 4 * chunk + 1)
    wanted = tokens * share * chunk * channels
    emitted = (2 * max(1.0, share * chunk) + 2) * channels * width
    return int(4 * (factors + wanted + emitted))


def _parts(rows: int, heads: int, head_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows and heads so that a part's temporaries stay within `SLICE_BYTES`, whole rows if they fit."""
    many = max(1, SLICE_BYTES // head_bytes)
    row_step, head_step = (many // heads, heads) if many >= heads else (1, many)
    for row in range(0, rows, row_step):
        for head in range(0, heads, head_step):
            yield slice(row, row + row_step), slice(head, head + head_step)
