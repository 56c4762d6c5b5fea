"""The values of one small batch, whole and in host memory, for checks that need several of them at once."""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kimicap.architecture import Architecture, Want
from kimicap.forwards import Decoding, Runner
from kimicap.hooks import Recorder
from kimicap.pieces import Piece, join
from kimicap.schema import Value
from kimicap.selection import Positions, Request, position_axis

STATE_STEP, FAST_STEP = 16, 64
"""Tokens between the states that are taken (all of them would not fit), and with ``--states fast``."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one batch gave.

    Attributes:
        tokens: int32 ``[tokens]`` of each row, decoded ones included.
        values: By dotted name and block, one tensor a row in the value's layout, all positions and heads;
            states after every ``state_step`` tokens. A value that was absent is not there.
        outputs: The tensors that the model itself returned, from its last forward.
        state_step: Tokens between states.
    """

    tokens: Sequence[np.ndarray]
    values: Mapping[tuple[str, int | None], Mapping[int, torch.Tensor]]
    outputs: Sequence[torch.Tensor]
    state_step: int

    def blocks(self, key: str) -> set[int | None]:
        """Blocks in which a value was taken; None for a value of the whole model."""
        return {block for name, block in self.values if name == key}


def whole_want(
    architecture: Architecture, value: Value, blocks: Sequence[int] | None = None, *, fast: bool = False
) -> Want:
    """A want of a value with all its positions and heads (states: every 16th, or 64th), in some or all blocks."""
    step = FAST_STEP if fast else STATE_STEP
    positions = Positions(kind="every", step=step) if value.name == "states" else Positions()
    known = () if value.host == "model" else architecture.blocks_of(value)
    chosen = known if blocks is None else tuple(block for block in known if block in blocks)
    value = architecture.value(value)
    return Want(request=Request(value=value, positions=positions), blocks=chosen, heads=None)


def take(
    model: torch.nn.Module,
    architecture: Architecture,
    wants: Sequence[Want],
    tokens: Sequence[np.ndarray],
    *,
    decoding: Decoding | None = None,
    hooked: bool = True,
    fast: bool = False,
) -> Taken:
    """Runs one batch, as a run would, and keeps all it gives.

    Args:
        model: The loaded model.
        architecture: Its family and sizes.
        wants: What to take.
        tokens: The rows, int32 ``[tokens]`` each.
        decoding: How to go on after the prompts, or None.
        fast: Whether states are the kernel's own.
        hooked: False runs the model untouched, so that only its outputs are there.
    """
    pieces: dict[tuple[str, int | None], dict[int, list[Piece]]] = {}

    def sink(key: str, block: int | None, piece: Piece) -> None:
        kept = replace(piece, tensor=piece.tensor.detach().cpu().clone())
        pieces.setdefault((key, block), {}).setdefault(piece.row, []).append(kept)

    family, layouts = architecture.family, {want.value.key: want.value.layout for want in wants}
    head = decoding is not None or any(family.needs_head(want.value) for want in wants)
    recorder = Recorder(model, architecture, wants, sink, fast=fast)
    runner = Runner(model, architecture, recorder, head=head)
    outputs: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        parts = output.values() if isinstance(output, Mapping) else output
        outputs[:] = [part.detach().cpu().clone() for part in parts if isinstance(part, torch.Tensor)]

    handle = (model if head else model.get_submodule(family.trunk)).register_forward_hook(keep)
    try:
        with recorder.attached() if hooked else _nothing():
            if decoding is None:
                runner.prompts(tokens)
            else:
                tokens = runner.decode(tokens, range(len(tokens)), decoding)
    finally:
        handle.remove()
    with torch.inference_mode():
        values = {
            place: {row: join(parts, layouts[place[0]]).tensor for row, parts in rows.items()}
            for place, rows in pieces.items()
        }
    return Taken(tokens=tokens, values=values, outputs=outputs, state_step=FAST_STEP if fast else STATE_STEP)


@contextmanager
def _nothing() -> Any:
    yield


def axis_of(value: Value) -> int | None:
    """Number of the layout's axis of positions (or queries), or None."""
    axis = position_axis(value)
    return None if axis is None else value.layout.index(axis)
