"""What a run will write, before anything runs: arrays, bytes, files, memory. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import numpy as np

from kimicap import grid
from kimicap.architecture import Architecture, Want
from kimicap.config import Settings, size_text
from kimicap.errors import RoomError
from kimicap.layout import ArrayLayout, Coordinate
from kimicap.value_plan import Scope, ValuePlan, coordinates, disk_bytes, frame_arrays, layer_axes, value_plans


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """A whole capture.

    Attributes:
        values: One entry an array of a value.
        frame: Arrays that every capture has: tokens, masks, lengths, rows, and the positions of selections.
        coordinates: Small arrays known beforehand.
        lengths: int32 ``[sequence]``, tokens of each sequence, the ones to decode included.
        longest_tokens: Size of the position axis.
        block_sequences: Sequences of a block.
        disk_bytes: Bytes that are expected on disk.
    """

    values: tuple[ValuePlan, ...]
    frame: tuple[ArrayLayout, ...]
    coordinates: tuple[Coordinate, ...]
    lengths: np.ndarray
    longest_tokens: int
    block_sequences: int
    disk_bytes: int

    @property
    def arrays(self) -> tuple[ArrayLayout, ...]:
        """Every array but the coordinates."""
        return (*self.frame, *(value.array for value in self.values))

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return ceil(len(self.lengths) / self.block_sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def files(self) -> int:
        """Shards of all arrays, at most (those that hold nothing but fill are not written)."""
        return sum(array.shards for array in self.frame) + sum(value.files for value in self.values)

    def with_source_dtypes(self, dtypes: Mapping[str, str]) -> "CapturePlan":
        """The plan with the dtypes in which the model was seen to have its values."""

        def seen(value: ValuePlan) -> ValuePlan:
            attributes = {**value.array.attributes}
            if value.key in dtypes:
                attributes["source_dtype"] = dtypes[value.key]
            return replace(value, array=replace(value.array, attributes=attributes))

        return replace(self, values=tuple(seen(value) for value in self.values))

    def with_layouts(self, layouts: Mapping[str, ArrayLayout]) -> "CapturePlan":
        """The plan on the arrays of a capture that exists, whose shards may have been cut for other batches."""
        return replace(
            self,
            frame=tuple(layouts.get(array.path, array) for array in self.frame),
            values=tuple(replace(value, array=layouts.get(value.array.path, value.array)) for value in self.values),
        )

    def block(self, number: int) -> range:
        """Sequence numbers of a block."""
        first = number * self.block_sequences
        return range(first, min(first + self.block_sequences, len(self.lengths)))


def plan_capture(
    architecture: Architecture,
    wants: Sequence[Want],
    lengths: np.ndarray,
    *,
    generate: int = 0,
    decodes: bool = False,
    packed: bool = False,
    block_sequences: int | None = None,
    together: int = 8,
    store_dtype: str = "lossless",
    model_dtype: str = "float32",
    codec: str = "lz4",
) -> CapturePlan:
    """The plan of a capture.

    Args:
        architecture: The model's sizes.
        wants: The values asked for.
        lengths: int32 ``[sequence]``, tokens of each prompt.
        generate: Tokens decoded after each prompt, beyond those given.
        decodes: Whether tokens are decoded at all, given ones or new ones.
        packed: Whether the sequences are packed windows.
        block_sequences: Sequences of a block, no more than there are; None to choose.
        together: Sequences of full length that one forward takes.
        store_dtype: ``lossless``, ``float32`` or ``float16``.
        model_dtype: The dtype of the model's weights.
        codec: ``lz4``, ``zstd`` or ``none``.

    Raises:
        UsageError: A selection of positions leaves nothing.
    """
    totals = (lengths + generate).astype(np.int32)
    longest, count = int(totals.max()), len(totals)
    scope = Scope(
        architecture=architecture,
        count=count,
        longest_tokens=longest,
        block=min(block_sequences, count) if block_sequences else grid.block_sequences(longest, count),
        together=together,
        store_dtype=store_dtype,
        model_dtype=model_dtype,
    )
    axes = layer_axes(wants)
    values = tuple(plan for want in wants for plan in value_plans(scope, want, axes[want.value.host]))
    frame = frame_arrays(values, scope, decodes=decodes, packed=packed)
    return CapturePlan(
        values=values,
        frame=frame,
        coordinates=coordinates(values, longest),
        lengths=totals,
        longest_tokens=longest,
        block_sequences=scope.block,
        disk_bytes=sum(array.nbytes for array in frame)
        + sum(disk_bytes(value, totals, model_dtype, codec) for value in values),
    )


def slot_memory(settings: Settings) -> int:
    """Bytes of ``--memory`` that slots may take: the rest is for what the store holds of shards being written.

    As measured, that is up to one and a half times a slot's size where chunks are compressed, and twice where not.
    """
    return settings.memory // 3 if settings.codec == "none" else settings.memory * 2 // 5


def forward_group(
    plan: CapturePlan, *, batch_tokens: int, batch_size: int | None, memory: int, whole: bool
) -> tuple[int, bool]:
    """How many sequences are worked on at once, so that the shards they open fit in host memory.

    Args:
        plan: The capture.
        batch_tokens: Tokens of one forward.
        batch_size: Sequences of one forward at most, or None.
        memory: Host bytes for slots, of open shards and of those being written.
        whole: Rows are complete only at the end of a batch (decoding), not block by block of the model.

    Returns:
        Sequences of a group, and whether the group may go through in several forwards (which leaves the shards
        of all blocks of the model open at once).

    Raises:
        RoomError: Not even one sequence fits.
    """
    block = plan.block_sequences
    divisors = [size for size in range(block, 0, -1) if block % size == 0]
    full = max(1, batch_tokens // plan.longest_tokens)
    if batch_size is not None:
        full = min(full, batch_size)

    def needed(size: int, *, all_layers: bool) -> int:
        return sum(_open_bytes(value, size, block, all_layers=all_layers) for value in plan.values)

    for limit in (memory // 2, memory):  # half is left to shards that are being written, if it can be
        split = next((size for size in divisors if needed(size, all_layers=True) <= limit), 0)
        if split and (split >= min(full, block) or whole):
            return split, True
        at_once = [] if whole else [size for size in divisors if size <= full]
        for size in at_once:
            if needed(size, all_layers=False) <= limit:
                return size, False
    least = min(needed(size, all_layers=whole) for size in divisors if size <= full)
    raise RoomError(
        f"The shards open at once are {size_text(least)}, more than the {size_text(memory)} that --memory has for "
        "them; give more memory, shorter sequences, or fewer values, layers, heads or positions."
    )


def _open_bytes(value: ValuePlan, size: int, block: int, *, all_layers: bool) -> int:
    """Host bytes of the shards of one value that are open at once, whole ones, as their slots are.

    Args:
        value: The value.
        size: Sequences worked on at once.
        block: Sequences of a block.
        all_layers: Whether the shards of all blocks of the model stay open. Else those of one are full, and on their
            way to the disk, before the next ones open, as long as no shard waits for sequences of a later forward.
    """
    array = value.array
    extents = dict(zip(range(len(array.shape)), array.shard, strict=True))
    sequences = extents.pop(value.leading - 1)
    shards = max((start + size - 1) // sequences - start // sequences + 1 for start in range(0, block, size))
    if value.leading == 2 and not all_layers and size % sequences == 0:
        shards *= min(2, ceil(array.shape[0] / extents.pop(0)))
    shards *= prod(ceil(array.shape[axis] / extent) for axis, extent in extents.items())
    return shards * min(array.shard_nbytes, array.nbytes)
