"""From a want to the array it becomes: names, sizes, grid, attributes, coordinates. Pure arithmetic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

from kimicap import grid
from kimicap.architecture import Architecture, Want
from kimicap.errors import UsageError
from kimicap.layout import ArrayLayout, Coordinate
from kimicap.selection import Request, position_axis

FILLS: Mapping[str, float | int | bool] = {"f": float("nan"), "i": -1, "b": False}


@dataclass(frozen=True, kw_only=True)
class ValuePlan:
    """One array of one value.

    Attributes:
        key: The value's dotted name, with ``_top`` or ``_top_ids`` where only the largest are kept.
        want: What was asked for; outside its blocks the fill value is read.
        layers: Block numbers on the layer axis; empty for values of the whole model.
        row_dims: The layout's dimension names, without layer and sequence.
        array: The array.
    """

    key: str
    want: Want
    layers: tuple[int, ...]
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

    @property
    def head_shards(self) -> int:
        """Shards that share the heads of one row."""
        if "head" not in self.row_dims:
            return 1
        axis = self.leading + self.row_dims.index("head")
        return ceil(self.array.shape[axis] / self.array.shard[axis])

    @property
    def files(self) -> int:
        """Shards that hold a block that has the value, at most (those that hold nothing but fill are not written)."""
        if self.leading != 2:
            return self.array.shards
        grid = {at // self.shard_layers for at, block in enumerate(self.layers) if block in self.want.blocks}
        return self.array.shards // ceil(len(self.layers) / self.shard_layers) * len(grid)

    @property
    def slot_bytes(self) -> int:
        """Host bytes that one open shard takes."""
        return min(self.array.shard_nbytes, self.array.nbytes)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What all arrays of a capture share.

    Attributes:
        count: Sequences.
        longest_tokens: Size of the position axis.
        block: Sequences of a block.
        together: Sequences of full length that one forward takes.
        store_dtype: ``lossless``, ``float32`` or ``float16``.
        model_dtype: The dtype of the model's weights.
    """

    architecture: Architecture
    count: int
    longest_tokens: int
    block: int
    together: int
    store_dtype: str
    model_dtype: str


def layer_axes(wants: Sequence[Want]) -> dict[str, tuple[int, ...]]:
    """Blocks on the layer axis of each host's group: those in which a value without layers of its own exists."""
    axes: dict[str, tuple[int, ...]] = {}
    for host in dict.fromkeys(want.value.host for want in wants):
        of_host = [want for want in wants if want.value.host == host]
        shared = [want for want in of_host if want.request.layers is None] or of_host
        axes[host] = tuple(sorted({block for want in shared for block in want.blocks}))
    return axes


def value_plans(scope: Scope, want: Want, group: tuple[int, ...]) -> Iterable[ValuePlan]:
    """The arrays that a want becomes, in a group whose layer axis holds the blocks ``group``.

    Raises:
        UsageError: The selection of positions leaves nothing.
    """
    in_model = want.value.host == "model"
    axis = group if want.request.layers is None or want.blocks == group else want.blocks
    for name, about, row_dims, dtype in _stored(want.request):
        dims, shape = _row_axes(scope, want, row_dims)
        lead = () if in_model else ("layer" if axis == group else f"{want.value.name}_layer",)
        array = _array(scope, want, name, about, lead, dims, tuple(shape), row_dims, dtype, len(axis))
        yield ValuePlan(key=f"{want.value.host}.{name}", want=want, layers=axis, row_dims=row_dims, array=array)


def _row_axes(scope: Scope, want: Want, row_dims: Sequence[str]) -> tuple[list[str], list[int]]:
    request, longest, name = want.request, scope.longest_tokens, want.value.name
    dims, shape = [], []
    for dim in row_dims:
        if dim == position_axis(want.value):
            slots = request.positions.slots(longest)
            if slots == 0:
                raise UsageError(
                    f"{name}@{request.positions} selects nothing: the longest sequence has {longest} tokens. "
                    "Choose other positions."
                )
            own = request.positions.kind != "all" or name == "states"
            dims.append(f"{name}_position" if own else dim)
            shape.append(slots)
        elif dim == "head" and want.heads is not None:
            dims.append(dim if request.heads is None else f"{name}_head")
            shape.append(len(want.heads))
        else:
            sizes = {"position": longest, "key": longest, "top": request.top}
            dims.append(dim)
            size = sizes.get(dim) or scope.architecture.size(want.value.host, dim)
            if size == 0:
                raise UsageError(f"{want.value.key} is empty: the config of this model has 0 for {dim}. Leave it out.")
            shape.append(size)
    return dims, shape


def _array(
    scope: Scope,
    want: Want,
    name: str,
    about: str,
    lead: tuple[str, ...],
    dims: Sequence[str],
    shape: tuple[int, ...],
    row_dims: tuple[str, ...],
    dtype: str,
    layers: int,
) -> ArrayLayout:
    value = want.value
    stored = _stored_dtype(dtype, scope)
    row = grid.Row(dims=row_dims, shape=shape, itemsize_bytes=np.dtype(stored).itemsize)
    found = grid.plan_grid(row, layers=max(1, layers), block=scope.block, together=min(scope.together, scope.block))
    source = {"computed": scope.model_dtype, "index": "int64"}.get(dtype, dtype)
    attributes = {
        "long_name": about,
        "site": "; ".join(dict.fromkeys(str(site) for site in scope.architecture.sites(value))),
        "layout": [*(["layer"] if lead else []), "sequence", *row_dims],
        "source_dtype": source,
    }
    if position_axis(value) is not None:
        attributes["positions"] = str(want.request.positions)
    return ArrayLayout(
        path=f"{value.host}/{name}" if lead else name,
        dims=(*lead, "sequence", *dims),
        shape=(*((layers,) if lead else ()), scope.count, *shape),
        dtype=stored,
        chunk=(*((1,) if lead else ()), found.chunk_sequences, *found.chunk_row),
        shard=(*((found.layers,) if lead else ()), found.sequences, *found.shard_row),
        fill=FILLS[np.dtype(stored).kind],
        attributes=attributes,
    )


