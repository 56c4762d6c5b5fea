"""Capture what happens inside Kimi-Linear and Kimi-K3 to labelled zarr arrays.

Importing this imports neither torch nor zarr; what is called does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kimicap._version import __version__

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.nn import Module
    from xarray import DataTree

    from kimicap.notebook import Captured

__all__ = ["__version__", "capture", "open"]


def open(path: Path | str) -> "DataTree":
    """A capture, complete or not, as an xarray tree; arrays are read when they are used.

    Raises:
        UsageError: Nothing is there, or not a capture.
        MismatchError: The capture's own metadata are broken or newer than this kimicap.
    """
    from kimicap.store import open_capture

    return open_capture(path)


def capture(
    model: "Module",
    values: Sequence[str] | str,
    *,
    layers: str | None = None,
    heads: str | None = None,
    schema: Path | None = None,
) -> "AbstractContextManager[Captured]":
    """Hooks on a model for the length of a ``with``; hands back tensors of its latest forward. For notebooks.

    Args:
        model: A loaded model of a family that the schema covers.
        values: Names with selections, as ``--values`` writes them.
        layers: Blocks of the model, as ``--layers`` writes them.
        heads: Heads, as ``--heads`` writes them.
        schema: Schema file laid over the built-in one.

    Raises:
        UsageError: The model is of no family, or lacks a value, or a selection lies outside it.
    """
    from kimicap.notebook import capture as attach

    return attach(model, values, layers=layers, heads=heads, schema=schema)
