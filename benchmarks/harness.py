"""Ratios: two things run alternately in one process, the median and the spread of the pairs."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table.

    Attributes:
        name: What over what.
        target: As the row demands it, ``<= 1.02``.
        measured: The ratio, or the figure where the row is none.
        spread: Least and most of the single pairs.
        detail: Seconds and rates behind it.
    """

    name: str
    target: str
    measured: float
    spread: tuple[float, float]
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        sign, number = self.target.split()
        return self.measured <= float(number) if sign == "<=" else self.measured >= float(number)

    def line(self) -> str:
        """The row for people."""
        low, high = self.spread
        mark = "met" if self.met else "MISSED"
        return f"{self.name:<88} {self.measured:8.3f} ({low:.3f}-{high:.3f})  target {self.target:<9} {mark}"

    def json(self) -> str:
        """The row for machines."""
        return json.dumps({**asdict(self), "met": self.met})


def seconds(run: Callable[[], object]) -> float:
    """Wall seconds of one run, the device's work included."""
    _settle()
    start = time.perf_counter()
    run()
    _settle()
    return time.perf_counter() - start


def alternate(
    runs: dict[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warm: bool = True,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each run, ``repeats`` times in turn, after one of each unmeasured; ``before`` each, not timed.

    Every other time the last is first, so that none always runs right after another one.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for repeat in range(repeats + warm):
        order.reverse()
        for name in order:
            before()
            took = seconds(runs[name])
            if repeat >= warm:
                taken[name].append(took)
    return taken


def over(one: list[float], *others: list[float]) -> tuple[float, tuple[float, float]]:
    """Median of ``one`` over the slowest of the others' medians, and the spread of the pairs."""
    below = max(others, key=statistics.median)
    pairs = [a / b for a, b in zip(one, below, strict=True)]
    return statistics.median(one) / statistics.median(below), (min(pairs), max(pairs))


def machine() -> dict[str, str]:
    """Machine and versions, for the table's head."""
    import torch

    found = {"python": platform.python_version(), "processor": platform.processor() or platform.machine()}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for name in ("torch", "transformers", "fla-core", "zarr", "tensorstore", "xarray", "numcodecs", "nnsight"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _settle() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
