"""Attention's scores and probabilities, computed from the queries and keys that entered the attention function.

Functions for schema.yaml's ``compute``, as those of `computed`; each hands out float32 pieces of a row at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kimicap import attention_triton
from kimicap.architecture import Want
from kimicap.pieces import SLICE_BYTES, Piece, pick
from kimicap.rows import Rows


@dataclass(frozen=True, kw_only=True)
class _Queried:
    """Queries and keys of some heads of one row.

    Attributes:
        row: Row of the batch.
        queries: ``[head, query, qk_dim]``, the wanted ones.
        keys: ``[head, key, qk_dim]``, all from the sequence's first token on.
        mask: ``[head or 1, query, key]``, boolean (True: may attend) or additive, or None where each query sees the
            keys up to its own position.
        first: Position of the first query.
        step: Positions from one query to the next.
        slot: Where on the query axis they begin.
        head: Where on the head axis they begin.
        complete: Whether the row has no more.
    """

    row: int
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None
    first: int
    step: int
    slot: int
    head: int
    complete: bool

    def piece(self, tensor: torch.Tensor, *, unseen: float) -> Piece:
        """What was computed from them."""
        return Piece(row=self.row, tensor=tensor, slot=self.slot, head=self.head, complete=self.complete, unseen=unseen)

    def scores(self, scaling: float) -> torch.Tensor:
        """``scaling * queries . keys``, minus infinity where a query may not attend."""
        scores = _products(self.queries, self.keys, scaling)
        if self.mask is not None:
            return _masked(scores, self.mask)
        number, total = scores.shape[1:]
        at = self.first + self.step * torch.arange(number, device=scores.device)
        return scores.masked_fill_(torch.arange(total, device=scores.device) > at[:, None], -torch.inf)


def _queried(
    want: Want, rows: Rows, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None
) -> Iterator[_Queried]:
    """The queries wanted, a row and a slice of heads at a time; the arguments of `attention_scores`."""
    groups = queries.shape[1] // keys.shape[1]
    heads = want.heads or range(queries.shape[1])
    for row, (start, count, past) in enumerate(zip(rows.starts, rows.counts, rows.past, strict=True)):
        offset, number, slot = want.request.positions.window(past, count, past + count) if count else (0, 0, 0)
        if not number:
            continue
        step, total = want.request.positions.step, past + count
        first_key = keys.shape[2] - rows.width_tokens + start - past
        queried = slice(start + offset, start + offset + (number - 1) * step + 1, step)
        each = max(1, SLICE_BYTES // (number * total * 4))
        for first in range(0, len(heads), each):
            chosen = list(heads[first : first + each])
            allowed = None
            if mask is not None and mask.ndim == 4:
                allowed = mask[row if mask.shape[0] > 1 else 0][:, queried, first_key : first_key + total]
                allowed = pick(allowed, 0, chosen) if allowed.shape[0] > 1 else allowed
            yield _Queried(
                row=row,
                queries=pick(queries[row, :, queried], 0, chosen),
                keys=pick(keys[row, :, first_key : first_key + total], 0, [head // groups for head in chosen]),
                mask=allowed,
                first=past + offset,
                step=step,
                slot=slot,
                head=first,
                complete=first + each >= len(heads),
            )


def attention_scores(
    want: Want, rows: Rows, *, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> Iterator[Piece]:
    """``scaling * queries . keys``, float32 ``[head, query, key]``, minus infinity where the mask forbids.

    Args:
        want: The heads and queries wanted.
        rows: The rows of this forward.
        queries: ``[batch, head, position, qk_dim]``.
        keys: ``[batch, key heads, past, qk_dim]``, with everything in the cache.
        mask: As the attention function took it: None, a padding mask, or ``[batch, heads or 1, position, past]``,
            boolean (True: may attend) or additive.
        scaling: Factor of the products.
    """
    for part in _queried(want, rows, queries, keys, mask):
        yield part.piece(part.scores(scaling), unseen=-torch.inf)


def attention_probabilities(
    want: Want, rows: Rows, *, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> Iterator[Piece]:
    """Softmax over the keys of `attention_scores`, float32 ``[head, query, key]``."""
    for part in _queried(want, rows, queries, keys, mask):
        if part.mask is None and attention_triton.fits(part.queries):
            found = attention_triton.probabilities_on_cuda(
                part.queries, part.keys, first=part.first, step=part.step, scaling=scaling
            )
        else:
            found = part.scores(scaling).softmax(-1)
        yield part.piece(found, unseen=0.0)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (attention_scores, attention_probabilities)
}


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``scores`` ``[head, query, key]`` under a mask, boolean or additive; its lowest number means minus infinity."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return (scores + mask.float()).masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


def _products(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """``scaling * queries @ keys`` of each head, summed and scaled in float32: ``[head, query, key]``."""
    if queries.is_cuda and queries.dtype in (torch.bfloat16, torch.float16):
        # Products of two bfloat16 are exact in float32, so this is what casting first would give, much faster.
        unread = queries.new_empty((), dtype=torch.float32)
        return torch.baddbmm(unread, queries, keys.transpose(1, 2), out_dtype=torch.float32, beta=0, alpha=scaling)
    return (queries.float() @ keys.float().transpose(1, 2)).mul_(scaling)
