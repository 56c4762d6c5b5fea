"""What must hold between captured values whatever the weights, one small function each.

Each works on one row in one block. Errors are relative to the largest expected magnitude, but for those of
quantities with a scale of their own (probabilities, scores, counts), which are absolute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kimicap import expressions, kda
from kimicap.architecture import Architecture
from kimicap.taken import Taken

KDA, MLA = "linear_attn", "self_attn"
FACTORS = tuple(f"{KDA}.{name}" for name in ("attention_keys", "attention_values", "decays", "betas"))
QUERIES = f"{KDA}.attention_queries"


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How one model's mixtures choose and weigh experts.

    Attributes:
        biases: Selection bias ``[expert]`` float32 in host memory, by block.
        renormalise: Whether the chosen sigmoids are divided by their sum.
        scaling: Factor of the weights.
    """

    biases: Mapping[int, Tensor]
    renormalise: bool
    scaling: float


@dataclass(frozen=True, kw_only=True)
class View:
    """One row in one block of what was taken."""

    taken: Taken
    row: int
    block: int | None
    rule: RouterRule | None
    replayed: dict[tuple[int, int | None], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def get(self, key: str, block: int | None = None) -> Tensor:
        """A value of the row, here or in another block; of the whole model if its name says so."""
        place = None if key.startswith("model.") else self.block if block is None else block
        return self.taken.values[key, place][self.row]


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """One of them.

    Attributes:
        name: What the schema's ``invariants`` and reports call it.
        keys: The values it needs, the one it judges first.
        tolerance: Largest error for a float32 model.
        narrow: Largest error for a model of 16 bits.
        error: The error in one view.
        stated: Whether a family has it only if its ``invariants`` name it.
        reach: How many blocks further it looks.
        first: Whether it is about block 0 alone.
    """

    name: str
    about: str
    keys: tuple[str, ...]
    tolerance: float
    narrow: float
    error: Callable[[View], float]
    stated: bool = False
    reach: int = 0
    first: bool = False

    def holds_in(self, architecture: Architecture) -> bool:
        """Whether this model's family promises it."""
        family = architecture.family
        return not (self.stated and self.name not in family.invariants)


def relative(found: Tensor, expected: Tensor, *, overall: bool = False) -> float:
    """Largest difference over the largest expected magnitude, or (``overall``) the norm of all over the norm.

    Infinite where shapes, NaN or infinities differ.
    """
    if found.shape != expected.shape:
        return torch.inf
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    odd_found, odd_expected = found[~finite].nan_to_num(nan=7.0), expected[~finite].nan_to_num(nan=7.0)
    if not (odd_found.equal(odd_expected) and found[finite].isfinite().all()):
        return torch.inf
    if not finite.any():
        return 0.0
    difference, expected = found[finite] - expected[finite], expected[finite]
    if overall:
        return float(difference.norm()) / (float(expected.norm()) or 1.0)
    return float(difference.abs().max()) / (float(expected.abs().max()) or 1.0)


def router_gap(logits: Tensor, indices: Tensor, bias: Tensor) -> Tensor:
    """By how much an expert left out outscores one chosen, at worst: a scalar, 0 where the choice is right.

    Args:
        logits: ``[position, expert]`` float32.
        indices: ``[position, slot]`` integers.
        bias: ``[expert]``, added to the sigmoids for the choice alone.

    Returns:
        The gap between scores; infinity where an index is no expert or an expert is chosen twice.
    """
    scores = logits.float().sigmoid() + bias.to(logits.device)
    inside = (indices >= 0) & (indices < scores.shape[1])
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, torch.where(inside, indices, 0).long(), True)
    worst = scores.masked_fill(~chosen, torch.inf).amin(1)
    best = scores.masked_fill(chosen, -torch.inf).amax(1)
    wrong = ~inside.all() | (chosen.sum(1) != indices.shape[1]).any()
    return torch.where(wrong, torch.inf, (best - worst).clamp(min=0).max())


