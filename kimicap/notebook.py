"""Tensors of one forward pass, for notebooks: ``with kimicap.capture(model, ["states"]) as captured: model(ids)``."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from kimicap import expressions
from kimicap.architecture import Architecture, Want, ranges, read_architecture, resolve
from kimicap.errors import UsageError
from kimicap.hooks import Recorder
from kimicap.pieces import Piece
from kimicap.prepare import meant
from kimicap.rows import Rows
from kimicap.schema import Family, Schema, load_schema
from kimicap.selection import Positions, parse_values, position_axis


class Blocks(dict[int | None, torch.Tensor]):
    """Tensors ``[batch, *layout]`` by the block's number in the model; None for values of the whole model."""

    def __missing__(self, block: int | None) -> torch.Tensor:
        if not self:
            raise UsageError(
                "The value has nothing in the latest forward: none of the chosen positions is among its tokens, or it "
                "began without a state."
            )
        blocks = sorted(found for found in self if found is not None)
        there = f"those of {ranges(blocks)}" if blocks else "[None], of the whole model"
        raise UsageError(f"The value was not captured in block {block}; there are {there}.")


class Captured(Mapping[str, Blocks]):
    """The values of the latest forward, by dotted, bare or short name.

    ``captured["router_logits"][3]`` is a tensor ``[batch, *layout]`` of block 3, on the model's device, detached, in
    the dtype in which the model has it. Position 0 is a row's first real token; beyond its last lies NaN, or -1 in
    indices, and in logits of positions that the model was not asked for (`logits_to_keep`, as in the first forward of
    `model.generate`). Where a value exists in no row of the forward (`state_input` of a prompt) it has no block.
    """

    def __init__(self, keys: Sequence[str], short_names: Mapping[str, str]) -> None:
        self._keys = tuple(keys)
        self._short_names = short_names
        self._forward: _Forward | None = None

    def __getitem__(self, name: str) -> Blocks:
        """The tensors of a value, by block.

        Raises:
            UsageError: No such value was asked for, or no forward has run.
        """
        full = self._short_names.get(name, name)
        found = [key for key in self._keys if full in (key, key.partition(".")[2])]
        if len(found) > 1:
            raise UsageError(f"{name} is captured of several hosts; say which is meant: {' or '.join(found)}.")
        if not found:
            near = get_close_matches(name, [*self._keys, *(key.partition(".")[2] for key in self._keys)], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"{name!r} is not captured.{hint} There are {', '.join(self._keys)}.")
        if self._forward is None:
            raise UsageError(f"{name} is not there yet; run the model once inside the `with`.")
        return self._forward.blocks(found[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"Captured({', '.join(self._keys)})"


@contextmanager
def capture(
    model: torch.nn.Module,
    values: Sequence[str] | str,
    *,
    layers: str | None = None,
    heads: str | None = None,
    schema: Path | None = None,
) -> Iterator[Captured]:
    """Hooks on a model for the length of a ``with``; see `kimicap.capture`.

    Raises:
        UsageError: The model is of no family, or lacks a value, or a selection lies outside it.
    """
    known = load_schema(schema)
    architecture = _architecture(model, known)
    requests = parse_values([values] if isinstance(values, str) else values, known)
    requests = [request for request in requests if meant(request, requests, architecture)]
    wants = resolve(architecture, requests, layers=layers, heads=heads)
    latest = _Latest(wants)
    recorder = Recorder(model, architecture, wants, latest.take)
    captured = Captured(latest.keys, known.short_names)
    # The trunk is run by the model, or alone: hooks on both see either.
    inner = model.get_submodule(architecture.match.inside)
    trunk = inner.get_submodule(architecture.family.trunk)
    needs_head = any(architecture.family.needs_head(want.value) for want in wants)
    kept: Any = None

    def asked(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal kept
        kept = _given(module, args, kwargs).get("logits_to_keep") if needs_head else None

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = _rows_of(_given(module, args, kwargs))
        recorder.rows = replace(rows, kept_tokens=_kept_tokens(kept, rows.width_tokens))
        latest.pieces = {}

    def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        captured._forward = _Forward(wants=wants, pieces=latest.pieces, rows=recorder.rows)

    with ExitStack() as stack:
        stack.callback(inner.register_forward_pre_hook(asked, with_kwargs=True).remove)
        stack.callback(trunk.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.enter_context(recorder.attached())
        for module in (trunk, model):
            stack.callback(module.register_forward_hook(after).remove)
        yield captured


def _architecture(model: torch.nn.Module, schema: Schema) -> Architecture:
    """The architecture of a loaded model, its family told by its class."""
    family = _family(model, schema)
    config: Any = model.config
    try:
        return read_architecture(family, config.to_dict())
    except expressions.MissingKey as error:
        raise UsageError(f"The model's config lacks {error}, which the schema needs for its sizes.") from None


def _family(model: torch.nn.Module, schema: Schema) -> Family:
    found = type(model)
    for family in schema.families.values():
        if any(match.fits(found) for match in family.matches):
            return family
    matches = [match for family in schema.families.values() for match in family.matches]
    known = " or ".join(
        f"{match.class_name} of {match.module}{f' ({match.code}.py)' if match.code else ''}" for match in matches
    )
    raise UsageError(
        f"The model is a {found.__name__} of {found.__module__}, which no family of the schema covers; pass a {known}, "
        "or name a schema file that has its family."
    )


def _given(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module is called with, by name."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def _kept_tokens(asked: Any, width: int) -> int | None:
    """How many of a forward's last tokens have logits, by the model's ``logits_to_keep``.

    Raises:
        UsageError: It names positions of its own.
    """
    if asked is None:
        return None
    if not isinstance(asked, int):
        raise UsageError(
            "The model is called with logits_to_keep that is no number; pass how many of the last tokens are meant, or "
            "leave out logits and what is made of them."
        )
    return len(range(width)[-asked:])


def _rows_of(given: Mapping[str, Any]) -> Rows:
    """Where the tokens of a forward's rows are, from what the model is called with.

    Raises:
        UsageError: A mask with holes.
    """
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        raise UsageError("The model is called without input_ids; pass them by that name or first.")
    batch, width = tokens.shape[:2]
    past = _past(given)
    mask = given.get("attention_mask")
    if mask is None:
        return Rows(
            width_tokens=width, starts=(0,) * batch, counts=(width,) * batch, past=(past,) * batch, first=past == 0
        )
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (width, past + width):
        raise UsageError(
            f"The attention mask has shape {list(mask.shape)} beside {batch} rows of {width} tokens after {past} in "
            "the cache; pass one entry a token, of the cache's and these."
        )
    real = mask.bool().cpu()
    before = [past] * batch if mask.shape[1] == width and past else real[:, : mask.shape[1] - width].sum(1).tolist()
    here = real[:, mask.shape[1] - width :]
    counts = here.sum(1).tolist()
    starts = [int(row.int().argmax()) for row in here]
    for number, row in enumerate(real):
        where = row.nonzero()[:, 0]
        if len(where) and int(where[-1] - where[0]) + 1 != len(where):
            raise UsageError(f"The attention mask of row {number} has holes between real tokens; pad at one end only.")
    return Rows(
        width_tokens=width,
        starts=tuple(starts),
        counts=tuple(counts),
        past=tuple(int(n) for n in before),
        first=past == 0,
    )


def _past(given: Mapping[str, Any]) -> int:
    """Tokens in the cache that the model is called with."""
    cache = given.get("past_key_values")
    cache = given.get("cache") if cache is None else cache
    return 0 if cache is None else int(cache.get_seq_length())


@dataclass(eq=False)
class _Latest:
    """The pieces of the forward in progress, by dotted name and block."""

    wants: Sequence[Want]
    pieces: dict[tuple[str, int | None], list[Piece]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The dotted names that pieces come under."""
        return [
            f"{want.value.key}{suffix}"
            for want in self.wants
            for suffix in (("",) if want.request.top is None else ("_top", "_top_ids"))
        ]

    def take(self, key: str, block: int | None, piece: Piece) -> None:
        """A piece from the recorder; copied, since the model may write over its tensors."""
        copy = Piece(row=piece.row, tensor=piece.tensor.detach().clone(), slot=piece.slot, head=piece.head)
        self.pieces.setdefault((key, block), []).append(copy)


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """All pieces of one forward."""

    wants: Sequence[Want]
    pieces: Mapping[tuple[str, int | None], Sequence[Piece]]
    rows: Rows

    def blocks(self, key: str) -> Blocks:
        """The tensors of one value, by block."""
        want = next(want for want in self.wants if key in {want.value.key + s for s in ("", "_top", "_top_ids")})
        blocks = sorted((block for found, block in self.pieces if found == key), key=lambda block: block or 0)
        return Blocks({block: _whole(want, self.pieces[key, block], self.rows) for block in blocks})


def _whole(want: Want, pieces: Sequence[Piece], rows: Rows) -> torch.Tensor:
    """The rows of one block together: ``[batch, *layout]``, of as many positions as the longest has.

    A forward that goes on from a cache has its own tokens alone: position 0 is then the first of these (but the key
    axis counts from the sequence's start).
    """
    layout = want.value.layout
    first = pieces[0].tensor
    shape = [len(rows.counts), *first.shape]
    slots = _slots(want.request.positions, rows)
    for axis, dim in enumerate(layout, start=1):
        if dim == position_axis(want.value):
            shape[axis] = max(number for _, number in slots)
        elif dim == "key":
            shape[axis] = max(past + count for past, count in zip(rows.past, rows.counts, strict=True))
        elif dim == "head":
            shape[axis] = max(piece.head + piece.tensor.shape[axis - 1] for piece in pieces)
    fill = float("nan") if first.is_floating_point() else -1
    whole = first.new_full(shape, fill)
    for piece in pieces:
        target = whole[piece.row]
        for axis, dim in enumerate(layout):
            start = _offset(want, dim, piece, slots)
            target = target.narrow(axis, start, piece.tensor.shape[axis])
        target.copy_(piece.tensor)
    return whole


def _offset(want: Want, dim: str, piece: Piece, slots: Sequence[tuple[int, int]]) -> int:
    if dim == position_axis(want.value):
        return piece.slot - slots[piece.row][0]
    return piece.head if dim == "head" else 0


def _slots(positions: Positions, rows: Rows) -> list[tuple[int, int]]:
    """For each row, the first slot of this forward, and how many it fills."""
    found = []
    for count, past in zip(rows.counts, rows.past, strict=True):
        _, number, slot = positions.window(past, count, past + count) if count else (0, 0, 0)
        found.append((slot, number))
    return found
