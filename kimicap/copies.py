"""Copies from a GPU to host memory, in order and in parts, so that whatever else is copied need not wait long.

The part of a GPU that copies to the host stays with a stream as long as that has more to copy. Given all of a batch's
copies on one stream, it would let a model that reads one number wait for them all, and the GPU for the model (84 ms a
forward were seen). So two streams take turns, each part waiting for the one before: at every turn others come in.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from kimicap.writers import Pending, Shard, Writers

PART_BYTES = 2**27
"""Bytes of one turn, 2.4 ms at PCIe's 55 GB/s. In turns of a quarter, an H200 busy with forwards copied 47 GB/s."""
TURN_SOURCES = 2**10
"""Most sources of one turn: small ones take 512 bytes of a GPU each, and are let go of a turn at a time."""
HELD_SHARE = 4
"""Sources that are not known to be copied take at most one part in so many of a GPU's free memory, or HELD_BYTES."""
HELD_BYTES = 2**30


class Copier:
    """Takes rows to their slots, and full shards on to the writers. All its methods are for one thread.

    Attributes:
        waited_s: Seconds spent waiting for copies, so that sources do not fill a GPU's memory.
    """

    def __init__(self, writers: Writers) -> None:
        self.waited_s = 0.0
        self._writers = writers
        self._turns: dict[torch.device, Turns] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Has the GPU copy what ``source`` is when its device's current stream has come here.

        Waits for earlier copies where too much of the device's memory is held by sources.

        Args:
            target: Pinned host memory.
            source: Contiguous, on a GPU, of the target's shape and dtype. Nobody may write to it any more.
        """
        turns = self._turns_of(source.device)
        self.waited_s += turns.make_room(source.nbytes)
        turns.copy(target, source)

    def submit(self, shard: Shard, pending: Pending) -> None:
        """Hands a full shard to the writers, to be waited for until the copies of its rows are done."""
        for device in shard.odd.devices:
            if device.type == "cuda":
                turns = self._turns_of(device)
                turns.follow()
                with torch.cuda.stream(turns.stream):
                    shard.odd.send(device)
        self._writers.submit(shard, [turns.event() for turns in self._turns.values()], pending)
        for turns in self._turns.values():
            turns.let_go()

    def close(self) -> None:
        """Waits until nothing is copied any more, and lets go of every source."""
        with ExitStack() as last_first:  # all of them, also where one fails
            last_first.callback(self._turns.clear)
            for turns in self._turns.values():
                last_first.callback(turns.wait)

    def _turns_of(self, device: torch.device) -> "Turns":
        if device not in self._turns:
            self._turns[device] = Turns(device)
        return self._turns[device]


class Turns:
    """The two streams of one GPU, and the sources that they copy from.

    Attributes:
        stream: The one whose turn it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most_bytes = max(HELD_BYTES, _free_bytes(device) // HELD_SHARE)
        self.stream, self._other = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._given_bytes = 0
        self._given: list[torch.Tensor] = []
        self._held: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()
        self._held_bytes = 0

    def let_go(self) -> None:
        """Lets go of sources that are copied."""
        while self._held and self._held[0][0].query():  # type: ignore[no-untyped-call]
            self._drop_oldest()

    def make_room(self, nbytes: int) -> float:
        """Lets go of sources that are copied, and waits until ``nbytes`` more may be held; seconds of waiting."""
        self.let_go()
        start = time.perf_counter()
        while self._held and self._held_bytes + nbytes > self._most_bytes:
            self._held[0][0].synchronize()
            self._drop_oldest()
        return time.perf_counter() - start

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Gives a source's copies, a part on each stream in turn."""
        self.follow()
        for to, of in _parts(target, source):
            if self._given_bytes >= PART_BYTES:
                self._turn()
            with torch.cuda.stream(self.stream):
                to.copy_(of, non_blocking=True)
            self._given_bytes += of.nbytes
        self._given.append(source)
        self._held_bytes += source.nbytes
        large = max(self._given_bytes, source.nbytes) >= PART_BYTES  # to be let go of as soon as it is copied
        if large or len(self._given) >= TURN_SOURCES:
            self._turn()

    def follow(self) -> None:
        """Has what comes wait for all that the device's current stream was given."""
        self.stream.wait_event(torch.cuda.current_stream(self._device).record_event())

    def event(self) -> torch.cuda.Event:
        """Done when all is copied that was given so far; a thread that waits for it keeps no processor busy."""
        event: torch.cuda.Event = self.stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        return event

    def wait(self) -> None:
        """Waits for all copies."""
        for stream in (self.stream, self._other):  # both, as a turn may have been broken off
            stream.synchronize()

    def _drop_oldest(self) -> None:
        """Of what is held: copied by now, or its memory would be used again too early."""
        _, sources = self._held.popleft()
        self._held_bytes -= sum(source.nbytes for source in sources)

    def _turn(self) -> None:
        """Holds on to the sources wholly given until they are copied, and passes on to the other stream."""
        event = self.event()
        self._held.append((event, self._given))
        self._given, self._given_bytes = [], 0
        self.stream, self._other = self._other, self.stream
        self.stream.wait_event(event)


def _free_bytes(device: torch.device) -> int:
    """What the device has left, and what torch keeps of it for tensors to come."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _parts(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Contiguous parts of at most PART_BYTES; one copy to a target with gaps would make the host wait."""
    if target.is_contiguous():
        elements = PART_BYTES // target.element_size()
        yield from zip(torch.split(target.view(-1), elements), torch.split(source.view(-1), elements), strict=True)
    else:
        for to, of in zip(target.unbind(0), source.unbind(0), strict=True):
            yield from _parts(to, of)