def router_rule(model: torch.nn.Module, architecture: Architecture) -> RouterRule | None:
    """The rule, with the biases copied to host memory; None where the family states none that is known here.

    A router that chooses among groups first is not redone, and weights that are offloaded are not read.
    """
    router = architecture.family.router
    if router is None or expressions.first(router.groups, architecture.config) != 1:
        return None
    path, biases = architecture.family.parts[router.part].module, {}
    model = model.get_submodule(architecture.match.inside)
    for block in architecture.blocks[router.part]:
        bias: Any = attrgetter(router.bias)(model.get_submodule(path.format(layer=block)))
        if bias.device.type == "meta":
            return None
        biases[block] = bias.detach().float().cpu()
    return RouterRule(
        biases=biases,
        renormalise=bool(expressions.first(router.renormalise, architecture.config)),
        scaling=float(expressions.first(router.scaling, architecture.config)),
    )


def _sum(total: str, *parts: str) -> Callable[[View], float]:
    def error(view: View) -> float:
        found = sum((view.get(part).double() for part in parts[1:]), view.get(parts[0]).double())
        return relative(found, view.get(total).double())

    return error


def _equal(name: str, other: str) -> Callable[[View], float]:
    return lambda view: relative(view.get(name), view.get(other))


def _chain(view: View) -> float:
    assert view.block is not None
    return relative(view.get("layers.layer_input", view.block + 1), view.get("layers.layer_output"))


def _slots(total: str) -> Callable[[View], float]:
    return lambda view: relative(view.get("mlp.expert_outputs").double().sum(1), view.get(total))


def _choice(view: View) -> float:
    assert view.rule is not None
    assert view.block is not None
    bias = view.rule.biases[view.block]
    return float(router_gap(view.get("mlp.router_logits"), view.get("mlp.expert_indices"), bias))


def _weights(view: View) -> float:
    assert view.rule is not None
    indices = view.get("mlp.expert_indices").long()
    scores = view.get("mlp.router_logits").double().sigmoid()
    if indices.min() < 0 or indices.max() >= scores.shape[1]:
        return torch.inf
    expected = scores.gather(1, indices)
    if view.rule.renormalise:
        expected = expected / expected.sum(1, keepdim=True)
    return relative(view.get("mlp.expert_weights"), expected * view.rule.scaling)


def _row_sums(view: View) -> float:
    sums = view.get(f"{MLA}.attention_probabilities").double().nan_to_num().sum(-1)
    return (sums - 1).abs().max().item()


def _above_diagonal(view: View) -> float:
    return view.get(f"{MLA}.attention_probabilities").nan_to_num().triu(1).abs().max().item()


def _average(view: View) -> float:
    pattern = view.get(f"{MLA}.attention_probabilities").double().nan_to_num()
    averages = (pattern @ view.get(f"{MLA}.attention_values").double()).transpose(0, 1)
    return relative(view.get(f"{MLA}.attention_head_outputs"), averages)


def _decays(view: View) -> float:
    return max(0.0, view.get(f"{KDA}.decays").max().item())


def _betas(view: View) -> float:
    betas = view.get(f"{KDA}.betas")
    return max(0.0, betas.max().item() - 1, -betas.min().item())


def _next_token(view: View) -> float:
    return relative(view.get("model.next_token_probs"), view.get("model.logits")[-1].float().softmax(-1))


def _replay(view: View) -> tuple[Tensor, Tensor, Tensor]:
    """States at the positions taken, the last one, and the heads' outputs, from the factors token by token."""
    place = view.row, view.block
    if place not in view.replayed:
        factors = [view.get(key)[None] for key in FACTORS]
        states, outputs = kda.replay(*factors, queries=view.get(QUERIES)[None])
        assert outputs is not None
        step = view.taken.state_step
        every = states[0, step - 1 :: step].clone()
        view.replayed[place] = every, states[0, -1].clone(), outputs[0]
    return view.replayed[place]


def _states(view: View) -> float:
    expected = _replay(view)[0]
    if not len(expected):
        return 0.0
    return relative(view.get(f"{KDA}.states"), expected)


def _final(view: View) -> float:
    return relative(view.get(f"{KDA}.state_output"), _replay(view)[1])


def _read_out(view: View) -> float:
    return relative(view.get(f"{KDA}.attention_head_outputs"), _replay(view)[2])


def _invariant(
    name: str,
    about: str,
    keys: tuple[str, ...],
    error: Callable[[View], float],
    tolerance: tuple[float, float],
    **more: Any,
) -> Invariant:
    return Invariant(
        name=name, about=about, keys=keys, tolerance=tolerance[0], narrow=tolerance[1], error=error, **more
    )


