"""Values computed from what sites give, one small function each, under the names that schema.yaml uses.

A function takes its ingredients by the schema's names and hands pieces of rows to ``emit``. Tensors given
in a value's layout have the batch axis before it; ingredients without a layout are as the model has them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from kimicap import attention_triton, kda, recomputed
from kimicap.architecture import Want
from kimicap.rows import Rows

CHUNK_TOKENS = 64
"""Tokens of a chunk of fla's delta-rule kernel."""
SLICE_BYTES = 2**30
"""Largest temporary on the device."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of one row of a value, or the same part of several rows.

    Attributes:
        row: Row of the batch, or the first of several.
        rows: How many rows, where ``tensor`` has an axis of them; None for one row without.
        tensor: In the value's layout, without batch; the position axis holds the chosen ones alone.
        slot: Where on the position axis it begins.
        head: Where on the head axis it begins, counted among the heads wanted.
        complete: Whether this is the row's last piece of this forward.
        unseen: What the value is at keys that come only in later forwards.
    """

    row: int
    tensor: torch.Tensor
    slot: int = 0
    head: int = 0
    complete: bool = True
    unseen: float = 0.0
    rows: int | None = None

    def split(self) -> Iterator["Piece"]:
        """The same as pieces of one row each."""
        if self.rows is None:
            yield self
        else:
            for at in range(self.rows):
                yield replace(self, row=self.row + at, rows=None, tensor=self.tensor[at])


def next_token_probs(want: Want, rows: Rows, *, logits: torch.Tensor) -> Iterator[Piece]:
    """Softmax in float32 of the logits ``[batch, position, vocab]`` at each row's last token: ``[vocab]``."""
    for row, (start, count) in enumerate(zip(rows.starts, rows.counts, strict=True)):
        if count:
            yield Piece(row=row, tensor=logits[row, start + count - 1].float().softmax(-1))


def final_state(
    want: Want,
    rows: Rows,
    *,
    returned: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    initial: torch.Tensor | None,
) -> Iterator[Piece]:
    """State after each row's last token, ``[head, key_dim, value_dim]`` float32.

    The kernel's own, but for batches with padding on the right, where the kernel's state ran on through it.
    """
    final = returned
    if any(start + count < rows.width_tokens for start, count in zip(rows.starts, rows.counts, strict=True) if count):
        everyone = range(len(rows.counts))
        factors = [_of(tensor, everyone, rows) for tensor in (keys, values, decays, betas)]
        final = kda.states_at(*factors, at=(), initial=initial, lengths=_lengths(everyone, rows, keys))[1]
    if rows.alike:
        yield Piece(row=0, rows=len(rows.counts), tensor=pick_heads(final, want, 1))
        return
    for row, count in enumerate(rows.counts):
        if count:
            yield Piece(row=row, tensor=pick_heads(final[row], want, 0))


