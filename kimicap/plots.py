"""Pictures of one value of one sequence of a capture. The only importer of matplotlib, an extra: ``kimicap[plots]``."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kimicap import store
from kimicap.errors import MismatchError, UsageError
from kimicap.schema import load_schema

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import DataArray


def plot(
    path: Path, value: str, *, out: Path, layer: int | None = None, head: int | None = None, sequence: int = 0
) -> None:
    """Draws one value of one sequence into a file: png, svg or pdf, by its ending.

    Patterns become a map of query and key of one layer and head; decays one of position and channel of one layer and
    head, betas one of position and head of one layer; expert indices one of the tokens that each layer sends to each
    expert; anything else with positions the norm at each layer and position.

    Args:
        path: The capture.
        value: Name of a captured value, bare, dotted or as the path of its array.
        out: The picture.
        layer: Number of the block in the model; the first captured one if None.
        head: Number of the head, for maps of one head; the first captured one if None.
        sequence: Number of the sequence.

    Raises:
        UsageError: The capture has no such value, layer, head or sequence; or matplotlib is not installed.
        MismatchError: Files of the capture are damaged.
    """
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"A picture is a .png, .svg or .pdf, and {out} is none; give another --out.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("Pictures need matplotlib; install it with `pip install kimicap[plots]`.") from None
    tree: Any = store.open_capture(path)
    array = _find(tree, value)
    lengths = tree["length"].values
    if not 0 <= sequence < len(lengths):
        raise UsageError(f"--sequence {sequence} lies outside the capture, which has 0 to {len(lengths) - 1}.")
    if lengths[sequence] < 0:
        raise UsageError(f"Sequence {sequence} is not captured yet; go on with `kimicap run --resume`.")
    array = array.isel(sequence=sequence)
    positions = _selected(tree, array, sequence)
    if positions is not None and not len(positions):
        raise UsageError(
            f"{array.name} has nothing of sequence {sequence}: none of its {lengths[sequence]} tokens was selected "
            f"({array.attrs['positions']}); choose a longer one with --sequence."
        )
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    try:
        drawn = _draw(axes, array, layer=layer, head=head, length=int(lengths[sequence]))
    except (ValueError, RuntimeError) as error:  # as zarr and its codecs tell of bytes that are not what was written
        raise MismatchError(f"{path} cannot be read ({error}); find the damage with `kimicap verify`.") from error
    if positions is not None:
        _label_selected(axes, array, positions)
    axes.set_title(f"{array.name} of sequence {sequence}{drawn}")
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"The picture {out} cannot be written: {error}. Give another --out.") from None


def _find(tree: Any, value: str) -> "DataArray":
    """The array of a value, in whatever group it lies."""
    arrays: Mapping[str, Any] = {
        f"{node.path.strip('/')}/{name}".strip("/"): array
        for node in tree.subtree
        for name, array in node.to_dataset(inherit=True).data_vars.items()
        if "site" in array.attrs
    }
    full = load_schema().short_names.get(value, value).replace(".", "/")
    found = [name for name in arrays if full in (name, name.rpartition("/")[2])]
    if len(found) > 1:
        raise UsageError(f"The capture has {value} of several hosts; say which with --value {' or '.join(found)}.")
    if not found:
        near = get_close_matches(value, [*arrays, *(name.rpartition("/")[2] for name in arrays)], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"The capture has no value {value!r}.{hint} It has {', '.join(arrays)}.")
    array: DataArray = arrays[found[0]]
    return array


def _draw(axes: "Axes", array: "DataArray", *, layer: int | None, head: int | None, length: int) -> str:
    """Draws what fits the dimensions; returns what of the value is seen, for the title."""
    dims = [str(dim) for dim in array.dims]
    if "key" in dims:
        return _draw_pattern(axes, array, layer, head, length)
    if "slot" in dims and array.dtype.kind == "i":
        return _draw_routing(axes, array)
    if array.name in ("decays", "betas"):
        return _draw_channels(axes, array, layer, head)
    if not any(dim.endswith("position") for dim in dims):
        raise UsageError(f"{array.name} has no positions to draw; read it with `kimicap.open`.")
    return _draw_norms(axes, array, layer)


def _draw_pattern(axes: "Axes", array: "DataArray", layer: int | None, head: int | None, length: int) -> str:
    picked, told = _pick(array, layer=layer, head=head)
    query = next(str(dim) for dim in picked.dims if dim != "key")
    data = picked.transpose(query, "key").values[:, :length]
    data = data[:length] if query == "query" else data
    if array.name == "attention_scores":
        data = np.where(np.isfinite(data), data, np.nan)
    # Most weights are small: the root shows them beside the large ones.
    norm = "linear" if array.name == "attention_scores" else _power(0.5)
    _map(axes, data, xlabel="key", ylabel=query, label="weight" if norm != "linear" else "score", norm=norm)
    return told


def _draw_routing(axes: "Axes", array: "DataArray") -> str:
    """Tokens that each layer sends to each expert."""
    layer = _layer_dim(array)
    data = array.transpose(layer, ...).values
    experts = int(data.max()) + 1
    counts = np.stack([np.bincount(row[row >= 0].ravel(), minlength=experts) for row in data])
    _map(axes, counts, xlabel="expert", ylabel="layer", label="tokens", rows=_numbers(array, layer))
    return ""


def _draw_channels(axes: "Axes", array: "DataArray", layer: int | None, head: int | None) -> str:
    """Position against channel of one head, or against head where there are no channels."""
    single = head if "key_dim" in array.dims else None
    picked, told = _pick(array, layer=layer, head=single, heads="key_dim" in array.dims)
    position = next(str(dim) for dim in picked.dims if str(dim).endswith("position"))
    other = next(str(dim) for dim in picked.dims if dim != position)
    data = _trimmed(picked.transpose(other, position).values)
    _map(axes, data, xlabel="position", ylabel=other, label=str(array.name))
    return told


def _draw_norms(axes: "Axes", array: "DataArray", layer: int | None) -> str:
    """Norm over everything but layer and position: a map of both, or a line for one layer."""
    position = next(str(dim) for dim in array.dims if str(dim).endswith("position"))
    lead = _layer_dim(array) if any(str(dim).endswith("layer") for dim in array.dims) else None
    kept = [position] if lead is None else [lead, position]
    rest = tuple(dim for dim in array.dims if dim not in kept)
    if lead is not None and layer is not None:
        array, told = _pick(array, layer=layer, heads=False)
        axes.plot(_norms(array, rest).values)
        axes.set(xlabel=position, ylabel="norm")
        return told
    norms = _norms(array, rest)
    if lead is None:
        axes.plot(norms.values)
        axes.set(xlabel=position, ylabel="norm")
        return ""
    data = _trimmed(norms.transpose(lead, position).values)
    _map(axes, data, xlabel=position, ylabel="layer", label="norm", rows=_numbers(array, lead), norm="log")
    return ""


def _norms(array: "DataArray", dims: tuple[Any, ...]) -> Any:
    return (array.astype("float64") ** 2).sum(dims, skipna=False) ** 0.5


def _selected(tree: Any, array: "DataArray", sequence: int) -> Any:
    """Positions of the sequence that the array's entries were read after; None where all are kept."""
    dim = next((str(dim) for dim in array.dims if str(dim).endswith("_position")), None)
    if dim is None:
        return None
    name = f"{dim.removesuffix('_position').removesuffix('_top_ids').removesuffix('_top')}_at"
    found = next(node[name] for node in tree.subtree if name in node.data_vars)
    positions = found.values[sequence]
    return positions[positions >= 0]


