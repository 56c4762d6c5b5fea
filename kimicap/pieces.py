"""Parts of values on their way from a hook to a sink."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from kimicap.architecture import Want

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
        fresh: Whether the tensor was made for the piece, so that it stays as it is after the forward.
    """

    row: int
    tensor: torch.Tensor
    slot: int = 0
    head: int = 0
    complete: bool = True
    unseen: float = 0.0
    rows: int | None = None
    fresh: bool = False

    def split(self) -> Iterator["Piece"]:
        """The same as pieces of one row each."""
        if self.rows is None:
            yield self
        else:
            for at in range(self.rows):
                yield replace(self, row=self.row + at, rows=None, tensor=self.tensor[at])


def join(pieces: Sequence[Piece], layout: Sequence[str], *, keys: int = 0) -> Piece:
    """Pieces of one row, perhaps of several forwards, as one piece from the first slot and head on.

    They lie side by side along positions and heads, and the later holds where two are at one place.

    Args:
        pieces: At least one.
        layout: Names of a tensor's axes.
        keys: How many the row has in the end, of which the pieces may have seen fewer.
    """
    places = []
    for piece in pieces:
        begins = {"position": piece.slot, "query": piece.slot, "head": piece.head}
        starts = (begins.get(dim, 0) for dim in layout)
        sizes = zip(starts, piece.tensor.shape, strict=True)
        places.append(tuple(slice(start, start + size) for start, size in sizes))
    shape = [max(place[axis].stop for place in places) for axis in range(len(layout))]
    if "key" in layout:
        shape[layout.index("key")] = max(keys, shape[layout.index("key")])
    last = pieces[-1]
    whole = torch.full(shape, last.unseen, dtype=last.tensor.dtype, device=last.tensor.device)
    for place, piece in zip(places, pieces, strict=True):
        whole[place] = piece.tensor
    return Piece(row=last.row, tensor=whole, fresh=True)


def pick_heads(tensor: torch.Tensor, want: Want, axis: int) -> torch.Tensor:
    """The heads wanted, of a tensor whose head axis is ``axis``."""
    return tensor if want.heads is None else pick(tensor, axis, want.heads)


def pick(tensor: torch.Tensor, axis: int, numbers: Sequence[int]) -> torch.Tensor:
    """Entries of an axis, as a view where they are evenly spaced; never by an index that the device would wait for."""
    if len(numbers) == 1:
        return tensor.narrow(axis, numbers[0], 1)
    step = numbers[1] - numbers[0]
    if step > 0 and all(after - before == step for before, after in pairwise(numbers)):
        return tensor[(slice(None),) * axis + (slice(numbers[0], numbers[-1] + 1, step),)]
    return torch.stack([tensor.select(axis, number) for number in numbers], axis)
