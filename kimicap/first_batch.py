"""Checks of a run's first batch, as cheap as can be: each piece becomes a few numbers on its own device.

Nothing waits for the device until `FirstBatch.checks`, which is called once.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from kimicap.architecture import Architecture, Want
from kimicap.invariants import RouterRule, router_gap
from kimicap.odd import odd_elements
from kimicap.outcome import Check
from kimicap.pieces import Piece
from kimicap.selection import position_axis

CHOICES = ("key", "slot", "source")
"""Last axes along which weights are shares: with one choice all of them are the same, rightly."""
SHORT = 16
"""Fewer elements may all be the same number by chance."""
PATTERNS, DECAYS = "self_attn.attention_probabilities", "linear_attn.decays"
LOGITS, INDICES = "mlp.router_logits", "mlp.expert_indices"


class FirstBatch:
    """Takes pieces as a sink does, and tells what is wrong with them.

    Args:
        architecture: The model's family and sizes.
        wants: The values watched; pieces of others are passed over.
        rule: How experts are chosen, or None if that is not to be checked.
    """

    def __init__(self, architecture: Architecture, wants: Sequence[Want], rule: RouterRule | None) -> None:
        self._architecture, self._rule = architecture, rule
        self._wants = {want.value.key: want for want in wants}
        self._seen: dict[tuple[str, int | None], list[torch.Tensor]] = defaultdict(list)
        self._sizes: dict[tuple[str, int | None], tuple[int, int]] = {}
        self._logits: dict[tuple[int | None, int], Piece] = {}
        both = [self._wants[key] for key in (LOGITS, INDICES) if key in self._wants]
        self._routes = rule is not None and len({want.request.positions for want in both}) == 1 and len(both) == 2

    def see(self, key: str, block: int | None, piece: Piece) -> None:
        """Reduces a piece to its count of elements that are not finite, its range, and the value's own measure."""
        tensor = piece.tensor
        if key not in self._wants or not tensor.numel():
            return
        count, _ = self._sizes.get((key, block), (0, 0))
        self._sizes[key, block] = count + tensor.numel(), tensor.shape[-1]
        finite, own = torch.isfinite(tensor), torch.zeros((), device=tensor.device)
        odd = odd_elements(tensor, self._wants[key].value.layout)
        lowest = torch.where(finite, tensor, _limit(tensor, high=True)).amin()
        highest = torch.where(finite, tensor, _limit(tensor, high=False)).amax()
        if key == PATTERNS:
            own = (tensor.sum(-1) - 1).abs().max()
        elif key in (LOGITS, INDICES) and self._routes and self._rule is not None:
            own = self._route(key, block, piece)
        axis = position_axis(self._wants[key].value)
        tokens = 1 if axis is None else tensor.shape[self._wants[key].value.layout.index(axis)]
        places = torch.full((), tokens, device=tensor.device)
        parts = odd.sum(), lowest, highest, own, places
        self._seen[key, block].append(torch.stack([part.double() for part in parts]))

    def _route(self, key: str, block: int | None, piece: Piece) -> torch.Tensor:
        """The router's gap, once logits and indices of a row are both there."""
        other = self._logits.pop((block, piece.row), None)
        if other is None:
            self._logits[block, piece.row] = piece
            return torch.zeros((), device=piece.tensor.device)
        logits, indices = (piece, other) if key == LOGITS else (other, piece)
        assert self._rule is not None
        assert block is not None
        return router_gap(logits.tensor, indices.tensor, self._rule.biases[block])

    def checks(self) -> list[Check]:
        """What was found, one check a kind and value, at its worst block. Waits for the device."""
        worst: dict[tuple[str, str], Check] = {}
        for (key, block), parts in self._seen.items():
            for check in self._judge(key, block, torch.stack(parts).cpu()):
                known = worst.get((check.name, key))
                if known is None or (known.passed and (not check.passed or check.error > known.error)):
                    worst[check.name, key] = check
        return list(worst.values())

    def _judge(self, key: str, block: int | None, found: torch.Tensor) -> list[Check]:
        """The checks of one value in one block, from what `see` left of each piece: ``[piece, 5]`` float64."""
        nonfinite, own = float(found[:, 0].sum()), float(found[:, 3].max())
        low, high = float(found[:, 1].min()), float(found[:, 2].max())
        empty = float(((found[:, 1] == 0) & (found[:, 2] == 0) & (found[:, 4] > 1)).sum())
        count, last = self._sizes[key, block]
        made: Callable[..., Check] = Check.of
        constant = float(nonfinite < count and self._is_constant(key, low, high, count, last))
        checks = [
            made("finite", key, block, nonfinite, 0.0, "elements that are NaN or infinite"),
            made("varied", key, block, constant, 0.0, f"from {low:.3g} to {high:.3g} in {count} elements"),
        ]
        if self._wants[key].value.dtype != "index":
            checks.append(made("no_row_of_zeros", key, block, empty, 0.0, "sequences that are 0 everywhere"))
        if key == PATTERNS:
            checks.append(made("patterns_sum", key, block, own, 1e-5, "rows of the pattern sum to 1"))
        if key == DECAYS:
            checks.append(made("decays_not_positive", key, block, max(0.0, high), 0.0, "decays <= 0"))
        if key == INDICES:
            experts = self._architecture.size("mlp", "expert")
            outside = max(0.0, -low, high - experts + 1)
            checks.append(made("indices_in_range", key, block, outside, 0.0, f"experts 0 to {experts - 1}"))
            if self._routes:
                logits = self._seen[LOGITS, block]
                gap = max(own, float(torch.stack(logits)[:, 3].max()))
                checks.append(made("router_chooses", key, block, gap, 1e-5, "top-k of sigmoid(logits) + bias"))
        return checks

    def _is_constant(self, key: str, low: float, high: float, count: int, last: int) -> bool:
        """Whether one number is all there is, where there should be more."""
        value = self._wants[key].value
        if low != high or count < 2 or any(site.absent for site in self._architecture.sites(value)):
            return False
        if value.dtype == "index":
            return last > 1 and count >= SHORT
        if low == 0:
            return True
        return count >= SHORT and value.layout[-1] not in CHOICES


def _limit(tensor: torch.Tensor, *, high: bool) -> torch.Tensor:
    """The largest or lowest number of the tensor's dtype, as a scalar on its device."""
    info = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
    return torch.full((), info.max if high else info.min, dtype=tensor.dtype, device=tensor.device)
