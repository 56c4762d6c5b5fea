"""Host memory for shards: a fixed budget of reusable buffers, pinned where a GPU copies into them."""

import threading
import time
from collections import defaultdict
from typing import Any

import torch

from kimicap.errors import RoomError


class Slots:
    """Buffers of a fixed total size. Whoever needs one waits until it fits: that is the memory bound.

    Attributes:
        budget_bytes: Bytes of all buffers together, at most.
        disk_s: Seconds spent waiting for a buffer while the disk was writing one.
        device_s: Seconds spent waiting for a buffer while none was being written: for a device's copies.
        peak_bytes: Most bytes that were ever allocated at once.
    """

    def __init__(self, budget_bytes: int, *, pinned: bool) -> None:
        self.budget_bytes = budget_bytes
        self.disk_s = self.device_s = 0.0
        self.peak_bytes = 0
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, torch.Tensor] = {}
        self._allocated_bytes = 0
        self._writing = 0
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
            while self._failure is None and not self._fits(nbytes):
                if len(self._lent) <= held:
                    raise RoomError(
                        f"The shards open at once need more than the {self.budget_bytes / 2**20:.0f} MiB that --memory "
                        "has for them; give more memory and go on with --resume."
                    )
                self._wait()
            if self._failure is not None:
                raise self._failure
            free = self._free[nbytes]
            buffer = free.pop() if free else self._allocate(nbytes)
            self._lent[buffer.data_ptr()] = buffer
            return buffer

    def begin_write(self) -> None:
        """Notes that the disk has begun to write a buffer."""
        with self._changed:
            self._writing += 1

    def give(self, buffer: torch.Tensor, *, written: bool = False) -> None:
        """Takes a buffer back; ``written`` if the disk had begun to write it."""
        with self._changed:
            self._writing -= written
            del self._lent[buffer.data_ptr()]
            self._free[buffer.numel()].append(buffer)
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Wakes everyone who waits; from now on `take` raises ``failure``."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def close(self) -> None:
        """Lets go of every buffer, lent ones too: no copy to one may be under way any more."""
        with self._changed:
            for buffers in [*self._free.values(), list(self._lent.values())]:
                for buffer in buffers:
                    self._release(buffer)
            self._free.clear()
            self._lent.clear()

    def _wait(self) -> None:
        """Waits for any change, and notes what for."""
        start, disk = time.perf_counter(), self._writing > 0
        self._changed.wait()
        waited = time.perf_counter() - start
        if disk:
            self.disk_s += waited
        else:
            self.device_s += waited

    def _fits(self, nbytes: int) -> bool:
        """Whether a buffer can be lent now, letting go of free ones of other sizes where they stand in the way."""
        if self._free[nbytes]:
            return True
        for buffers in self._free.values():
            while buffers and self._allocated_bytes + nbytes > self.budget_bytes:
                self._release(buffers.pop())
        return self._allocated_bytes + nbytes <= self.budget_bytes

    def _allocate(self, nbytes: int) -> torch.Tensor:
        # Hooks run in inference mode, and a tensor made there could not be written to outside it.
        with torch.inference_mode(False):
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self._pinned:
            # torch's own pinned memory is rounded up to a power of two, and never given back.
            error = int(_cuda().cudaHostRegister(buffer.data_ptr(), nbytes, 0))
            if error:
                raise RoomError(
                    f"{nbytes / 2**20:.0f} MiB of host memory could not be pinned (CUDA error {error}); give a smaller "
                    "--memory, or raise the limit on locked memory (ulimit -l), and go on with --resume."
                )
        self._allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._allocated_bytes)
        return buffer

    def _release(self, buffer: torch.Tensor) -> None:
        self._allocated_bytes -= buffer.numel()
        if self._pinned:
            _cuda().cudaHostUnregister(buffer.data_ptr())


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
