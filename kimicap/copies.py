"""Copies from a GPU to host memory, in order, by a thread that keeps only a few short ones under way.

A GPU copies to the host what it is given, one after the other. Were all of a batch's copies given at once, a model that
reads one number from the device would wait for them, and the GPU for the model.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue

import torch

from kimicap.writers import Pending, Shard, Writers

PART_BYTES = 2**27
"""Bytes of one copy, 2.4 ms at PCIe's 55 GB/s. An H200 given three of a quarter of that copied 43 GB/s."""
UNDER_WAY = 3
"""Copies of that size given to a GPU at once: the thread has 5 ms to wake, and a model's own read waits 7 at most."""
QUEUED_SHARE = 4
"""Sources whose copy has not begun take at most one part in so many of a GPU's free memory, or QUEUED_BYTES."""
QUEUED_BYTES = 2**30


class Copier:
    """Takes rows to their slots, and full shards on to the writers. Its methods are for one thread, another's."""

    def __init__(self, writers: Writers) -> None:
        self._writers = writers
        self._queued_bytes: dict[torch.device, int] = defaultdict(int)
        self._most_bytes: dict[torch.device, int] = {}
        self._fewer = threading.Condition()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._under_way: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()
        self._given: list[torch.Tensor] = []
        self._given_bytes = 0
        self._thread: threading.Thread | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy of what ``source`` is when its device's current stream has come here.

        Waits where too much of the device's memory is held by copies that have not begun.

        Args:
            target: Pinned host memory.
            source: Contiguous, on a GPU, of the target's shape and dtype. Nobody may write to it any more.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kimicap-copier", daemon=True)
            self._thread.start()
        with self._fewer:
            self._fewer.wait_for(lambda: self._may_queue(source))
            self._queued_bytes[source.device] += source.nbytes
        self._jobs.put(partial(self._copy, target, source, _here(source.device)))

    def submit(self, shard: Shard, pending: Pending) -> None:
        """Queues a full shard for the writers, behind the copies of its rows."""
        self._writers.expect(pending)
        if self._thread is None:
            self._writers.submit(shard, (), pending)
        else:
            ready = {device: _here(device) for device in shard.odd.devices if device.type == "cuda"}
            self._jobs.put(partial(self._submit, shard, pending, ready))

    def close(self) -> None:
        """Waits for everything queued, and ends the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        self._under_way.clear()
        self._given.clear()

    def _work(self) -> None:
        with torch.inference_mode():
            while self._do_next():
                pass

    def _do_next(self) -> bool:
        """The next job; False after the last. Nothing of it is held on to while the one after is waited for."""
        job = self._jobs.get()
        try:
            if job is None:
                for stream in self._streams.values():
                    stream.synchronize()
                return False
            job()
        except BaseException as failure:  # told to the loop, which raises it
            self._writers.fail(failure)
        return job is not None

    def _copy(self, target: torch.Tensor, source: torch.Tensor, ready: torch.cuda.Event) -> None:
        try:
            if self._given and self._given[-1].device != source.device:
                self._mark()
            stream = self._stream(source.device)
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                for to, of in _parts(target, source):
                    self._given.append(of)
                    self._given_bytes += of.nbytes
                    to.copy_(of, non_blocking=True)
                    if self._given_bytes >= PART_BYTES:
                        self._mark()
        finally:
            with self._fewer:
                self._queued_bytes[source.device] -= source.nbytes
                self._fewer.notify_all()

    def _mark(self) -> None:
        """Holds on to what was given until it is copied, and waits where too much is under way."""
        event = self._stream(self._given[-1].device).record_event(_event())
        self._under_way.append((event, self._given))
        self._given, self._given_bytes = [], 0
        while len(self._under_way) > UNDER_WAY:
            self._under_way[0][0].synchronize()
            self._under_way.popleft()  # not before: the memory of its sources would be used again

    def _submit(self, shard: Shard, pending: Pending, ready: Mapping[torch.device, torch.cuda.Event]) -> None:
        events: list[torch.cuda.Event] = []
        try:
            for device, event in ready.items():
                self._stream(device).wait_event(event)
                with torch.cuda.stream(self._stream(device)):
                    shard.odd.send(device)
            events = [stream.record_event(_event()) for stream in self._streams.values()]
        except BaseException as failure:  # told first: the writers must not take the shard for whole
            self._writers.fail(failure)
        self._writers.submit(shard, events, pending)

    def _may_queue(self, source: torch.Tensor) -> bool:
        """Whether a source may wait too: nothing else does, or all stay within the bound of the first call."""
        device, queued = source.device, self._queued_bytes[source.device]
        if device not in self._most_bytes:
            self._most_bytes[device] = max(QUEUED_BYTES, torch.cuda.mem_get_info(device)[0] // QUEUED_SHARE)
        return not queued or queued + source.nbytes <= self._most_bytes[device]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def _here(device: torch.device) -> torch.cuda.Event:
    """An event where the device's current stream is now."""
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _event() -> torch.cuda.Event:
    """One that a thread can wait for without keeping a processor busy."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _parts(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Contiguous parts of at most PART_BYTES; one copy to a target with gaps would make the host wait."""
    if target.is_contiguous():
        elements = PART_BYTES // target.element_size()
        yield from zip(torch.split(target.view(-1), elements), torch.split(source.view(-1), elements), strict=True)
    else:
        for to, of in zip(target.unbind(0), source.unbind(0), strict=True):
            yield from _parts(to, of)
