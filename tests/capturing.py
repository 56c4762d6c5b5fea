"""What the registrar hands over, row by row, without store or plan: for tests that compare it with the oracles."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kimicap.architecture import Architecture, Want, read_architecture, resolve
from kimicap.forwards import Decoding, Runner
from kimicap.hooks import Recorder
from kimicap.pieces import Piece
from kimicap.schema import load_schema
from kimicap.selection import parse_values, position_axis

Captured = dict[tuple[str, int | None, int], torch.Tensor]
"""Tensors in the value's layout, cut to the row's own tokens, by value, block and row."""


def architecture(model: torch.nn.Module, family: str = "kimi_linear") -> Architecture:
    return read_architecture(load_schema().families[family], model.config.to_dict())


def wants(found: Architecture, values: Sequence[str], **selections: str) -> list[Want]:
    requests = [r for r in parse_values(values, load_schema()) if found.why_missing(r.value) is None]
    return resolve(found, requests, **selections)


def all_values(found: Architecture) -> list[str]:
    """Every value that the model has, states at every token."""
    keys = [key for key, value in load_schema().values.items() if found.why_missing(value) is None]
    return [f"{key}@all" if key == "linear_attn.states" else key for key in keys]


class Collector:
    """A sink that keeps every piece and lays a row's pieces side by side."""

    def __init__(self, wanted: Sequence[Want]) -> None:
        self._values = {want.value.key: want.value for want in wanted}
        self._pieces: dict[tuple[str, int | None, int], list[Piece]] = defaultdict(list)

    def __call__(self, key: str, block: int | None, piece: Piece) -> None:
        self._pieces[key, block, piece.row].append(piece)

    def rows(self) -> Captured:
        return {place: self._joined(place[0], pieces) for place, pieces in self._pieces.items()}

    def _joined(self, key: str, pieces: list[Piece]) -> torch.Tensor:
        value = self._values[key.removesuffix("_ids").removesuffix("_top")]
        axis = position_axis(value)
        if axis is None:
            return pieces[-1].tensor.clone()
        place = value.layout.index(axis)
        slots = max(piece.slot + piece.tensor.shape[place] for piece in pieces)
        shape = [max(piece.tensor.shape[at] for piece in pieces) for at in range(len(value.layout))]
        if "head" in value.layout:
            at = value.layout.index("head")
            shape[at] = max(piece.head + piece.tensor.shape[at] for piece in pieces)
        shape[place] = slots
        first = pieces[0].tensor
        whole = first.new_full(shape, pieces[0].unseen)
        for piece in pieces:
            part = whole
            for at, size in enumerate(piece.tensor.shape):
                start = piece.slot if at == place else piece.head if value.layout[at] == "head" else 0
                part = part.narrow(at, start, size)
            part.copy_(piece.tensor)
        return whole


def capture_prompts(
    model: torch.nn.Module,
    rows: Sequence[Sequence[int]],
    values: Sequence[str] | None = None,
    *,
    family: str = "kimi_linear",
    run: Callable[[Runner, Recorder, list[np.ndarray]], None] | None = None,
    fast: bool = False,
    **selections: str,
) -> Captured:
    """One batch of whole prompts, of any lengths; ``run`` replaces how it goes through the model.

    ``fast`` has the kernel's own states, as ``--states fast``.
    """
    found = architecture(model, family)
    wanted = wants(found, values or all_values(found), **selections)
    sink = Collector(wanted)
    recorder = Recorder(model, found, wanted, sink, fast=fast)
    runner = Runner(model, found, recorder, head=True)
    tokens = [np.asarray(row, np.int32) for row in rows]
    with recorder.attached():
        if run is None:
            runner.prompts(tokens)
        else:
            run(runner, recorder, tokens)
    assert recorder.missing() == []
    return sink.rows()


def capture_decoded(
    model: torch.nn.Module,
    rows: Sequence[Sequence[int]],
    values: Sequence[str] | None = None,
    *,
    tokens: int,
    forced: bool = False,
    temperature: float = 0.0,
    family: str = "kimi_linear",
    stop: tuple[int, ...] = (),
) -> tuple[Captured, list[list[int]]]:
    """A batch of prompts and what is decoded after them; also every row's tokens."""
    found: list[np.ndarray] = []
    decoding = Decoding(tokens=tokens, forced=forced, temperature=temperature, seed=0, stop=stop)

    def run(runner: Runner, recorder: Recorder, given: list[np.ndarray]) -> None:
        found.extend(runner.decode(given, range(len(given)), decoding))

    captured = capture_prompts(model, rows, values, family=family, run=run)
    return captured, [row.tolist() for row in found]
