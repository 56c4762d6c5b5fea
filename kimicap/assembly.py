"""From pieces of rows to whole shards: placed in host slots as they come, handed to the store when full."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod

import numpy as np
import torch

from kimicap.copies import Copier
from kimicap.odd import Odd
from kimicap.pieces import Piece
from kimicap.plan import CapturePlan
from kimicap.records import storage_error
from kimicap.selection import position_axis
from kimicap.slots import Slots
from kimicap.store import Store
from kimicap.value_plan import ValuePlan
from kimicap.writers import Pending, Shard, Writers


class Assembler:
    """Places pieces in shards. All its methods but the writers' callbacks are for one thread.

    Rows on a GPU are cast and made whole there, on the model's stream, and then copied to pinned memory beside it.

    Attributes:
        writers: Take the full shards.
        copier: Takes rows from a GPU.
        written_bytes: Bytes handed to the writers, uncompressed.
    """

    def __init__(self, plan: CapturePlan, store: Store, slots: Slots) -> None:
        self.written_bytes = 0
        self._plan, self._store, self._slots = plan, store, slots
        self._values: Mapping[str, ValuePlan] = {value.key: value for value in plan.values}
        self._open: dict[tuple[str, tuple[int, ...]], Shard] = {}
        self._pending = Pending()
        self.writers = Writers(store, slots)
        self.copier = Copier(self.writers)

    def put(self, key: str, block: int | None, sequence: int, piece: Piece) -> None:
        """Places a piece of one row, or of several that follow each other from ``sequence`` on.

        A row's last piece completes it, its last row the shard.
        """
        self.writers.check()
        value = self._values[key]
        layer = 0 if block is None else value.layers.index(block)
        tensor = piece.tensor[None] if piece.rows is None else piece.tensor
        last = sequence + len(tensor)
        first = sequence
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # its others would spin for each other on processors where the store encodes
            while first < last:
                stop = min(last, (first // value.shard_sequences + 1) * value.shard_sequences)
                part = tensor[first - sequence : stop - sequence]
                self._put_rows(value, layer, range(first, stop), part, piece)
                first = stop
        finally:
            torch.set_num_threads(threads)

    def _put_rows(self, value: ValuePlan, layer: int, sequences: range, tensor: torch.Tensor, piece: Piece) -> None:
        """Places ``[sequence, *row]`` in the shards of these sequences, one a share of the heads."""
        own = position_axis(value.want.value)
        begins = [piece.slot if dim == own else 0 for dim in value.row_dims]
        if "head" not in value.row_dims:
            shard = self._shard(value, layer, sequences.start, 0)
            self._place(shard, layer, sequences, begins, tensor, fresh=piece.fresh)
        else:
            axis = value.row_dims.index("head")
            extent, heads = value.array.shard[value.leading + axis], tensor.shape[axis + 1]
            for number in range(piece.head // extent, ceil((piece.head + heads) / extent)):
                first = max(piece.head, number * extent)
                last = min(piece.head + heads, (number + 1) * extent)
                begins[axis] = first - number * extent
                part = tensor.narrow(axis + 1, first - piece.head, last - first)
                shard = self._shard(value, layer, sequences.start, number)
                self._place(shard, layer, sequences, begins, part, fresh=piece.fresh)
        if piece.complete:
            self.complete(value, layer, sequences)

    def complete(self, value: ValuePlan, layer: int, sequences: range) -> None:
        """Counts rows as whole in every shard that shares their heads, and writes those that are full."""
        for number in range(value.head_shards):
            shard = self._shard(value, layer, sequences.start, number)
            shard.rows_left -= len(sequences)
            assert shard.rows_left >= 0, f"{value.key}: a row was completed twice"
            if shard.rows_left == 0:
                self._submit(shard)

    def fill(self, key: str, block: int | None, sequence: int) -> None:
        """A whole row of fill, for a value that may be absent."""
        value = self._values[key]
        layer = 0 if block is None else value.layers.index(block)
        for number in range(value.head_shards):
            shard = self._shard(value, layer, sequence, number)
            self._rows_of(shard, layer, range(sequence, sequence + 1)).fill_(value.array.fill)
        self.complete(value, layer, range(sequence, sequence + 1))

    def write_frame(self, array: str, shards: Iterable[tuple[tuple[int, ...], np.ndarray]], pending: Pending) -> None:
        """Writes whole shards, origin and data of each, of an array that every capture has.

        Raises:
            KimicapError: One cannot be written.
        """
        layout = self._store.layouts[array]
        for origin, data in shards:
            index = tuple(first // extent for first, extent in zip(origin, layout.shard, strict=True))
            pending.shards.setdefault(array, []).append(index)
            try:
                pending.writes.append(self._store.write(array, origin, data))
            except Exception as failure:
                raise storage_error(failure, self._store.path / array) from failure

    def take_pending(self) -> Pending:
        """The block's shards so far; what comes next belongs to the next block."""
        assert not self._open, f"shards left open: {[shard.value.key for shard in self._open.values()]}"
        pending, self._pending = self._pending, Pending()
        return pending

    def drop(self) -> None:
        """Lets go of the block in hand; those before it go on to the disk."""
        self._pending.dropped = True

    def close(self) -> None:
        """Waits until nothing uses a slot any more, and gives back those of shards never finished."""
        try:
            self.copier.close()
        finally:
            self.writers.close()
            for shard in self._open.values():
                self._slots.give(shard.slot)
            self._open.clear()

    def _shard(self, value: ValuePlan, layer: int, sequence: int, head: int) -> Shard:
        grid = [layer // value.shard_layers] if value.leading == 2 else []
        index = (*grid, sequence // value.shard_sequences, *(head if dim == "head" else 0 for dim in value.row_dims))
        found = self._open.get((value.key, index))
        if found is None:
            found = self._open[value.key, index] = self._new_shard(value, index)
        return found

    def _rows_of(self, shard: Shard, layer: int, sequences: range) -> torch.Tensor:
        """``[sequence, *row]``, a view of the shard's slot."""
        at, first = shard.place(layer, sequences.start)
        return shard.layers[at].narrow(0, first, len(sequences))

    def _new_shard(self, value: ValuePlan, index: tuple[int, ...]) -> Shard:
        """Takes a slot and lays the shard out in it, clipped to the array and to its longest sequence."""
        array = value.array
        origin = tuple(at * extent for at, extent in zip(index, array.shard, strict=True))
        shape = [
            min(extent, size - first) for extent, size, first in zip(array.shard, array.shape, origin, strict=True)
        ]
        first = origin[value.leading - 1]
        longest = int(self._plan.lengths[first : first + shape[value.leading - 1]].max())
        own = position_axis(value.want.value)
        for axis, dim in enumerate(value.row_dims, start=value.leading):
            needed = shape[axis]
            if dim == own:
                needed = value.want.request.positions.slots(longest)
            elif dim == "key":
                needed = longest
            shape[axis] = min(shape[axis], ceil(max(1, needed) / array.chunk[axis]) * array.chunk[axis])
        slot = self._slots.take(value.slot_bytes, held=len(self._open))
        with torch.inference_mode(False):  # a view made inside a forward could not be written to outside it
            data = slot[: prod(shape) * array.itemsize_bytes].view(getattr(torch, array.dtype)).view(shape)
        layers = range(origin[0], origin[0] + shape[0]) if value.leading == 2 else (0,)
        absent = [at - layers[0] for at in layers if value.layers and value.layers[at] not in value.want.blocks]
        for at in absent:
            data[at].fill_(array.fill)
        sequences = shape[value.leading - 1]
        return Shard(
            value=value,
            index=index,
            origin=origin,
            slot=slot,
            data=data,
            rows_left=(len(layers) - len(absent)) * sequences,
            odd=Odd(value.row_dims, layers=len(layers), sequences=sequences),
        )

    def _place(
        self,
        shard: Shard,
        layer: int,
        sequences: range,
        begins: Sequence[int],
        tensor: torch.Tensor,
        *,
        fresh: bool,
    ) -> None:
        """Casts, pads and copies ``[sequence, *row]``, whose row begins at ``begins``, into its place in the slot."""
        value, target = shard.value, self._rows_of(shard, layer, sequences)
        if "head" in value.row_dims:
            axis = value.row_dims.index("head")
            target = target.narrow(axis + 1, begins[axis], tensor.shape[axis + 1])
        if not _on_gpu(tensor):
            stored = self._lay(value, target, begins, tensor)
        else:
            whole = stored = tensor
            fits = tensor.shape == target.shape and tensor.dtype == target.dtype and tensor.is_contiguous()
            if not (fits and fresh):
                whole = torch.empty(target.shape, dtype=target.dtype, device=tensor.device)
                stored = self._lay(value, whole, begins, tensor)
            self.copier.copy(target, whole)
        at, first = shard.place(layer, sequences.start)
        shard.odd.see(at, slice(first, first + len(sequences)), begins, tensor, stored)

    def _lay(self, value: ValuePlan, target: torch.Tensor, begins: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
        """Copies into ``target``, which has the tensor's heads alone, with fill around; returns where it lies."""
        part = target
        for axis, (begin, size) in enumerate(zip(begins, tensor.shape[1:], strict=True), start=1):
            if size != target.shape[axis]:
                part = part.narrow(axis, begin, size)
        if part is not target:
            target.fill_(value.array.fill)
        part.copy_(tensor)
        return part

    def _submit(self, shard: Shard) -> None:
        del self._open[shard.value.key, shard.index]
        shard.odd.gather()
        self.written_bytes += shard.data.numel() * shard.data.element_size()
        self._pending.shards.setdefault(shard.value.array.path, []).append(shard.index)
        self.copier.submit(shard, self._pending)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"
