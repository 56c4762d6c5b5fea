"""Two takings of the same tokens, value by value: a batch against its rows alone, decoding against prompts."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from kimicap.invariants import RouterRule, relative, router_gap
from kimicap.outcome import Check
from kimicap.schema import Schema, Value
from kimicap.taken import Taken, axis_of

LOGITS, INDICES = "mlp.router_logits", "mlp.expert_indices"
BEFORE_MIXTURE = ("layer_input", "attention_norm_output", "layer_mid", "mlp_norm_output", "mlp_input")


def compare(
    taken: Taken,
    alone: Sequence[Taken],
    schema: Schema,
    keys: Collection[str],
    rule: RouterRule | None,
    tolerance: float,
    *,
    narrow: bool,
    name: str,
    about: str,
) -> Iterator[Check]:
    """One check a value, at the row and block where the two differ most.

    Where rounding lets the router choose another expert of as good a score, everything after that token is
    another computation: it is left out, and the choice itself is judged by the gap between the scores.

    Args:
        taken: A batch.
        alone: The same rows, a batch each.
        schema: Where the values' layouts are found.
        keys: The values compared.
        rule: How experts are chosen; without it, indices must be the same.
        tolerance: Largest error that passes.
        narrow: Whether the model computes in 16 bits. Then single elements may be far off by rounding alone, and
            the norm of a row's differences is judged instead of the largest.
        name: Of the checks.
        about: Of the checks.
    """
    worst: dict[str, tuple[float, int | None]] = {}
    for row, other in enumerate(alone):
        changed = _changes(taken, row, other)
        for (key, block), rows in taken.values.items():
            if key not in keys:
                continue
            value, found = schema.values[key], rows.get(row)
            expected = other.values.get((key, block), {}).get(0)
            if found is None or expected is None:
                error = 0.0 if found is expected else torch.inf
            elif key == INDICES:
                error = _choice(found, expected, other, block, rule, changed)
            else:
                slots = _order(taken, row, block), _order(other, 0, block)
                pair = _comparable(value, (found, expected), slots, _end(value, block, changed), taken.state_step)
                error = 0.0 if pair is None else relative(*pair, overall=narrow)
            if key not in worst or not error <= worst[key][0]:
                worst[key] = error, block
    for key, (error, block) in worst.items():
        yield Check.of(name, key, block, error, tolerance, about)


def _order(taken: Taken, row: int, block: int | None) -> Tensor | None:
    """The order of each token's slots by expert ``[position, slot]``; routers leave it open."""
    found = taken.values.get((INDICES, block), {}).get(row)
    return None if found is None else found.argsort(1)


def _changes(taken: Taken, row: int, other: Taken) -> dict[int, int]:
    """The first position of each block at which other experts were chosen."""
    changes: dict[int, int] = {}
    for block in taken.blocks(INDICES):
        found = taken.values[INDICES, block][row].sort(1)[0]
        expected = other.values[INDICES, block][0].sort(1)[0]
        if block is not None and found.shape == expected.shape:
            where = (found != expected).any(1).nonzero()
            if len(where):
                changes[block] = int(where[0])
    return changes


def _end(value: Value, block: int | None, changed: dict[int, int]) -> int | None:
    """The first position that a changed choice of experts may have reached; None if none has."""
    if value.host == "model":
        reached = [] if value.name == "token_embeddings" else list(changed.values())
    else:
        assert block is not None
        within = value.host == "mlp" or (value.host == "layers" and value.name not in BEFORE_MIXTURE)
        within = within and value.name != "router_logits"
        reached = [position for at, position in changed.items() if at < block or (at == block and within)]
    return min(reached, default=None)


def _choice(
    found: Tensor, expected: Tensor, other: Taken, block: int | None, rule: RouterRule | None, changed: dict[int, int]
) -> float:
    """By how much the experts found are worse than the best, by the scores of the row alone."""
    if found.shape != expected.shape:
        return torch.inf
    earlier = [position for at, position in changed.items() if block is not None and at < block]
    end = min(earlier, default=len(found))
    if end == 0 or found[:end].sort(1)[0].equal(expected[:end].sort(1)[0]):
        return 0.0
    if rule is None or block is None or (LOGITS, block) not in other.values:
        return torch.inf
    return float(router_gap(other.values[LOGITS, block][0][:end], found[:end], rule.biases[block]))


def _comparable(
    value: Value,
    pair: tuple[Tensor, Tensor],
    slots: tuple[Tensor | None, Tensor | None],
    end: int | None,
    state_step: int,
) -> tuple[Tensor, Tensor] | None:
    """What of one row in one block can be compared: slots in one order, up to the position ``end``; None if nothing."""
    found, expected = pair
    if found.shape != expected.shape:
        return pair
    if "slot" in value.layout and slots[0] is not None and slots[1] is not None:
        assert value.layout.index("slot") == 1, "slots follow positions"
        found, expected = _sorted(found, slots[0]), _sorted(expected, slots[1])
    own = axis_of(value)
    if end is not None:
        if own is None:
            return None
        stop = end // state_step if value.name == "states" else end
        found, expected = found.narrow(own, 0, stop), expected.narrow(own, 0, stop)
    if "key" in value.layout:  # what lies above the diagonal is another check's
        below = torch.ones(found.shape[-2:], dtype=torch.bool).tril()
        found, expected = found[..., below], expected[..., below]
    return (found, expected) if found.numel() else None


def _sorted(tensor: Tensor, order: Tensor) -> Tensor:
    """``[position, slot, …]`` with each token's slots in the order ``[position, slot]``."""
    return tensor.gather(1, order.reshape(*order.shape, *[1] * (tensor.ndim - 2)).expand(tensor.shape))
