"""What a run tells as it goes; `kimicap.report` shows it to people."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the run is, after each batch.

    Attributes:
        sequences: Sequences done in this run.
        tokens: Tokens done in this run.
        written_bytes: Bytes handed to the writers, uncompressed.
        elapsed_s: Seconds since the first batch.
        waited_s: Of them, seconds the loop waited for the disk.
        seconds: Of them, by stage: ``forward`` (the loop in the model's forwards; on a GPU, launching them),
            ``device`` (the loop waiting for a GPU's copies), ``disk`` (waiting for the disk) and, beside those,
            ``writing`` (at least one shard on its way to the disk).
    """

    sequences: int
    tokens: int
    written_bytes: int
    elapsed_s: float
    waited_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A block is on disk and recorded.

    Attributes:
        nonfinite: How many elements are NaN or infinite, by value and block of the model; those without any left out.
    """

    block: int
    sequences: int
    nonfinite: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


Event = Progress | Committed
