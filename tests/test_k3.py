"""Every value of Kimi-K3 against the oracle of that sequence alone: prompts, padding, decoding, implementations."""

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kimicap.errors import UsageError
from kimicap.models import bring_in_uncalled
from kimicap.rows import Rows
from kimicap.schema import load_schema
from tests.capturing import all_values, architecture, capture_decoded, capture_prompts
from tests.compare import assert_close
from tests.judging import ROWS, check_against_oracle
from tests.standins import modeling_kimi_linear as modelling
from tests.standins.build import k3_model

FAMILY = "kimi_k3"
K3_ALONE = {
    "model.final_running_sum",
    "model.stored_sums",
    "model.output_mix_weights",
    "model.output_mix",
    "layers.attention_mix_weights",
    "layers.mlp_mix_weights",
    "layers.attention_mix",
    "layers.mlp_mix",
    "self_attn.output_gate",
    "self_attn.query_latent",
    "mlp.routed_input",
    "mlp.routed_latent",
}


@pytest.fixture(scope="module")
def model():
    return k3_model()


@pytest.fixture
def flash(monkeypatch):
    """A model under the implementation that its code forces, which is played by one for the CPU."""
    seen = []

    def flash_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        seen.append(value.shape[-1])
        total, past = key.shape[2], key.shape[2] - query.shape[2]
        allowed = torch.ones(query.shape[2], total).tril(past).bool()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None].bool()
        mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill(~allowed, torch.finfo(query.dtype).min)
        return modelling.eager_attention_forward(module, query, key, value, mask, scaling)[0], None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash_attention)
    return seen


