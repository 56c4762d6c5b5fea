"""What was captured from a model with its own code, against the oracle of each sequence alone."""

from typing import Any

from tests.capturing import Captured
from tests.compare import assert_close, same_experts, slots_like
from tests.oracle_k3 import reference

SLOTTED = ("mlp.expert_indices", "mlp.expert_weights", "mlp.expert_outputs")
ROWS = [[7, 5, 300, 41, 9, 9, 12], list(range(3, 76)), [11], list(range(100, 117))]


def check_against_oracle(model: Any, captured: Captured, rows: Any, *, rel: float = 2e-4) -> int:
    """Compares all that was captured; returns how many tensors were compared."""
    compared = 0
    text = getattr(model, "language_model", model)
    for number, ids in enumerate(rows):
        expected = reference(model, list(ids))
        for (key, block, row), found in captured.items():
            if row != number or key == "linear_attn.state_input":
                continue
            wanted = expected[key][block]
            if key in SLOTTED:
                indices = captured["mlp.expert_indices", block, row]
                gate = text.model.layers[block].block_sparse_moe.gate
                logits = expected["mlp.router_logits"][block]
                assert same_experts(indices, logits, gate.e_score_correction_bias, gate.top_k, 1e-4), (key, block)
                wanted = slots_like(indices, expected["mlp.expert_indices"][block], wanted)
            assert_close(found, wanted, rel=rel, rel_max=20 * rel, name=key, layer=block)
            compared += 1
    return compared
