"""What a run will write, before anything runs: arrays, bytes, files, memory. Pure arithmetic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import numpy as np

from kimicap import grid
from kimicap.architecture import Architecture
from kimicap.errors import RoomError, UsageError
from kimicap.layout import ArrayLayout, Coordinate
from kimicap.selection import Request, parse_numbers, position_axis

FILLS: Mapping[str, float | int | bool] = {"f": float("nan"), "i": -1, "b": False}


@dataclass(frozen=True, kw_only=True)
class ValuePlan:
    """One array of one value.

    Attributes:
        key: The value's dotted name, with ``_top`` or ``_top_ids`` where only the largest are kept.
        request: What was asked for.
        layers: Block numbers on the layer axis; empty for values of the whole model.
        present: Those of them in which the value exists; elsewhere the fill value is read.
        heads: Head numbers kept, or None for all.
        row_dims: The layout's dimension names, without layer and sequence.
        array: The array.
    """

    key: str
    request: Request
    layers: tuple[int, ...]
    present: frozenset[int]
    heads: tuple[int, ...] | None
    row_dims: tuple[str, ...]
    array: ArrayLayout

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Elements an axis of one row: one block of the model, one sequence."""
        return self.array.shape[len(self.array.shape) - len(self.row_dims) :]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, uncompressed."""
        return prod(self.row_shape) * self.array.itemsize_bytes

    @property
    def leading(self) -> int:
        """Axes before the row: layer and sequence, or sequence alone."""
        return len(self.array.shape) - len(self.row_dims)

    @property
    def shard_sequences(self) -> int:
        """Sequences of one shard."""
        return self.array.shard[self.leading - 1]

    @property
    def shard_layers(self) -> int:
        """Blocks of the model in one shard; 1 for values of the whole model."""
        return self.array.shard[0] if self.leading == 2 else 1


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
    attributes: Mapping[str, Any] = field(default_factory=dict)

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
        return sum(
            prod(ceil(size / extent) for size, extent in zip(array.shape, array.shard, strict=True))
            for array in self.arrays
        )

    def block(self, number: int) -> range:
        """Sequence numbers of a block."""
        first = number * self.block_sequences
        return range(first, min(first + self.block_sequences, len(self.lengths)))


def plan_capture(
    architecture: Architecture,
    requests: Sequence[Request],
    lengths: np.ndarray,
    *,
    layers: str | None = None,
    heads: str | None = None,
    generate: int = 0,
    packed: bool = False,
    block_sequences: int | None = None,
    together: int = 8,
    store_dtype: str = "lossless",
    model_dtype: str = "float32",
) -> CapturePlan:
    """The plan of a capture.

    Args:
        architecture: The model's sizes.
        requests: The values asked for; those that every capture has anyway are passed over.
        lengths: int32 ``[sequence]``, tokens of each prompt.
        layers: ``--layers``.
        heads: ``--heads``.
        generate: Tokens decoded after each prompt.
        packed: Whether the sequences are packed windows.
        block_sequences: Sequences of a block, or None to choose.
        together: Sequences of full length that one forward takes.
        store_dtype: ``lossless``, ``float32`` or ``float16``.
        model_dtype: The dtype of the model's weights.

    Raises:
        UsageError: A value the model lacks, or a selection that leaves nothing.
    """
    for request in requests:
        why = architecture.why_missing(request.value)
        if why:
            raise UsageError(
                f"This model has no {request.value.key}: {why}. `kimicap values --model …` lists what it has."
            )
    totals = (lengths + generate).astype(np.int32)
    longest, count = int(totals.max()), len(totals)
    block = block_sequences or grid.block_sequences(longest, count)
    wanted = [request for request in requests if not _in_frame(architecture, request)]
    chosen = None if layers is None else parse_numbers(layers, architecture.layers, what="--layers")
    axes = _layer_axes(architecture, wanted, chosen)
    values = tuple(
        _value_plan(
            architecture,
            request,
            name,
            row_dims,
            dtype,
            group=axes[request.value.host],
            chosen=chosen,
            heads=heads,
            longest=longest,
            count=count,
            block=block,
            together=together,
            store_dtype=store_dtype,
            model_dtype=model_dtype,
        )
        for request in wanted
        for name, row_dims, dtype in _stored(request)
    )
    return CapturePlan(
        values=values,
        frame=_frame(values, count, longest, block, generate=generate, packed=packed),
        coordinates=_coordinates(values, axes, longest),
        lengths=totals,
        longest_tokens=longest,
        block_sequences=block,
        disk_bytes=sum(_disk_bytes(value, totals, model_dtype) for value in values),
    )


def forward_group(
    plan: CapturePlan, *, batch_tokens: int, batch_size: int | None, memory: int, whole: bool
) -> tuple[int, bool]:
    """How many sequences are worked on at once, so that the shards they open fit in host memory.

    Args:
        plan: The capture.
        batch_tokens: Tokens of one forward.
        batch_size: Sequences of one forward at most, or None.
        memory: Host bytes for shards, open ones and those being written.
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
    for size in divisors:
        if sum(_open_bytes(value, size, all_layers=True) for value in plan.values) <= memory // 2:
            if size >= min(full, block) or whole:
                return size, True
            break
    if not whole:
        for size in (size for size in divisors if size <= full):
            if sum(_open_bytes(value, size, all_layers=False) for value in plan.values) <= memory // 2:
                return size, False
    least = sum(_open_bytes(value, 1, all_layers=whole) for value in plan.values)
    if least <= memory:
        return 1, False
    raise RoomError(
        f"One sequence opens shards of {least / 2**30:.1f} GiB, more than --memory {memory / 2**30:.1f} GiB; give more "
        "memory, shorter sequences, or fewer values, layers, heads or positions."
    )