def padded(side, extra):
    def run(runner, recorder, tokens):
        width = max(map(len, tokens)) + extra
        ids = torch.zeros(len(tokens), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, given in enumerate(tokens):
            place = slice(width - len(given), None) if side == "left" else slice(0, len(given))
            ids[row, place], mask[row, place] = torch.from_numpy(given).long(), 1
        recorder.rows = Rows.of_prompts(list(map(len, tokens)), width_tokens=width, left=side == "left")
        with torch.inference_mode():
            runner._model(input_ids=ids, attention_mask=mask, use_cache=False)

    return run


def test_every_value_of_mixed_lengths_equals_each_row_alone(model):
    captured = capture_prompts(model, ROWS, family=FAMILY)
    keys = {key for key, _, _ in captured}
    have = {name.removesuffix("@all") for name in all_values(architecture(model, FAMILY))}
    assert keys == have - {"model.input_ids", "model.attention_mask", "linear_attn.state_input"}
    assert have == set(load_schema().values)
    assert keys > K3_ALONE
    assert check_against_oracle(model, captured, ROWS) > 4 * 150


def test_the_text_model_alone_is_found_too():
    model = k3_model(alone=True)
    check_against_oracle(model, capture_prompts(model, ROWS[:1], family=FAMILY), ROWS[:1])


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash_attention_2"])
def test_padding_with_a_mask_changes_nothing(flash, attention):
    model = k3_model(attention=attention)
    for rows in (ROWS, ROWS[:1]):
        for side in ("left", "right"):
            run = padded(side, 3)
            check_against_oracle(model, capture_prompts(model, rows, family=FAMILY, run=run), rows)


def test_values_that_flash_attention_pads_are_captured_at_their_own_width(flash):
    model = k3_model(attention="flash_attention_2")
    captured = capture_prompts(model, ROWS, ["self_attn.attention_values", "self_attn.attention_head_outputs"],
                               family=FAMILY)  # fmt: skip
    assert set(flash) == {24}
    assert {tensor.shape[-1] for tensor in captured.values()} == {16}
    check_against_oracle(model, captured, ROWS)


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_decoding_equals_the_same_tokens_as_one_prompt(flash, attention):
    model = k3_model(attention=attention)
    captured, rows = capture_decoded(model, ROWS, tokens=4, family=FAMILY)
    assert [len(row) for row in rows] == [len(row) + 4 for row in ROWS]
    check_against_oracle(model, captured, rows)


def test_decoding_one_new_token_enters_with_the_state_of_the_prompt(model):
    prompt = torch.tensor([ROWS[0]])
    with torch.inference_mode():
        cache = model(input_ids=prompt, use_cache=True).past_key_values

    def run(runner, recorder, tokens):
        recorder.rows = Rows(width_tokens=1, starts=(0,), counts=(1,), past=(len(ROWS[0]),))
        with torch.inference_mode():
            model(input_ids=torch.tensor([[42]]), past_key_values=cache, use_cache=True)

    before = {block: cache.recurrent_states[block].clone() for block in (0, 1, 3, 4)}
    captured = capture_prompts(model, [[42]], ["state_input", "state_output"], family=FAMILY, run=run)
    for block, state in before.items():
        assert torch.equal(captured["linear_attn.state_input", block, 0], state[0].transpose(1, 2))


def test_bfloat16_values_follow_the_oracle():
    # Few blocks, since rounding errors grow with depth; dense ones, since routes differ in rounded streams.
    model = k3_model(dtype=torch.bfloat16, num_hidden_layers=3, first_k_dense_replace=3)
    captured = capture_prompts(model, ROWS, family=FAMILY)
    captured = {place: tensor for place, tensor in captured.items() if "next_token" not in place[0]}
    assert check_against_oracle(model, captured, ROWS, rel=0.12) > 4 * 60


@pytest.mark.parametrize("decoded", [0, 3])
def test_bfloat16_mixtures_add_up(decoded):
    model = k3_model(dtype=torch.bfloat16)
    names = [f"mlp.{name}" for name in (
        "router_logits", "expert_indices", "expert_weights", "expert_outputs", "routed_latent", "routed_output",
        "shared_expert_output", "mlp_output",
    )]  # fmt: skip
    names.append("mlp_input")
    captured, _ = capture_decoded(model, ROWS, names, tokens=decoded, family=FAMILY)
    for block in range(1, 6):
        gate = model.language_model.model.layers[block].block_sparse_moe.gate
        for row in range(len(ROWS)):
            found = {name.removeprefix("mlp."): captured[name if "." in name else f"layers.{name}", block, row]
                     for name in names}  # fmt: skip
            logits = found["router_logits"]
            assert logits.dtype == torch.float32
            assert_close(logits, found["mlp_input"].double() @ gate.weight.double().T, rel=1e-6)
            best = (logits.sigmoid() + gate.e_score_correction_bias.float()).topk(2).indices
            assert torch.equal(best.sort().values, found["expert_indices"].sort().values)
            assert_close(found["expert_weights"].sum(-1), torch.ones(len(logits)), rel=1e-5)
            assert_close(found["expert_outputs"].float().sum(1), found["routed_latent"].float(), rel=1e-2)
            whole = found["routed_output"].float() + found["shared_expert_output"].float()
            assert_close(found["mlp_output"].float(), whole, rel=1e-2)


def test_bfloat16_states_follow_the_recurrence_over_the_captured_factors():
    from kimicap import kda

    model = k3_model(dtype=torch.bfloat16)
    names = ["attention_keys", "attention_values", "decays", "betas"]
    values = [*(f"linear_attn.{name}" for name in names), "states@all", "state_output"]
    captured, _ = capture_decoded(model, ROWS, values, tokens=2, family=FAMILY)
    for number in range(len(ROWS)):
        for block in (0, 1, 3, 4):
            factors = [captured[f"linear_attn.{name}", block, number][None] for name in names]
            assert factors[2].dtype == torch.float32
            assert -5 <= factors[2].min()
            assert factors[2].max() <= 0
            states, _ = kda.replay(*factors)
            final = captured["linear_attn.state_output", block, number]
            assert_close(final, states[0, -1], rel=1e-4, name="state_output", layer=block)
            assert_close(captured["linear_attn.states", block, number], states[0], rel=1e-4, name="states", layer=block)


def test_running_sums_add_up_inside_a_group_and_restart_with_it(model):
    names = ["layer_input", "layer_mid", "layer_output", "attention_output", "mlp_output"]
    captured = capture_prompts(model, ROWS[:1], names, family=FAMILY)
    found = {(key.split(".")[1], block): tensor for (key, block, _), tensor in captured.items()}
    for block in range(6):
        before = 0.0 if block % 2 == 0 else found["layer_input", block]
        assert torch.equal(found["layer_mid", block], before + found["attention_output", block])
        assert_close(found["layer_output", block], found["layer_mid", block] + found["mlp_output", block])


def test_the_models_outputs_are_bit_for_bit_those_without_hooks(model):
    ids = torch.tensor([ROWS[1]])
    with torch.inference_mode():
        plain = model(input_ids=ids, use_cache=False).logits
    seen = []

    def run(runner, recorder, tokens):
        recorder.rows = Rows.of_prompts([len(ROWS[1])])
        with torch.inference_mode():
            seen.append(model(input_ids=ids, use_cache=False).logits)

    capture_prompts(model, [ROWS[1]], family=FAMILY, run=run)
    assert torch.equal(seen[0], plain)


def test_everything_is_taken_away_again():
    model = k3_model()
    before = modelling._apply_attn_res, modelling.chunk_kda, modelling.eager_attention_forward
    with pytest.raises(ZeroDivisionError):
        capture_prompts(model, ROWS, family=FAMILY, run=lambda *_: 1 // 0)
    assert before == (modelling._apply_attn_res, modelling.chunk_kda, modelling.eager_attention_forward)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "moe_infer" not in vars(module)


def test_router_values_take_as_many_hooks_with_many_experts():
    counts = []
    for experts in (8, 64):
        model = k3_model(num_experts=experts)

        def run(runner, recorder, tokens, model=model):
            hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
            sink, handed = recorder._sink, []
            recorder._sink = lambda *piece: handed.append(piece) or sink(*piece)
            runner.prompts(tokens)
            counts.append((sum(hooks), len(handed)))

        names = ["router_logits", "expert_indices", "expert_weights", "expert_outputs", "routed_latent"]
        check_against_oracle(model, capture_prompts(model, ROWS[:1], names, family=FAMILY, run=run), ROWS[:1])
    assert counts[0] == counts[1]


def test_a_model_without_the_modules_of_the_schema_is_refused(model):
    del (broken := k3_model()).language_model.model.layers[1].mlp_res_proj
    with pytest.raises(UsageError, match=r"no module 'mlp_res_proj'.*does not fit this model"):
        capture_prompts(broken, ROWS, ["mlp_mix_weights"], family=FAMILY)


def test_layouts_and_descriptions_are_those_of_the_family(model):
    found, values = architecture(model, FAMILY), load_schema().values
    assert found.value(values["mlp.expert_outputs"]).layout == ("position", "slot", "latent")
    assert "restarts" in found.value(values["layers.layer_mid"]).about
    assert found.size("model", "source") == 4
    assert np.array_equal(found.blocks["kda"], [0, 1, 3, 4])


def test_offloaded_weights_are_there_for_every_value(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, expected = k3_model(), k3_model()
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    bring_in_uncalled(model, architecture(model, FAMILY))
    rows = ROWS[::2]
    check_against_oracle(expected, capture_prompts(model, rows, family=FAMILY), rows)
    captured, rows = capture_decoded(model, rows, tokens=2, family=FAMILY)
    check_against_oracle(expected, captured, rows)
    gates = [module for name, module in model.named_modules() if name.endswith("gate")]
    assert all(weight.is_meta for gate in gates for weight in gate.parameters())
