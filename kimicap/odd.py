"""Counts of odd elements, kept on the device until a block is done, so that nothing waits for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Name = tuple[str, int | None, str]
"""A value, a block of the model (None for values of the whole model) and a kind: ``nonfinite``, ``overflow``."""


@dataclass(eq=False)
class Counts:
    """Counts on their way to the host; `read` waits for them."""

    parts: list[tuple[list[Name], torch.Tensor, torch.cuda.Event | None]] = field(default_factory=list)

    def read(self) -> dict[str, dict[str, dict[str, int]]]:
        """By kind, value and block; zeros left out."""
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for names, numbers, copied in self.parts:
            if copied is not None:
                copied.synchronize()
            for (key, block, kind), number in zip(names, numbers.tolist(), strict=True):
                if number:
                    counts.setdefault(kind, {}).setdefault(key, {})["model" if block is None else str(block)] = number
        return counts


class Odd:
    """Running counts, each a scalar on the device of what is counted."""

    def __init__(self) -> None:
        self._counts: dict[Name, torch.Tensor] = {}

    def add(self, name: Name, where: torch.Tensor) -> None:
        """Adds the number of true elements, on the current stream."""
        number = where.sum()
        before = self._counts.get(name)
        self._counts[name] = number if before is None else before + number

    def take(self, streams: Sequence[torch.cuda.Stream]) -> Counts:
        """Starts the copy of all counts to the host, and begins anew.

        Args:
            streams: One a GPU: that on which its counts were added.
        """
        by_device: dict[torch.device, list[Name]] = {}
        for name, count in self._counts.items():
            by_device.setdefault(count.device, []).append(name)
        taken = Counts()
        of_device = {stream.device: stream for stream in streams}
        for device, names in by_device.items():
            counts = [self._counts[name] for name in names]
            if device.type != "cuda":
                taken.parts.append((names, torch.stack(counts), None))
                continue
            with torch.cuda.stream(of_device[device]):
                numbers = torch.stack(counts).to("cpu", non_blocking=True)
                taken.parts.append((names, numbers, of_device[device].record_event()))
        self._counts.clear()
        return taken
