"""Host memory for shards: a fixed budget of reusable buffers, pinned where a GPU copies into them."""

import threading
import time
from collections import defaultdict

import torch

from kimicap.errors import RoomError


class Slots:
    """Buffers of a fixed total size. Whoever needs one waits until it fits: that is the memory bound.

    Attributes:
        budget_bytes: Bytes of all buffers together, at most.
        waited_s: Seconds spent waiting for a buffer, which is waiting for the disk.
        peak_bytes: Most bytes that were ever allocated at once.
    """

    def __init__(self, budget_bytes: int, *, pinned: bool) -> None:
        self.budget_bytes = budget_bytes
        self.waited_s = 0.0
        self.peak_bytes = 0
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._allocated_bytes = 0
        self._lent = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def take(self, nbytes: int, *, held: int) -> torch.Tensor:
        """A buffer of ``nbytes`` (uint8, contents undefined), as soon as the budget allows.

        Args:
            nbytes: Its size.
            held: Buffers that whoever asks holds already: if those are all there are, waiting would never end.

        Raises:
            RoomError: The budget is too small for what must be held at once.
            BaseException: What `fail` was told, since then nobody gives buffers back.
        """
        with self._changed:
            start = time.perf_counter()
            while self._failure is None and not self._fits(nbytes):
                if self._lent <= held:
                    raise RoomError(
                        f"The shards open at once need more than --memory {self.budget_bytes / 2**20:.0f} MiB; give "
                        "more memory and go on with --resume."
                    )
                self._changed.wait()
            self.waited_s += time.perf_counter() - start
            if self._failure is not None:
                raise self._failure
            self._lent += 1
            if self._free[nbytes]:
                return self._free[nbytes].pop()
            self._allocated_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._allocated_bytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back."""
        with self._changed:
            self._lent -= 1
            self._free[buffer.numel()].append(buffer)
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Wakes everyone who waits; from now on `take` raises ``failure``."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        """Whether a buffer can be lent now, letting go of free ones of other sizes where they stand in the way."""
        if self._free[nbytes]:
            return True
        for size, buffers in self._free.items():
            while buffers and self._allocated_bytes + nbytes > self.budget_bytes:
                buffers.pop()
                self._allocated_bytes -= size
        return self._allocated_bytes + nbytes <= self.budget_bytes
