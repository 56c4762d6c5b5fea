"""Whether the loaded model's values are what they are called: one small batch, every invariant of what was asked for.

`run_checks` is `kimicap check`. `FirstBatch` watches the first batch of a run for what costs next to nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import numpy as np
import torch

from kimicap.architecture import Architecture, Want
from kimicap.compared import compare
from kimicap.first_batch import FirstBatch
from kimicap.forwards import Decoding
from kimicap.invariants import INVARIANTS, Invariant, RouterRule, View, router_rule
from kimicap.models import load_model
from kimicap.outcome import Check
from kimicap.pieces import Piece
from kimicap.prepare import Prepared
from kimicap.schema import Schema
from kimicap.session import decoding_of
from kimicap.taken import Taken, take, whole_want

LENGTHS = (70, 37, 5, 1)
"""Tokens of the rows: across a 64-token chunk of the kernels, and too short for one."""
DECODED = 6
"""Tokens decoded at most."""
ALONE = (1e-4, 0.2)
"""Largest difference to a row run alone, for float32 models and those of 16 bits (see `compare`).

Norms of nearly empty read-outs amplify rounding: over 27 random blocks 600-fold, to 3e-5 in float32 and 0.15 in
bfloat16. A row that is shifted, padded or another's differs by 0.5 and more.
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is checked.

    Attributes:
        wants: The values and what they are checked against, whole.
        keys: The values themselves.
        rule: How the model chooses experts, where that is known.
        narrow: Whether the model computes in 16 bits.
        fast: Whether states are the kernel's own, of 16 bits.
    """

    model: torch.nn.Module
    architecture: Architecture
    schema: Schema
    wants: Sequence[Want]
    keys: frozenset[str]
    rule: RouterRule | None
    narrow: bool
    fast: bool

    def take(self, tokens: Sequence[np.ndarray], *, decoding: Decoding | None = None, hooked: bool = True) -> Taken:
        """One batch of it."""
        return take(self.model, self.architecture, self.wants, tokens, decoding=decoding, hooked=hooked, fast=self.fast)

    def compare(self, taken: Taken, name: str, about: str) -> Iterator[Check]:
        """A batch against each of its rows alone, as a prompt."""
        alone = [self.take([row]) for row in taken.tokens]
        return compare(
            taken,
            alone,
            self.schema,
            self.keys,
            self.rule,
            ALONE[self.narrow or self.fast],
            narrow=self.narrow or self.fast,
            name=name,
            about=about,
        )


def run_checks(prepared: Prepared) -> list[Check]:
    """Loads the model and checks what was asked for on one batch of mixed lengths; with ``--generate`` decoding too.

    Raises:
        KimicapError: The model cannot be loaded, or a site does not fit it.
    """
    settings, sequences = prepared.settings, prepared.sequences
    model = load_model(settings, prepared.architecture)
    chosen = [number % len(sequences.lengths) for number in range(len(LENGTHS))]
    rows = [sequences.tokens(number)[:length] for number, length in zip(chosen, LENGTHS, strict=True)]
    return check_model(
        model,
        prepared.architecture,
        prepared.schema,
        prepared.wants,
        rows,
        decoding=decoding_of(settings, model),
        fast=settings.states == "fast",
    )


def check_model(
    model: torch.nn.Module,
    architecture: Architecture,
    schema: Schema,
    wants: Sequence[Want],
    tokens: Sequence[np.ndarray],
    *,
    decoding: Decoding | None = None,
    fast: bool = False,
) -> list[Check]:
    """Every check of some values of a loaded model.

    Args:
        model: The loaded model.
        architecture: Its family and sizes.
        schema: Where the values that the wanted ones are checked against are found.
        wants: The values; selections of positions and heads are left aside, those of blocks hold.
        tokens: Rows of token ids, of mixed length.
        decoding: How to decode, or None to check prompts alone.
        fast: Whether states are the kernel's own.

    Returns:
        One check an invariant and value, at its worst block; what failed comes first.
    """
    subject = Subject(
        model=model,
        architecture=architecture,
        schema=schema,
        wants=_widened(architecture, schema, wants, fast=fast),
        keys=frozenset(want.value.key for want in wants),
        rule=router_rule(model, architecture),
        narrow=any(parameter.element_size() < 4 for parameter in model.parameters()),
        fast=fast,
    )
    taken = subject.take(tokens)
    checks = [*_of_batch(subject, taken), *subject.compare(taken, "row_alone", "as the row alone")]
    checks.append(_unhooked(subject, taken))
    if decoding is not None:
        checks += _decoded(subject, tokens, decoding)
    return sorted(checks, key=lambda check: check.passed)


def _decoded(subject: Subject, tokens: Sequence[np.ndarray], decoding: Decoding) -> Iterator[Check]:
    """The same of a decoded batch, which must give what the same tokens give as prompts."""
    count = min(decoding.tokens, DECODED)
    rows = [row for row in tokens if len(row) > count] if decoding.forced else tokens
    if not rows:
        return
    taken = subject.take(rows, decoding=replace(decoding, tokens=count))
    for check in _of_batch(subject, taken):
        yield replace(check, name=f"{check.name} (decoding)")
    yield from subject.compare(taken, "decoded_as_prompt", "as the same tokens in one prompt")


def _widened(architecture: Architecture, schema: Schema, wants: Sequence[Want], *, fast: bool) -> list[Want]:
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
    widened = [whole_want(architecture, schema.values[key], sorted(found), fast=fast) for key, found in blocks.items()]
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


def _of_batch(subject: Subject, taken: Taken) -> Iterator[Check]:
    """What must hold inside one batch."""
    keys, rule, narrow = subject.keys, subject.rule, subject.narrow or subject.fast
    first = FirstBatch(subject.architecture, [want for want in subject.wants if want.value.key in keys], None)
    for (key, block), rows in taken.values.items():
        for row, tensor in rows.items():
            first.see(key, block, Piece(row=row, tensor=tensor))
    seen = first.checks()
    yield from seen
    cache: dict[Any, Any] = {}
    for invariant in INVARIANTS:
        if not keys & set(invariant.keys) or not invariant.holds_in(subject.architecture):
            continue
        if (invariant.name.startswith("router_") and rule is None) or invariant.name in {one.name for one in seen}:
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


def _unhooked(subject: Subject, taken: Taken) -> Check:
    """The model's outputs with hooks against those without, bit for bit; to its own noise where it has some."""
    plain = [subject.take(taken.tokens, hooked=False).outputs for _ in range(2)]
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
