"""Full shards on their way to the disk: a thread that waits for a device's copies and hands them to the store."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kimicap.odd import Odd
from kimicap.records import storage_error
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
        odd: What is not finite in it.
    """

    value: ValuePlan
    index: tuple[int, ...]
    origin: tuple[int, ...]
    slot: torch.Tensor
    data: torch.Tensor
    rows_left: int
    odd: Odd

    @property
    def layers(self) -> torch.Tensor:
        """The data with an axis of layers, of one where the array has none."""
        return self.data if self.value.leading == 2 else self.data[None]

    def place(self, layer: int, sequence: int) -> tuple[int, int]:
        """Where on the shard's own axes a row is."""
        first = self.origin[self.value.leading - 1]
        return (layer - self.origin[0] if self.value.leading == 2 else 0), sequence - first

    def block(self, at: int) -> str:
        """Name of the block of the model at an entry of the shard's layers, as block records have it."""
        return str(self.value.layers[self.origin[0] + at]) if self.value.leading == 2 else "model"


@dataclass(eq=False)
class Pending:
    """Shards of one block on their way to the disk.

    Attributes:
        shards: Grid indices of every shard, by array.
        writes: Those that the store has.
        queued: How many it does not have yet, of those that are full.
        odd: Numbers of odd elements, by kind (``nonfinite``, ``overflow``), value and block of the model.
        dropped: Nobody wants them any more: those that the store does not have are let go.
    """

    shards: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    writes: list[Any] = field(default_factory=list)
    queued: int = 0
    odd: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    dropped: bool = False

    def wait(self) -> None:
        """Waits until all that the store has is durable.

        Raises:
            KimicapError: A write failed.
        """
        for write in self.writes:
            write.result()


class Writers:
    """Waits for a shard's copies, hands it to the store, and gives its slot back when its bytes are durable."""

    def __init__(self, store: Store, slots: Slots) -> None:
        self._store, self._slots = store, slots
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._queue: deque[tuple[Shard, Sequence[torch.cuda.Event], Pending]] = deque()
        self._in_store = 0
        self._busy_s = self._busy_since = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="kimicap-writer", daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one shard was being written."""
        with self._changed:
            return self._busy_s + (time.perf_counter() - self._busy_since if self._in_store else 0.0)

    def submit(self, shard: Shard, events: Sequence[torch.cuda.Event], pending: Pending) -> None:
        """Queues a full shard, to be written when its copies are done."""
        with self._changed:
            pending.queued += 1
            self._queue.append((shard, events, pending))
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what a write failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    def ready(self, pending: Pending) -> bool:
        """Whether all of ``pending`` is durable, or has failed."""
        return not pending.queued and all(write.done() for write in pending.writes)

    def wait_handed_over(self, pending: Pending) -> None:
        """Waits until the store has every shard of ``pending``.

        Raises:
            KimicapError: A write failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not pending.queued or self._failure is not None)
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
                shard, events, pending = self._queue.popleft()
            handed = False
            try:
                for event in events:  # of dropped shards too: their slots must be nobody's target any more
                    event.synchronize()
                if self._failure is None and not pending.dropped:
                    self._hand_over(shard, pending)
                    handed = True
            except BaseException as failure:  # told to the loop, which raises it
                self.fail(storage_error(failure, self._store.path / shard.value.array.path))
            if not handed:
                self._slots.give(shard.slot)
            with self._changed:
                pending.queued -= handed
                self._changed.notify_all()

    def _hand_over(self, shard: Shard, pending: Pending) -> None:
        for at, kind, number in shard.odd.count(shard.layers):
            blocks = pending.odd.setdefault(kind, {}).setdefault(shard.value.key, {})
            blocks[shard.block(at)] = blocks.get(shard.block(at), 0) + number
        write = self._store.write(shard.value.array.path, shard.origin, shard.data.numpy())
        pending.writes.append(write)
        self._slots.begin_write()
        with self._changed:
            if not self._in_store:
                self._busy_since = time.perf_counter()
            self._in_store += 1
        write.add_done_callback(self._done(shard))

    def _done(self, shard: Shard) -> Callable[[Any], None]:
        def done(write: Any) -> None:
            try:
                write.result()
            except BaseException as failure:  # told to the loop, which raises it
                self.fail(failure)
            self._slots.give(shard.slot, written=True)
            with self._changed:
                self._in_store -= 1
                if not self._in_store:
                    self._busy_s += time.perf_counter() - self._busy_since
                self._changed.notify_all()

        return done

    def fail(self, failure: BaseException) -> None:
        """Has `check` raise ``failure`` from now on, and lets go of every shard that the store does not have."""
        self._failure = self._failure or failure
        self._slots.fail(self._failure)
        with self._changed:
            self._changed.notify_all()
