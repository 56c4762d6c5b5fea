"""Values computed from what sites give, one small function each, under the names that schema.yaml uses.

A function takes its ingredients by the schema's names and hands pieces of rows to ``emit``. Tensors given
in a value's layout have the batch axis before it; ingredients without a layout are as the model has them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from kimicap import attention, kda, recomputed
from kimicap.architecture import Want
from kimicap.pieces import SLICE_BYTES, Piece, pick, pick_heads
from kimicap.rows import Rows

CHUNK_TOKENS = 64
"""Tokens of a chunk of fla's delta-rule kernel."""


def next_token_probs(want: Want, rows: Rows, *, logits: torch.Tensor) -> Iterator[Piece]:
    """Softmax in float32 of the logits ``[batch, kept, vocab]`` at each row's last token: ``[vocab]``."""
    rows = rows.kept
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
            slot = windows[0][2]
            yield Piece(row=0, rows=len(live), tensor=tensor, slot=slot, head=first, complete=complete, fresh=True)
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
    **attention.FUNCTIONS,
    **{
        function.__name__: function
        for function in (
            next_token_probs,
            final_state,
            states,
            chunk_states,
            expert_outputs,
        )
    },
}


def _of(tensor: torch.Tensor, chosen: Sequence[int], rows: Rows) -> torch.Tensor:
    """The chosen rows ``[row, position, …]``, moved so that position 0 is the first real token."""
    if rows.aligned:
        return pick(tensor, 0, chosen)
    parts = [tensor[row, rows.starts[row] : rows.starts[row] + rows.counts[row]] for row in chosen]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def _lengths(chosen: Sequence[int], rows: Rows, like: torch.Tensor) -> torch.Tensor | None:
    """Real tokens of the chosen rows on the device of ``like``, or None where all fill the forward."""
    counts = [rows.counts[row] for row in chosen]
    if rows.aligned and all(count == rows.width_tokens for count in counts):
        return None
    lengths = torch.tensor(counts, dtype=torch.int32)
    return lengths.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else lengths