def _stored(request: Request) -> Iterable[tuple[str, str, tuple[str, ...], str]]:
    """Name, meaning, layout and dtype of each array that a request becomes."""
    value = request.value
    if request.top is None:
        yield value.name, value.about, value.layout, value.dtype
        return
    layout = tuple("top" if dim == "vocab" else dim for dim in value.layout)
    yield f"{value.name}_top", value.about, layout, value.dtype
    yield f"{value.name}_top_ids", f"Token ids of {value.name}_top.", layout, "int32"


def _stored_dtype(dtype: str, scope: Scope) -> str:
    """Indices take int16, which holds 32,767 experts, so that they are the same in every capture."""
    if dtype in ("int32", "bool"):
        return dtype
    if dtype == "index":
        return "int16"
    return "float16" if scope.store_dtype == "float16" else "float32"


def frame_arrays(values: Sequence[ValuePlan], scope: Scope, *, decodes: bool, packed: bool) -> tuple[ArrayLayout, ...]:
    """The arrays that every capture has, and ``<value>_at`` of each selection of positions."""
    count, longest, block = scope.count, scope.longest_tokens, scope.block
    per_token = [
        ("input_ids", "int32", "Token ids the model read; -1 beyond the sequence."),
        ("attention_mask", "bool", "True at the sequence's own tokens."),
        ("special_tokens_mask", "bool", "True at the tokenizer's special tokens."),
    ]
    if packed:
        per_token.append(("document", "int32", "Dataset row that each token of a packed window came from."))
    if decodes:
        per_token.append(("generated", "bool", "True at decoded tokens."))
    per_sequence = [
        ("length", "int32", "Tokens of the sequence."),
        ("row", "int64", "Row of the dataset that the sequence's first token came from."),
    ]
    arrays = [
        _frame_array(name, ("position",), (longest,), dtype, about, count, block) for name, dtype, about in per_token
    ]
    arrays += [_frame_array(name, (), (), dtype, about, count, block) for name, dtype, about in per_sequence]
    for path, own, slots in dict.fromkeys(selections(values)):
        about = f"Position that each entry of {own} was read after; -1 for none."
        arrays.append(_frame_array(path, (own,), (slots,), "int32", about, count, block))
    return tuple(arrays)


def selections(values: Sequence[ValuePlan]) -> Iterable[tuple[str, str, int]]:
    """Path of ``<value>_at``, the dimension it is for and that one's size, of each array with positions of its own."""
    for value in values:
        own = f"{value.want.value.name}_position"
        if own in value.array.dims:
            folder = value.array.path.removesuffix(value.array.path.rpartition("/")[2])
            yield f"{folder}{value.want.value.name}_at", own, value.array.shape[value.array.dims.index(own)]


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


def coordinates(values: Sequence[ValuePlan], longest: int) -> tuple[Coordinate, ...]:
    """The coordinates of the root and of each group."""
    found: dict[str, Coordinate] = {}

    def add(path: str, numbers: Sequence[int], about: str) -> None:
        name = path.rpartition("/")[2]
        data = np.asarray(numbers, np.int32)
        found[path] = Coordinate(path=path, dims=(name,), data=data, attributes={"long_name": about})

    add("position", range(longest), "Position in the sequence; 0 is the first real token.")
    for value in values:
        folder = "" if value.leading == 1 else f"{value.want.value.host}/"
        for dim in value.array.dims:
            if dim == "position":
                add(f"{folder}position", range(longest), "Position in the sequence; 0 is the first real token.")
            elif dim == "layer" or dim.endswith("_layer"):
                add(f"{folder}{dim}", value.layers, "Number of the block in the model.")
            elif (dim == "head" or dim.endswith("_head")) and value.want.heads is not None:
                add(f"{folder}{dim}", value.want.heads, "Number of the head in the model.")
    return tuple(found.values())


def disk_bytes(value: ValuePlan, lengths: np.ndarray, model_dtype: str, codec: str) -> int:
    """Bytes expected on disk: real positions only, and a 16-bit float in float32 as what it packs to.

    Without a codec nothing packs, and chunks that hold any position are there whole.
    """
    blocks = max(1, len(value.want.blocks))
    if codec == "none":
        array = value.array
        axes = zip(array.shape[value.leading - 1 :], array.chunk[value.leading - 1 :], strict=True)
        return blocks * prod(ceil(size / chunk) * chunk for size, chunk in axes) * array.itemsize_bytes
    axis = position_axis(value.want.value)
    filled = float(len(lengths))
    if axis is not None:
        slots = value.row_shape[value.row_dims.index(axis)]
        keys = value.row_shape[value.row_dims.index("key")] if "key" in value.row_dims else None
        window = value.want.request.positions.window
        each = zip(*(numbers.tolist() for numbers in np.unique(lengths, return_counts=True)), strict=True)
        filled = sum(count * window(0, n, n)[1] / slots * (n / keys if keys else 1) for n, count in each)
    packs = value.want.value.dtype == "computed" and value.array.dtype == "float32"
    share = {"bfloat16": 0.5, "float16": 0.6}.get(model_dtype, 1.0) if packs else 1.0
    return int(blocks * filled * value.row_bytes * share)
