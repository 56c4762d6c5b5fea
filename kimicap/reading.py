"""What a site gives: an argument by name or place, an item of an output, and the layout of its axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kimicap.errors import UsageError


def own_layout(axes: Sequence[str]) -> list[str]:
    """The layout of an ingredient that is no value: its own axes."""
    renamed = dict.fromkeys(("token", "past", "kept"), "position")
    names = [renamed.get(name, name) for axis in axes for name in axis.split("*")]
    return [name for name in names if name != "batch"]


def argument_of(
    which: str | int | None, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], where: str
) -> Any:
    """An argument by its name or place, however it was passed; None where it was left to its default.

    Args:
        which: Its name, or its place among all.
        names: The names of all, in order.
        args: Those passed by place.
        kwargs: Those passed by name.
        where: What to call the site in an error.

    Raises:
        UsageError: No argument has this name.
    """
    if isinstance(which, int):
        if which < len(args):
            return args[which]
        which = names[which] if which < len(names) else which
    if which in kwargs:
        return kwargs[str(which)]
    if which in names and names.index(str(which)) < len(args):
        return args[names.index(str(which))]
    if which in names:
        return None
    raise UsageError(f"{where}: no argument is called {which!r} (there are {', '.join(names)}); mend the schema.")


def item_of(which: str | int | None, output: Any, where: str) -> Any:
    """An item of what a module or function returned; None means the whole, which must then be one tensor.

    Raises:
        UsageError: There is no such item, or several where the schema names none.
    """
    if which is None:
        if isinstance(output, torch.Tensor) or output is None:
            return output
        size = f" of {len(output)}" if isinstance(output, tuple | list) else ""
        raise UsageError(f"{where}: found a {type(output).__name__}{size}; say which `item` is meant in the schema.")
    try:
        return output[which]
    except (IndexError, KeyError, TypeError):
        raise UsageError(f"{where}: the output, a {type(output).__name__}, has no item {which!r}.") from None


def refuse_missing(missing: Sequence[tuple[str, int | None]]) -> None:
    """Refuses a model in which wanted values, given with their blocks, did not appear in a forward.

    Raises:
        UsageError: There is one.
    """
    if missing:
        key, block = missing[0]
        where = "" if block is None else f" of block {block}"
        raise UsageError(
            f"{key}{where} did not appear in a forward, though the schema has a site for it; "
            "the schema does not fit this model."
        )
