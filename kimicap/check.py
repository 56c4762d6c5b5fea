"""Whether the loaded model's values are what they are called: one small batch, every invariant of what was asked for.

`run_checks` is `kimicap check`. `FirstBatch` watches the first batch of a run for what costs next to nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import numpy as np
import torch

from kimicap.architecture import Architecture, Want
from kimicap.compared import compare
from kimicap.computed import Piece
from kimicap.first_batch import FirstBatch
from kimicap.forwards import Decoding
from kimicap.invariants import INVARIANTS, Invariant, RouterRule, View, router_rule
from kimicap.models import load_model
from kimicap.outcome import Check
from kimicap.prepare import Prepared
from kimicap.schema import Schema
from kimicap.session import decoding_of
from kimicap.taken import Taken, take, whole_want

LENGTHS = (70, 37, 5, 1)
"""Tokens of the rows: across a 64-token chunk of the kernels, and too short for one."""
DECODED = 6
"""Tokens decoded at most."""
ALONE = (1e-4, 5e-2)
"""Largest difference to a row run alone, relative to its largest element: float32 models, and those of 16 bits."""


def run_checks(prepared: Prepared) -> list[Check]:
    """Loads the model and checks what was asked for on one batch of mixed lengths; with ``--generate`` decoding too.

    Raises:
        KimicapError: The model cannot be loaded, or a site does not fit it.
    """
    model = load_model(prepared.settings, prepared.architecture)
    decoding = decoding_of(prepared.settings, model)
    sequences = prepared.sequences
    chosen = [i % len(sequences.lengths) for i in range(len(LENGTHS))]
    rows = [sequences.tokens(i)[:length] for i, length in zip(chosen, LENGTHS, strict=True)]
    return check_model(model, prepared.architecture, prepared.schema, prepared.wants, rows, decoding=decoding)


def check_model(
    model: torch.nn.Module,
    architecture: Architecture,
    schema: Schema,
    wants: Sequence[Want],
    tokens: Sequence[np.ndarray],
    *,
    decoding: Decoding | None = None,
) -> list[Check]:
    """Every check of some values of a loaded model.

    Args:
        model: The loaded model.
        architecture: Its family and sizes.
        schema: Where the values that the wanted ones are checked against are found.
        wants: The values; selections of positions and heads are left aside, those of blocks hold.
        tokens: Rows of token ids, of mixed length.
        decoding: How to decode, or None to check prompts alone.

    Returns:
        One check an invariant and value, at its worst block; what failed comes first.
    """
    keys = {want.value.key for want in wants}
    widened = _widened(architecture, schema, wants)
    narrow = any(parameter.element_size() < 4 for parameter in model.parameters())
    rule = router_rule(model, architecture)
    taken = take(model, architecture, widened, tokens)
    checks = list(_of_batch(taken, architecture, widened, keys, rule, narrow))
    alone = [take(model, architecture, widened, [row]) for row in tokens]
    name, about = "row_alone", "as the row alone"
    checks += compare(taken, alone, schema, architecture, keys, rule, ALONE[narrow], name=name, about=about)
    checks.append(_unhooked(model, architecture, widened, tokens, taken))
    if decoding is not None:
        checks += _decoded(model, architecture, schema, widened, keys, tokens, decoding, rule, narrow)
    return sorted(checks, key=lambda check: check.passed)


def _decoded(
    model: torch.nn.Module,
    architecture: Architecture,
    schema: Schema,
    widened: Sequence[Want],
    keys: set[str],
    tokens: Sequence[np.ndarray],
    decoding: Decoding,
    rule: RouterRule | None,
    narrow: bool,
) -> Iterator[Check]:
    """The same of a decoded batch, which must give what the same tokens give as prompts."""
    count = min(decoding.tokens, DECODED)
    rows = [row for row in tokens if len(row) > count] if decoding.forced else tokens
    taken = take(model, architecture, widened, rows, decoding=replace(decoding, tokens=count))
    for check in _of_batch(taken, architecture, widened, keys, rule, narrow):
        yield replace(check, name=f"{check.name} (decoding)")
    alone = [take(model, architecture, widened, [row]) for row in taken.tokens]
    name, about = "decoded_as_prompt", "as the same tokens in one prompt"
    yield from compare(taken, alone, schema, architecture, keys, rule, ALONE[narrow], name=name, about=about)


def _widened(architecture: Architecture, schema: Schema, wants: Sequence[Want]) -> list[Want]:
    """The wants and what they are checked against, whole, in the blocks wanted."""
    asked = {want.value.key: set(want.blocks) for want in wants}
    blocks = {key: set(found) for key, found in asked.items()}
    for invariant in _applicable(architecture, schema, set(asked)):
        meant = set().union(*(asked.get(key, set()) for key in invariant.keys))
        meant |= {block + invariant.reach for block in meant} | ({0} if invariant.first else set())
        for key in invariant.keys:
            blocks.setdefault(key, set()).update(meant)
    router = ("mlp.router_logits", "mlp.expert_indices")  # tell rows in which rounding chose another expert
    for key in router:
        if key in schema.values and architecture.why_missing(schema.values[key]) is None:
            blocks[key] = set(range(architecture.layers))
    widened = [whole_want(architecture, schema.values[key], sorted(found)) for key, found in blocks.items()]
    return [want for want in widened if want.blocks or want.value.host == "model"]


def _applicable(architecture: Architecture, schema: Schema, keys: set[str]) -> list[Invariant]:
    """Invariants of some values that this model's family promises and that it has all values for."""

    def known(key: str) -> bool:
        return key in schema.values and architecture.why_missing(schema.values[key]) is None

    return [
        invariant
        for invariant in INVARIANTS
        if keys & set(invariant.keys) and invariant.holds_in(architecture) and all(map(known, invariant.keys))
    ]


