"""From pieces of rows to whole shards: placed in host slots as they come, handed to the store when full."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import numpy as np
import torch

from kimicap.computed import Piece
from kimicap.plan import CapturePlan
from kimicap.selection import position_axis
from kimicap.slots import Slots
from kimicap.store import Store
from kimicap.value_plan import ValuePlan


@dataclass(eq=False)
class Shard:
    """One shard being filled.

    Attributes:
        value: The value it holds.
        index: Its place on the array's grid of shards.
        origin: Its first element on each axis.
        data: ``[layer, sequence, *row]`` (or ``[sequence, *row]``), a view of its slot, rows cut where all end.
        rows_left: Rows still to come.
    """

    value: ValuePlan
    index: tuple[int, ...]
    origin: tuple[int, ...]
    slot: torch.Tensor
    data: torch.Tensor
    rows_left: int


@dataclass(eq=False)
class Pending:
    """Shards of one block on their way to the disk."""

    shards: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    writes: list[Any] = field(default_factory=list)


class Assembler:
    """Places pieces in shards. All its methods but the writers' callbacks are for one thread.

    On a GPU a side stream casts, pads and copies, so that the model's stream never waits for it; the row is made
    whole on the device, and one contiguous copy takes it to pinned memory.

    Attributes:
        written_bytes: Bytes handed to the store, uncompressed.
        odd: Elements that are not finite, by value and block: a count on the device, read with `odd_counts`.
    """

    def __init__(self, plan: CapturePlan, store: Store, slots: Slots) -> None:
        self.written_bytes = 0
        self._plan, self._store, self._slots = plan, store, slots
        self._values: Mapping[str, ValuePlan] = {value.key: value for value in plan.values}
        self._open: dict[tuple[str, tuple[int, ...]], Shard] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._odd: dict[tuple[str, int | None, str], torch.Tensor] = {}
        self._writers = Writers(store, slots)
        self.pending = Pending()

    def put(self, key: str, block: int | None, sequence: int, piece: Piece) -> None:
        """Places a piece of one row; its last piece completes the row, its last row the shard."""
        self._writers.check()
        value = self._values[key]
        layer = 0 if block is None else value.layers.index(block)
        head = value.row_dims.index("head") if "head" in value.row_dims else None
        extent = value.array.shard[value.leading + head] if head is not None else 1
        heads = piece.tensor.shape[head] if head is not None else 1
        for number in range(piece.head // extent, ceil((piece.head + heads) / extent)):
            shard = self._shard(value, layer, sequence, number)
            row = shard.data[self._inside(shard, layer, sequence)]
            tensor = piece.tensor
            if head is not None:
                first = max(piece.head, number * extent)
                last = min(piece.head + heads, (number + 1) * extent)
                tensor = tensor.narrow(head, first - piece.head, last - first)
                if last - first < row.shape[head]:
                    row = row.narrow(head, first - number * extent, last - first)
            self._place(value, block, row, tensor, piece.slot)
        if piece.complete:
            self.complete(value, layer, sequence)

    def complete(self, value: ValuePlan, layer: int, sequence: int) -> None:
        """Counts a row as whole in every shard that shares its heads, and writes those that are full."""
        for number in range(self._head_shards(value)):
            shard = self._shard(value, layer, sequence, number)
            shard.rows_left -= 1
            assert shard.rows_left >= 0, f"{value.key}: a row was completed twice"
            if shard.rows_left == 0:
                self._submit(shard)

    def fill(self, key: str, block: int | None, sequence: int) -> None:
        """A whole row of fill, for a value that may be absent."""
        value = self._values[key]
        layer = 0 if block is None else value.layers.index(block)
        for number in range(self._head_shards(value)):
            shard = self._shard(value, layer, sequence, number)
            with torch.inference_mode():  # the slot may have been taken inside a forward
                shard.data[self._inside(shard, layer, sequence)].fill_(value.array.fill)
        self.complete(value, layer, sequence)

    def write_frame(self, array: str, origin: tuple[int, ...], data: np.ndarray) -> None:
        """Writes a whole shard of an array that every capture has."""
        layout = self._store.layouts[array]
        index = tuple(first // extent for first, extent in zip(origin, layout.shard, strict=True))
        self.pending.shards.setdefault(array, []).append(index)
        self.pending.writes.append(self._store.write(array, origin, data))

    def odd_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Counts since the last call, by kind (``nonfinite``, ``overflow``), value and block; zeros left out."""
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for (key, block, kind), count in self._odd.items():
            if number := int(count):
                of_value = counts.setdefault(kind, {}).setdefault(key, {})
                of_value["model" if block is None else str(block)] = number
        self._odd.clear()
        return counts

    def take_pending(self) -> Pending:
        """The block's shards so far; what comes next belongs to the next block."""
        assert not self._open, f"shards left open: {[shard.value.key for shard in self._open.values()]}"
        self._writers.drain_submissions()
        pending, self.pending = self.pending, Pending()
        return pending

    def close(self) -> None:
        """Waits until no writer uses a slot any more."""
        self._writers.close()

    def check(self) -> None:
        """Raises what a writer failed with, if one did."""
        self._writers.check()

    def _head_shards(self, value: ValuePlan) -> int:
        if "head" not in value.row_dims:
            return 1
        axis = value.leading + value.row_dims.index("head")
        return ceil(value.array.shape[axis] / value.array.shard[axis])

    def _shard(self, value: ValuePlan, layer: int, sequence: int, head: int) -> Shard:
        grid = [layer // value.shard_layers] if value.leading == 2 else []
        index = (*grid, sequence // value.shard_sequences, *(head if dim == "head" else 0 for dim in value.row_dims))
        found = self._open.get((value.key, index))
        if found is None:
            found = self._open[value.key, index] = self._new_shard(value, index)
        return found

    def _inside(self, shard: Shard, layer: int, sequence: int) -> tuple[int, ...]:
        place = (layer, sequence) if shard.value.leading == 2 else (sequence,)
        return tuple(at - first for at, first in zip(place, shard.origin, strict=False))

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
        slot = self._slots.take(min(array.shard_nbytes, array.nbytes), held=len(self._open))
        dtype = getattr(torch, array.dtype)
        data = slot[: prod(shape) * array.itemsize_bytes].view(dtype).view(shape)
        layers = range(origin[0], origin[0] + shape[0]) if value.leading == 2 else (0,)
        absent = [at - layers[0] for at in layers if value.layers and value.layers[at] not in value.want.blocks]
        for at in absent:
            data[at].fill_(array.fill)
        rows = (len(layers) - len(absent)) * shape[value.leading - 1]
        return Shard(value=value, index=index, origin=origin, slot=slot, data=data, rows_left=rows)

    def _place(self, value: ValuePlan, block: int | None, row: torch.Tensor, tensor: torch.Tensor, first: int) -> None:
        """Casts, pads and copies a piece into its place in the slot."""
        if tensor.device.type != "cuda":
            self._lay(value, block, row, tensor, first)
            return
        side = self._stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            whole = torch.empty(row.shape, dtype=row.dtype, device=tensor.device)
            self._lay(value, block, whole, tensor, first)
            row.copy_(whole, non_blocking=True)
        tensor.record_stream(side)

    def _lay(self, value: ValuePlan, block: int | None, target: torch.Tensor, tensor: torch.Tensor, first: int) -> None:
        own = position_axis(value.want.value)
        part = target
        for axis, (dim, size) in enumerate(zip(value.row_dims, tensor.shape, strict=True)):
            if size != target.shape[axis]:
                part = part.narrow(axis, first if dim == own else 0, size)
        if part is not target:
            target.fill_(value.array.fill)
        part.copy_(tensor)
        if tensor.is_floating_point():
            self._count(value, block, part, tensor)

    def _count(self, value: ValuePlan, block: int | None, stored: torch.Tensor, tensor: torch.Tensor) -> None:
        """Counts elements that are not finite, and those that a narrower dtype could not hold."""
        finite = torch.isfinite(tensor)
        odd = ~finite
        if "key" in value.row_dims:
            odd &= tensor != -torch.inf  # the mask's own
        self._add(value.key, block, "nonfinite", odd)
        if value.array.dtype == "float16":
            self._add(value.key, block, "overflow", finite & torch.isinf(stored))

    def _add(self, key: str, block: int | None, kind: str, where: torch.Tensor) -> None:
        before = self._odd.get((key, block, kind))
        self._odd[key, block, kind] = where.sum() if before is None else before + where.sum()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _submit(self, shard: Shard) -> None:
        del self._open[shard.value.key, shard.index]
        events = [stream.record_event() for stream in self._streams.values()]
        self.written_bytes += shard.data.numel() * shard.data.element_size()
        self.pending.shards.setdefault(shard.value.array.path, []).append(shard.index)
        self._writers.submit(shard, events, self.pending.writes)


class Writers:
    """Waits for a shard's copies, hands it to the store, and gives its slot back when its bytes are durable."""

    def __init__(self, store: Store, slots: Slots) -> None:
        self._store, self._slots = store, slots
        self._failure: BaseException | None = None
        self._left = 0
        self._changed = threading.Condition()
        self._queue: list[tuple[Shard, Sequence[torch.cuda.Event], list[Any]]] = []
        self._in_store = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="kimicap-writer", daemon=True)
        self._thread.start()

    def submit(self, shard: Shard, events: Sequence[torch.cuda.Event], writes: list[Any]) -> None:
        """Queues a full shard; its write is appended to ``writes``."""
        with self._changed:
            self._queue.append((shard, events, writes))
            self._left += 1
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what a write failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    def drain_submissions(self) -> None:
        """Waits until every queued shard has been handed to the store."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0 or self._failure is not None)
        self.check()

    def close(self) -> None:
        """Waits for the store to be done with every slot, and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._changed.wait_for(lambda: self._in_store == 0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                shard, events, writes = self._queue.pop(0)
            try:
                for event in events:
                    event.synchronize()
                if self._failure is None:
                    self._hand_over(shard, writes)
            except BaseException as failure:  # told to the loop, which raises it
                self._fail(failure)
            with self._changed:
                self._left -= 1
                self._changed.notify_all()

    def _hand_over(self, shard: Shard, writes: list[Any]) -> None:
        write = self._store.write(shard.value.array.path, shard.origin, shard.data.numpy())
        writes.append(write)
        with self._changed:
            self._in_store += 1
        write.add_done_callback(self._done(shard))

    def _done(self, shard: Shard) -> Callable[[Any], None]:
        def done(write: Any) -> None:
            try:
                write.result()
            except BaseException as failure:  # told to the loop, which raises it
                self._fail(failure)
            self._slots.give(shard.slot)
            with self._changed:
                self._in_store -= 1
                self._changed.notify_all()

        return done

    def _fail(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        self._slots.fail(failure)
        with self._changed:
            self._changed.notify_all()


def assemble(pieces: Sequence[Piece], value: ValuePlan, shape: Sequence[int]) -> Piece:
    """Pieces of one row from several forwards as one piece, of up to ``shape`` elements an axis.

    Of a value without positions the latest piece holds; the others are laid side by side.
    """
    own = position_axis(value.want.value)
    if own is None or value.want.request.positions.kind == "last":
        return pieces[-1]
    axis = value.row_dims.index(own)
    slots = pieces[-1].slot + pieces[-1].tensor.shape[axis]
    size = [slots if at == axis else extent for at, extent in enumerate(shape)]
    if "key" in value.row_dims:
        keys = value.row_dims.index("key")
        size[keys] = max(piece.tensor.shape[keys] for piece in pieces)
    first = pieces[0].tensor
    whole = torch.full(size, pieces[0].unseen, dtype=first.dtype, device=first.device)
    for piece in pieces:
        part = whole.narrow(axis, piece.slot, piece.tensor.shape[axis])
        for at, (dim, extent) in enumerate(zip(value.row_dims, piece.tensor.shape, strict=True)):
            if dim == "head":
                part = part.narrow(at, piece.head, extent)
            elif dim != own and extent != part.shape[at]:
                part = part.narrow(at, 0, extent)
        part.copy_(piece.tensor)
    return Piece(row=pieces[-1].row, tensor=whole)
