"""The arrays that every capture has: tokens, masks, lengths, rows, and the positions of selections."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kimicap.batches import Sequences
from kimicap.layout import ArrayLayout
from kimicap.plan import CapturePlan
from kimicap.value_plan import ValuePlan


class Frame:
    """What the frame of a capture holds, once the tokens of a block are known.

    Args:
        plan: The capture.
        sequences: Its sequences, as they were given.
        held_tokens: Tokens at the end of each given sequence that count as decoded.
    """

    def __init__(self, plan: CapturePlan, sequences: Sequences, *, held_tokens: int) -> None:
        self._plan, self._sequences, self._held_tokens = plan, sequences, held_tokens
        self._special_ids = np.asarray(sorted(sequences.special_ids), np.int64)

    def shards(
        self, array: ArrayLayout, block: range, tokens: Mapping[int, np.ndarray]
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """A block's shards of one array: where each begins, and its data.

        Args:
            array: One of the plan's frame.
            block: Sequence numbers of the block.
            tokens: int32 ``[position]`` of each, decoded ones included.
        """
        data = np.full((len(block), *array.shape[1:]), array.fill, array.dtype)
        for at, sequence in enumerate(block):
            entry = self._entry(array.path, sequence, tokens[sequence])
            if data.ndim == 1:
                data[at] = entry
            else:
                data[at, : len(entry)] = entry
        for first in range(0, len(block), array.shard[0]):
            part = np.ascontiguousarray(data[first : first + array.shard[0]])
            yield (block.start + first, *(0 for _ in array.shape[1:])), part

    def _entry(self, path: str, sequence: int, tokens: np.ndarray) -> Any:
        given = int(self._sequences.lengths[sequence])
        if path == "input_ids":
            return tokens
        if path == "attention_mask":
            return np.ones(len(tokens), bool)
        if path == "special_tokens_mask":
            return np.isin(tokens, self._special_ids)
        if path == "generated":
            return np.arange(len(tokens)) >= given - self._held_tokens
        if path == "document":
            return self._sequences.documents(sequence)
        if path == "length":
            return len(tokens)
        if path == "row":
            return self._sequences.rows[sequence]
        value = self._selected(path)
        slots = value.array.shape[next(i for i, dim in enumerate(value.array.dims) if dim.endswith("_position"))]
        return value.want.request.positions.at(len(tokens), slots)

    def _selected(self, path: str) -> ValuePlan:
        name = path.removesuffix("_at")
        return next(value for value in self._plan.values if value.array.path.removesuffix("_top") == name)
