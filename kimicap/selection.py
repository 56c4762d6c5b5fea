"""What a person asked for: ``--values states@every:64,layer_output@0:128@layers:0-3`` as frozen requests."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np

from kimicap.errors import UsageError
from kimicap.schema import Schema, Value

_NUMBER = r"-?\d{1,9}"
_GOES_ON = re.compile(rf"{_NUMBER}(-{_NUMBER})?(@.*)?")
"""What may follow a comma inside a list of numbers: ``layers:0,4-6@last``."""
_OTHERS = ("layers", "heads", "top")
"""Selections that are not of positions."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Chosen positions of a sequence: all, a range, every N-th or the last.

    Attributes:
        kind: ``all``, ``every``, ``last`` or ``range``.
        start: First position of a range.
        stop: Position after a range's last.
        step: N of ``every:N``, which reads after positions N-1, 2N-1, ….
    """

    kind: str = "all"
    start: int = 0
    stop: int = 0
    step: int = 1

    def slots(self, longest_tokens: int) -> int:
        """Places on the array's axis, for sequences of up to ``longest_tokens``."""
        if self.kind == "every":
            return longest_tokens // self.step
        if self.kind == "range":
            return max(0, min(self.stop, longest_tokens) - self.start)
        return longest_tokens if self.kind == "all" else 1

    def window(self, past: int, count: int, total: int) -> tuple[int, int, int]:
        """The chosen ones among positions ``past`` to ``past + count - 1`` of a sequence of ``total`` tokens.

        Returns:
            Offset from ``past`` of the first, how many there are, and the slot of the first. They are
            ``step`` apart and their slots adjoin.
        """
        first, last, slot = past, past + count, past
        if self.kind == "every":
            slot = past // self.step
            first = (slot + 1) * self.step - 1
        elif self.kind == "range":
            first, last = max(past, self.start), min(last, self.stop)
            slot = first - self.start
        elif self.kind == "last":
            first, slot = total - 1, 0
            if not past <= first < last:
                return 0, 0, 0
        number = max(0, -(-(last - first) // self.step))
        return first - past, number, slot

    def at(self, length: int, slots: int) -> np.ndarray:
        """Position of each slot for a sequence of ``length`` tokens, int32 ``[slots]``, -1 for none."""
        positions = np.full(slots, -1, np.int32)
        offset, number, slot = self.window(0, length, length)
        positions[slot : slot + number] = offset + self.step * np.arange(number)
        return positions

    def __str__(self) -> str:
        """As it is written after the ``@``."""
        return {"every": f"every:{self.step}", "range": f"{self.start}:{self.stop}"}.get(self.kind, self.kind)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One value, with what of it is wanted.

    Attributes:
        layers: Blocks as written after ``@layers:``, or None for those of ``--layers``.
        heads: Heads as written after ``@heads:``, or None for those of ``--heads``.
        top: N of ``@top:N``, or None.
        dotted: Whether the name said which host is meant.
    """

    value: Value
    positions: Positions = Positions()
    layers: str | None = None
    heads: str | None = None
    top: int | None = None
    dotted: bool = True


def parse_values(text: Iterable[str], schema: Schema) -> list[Request]:
    """The requests written in ``--values``; a bare name that several hosts own becomes one request a host.

    Raises:
        UsageError: An unknown name (with the nearest), a selection that cannot be read or does not fit, a name twice.
    """
    requests: list[Request] = []
    for item in split_values(text):
        name, *selections = (part.strip() for part in item.split("@"))
        _refuse_two_of_a_kind(selections, item)
        for value in _named(name, schema):
            request = Request(value=value, positions=_default(value), dotted=name != value.name)
            for selection in selections:
                request = _narrow(request, selection, item)
            requests.append(request)
    keys = [request.value.key for request in requests]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice:
        raise UsageError(f"{twice} is asked for twice; name each value once, with one selection.")
    if not requests:
        raise UsageError("No values are asked for; name some with --values (`kimicap values` lists them).")
    return requests


def parse_numbers(text: str, size: int, *, what: str) -> tuple[int, ...]:
    """Numbers written as ``0-3,8,-1``, sorted, each once; negative ones count from the end of ``size``.

    Raises:
        UsageError: Not of that form, or outside the model.
    """
    numbers: set[int] = set()
    for item in (item.strip() for item in text.split(",")):
        found = re.fullmatch(rf"({_NUMBER})(?:-({_NUMBER}))?", item)
        if not found:
            raise UsageError(
                f"{what} {text!r} cannot be read at {item!r}; write numbers and ranges like 0-3,8,-1, where negative "
                "numbers count from the end."
            )
        first, last = (number + size if number < 0 else number for number in map(int, (found[1], found[2] or found[1])))
        if not (0 <= first < size and 0 <= last < size):
            raise UsageError(f"{what} {item} lies outside the model, which has 0 to {size - 1}.")
        if first > last:
            raise UsageError(f"{what} {item} runs backwards; write the smaller number first.")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def split_values(text: Iterable[str]) -> list[str]:
    """One entry a value: split at commas, but for those inside a list of numbers (``@layers:0,4``)."""
    items: list[str] = []
    for line in text:
        of_line: list[str] = []
        for part in (part.strip() for part in line.split(",")):
            if of_line and _GOES_ON.fullmatch(part) and re.search(r"@(layers|heads):[^@]*$", of_line[-1]):
                of_line[-1] += f",{part}"
            elif part:
                of_line.append(part)
        items += of_line
    return items


def _named(name: str, schema: Schema) -> Sequence[Value]:
    full = schema.short_names.get(name, name)
    if full in schema.values:
        return [schema.values[full]]
    found = [value for value in schema.values.values() if value.name == full]
    if not found:
        known = [*schema.short_names, *schema.values, *(value.name for value in schema.values.values())]
        near = list(dict.fromkeys(get_close_matches(name, known, n=3)))
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"No value is called {name!r}.{hint} `kimicap values` lists them all.")
    return found


def _default(value: Value) -> Positions:
    return Positions(kind="every", step=64) if value.name == "states" else Positions()


def position_axis(value: Value) -> str | None:
    """The axis of the layout that a selection of positions narrows, or None."""
    return next((axis for axis in ("position", "query") if axis in value.layout), None)


def _refuse_two_of_a_kind(selections: Sequence[str], item: str) -> None:
    kinds = [kind if (kind := selection.partition(":")[0]) in _OTHERS else "positions" for selection in selections]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice:
        raise UsageError(f"{item!r} selects {twice} twice; write one selection of {twice}.")


def _narrow(request: Request, selection: str, item: str) -> Request:
    kind, _, rest = selection.partition(":")
    key, layout = request.value.key, request.value.layout
    if kind in ("layers", "heads"):
        if kind == "layers" and request.value.host == "model":
            raise UsageError(f"{item!r} narrows layers, but {key} belongs to the whole model; drop @layers.")
        if kind == "heads" and "head" not in layout:
            raise UsageError(f"{item!r} narrows heads, but {key} has none; drop @heads.")
        if not rest:
            raise UsageError(f"{item!r} needs numbers after @{kind}:, like @{kind}:0-3,8.")
        return replace(request, layers=rest) if kind == "layers" else replace(request, heads=rest)
    if kind == "top":
        if "vocab" not in layout or "position" not in layout:
            raise UsageError(f"{item!r} asks for the largest of a vocabulary; only logits and lm_head_output have one.")
        return replace(request, top=_whole(rest, item))
    positions = _positions(selection, item)
    if position_axis(request.value) is None:
        raise UsageError(f"{item!r} narrows positions, but {key} has none; drop @{selection}.")
    return replace(request, positions=positions)


def _positions(selection: str, item: str) -> Positions:
    kind, colon, rest = selection.partition(":")
    if selection in ("all", "last"):
        return Positions(kind=selection)
    if kind == "every" and colon:
        return Positions(kind="every", step=_whole(rest, item))
    if colon and re.fullmatch(r"\d{0,9}", kind):
        start, stop = int(kind or 0), _whole(rest, item)
        if start >= stop:
            raise UsageError(f"The range in {item!r} is empty; write first:stop with first below stop.")
        return Positions(kind="range", start=start, stop=stop)
    raise UsageError(
        f"The selection @{selection} in {item!r} is not known; use all, last, every:N, first:stop, top:N, "
        "layers:… or heads:…."
    )


def _whole(text: str, item: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
        raise UsageError(f"{item!r} needs a whole number from 1 to 999999999 where it says {text!r}.")
    return int(text)
