"""Which tokens of a forward belong to which sequence, and tensors brought from a site's axes to a layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kimicap.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one forward.

    Attributes:
        width_tokens: Tokens of each row, padding included.
        starts: Index of each row's first real token among them.
        counts: Real tokens of each row; 0 for a row that has ended.
        past: Tokens of each sequence read before this forward, which is the position of its first token here.
        first: Whether this is the first forward of these sequences.
        kept_tokens: How many of the last tokens the model was asked for logits of; None for all.
    """

    width_tokens: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    past: tuple[int, ...]
    first: bool = True
    kept_tokens: int | None = None

    @staticmethod
    def of_prompts(lengths: Sequence[int], *, width_tokens: int | None = None, left: bool = False) -> "Rows":
        """Rows that hold whole prompts, padded on the right (or left) to the longest."""
        width = width_tokens or max(lengths)
        starts = tuple(width - length if left else 0 for length in lengths)
        return Rows(width_tokens=width, starts=starts, counts=tuple(lengths), past=(0,) * len(lengths))

    @property
    def alike(self) -> bool:
        """Whether all rows have their real tokens at the same places, none of them ended."""
        return len(set(zip(self.starts, self.counts, self.past, strict=True))) == 1 and self.counts[0] > 0

    @property
    def kept(self) -> "Rows":
        """The rows of the last ``kept_tokens`` tokens; those before are as if read by an earlier forward."""
        if self.kept_tokens is None:
            return self
        cut = self.width_tokens - self.kept_tokens
        read = [min(max(cut - start, 0), count) for start, count in zip(self.starts, self.counts, strict=True)]
        return replace(
            self,
            width_tokens=self.kept_tokens,
            starts=tuple(max(start - cut, 0) for start in self.starts),
            counts=tuple(count - gone for count, gone in zip(self.counts, read, strict=True)),
            past=tuple(past + gone for past, gone in zip(self.past, read, strict=True)),
            kept_tokens=None,
        )

    @property
    def aligned(self) -> bool:
        """Whether every row begins at the forward's first token."""
        return not any(self.starts)


def to_layout(
    tensor: torch.Tensor, axes: Sequence[str], layout: Sequence[str], rows: Rows, size: Callable[[str], int], where: str
) -> torch.Tensor:
    """A site's tensor as ``[batch, *layout]``, its sizes checked.

    The position axis holds the forward's ``width_tokens``, padding included; a ``kept`` axis holds those of
    `Rows.kept`, and so does the result. Of a ``past`` axis, which also holds the cache, the last ``width_tokens``
    are taken. A ``token`` axis may also come unfolded, as two. Tensors that lost their padding on the way,
    ``[1, real tokens, …]``, are given it back, as zeros.

    Args:
        tensor: As it was found.
        axes: The names of its axes, as the schema writes them.
        layout: The value's layout.
        rows: The rows of this forward.
        size: Elements of a dimension.
        where: What to call the site in an error.

    Raises:
        UsageError: The tensor's shape is not what the axes say.
    """
    if "kept" in axes:
        rows, axes = rows.kept, ["position" if axis == "kept" else axis for axis in axes]
    batch, width = len(rows.counts), rows.width_tokens
    names = [name for axis in axes for name in axis.split("*")]
    names = ["position" if name == "token" else name for name in names]
    if "token" in axes:
        names.insert(names.index("position"), "batch")
    if "token" in axes and tensor.ndim == len(axes) + 1:
        axes = [part for axis in axes for part in (("batch", "position") if axis == "token" else (axis,))]
    padless = list(axes[:2]) == ["batch", "position"] and list(tensor.shape[:2]) == [1, sum(rows.counts)]
    padless = padless and list(tensor.shape[:2]) != [batch, width]
    expected: list[int] = []
    for axis, found in zip(axes, tensor.shape, strict=False):
        sizes = {"batch": batch, "token": batch * width, "position": width, "past": max(found, width)}
        product = 1
        for name in axis.split("*"):
            product *= sizes[name] if name in sizes else size(name)
        expected.append(product)
    if padless:
        expected[:2] = tensor.shape[:2]
    if list(tensor.shape) != expected or len(axes) != tensor.ndim:
        wanted = f"{list(axes)}" + (f" = {expected}" if len(axes) == tensor.ndim else "")
        raise UsageError(
            f"{where}: expected a tensor of axes {wanted}, found shape {list(tensor.shape)}; the schema's axes or "
            "sizes do not fit this model."
        )
    if padless:
        tensor = _pad(tensor, rows)
    known = {"batch": batch, "position": width}
    shape = [known[name] if name in known else size(name) for name in names if name != "past"]
    if "past" in names:
        shape.insert(names.index("past"), tensor.shape[list(axes).index("past")])
    tensor = tensor.reshape(shape)
    if "past" in names:
        place = names.index("past")
        tensor = tensor.narrow(place, tensor.shape[place] - width, width)
        names[place] = "position"
    order = ["batch", *layout]
    return tensor if names == order else tensor.permute([names.index(name) for name in order])


def _pad(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """``[1, real tokens, …]`` back to ``[batch, width_tokens, …]``."""
    padded = tensor.new_zeros((len(rows.counts), rows.width_tokens, *tensor.shape[2:]))
    taken = 0
    for row, (start, count) in enumerate(zip(rows.starts, rows.counts, strict=True)):
        padded[row, start : start + count] = tensor[0, taken : taken + count]
        taken += count
    return padded
