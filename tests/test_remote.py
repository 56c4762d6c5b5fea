"""Every value of Kimi-Linear by its checkpoint's own code against the oracle of that sequence alone."""

import pytest
import torch

from tests.capturing import all_values, architecture, capture_decoded, capture_prompts
from tests.compare import assert_close
from tests.judging import ROWS, check_against_oracle
from tests.standins.build import remote_model
from tests.test_k3 import K3_ALONE, padded

FAMILY = "kimi_linear_remote"


@pytest.fixture(scope="module")
def model():
    return remote_model()


def test_every_value_of_mixed_lengths_equals_each_row_alone(model):
    captured = capture_prompts(model, ROWS, family=FAMILY)
    keys = {key for key, _, _ in captured}
    have = {name.removesuffix("@all") for name in all_values(architecture(model, FAMILY))}
    native = {name.removesuffix("@all") for name in _native_values()}
    assert have == native
    assert not have & K3_ALONE
    assert keys == have - {"model.input_ids", "model.attention_mask", "linear_attn.state_input"}
    assert check_against_oracle(model, captured, ROWS) > 4 * 100


def _native_values():
    from kimicap.schema import load_schema

    schema = load_schema()
    return [key for key, value in schema.values.items() if schema.families["kimi_linear"].sites_of(value)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_with_a_mask_changes_nothing(side, attention):
    model = remote_model(attention=attention)
    for rows in (ROWS, ROWS[:1]):
        captured = capture_prompts(model, rows, family=FAMILY, run=padded(side, 2))
        check_against_oracle(model, captured, rows)


def test_decoding_equals_the_same_tokens_as_one_prompt(model):
    captured, rows = capture_decoded(model, ROWS, tokens=4, family=FAMILY)
    assert [len(row) for row in rows] == [len(row) + 4 for row in ROWS]
    check_against_oracle(model, captured, rows)


def test_bfloat16_values_follow_the_oracle():
    # Few blocks, since rounding errors grow with depth; dense ones, since routes differ in rounded streams.
    model = remote_model(dtype=torch.bfloat16, num_hidden_layers=3, first_k_dense_replace=3)
    captured = capture_prompts(model, ROWS, family=FAMILY)
    captured = {place: tensor for place, tensor in captured.items() if "next_token" not in place[0]}
    assert check_against_oracle(model, captured, ROWS, rel=6e-2) > 4 * 50


def test_bfloat16_mixtures_add_up():
    model = remote_model(dtype=torch.bfloat16)
    names = ["router_logits", "expert_indices", "expert_weights", "expert_outputs", "routed_output", "mlp_input"]
    captured, _ = capture_decoded(model, ROWS, names, tokens=2, family=FAMILY)
    for block in range(1, 5):
        gate = model.model.layers[block].block_sparse_moe.gate
        for row in range(len(ROWS)):
            logits, indices, weights, outputs, routed = (captured[f"mlp.{name}", block, row] for name in names[:5])
            given = captured["layers.mlp_input", block, row].double()
            assert_close(logits, given @ gate.weight.double().T, rel=1e-6)
            best = (logits.sigmoid() + gate.e_score_correction_bias.float()).topk(2).indices
            assert torch.equal(best.sort().values, indices.sort().values)
            assert_close(weights.sum(-1), torch.full((len(logits),), 2.446), rel=1e-5)
            assert_close(outputs.float().sum(1), routed.float(), rel=1e-2)