def _of_batch(
    taken: Taken,
    architecture: Architecture,
    widened: Sequence[Want],
    keys: set[str],
    rule: RouterRule | None,
    narrow: bool,
) -> Iterator[Check]:
    """What must hold inside one batch."""
    first = FirstBatch(architecture, [want for want in widened if want.value.key in keys], None)
    for (key, block), rows in taken.values.items():
        for row, tensor in rows.items():
            first.see(key, block, Piece(row=row, tensor=tensor))
    yield from first.checks()
    cache: dict[Any, Any] = {}
    for invariant in INVARIANTS:
        if not keys & set(invariant.keys) or not invariant.holds_in(architecture):
            continue
        if invariant.name.startswith("router_") and rule is None:
            continue
        found = list(_errors(invariant, taken, rule, cache))
        if found:
            error, block = max(found, key=lambda pair: inf if pair[0] != pair[0] else pair[0])
            tolerance = invariant.narrow if narrow else invariant.tolerance
            yield Check.of(invariant.name, invariant.keys[0], block, error, tolerance, invariant.about)


def _errors(
    invariant: Invariant, taken: Taken, rule: RouterRule | None, cache: dict[Any, Any]
) -> Iterator[tuple[float, int | None]]:
    """Error and block of each row in each block in which all values of an invariant are there."""
    in_blocks = [key for key in invariant.keys if not key.startswith("model.")]
    blocks = set.intersection(*(taken.blocks(key) for key in in_blocks or invariant.keys))
    for block in sorted(blocks, key=str):
        if invariant.first and block != 0:
            continue
        if invariant.reach and (block is None or block + invariant.reach not in blocks):
            continue
        rows = set.intersection(
            *(set(taken.values.get((key, None if key.startswith("model.") else block), ())) for key in invariant.keys)
        )
        for row in sorted(rows):
            yield invariant.error(View(taken=taken, row=row, block=block, rule=rule, replayed=cache)), block


def _unhooked(
    model: torch.nn.Module,
    architecture: Architecture,
    widened: Sequence[Want],
    tokens: Sequence[np.ndarray],
    taken: Taken,
) -> Check:
    """The model's outputs with hooks against those without, bit for bit; to its own noise where it has some."""
    plain = [take(model, architecture, widened, tokens, hooked=False).outputs for _ in range(2)]
    noise = _largest(plain[0], plain[1])
    error = _largest(taken.outputs, plain[0])
    return Check.of("hooks_change_nothing", "model", None, error, 2 * noise, "outputs with hooks = outputs without")


def _largest(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Largest difference between tensors, infinite where one is NaN and the other is not; 0 bit for bit."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return inf
        if not torch.equal(one.nan_to_num(), other.nan_to_num()) or not one.isnan().equal(other.isnan()):
            difference = (one.double() - other.double()).abs().max().item()
            worst = max(worst, difference if isfinite(difference) else inf)
    return worst