EXACT, ROUNDED, SUMMED, REPLAYED = (0.0, 0.0), (1e-6, 4e-3), (1e-5, 1e-2), (1e-4, 1e-2)


def _adds(name: str, about: str, total: str, *parts: str) -> Invariant:
    return _invariant(name, about, (total, *parts), _sum(total, *parts), ROUNDED, stated=True)


MID, OUT, IN = "layers.layer_mid", "layers.layer_output", "layers.layer_input"
EMBEDDED, MLP_IN, MLP_NORM = "model.token_embeddings", "layers.mlp_input", "layers.mlp_norm_output"
SLOTS, ROUTED, LATENT = "mlp.expert_outputs", "mlp.routed_output", "mlp.routed_latent"
LOGITS, INDICES, WEIGHTS = "mlp.router_logits", "mlp.expert_indices", "mlp.expert_weights"
PATTERNS = f"{MLA}.attention_probabilities"

INVARIANTS: tuple[Invariant, ...] = (
    _invariant(
        "embeddings_enter",
        "block 0's layer_input = token_embeddings",
        (IN, EMBEDDED),
        _equal(IN, EMBEDDED),
        EXACT,
        stated=True,
        first=True,
    ),
    _adds("mixer_adds", "layer_mid = layer_input + attention_output (KDA)", MID, IN, f"{KDA}.attention_output"),
    _adds("mixer_adds", "layer_mid = layer_input + attention_output (MLA)", MID, IN, f"{MLA}.attention_output"),
    _adds("mlp_adds", "layer_output = layer_mid + mlp_output", OUT, MID, "mlp.mlp_output"),
    _invariant("blocks_chain", "next layer_input = layer_output", (OUT, IN), _chain, EXACT, stated=True, reach=1),
    _invariant(
        "mlp_reads_norm",
        "mlp_input = mlp_norm_output",
        (MLP_IN, MLP_NORM),
        _equal(MLP_IN, MLP_NORM),
        EXACT,
        stated=True,
    ),
    _invariant("slots_add", "slots sum to routed_output", (SLOTS, ROUTED), _slots(ROUTED), SUMMED, stated=True),
    _invariant("latent_slots_add", "slots sum to routed_latent", (SLOTS, LATENT), _slots(LATENT), SUMMED, stated=True),
    _adds(
        "experts_add",
        "mlp_output = routed_output + shared_expert_output",
        "mlp.mlp_output",
        ROUTED,
        "mlp.shared_expert_output",
    ),
    _invariant("router_chooses", "top-k of sigmoid(logits) + bias", (INDICES, LOGITS), _choice, (1e-5, 1e-5)),
    _invariant(
        "router_weighs", "chosen sigmoids, renormalised and scaled", (WEIGHTS, INDICES, LOGITS), _weights, (1e-5, 1e-5)
    ),
    _invariant("patterns_sum", "rows of the pattern sum to 1", (PATTERNS,), _row_sums, (1e-5, 1e-5)),
    _invariant("patterns_causal", "no weight above the diagonal", (PATTERNS,), _above_diagonal, EXACT),
    _invariant(
        "heads_average",
        "head outputs = pattern . values",
        (f"{MLA}.attention_head_outputs", PATTERNS, f"{MLA}.attention_values"),
        _average,
        REPLAYED,
    ),
    _invariant("decays_not_positive", "decays <= 0", (f"{KDA}.decays",), _decays, EXACT),
    _invariant("betas_in_range", "betas between 0 and 1", (f"{KDA}.betas",), _betas, EXACT),
    _invariant("states_replay", "the plain recurrence", (f"{KDA}.states", *FACTORS, QUERIES), _states, REPLAYED),
    _invariant("final_replay", "the plain recurrence", (f"{KDA}.state_output", *FACTORS, QUERIES), _final, REPLAYED),
    _invariant(
        "heads_read",
        "head outputs = state . query",
        (f"{KDA}.attention_head_outputs", *FACTORS, QUERIES),
        _read_out,
        REPLAYED,
    ),
    _invariant(
        "probs_follow",
        "softmax of the last logits",
        ("model.next_token_probs", "model.logits"),
        _next_token,
        (1e-6, 1e-6),
    ),
)