def _open_bytes(value: ValuePlan, size: int, *, all_layers: bool) -> int:
    spans = value.shard_sequences > size
    layers = (
        max(1, len(value.layers)) if all_layers or spans else min(2 * value.shard_layers, max(1, len(value.layers)))
    )
    return max(size, value.shard_sequences) * layers * value.row_bytes


def _in_frame(architecture: Architecture, request: Request) -> bool:
    return any(site.batch is not None for site in architecture.sites(request.value))


def _stored(request: Request) -> Iterable[tuple[str, tuple[str, ...], str]]:
    """Name, layout and dtype of each array that a request becomes."""
    value = request.value
    if request.top is None:
        yield value.name, value.layout, value.dtype
        return
    layout = tuple("top" if dim == "vocab" else dim for dim in value.layout)
    yield f"{value.name}_top", layout, value.dtype
    yield f"{value.name}_top_ids", layout, "int32"


def _own_layers(architecture: Architecture, request: Request, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    """Blocks in which the request's value exists and is wanted."""
    value = request.value
    blocks = architecture.blocks_of(value)
    if request.layers is not None:
        chosen = parse_numbers(request.layers, architecture.layers, what=f"{value.name}@layers")
    kept = blocks if chosen is None else tuple(block for block in blocks if block in chosen)
    if not kept:
        raise UsageError(
            f"The layers asked for hold no {value.key}; it exists in {_ranges(blocks)}. Choose among these."
        )
    return kept


def _layer_axes(
    architecture: Architecture, requests: Sequence[Request], chosen: tuple[int, ...] | None
) -> dict[str, tuple[int, ...]]:
    """Blocks on the layer axis of each host's group."""
    axes: dict[str, tuple[int, ...]] = {}
    for host in dict.fromkeys(request.value.host for request in requests):
        of_host = [request for request in requests if request.value.host == host]
        shared = [request for request in of_host if request.layers is None] or of_host
        if host == "model":
            axes[host] = ()
            continue
        axes[host] = tuple(sorted({b for request in shared for b in _own_layers(architecture, request, chosen)}))
    return axes


def _value_plan(
    architecture: Architecture,
    request: Request,
    name: str,
    row_dims: tuple[str, ...],
    dtype: str,
    *,
    group: tuple[int, ...],
    chosen: tuple[int, ...] | None,
    heads: str | None,
    longest: int,
    count: int,
    block: int,
    together: int,
    store_dtype: str,
    model_dtype: str,
) -> ValuePlan:
    value, host = request.value, request.value.host
    in_model = host == "model"
    present = () if in_model else _own_layers(architecture, request, chosen)
    axis = group if request.layers is None or present == group else present
    kept = _heads(architecture, request, heads)
    shape, dims = [], []
    for dim in row_dims:
        if dim == position_axis(value):
            slots = request.positions.slots(longest)
            if slots == 0:
                raise UsageError(
                    f"{value.name}@{request.positions} selects nothing: the longest sequence has {longest} tokens. "
                    "Choose other positions."
                )
            own = request.positions.kind != "all" or name == "states"
            shape.append(slots)
            dims.append(f"{name}_position" if own else dim)
        elif dim == "head" and kept is not None:
            shape.append(len(kept))
            dims.append(dim if request.heads is None else f"{name}_head")
        else:
            sizes = {"position": longest, "query": longest, "key": longest, "top": request.top}
            shape.append(sizes.get(dim) or architecture.size(host, dim))
            dims.append(dim)
    stored = _stored_dtype(dtype, architecture, value.host, row_dims, store_dtype)
    row = grid.Row(dims=row_dims, shape=tuple(shape), itemsize_bytes=np.dtype(stored).itemsize)
    found = grid.plan_grid(row, layers=max(1, len(axis)), block=block, together=min(together, block))
    lead = () if in_model else ("layer" if axis == group else f"{name}_layer",)
    array = ArrayLayout(
        path=name if in_model else f"{host}/{name}",
        dims=(*lead, "sequence", *dims),
        shape=(*((len(axis),) if lead else ()), count, *shape),
        dtype=stored,
        chunk=(*((1,) if lead else ()), found.chunk_sequences, *found.chunk_row),
        shard=(*((found.layers,) if lead else ()), found.sequences, *found.shard_row),
        fill=FILLS[np.dtype(stored).kind],
        attributes={
            "long_name": value.about,
            "site": "; ".join(dict.fromkeys(str(site) for site in architecture.sites(value))),
            "layout": [*(("layer",) if lead else ()), "sequence", *row_dims],
            "source_dtype": model_dtype if dtype == "computed" else "int64" if dtype == "index" else dtype,
            **({} if position_axis(value) is None else {"positions": str(request.positions)}),
        },
    )
    return ValuePlan(
        key=f"{host}.{name}",
        request=request,
        layers=axis,
        present=frozenset(present),
        heads=kept,
        row_dims=row_dims,
        array=array,
    )


def _heads(architecture: Architecture, request: Request, heads: str | None) -> tuple[int, ...] | None:
    text = request.heads or heads
    if "head" not in request.value.layout or text is None:
        return None
    what = "--heads" if request.heads is None else f"{request.value.name}@heads"
    return parse_numbers(text, architecture.size(request.value.host, "head"), what=what)


def _stored_dtype(dtype: str, architecture: Architecture, host: str, dims: Sequence[str], store_dtype: str) -> str:
    if dtype == "index":
        largest = architecture.size(host, "expert") if "slot" in dims else architecture.size(host, "vocab")
        return next(name for name in ("int8", "int16", "int32") if largest - 1 <= np.iinfo(name).max)
    if dtype in ("int32", "bool"):
        return dtype
    return "float16" if store_dtype == "float16" else "float32"


def _frame(
    values: Sequence[ValuePlan], count: int, longest: int, block: int, *, generate: int, packed: bool
) -> tuple[ArrayLayout, ...]:
    per_token = [
        ("input_ids", "int32", "Token ids the model read; -1 beyond the sequence."),
        ("attention_mask", "bool", "True at the sequence's own tokens."),
        ("special_tokens_mask", "bool", "True at the tokenizer's special tokens."),
    ]
    if packed:
        per_token.append(("document", "int32", "Dataset row that each token of a packed window came from."))
    if generate:
        per_token.append(("generated", "bool", "True at decoded tokens."))
    per_sequence = [
        ("length", "int32", "Tokens of the sequence."),
        ("row", "int64", "Row of the dataset that the sequence's first token came from."),
    ]
    arrays = [
        _frame_array(name, ("position",), (longest,), dtype, about, count, block) for name, dtype, about in per_token
    ]
    arrays += [_frame_array(name, (), (), dtype, about, count, block) for name, dtype, about in per_sequence]
    for value in values:
        own = next((dim for dim in value.array.dims if dim.endswith("_position")), None)
        if own and not value.key.endswith("_top_ids"):
            slots = value.array.shape[value.array.dims.index(own)]
            about = f"Position that each entry of {own} was read after; -1 for none."
            path = f"{value.array.path.removesuffix('_top')}_at"
            arrays.append(_frame_array(path, (own,), (slots,), "int32", about, count, block))
    return tuple(arrays)


def _frame_array(
    path: str, dims: tuple[str, ...], shape: tuple[int, ...], dtype: str, about: str, count: int, block: int
) -> ArrayLayout:
    row = grid.Row(dims=dims, shape=shape, itemsize_bytes=np.dtype(dtype).itemsize)
    found = grid.plan_grid(row, layers=1, block=block, together=block)
    return ArrayLayout(
        path=path,
        dims=("sequence", *dims),
        shape=(count, *shape),
        dtype=dtype,
        chunk=(found.chunk_sequences, *found.chunk_row),
        shard=(found.sequences, *found.shard_row),
        fill=FILLS[np.dtype(dtype).kind],
        attributes={"long_name": about, "layout": ["sequence", *dims]},
    )


def _coordinates(
    values: Sequence[ValuePlan], axes: Mapping[str, tuple[int, ...]], longest: int
) -> tuple[Coordinate, ...]:
    found: dict[str, Coordinate] = {}

    def add(path: str, numbers: Sequence[int], about: str) -> None:
        name = path.rpartition("/")[2]
        data = np.asarray(numbers, np.int32)
        found[path] = Coordinate(path=path, dims=(name,), data=data, attributes={"long_name": about})

    add("position", range(longest), "Position in the sequence; 0 is the first real token.")
    for value in values:
        folder = "" if value.leading == 1 else f"{value.request.value.host}/"
        for dim, size in zip(value.array.dims, value.array.shape, strict=True):
            if dim == "position":
                add(f"{folder}position", range(longest), "Position in the sequence; 0 is the first real token.")
            elif dim == "layer" or dim.endswith("_layer"):
                add(f"{folder}{dim}", value.layers, "Number of the block in the model.")
            elif (dim == "head" or dim.endswith("_head")) and value.heads is not None:
                add(f"{folder}{dim}", value.heads, "Number of the head in the model.")
            assert size >= 0
    return tuple(found.values())


def _disk_bytes(value: ValuePlan, lengths: np.ndarray, model_dtype: str) -> int:
    """Bytes expected on disk: real positions only, bfloat16 widened to float32 counted as the bfloat16 it packs to."""
    rows = max(1, len(value.present))
    per_position = value.row_bytes
    axis = position_axis(value.request.value)
    if axis is None:
        real = float(len(lengths))
    else:
        slots = value.row_shape[value.row_dims.index(axis)]
        real = sum(_filled(value, int(length), slots) for length in lengths) if len(lengths) < 10**5 else len(lengths)
    packed = 0.5 if model_dtype in ("bfloat16", "float16") and value.array.dtype == "float32" else 1.0
    halves = packed if value.request.value.dtype == "computed" else 1.0
    return int(rows * real * per_position * halves)


def _filled(value: ValuePlan, length: int, slots: int) -> float:
    """Part of a row that a sequence of this length fills."""
    number = value.request.positions.window(0, length, length)[1]
    keys = length / value.row_shape[value.row_dims.index("key")] if "key" in value.row_dims else 1.0
    return number / slots * keys


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[str] = []
    for number in numbers:
        if parts and number == int(parts[-1].split("-")[-1]) + 1:
            parts[-1] = f"{parts[-1].split('-')[0]}-{number}"
        else:
            parts.append(str(number))
    return ",".join(parts)