def _label_selected(axes: "Axes", array: "DataArray", positions: Any) -> None:
    """Writes positions of the sequence on an axis that counts the selected ones."""
    dim = next(str(dim) for dim in array.dims if str(dim).endswith("_position"))
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_label_text() == dim:
            shown = range(0, len(positions), max(1, len(positions) // 16))
            axis.set_ticks(shown, [str(positions[at]) for at in shown])
            axis.set_label_text("position")


def _pick(
    array: "DataArray", *, layer: int | None, head: int | None = None, heads: bool = True
) -> tuple["DataArray", str]:
    """One layer and, with ``heads``, one head, by their numbers in the model; and both in words."""
    told = ""
    wanted = [("layer", layer), *([("head", head)] if heads else [])]
    for kind, number in wanted:
        dim = next((str(dim) for dim in array.dims if dim == kind or str(dim).endswith(f"_{kind}")), None)
        if dim is None:
            continue
        numbers = _numbers(array, dim)
        chosen = numbers[0] if number is None else number
        if chosen not in numbers:
            raise UsageError(
                f"--{kind} {number} is not in the capture; {array.name} has {', '.join(map(str, numbers))}."
            )
        array, told = array.isel({dim: numbers.index(chosen)}), f"{told}, {kind} {chosen}"
    return array, told


def _layer_dim(array: "DataArray") -> str:
    return next(str(dim) for dim in array.dims if str(dim).endswith("layer"))


def _numbers(array: "DataArray", dim: str) -> list[int]:
    """The coordinate of a dimension, or its indices."""
    return [int(number) for number in (array[dim].values if dim in array.coords else range(array.sizes[dim]))]


def _trimmed(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Without the columns beyond the sequence, which hold nothing."""
    filled = np.flatnonzero(~np.isnan(data).all(0))
    return data[:, : filled[-1] + 1] if len(filled) else data


def _power(exponent: float) -> Any:
    from matplotlib.colors import PowerNorm

    return PowerNorm(exponent, vmin=0)


def _map(
    axes: "Axes",
    data: np.ndarray[Any, Any],
    *,
    xlabel: str,
    ylabel: str,
    label: str,
    rows: list[int] | None = None,
    norm: Any = "linear",
) -> None:
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(data, aspect="auto", interpolation="nearest", norm=norm)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if rows is not None:
        step = max(1, len(rows) // 30)
        axes.set_yticks(range(0, len(rows), step), [str(row) for row in rows[::step]])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, label=label)