def states(
    want: Want,
    rows: Rows,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    initial: torch.Tensor | None,
    returned: torch.Tensor | None = None,
) -> Iterator[Piece]:
    """States after the chosen tokens, ``[position, head, key_dim, value_dim]`` float32, a slice of heads at a time."""
    del returned
    positions, heads = want.request.positions, want.heads or range(keys.shape[2])
    live = [row for row, count in enumerate(rows.counts) if count]
    windows = {}
    for row in live:
        past, count = rows.past[row], rows.counts[row]
        windows[row] = positions.window(past, count, past + count)
    live = [row for row in live if windows[row][1]]
    if not live:
        return
    last = positions.kind == "last"
    chosen_at = {row: [windows[row][0] + at * positions.step for at in range(windows[row][1])] for row in live}
    at = [] if last else sorted(set().union(*chosen_at.values()))
    place_of = {position: place for place, position in enumerate(at)}
    head_bytes = len(live) * max(1, len(at)) * keys.shape[3] * values.shape[3] * 4
    each = max(1, SLICE_BYTES // head_bytes)
    for first in range(0, len(heads), each):
        chosen = list(heads[first : first + each])
        factors = [pick(_of(tensor, live, rows), 2, chosen) for tensor in (keys, values, decays, betas)]
        before = None if initial is None else pick(pick(initial, 0, live), 1, chosen)
        found, final = kda.states_at(*factors, at=at, initial=before, lengths=_lengths(live, rows, keys))
        if rows.alike:
            tensor = final[:, None] if last else found
            complete = first + each >= len(heads)
            yield Piece(row=0, rows=len(live), tensor=tensor, slot=windows[0][2], head=first, complete=complete)
            continue
        for place, row in enumerate(live):
            offset, number, _ = windows[row]
            places = [] if last else [place_of[offset + i * positions.step] for i in range(number)]
            tensor = final[place, None] if last else pick(found[place], 0, places)
            yield Piece(row=row, tensor=tensor, slot=windows[row][2], head=first, complete=first + each >= len(heads))


def chunk_states(
    want: Want,
    rows: Rows,
    *,
    chunks: torch.Tensor | None,
    returned: torch.Tensor,
    bounds: torch.Tensor | None = None,
) -> Iterator[Piece]:
    """States after the chosen tokens as the chunked kernel had them, in its own dtype.

    Args:
        want: Positions must be ends of the kernel's chunks of 64, or the last of rows without padding.
        rows: The rows of this forward, each from the kernel's first token on.
        chunks: ``[batch, chunk, head, key_dim, value_dim]``, the state before each chunk; None from a kernel without
            chunks, which models call for at most 64 tokens.
        returned: ``[batch, head, key_dim, value_dim]``, the state after the last.
        bounds: Where each row began and ended in what the kernel read, if the mixer dropped the padding: ``chunks``
            is then ``[1, …]``, with the chunks of all rows one after another.
    """
    assert rows.aligned or bounds is not None, "checked with the settings"
    begins = [0, *accumulate(-(-count // CHUNK_TOKENS) for count in rows.counts)]
    positions = want.request.positions
    for row, (count, past) in enumerate(zip(rows.counts, rows.past, strict=True)):
        offset, number, slot = positions.window(past, count, past + count)
        ends = [(offset + at * positions.step + 1) // CHUNK_TOKENS for at in range(number)]
        if not ends:
            continue
        if rows.alike and chunks is not None and bounds is None:
            after = torch.cat([chunks, returned[:, None].to(chunks.dtype)], 1)
            tensor = pick_heads(pick(after, 1, ends), want, 2)
            yield Piece(row=0, rows=len(rows.counts), tensor=tensor, slot=slot)
            return
        after = returned[row, None]
        if chunks is not None:
            own = chunks[row] if bounds is None else chunks[0, begins[row] : begins[row + 1]]
            after = pick(torch.cat([own, after.to(own.dtype)]), 0, ends)
        yield Piece(row=row, tensor=pick_heads(after, want, 1), slot=slot)


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


def expert_outputs(want: Want, rows: Rows, *, experts: tuple[torch.nn.Module, Mapping[str, Any]]) -> torch.Tensor:
    """Weighted output of each slot, ``[token, slot, hidden]``, by calling the experts with one slot a row.

    Args:
        want: The request.
        rows: The rows of this forward.
        experts: The experts module and the arguments it was called with: ``hidden_states`` ``[token, hidden]``,
            ``top_k_index`` and ``top_k_weights`` ``[token, slot]``.
    """
    module, arguments = experts
    hidden, index, weights = arguments["hidden_states"], arguments["top_k_index"], arguments["top_k_weights"]
    slots = index.shape[1]
    found: torch.Tensor = module(hidden.repeat_interleave(slots, 0), index.reshape(-1, 1), weights.reshape(-1, 1))
    return found.view(hidden.shape[0], slots, -1)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **recomputed.FUNCTIONS,
    **{
        function.__name__: function
        for function in (
            next_token_probs,
            final_state,
            states,
            chunk_states,
            attention_scores,
            attention_probabilities,
            expert_outputs,
        )
    },
}


def pick_heads(tensor: torch.Tensor, want: Want, axis: int) -> torch.Tensor:
    """The heads wanted, of a tensor whose head axis is ``axis``."""
    return tensor if want.heads is None else pick(tensor, axis, want.heads)


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``scores`` ``[head, query, key]`` under a mask, boolean or additive; its lowest number means minus infinity."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return (scores + mask.float()).masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


def _of(tensor: torch.Tensor, chosen: Sequence[int], rows: Rows) -> torch.Tensor:
    """The chosen rows ``[row, position, …]``, moved so that position 0 is the first real token."""
    if rows.aligned:
        return pick(tensor, 0, chosen)
    parts = [tensor[row, rows.starts[row] : rows.starts[row] + rows.counts[row]] for row in chosen]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def pick(tensor: torch.Tensor, axis: int, numbers: Sequence[int]) -> torch.Tensor:
    """Entries of an axis, as a view where they are evenly spaced; never by an index that the device would wait for."""
    if len(numbers) == 1:
        return tensor.narrow(axis, numbers[0], 1)
    step = numbers[1] - numbers[0]
    if step > 0 and all(after - before == step for before, after in pairwise(numbers)):
        return tensor[(slice(None),) * axis + (slice(numbers[0], numbers[-1] + 1, step),)]
    return torch.stack([tensor.select(axis, number) for number in numbers], axis)


def _lengths(chosen: Sequence[int], rows: Rows, like: torch.Tensor) -> torch.Tensor | None:
    """Real tokens of the chosen rows on the device of ``like``, or None where all fill the forward."""
    counts = [rows.counts[row] for row in chosen]
    if rows.aligned and all(count == rows.width_tokens for count in counts):
        return None
    lengths = torch.tensor(counts, dtype=torch.int32)
    return lengths.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else lengths


def _products(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """``scaling * queries @ keys`` of each head, summed and scaled in float32: ``[head, query, key]``."""
    if queries.is_cuda and queries.dtype in (torch.bfloat16, torch.float16):
        # Products of two bfloat16 are exact in float32, so this is what casting first would give, much faster.
        unread = queries.new_empty((), dtype=torch.float32)
        return torch.baddbmm(unread, queries, keys.transpose(1, 2), out_dtype=torch.float32, beta=0, alpha=scaling)
    return (queries.float() @ keys.float().transpose(1, 2)).mul_(scaling)
