"""Every value of Kimi-Linear against the oracle of that sequence alone, whatever the batch."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimicap.forwards import Runner
from kimicap.hooks import Recorder
from kimicap.rows import Rows
from tests import properties
from tests.capturing import Captured, Collector, all_values, architecture, capture_decoded, capture_prompts, wants
from tests.compare import assert_close, same_experts, slots_like
from tests.models import build_model, need_kimi_linear, tiny_model
from tests.oracle import reference

ROWS = [[7, 5, 300, 41, 9, 9, 12], list(range(3, 90)), [11], list(range(100, 117))]
FAMILY_VALUES = 43
SLOTTED = {"mlp.expert_indices", "mlp.expert_weights", "mlp.expert_outputs"}


def check_against_oracle(model, captured: Captured, rows, *, rel: float = 2e-5, last_only: bool = False) -> int:
    """Compares all that was captured with each row's own reference; returns how many tensors were compared."""
    compared = 0
    for number, ids in enumerate(rows):
        expected = reference(model, list(ids))
        indices = {b: captured.get(("mlp.expert_indices", b, number)) for b in range(model.config.num_hidden_layers)}
        for (key, block, row), found in captured.items():
            if row != number or key == "linear_attn.state_input":
                continue
            wanted = expected[key][block]
            if key in SLOTTED:
                bias = model.model.layers[block].mlp.gate.e_score_correction_bias
                logits = expected["mlp.router_logits"][block]
                top = model.config.num_experts_per_tok
                assert same_experts(indices[block], logits, bias, top, 1e-5), f"{key} of block {block}"
                if key != "mlp.expert_indices":
                    wanted = slots_like(indices[block], expected["mlp.expert_indices"][block], wanted)
                else:
                    continue
            assert_close(found, wanted, rel=rel, rel_max=20 * rel, name=key, layer=block)
            compared += 1
    return compared


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_every_value_of_mixed_lengths_equals_each_row_alone(model):
    captured = capture_prompts(model, ROWS)
    keys = {key for key, _, _ in captured}
    assert keys == {v.removesuffix("@all") for v in all_values(architecture(model))} - {
        "model.input_ids",
        "model.attention_mask",
        "linear_attn.state_input",
    }
    assert len(keys) == FAMILY_VALUES - 1
    assert check_against_oracle(model, captured, ROWS) > 4 * 100


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation(attention, experts):
    model = tiny_model(attention=attention, experts=experts)
    rows = ROWS[:1] + ROWS[2:]
    check_against_oracle(model, capture_prompts(model, rows), rows)


def left_padded(extra: int):
    """Rows padded on the left by hand, with a mask, as other tools batch."""

    def run(runner: Runner, recorder: Recorder, tokens: list[np.ndarray]) -> None:
        width = max(map(len, tokens)) + extra
        ids = torch.zeros(len(tokens), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, given_ids in enumerate(tokens):
            ids[row, width - len(given_ids) :] = torch.from_numpy(given_ids).long()
            mask[row, width - len(given_ids) :] = 1
        recorder.rows = Rows.of_prompts([len(row) for row in tokens], width_tokens=width, left=True)
        with torch.inference_mode():
            runner._model(input_ids=ids, attention_mask=mask, use_cache=False)

    return run


def right_padded(extra: int):
    def run(runner: Runner, recorder: Recorder, tokens: list[np.ndarray]) -> None:
        width = max(map(len, tokens)) + extra
        ids = torch.zeros(len(tokens), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, given_ids in enumerate(tokens):
            ids[row, : len(given_ids)] = torch.from_numpy(given_ids).long()
            mask[row, : len(given_ids)] = 1
        recorder.rows = Rows.of_prompts([len(row) for row in tokens], width_tokens=width)
        with torch.inference_mode():
            runner._model(input_ids=ids, attention_mask=mask, use_cache=False)

    return run


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["mixed", "one"])
@pytest.mark.parametrize(
    "padding", [left_padded(0), left_padded(5), right_padded(5)], ids=["left", "left+5", "right+5"]
)
def test_padding_with_a_mask_changes_nothing(attention, rows, padding):
    model = tiny_model(attention=attention)
    check_against_oracle(model, capture_prompts(model, rows, run=padding), rows)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decoding_equals_the_same_tokens_as_one_prompt(attention):
    model = tiny_model(attention=attention)
    captured, rows = capture_decoded(model, ROWS, tokens=5)
    assert [len(row) for row in rows] == [len(row) + 5 for row in ROWS]
    check_against_oracle(model, captured, rows)


def test_greedy_decoding_is_transformers_own(model):
    _, rows = capture_decoded(model, ROWS[1:2], tokens=4)
    ids = torch.tensor(ROWS[1:2])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert rows[0] == expected[0].tolist()


def test_forced_decoding_equals_the_prompt(model):
    rows = [row for row in ROWS if len(row) > 4]
    captured, found = capture_decoded(model, rows, tokens=4, forced=True)
    assert found == rows
    check_against_oracle(model, captured, rows)


def test_stop_tokens_end_a_sequence_and_its_values(model):
    _, free = capture_decoded(model, ROWS, ["mlp_output"], tokens=6)
    stop = free[1][len(ROWS[1]) + 2]
    captured, rows = capture_decoded(model, ROWS, tokens=6, stop=(stop,))
    cut = [
        row[: row.index(stop, len(given_ids)) + 1] if stop in row[len(given_ids) :] else row
        for row, given_ids in zip(free, ROWS, strict=True)
    ]
    assert rows == cut
    assert len(rows[1]) == len(ROWS[1]) + 3
    check_against_oracle(model, captured, rows)


def test_sampling_depends_on_the_sequence_not_on_its_batch(model):
    _, together = capture_decoded(model, ROWS, ["mlp_output"], tokens=4, temperature=1.0)
    _, alone = capture_decoded(model, ROWS[:1], ["mlp_output"], tokens=4, temperature=1.0)
    assert together[0] == alone[0]


def test_bfloat16_rows_equal_the_row_alone():
    model = tiny_model(dtype=torch.bfloat16, mlp_layer_types=["dense"] * 6)
    together = capture_prompts(model, ROWS)
    for number, row in enumerate(ROWS):
        for (key, block, _), expected in capture_prompts(model, [row]).items():
            assert_close(together[key, block, number], expected, rel=2e-2, rel_max=0.2, name=key, layer=block)


def test_bfloat16_states_follow_the_recurrence_over_the_captured_factors():
    from kimicap import kda

    model = tiny_model(dtype=torch.bfloat16)
    names = ["attention_keys", "attention_values", "decays", "betas"]
    captured = capture_prompts(model, ROWS, [*(f"linear_attn.{n}" for n in names), "states@all", "state_output"])
    for number in range(len(ROWS)):
        for block in (0, 1, 2, 4):
            factors = [captured[f"linear_attn.{name}", block, number][None] for name in names]
            states, _ = kda.replay(*factors)
            assert_close(captured["linear_attn.states", block, number], states[0], rel=1e-5, name="states", layer=block)
            final = captured["linear_attn.state_output", block, number]
            assert_close(final, states[0, -1], rel=1e-4, name="state_output", layer=block)


def test_router_logits_are_never_rounded():
    model = tiny_model(dtype=torch.bfloat16)
    captured = capture_prompts(model, ROWS, ["router_logits", "expert_indices", "mlp_input"])
    for block in range(1, 6):
        gate = model.model.layers[block].mlp.gate
        for row in range(len(ROWS)):
            logits = captured["mlp.router_logits", block, row]
            assert logits.dtype == torch.float32
            x = captured["layers.mlp_input", block, row].double()
            assert_close(logits, x @ gate.weight.double().T, rel=1e-6, name="router_logits", layer=block)
            best = (logits.sigmoid() + gate.e_score_correction_bias).topk(2).indices
            assert torch.equal(best.sort().values, captured["mlp.expert_indices", block, row].sort().values)


def test_patterns_are_those_of_eager_attention():
    model = tiny_model(attention="sdpa")
    captured = capture_prompts(model, [ROWS[1]], ["patterns", "attention_scores"])
    eager = tiny_model(attention="eager")
    with torch.inference_mode():
        weights = eager(torch.tensor([ROWS[1]]), output_attentions=True, use_cache=False).attentions
    for block, expected in zip((3, 5), weights, strict=True):
        found = captured["self_attn.attention_probabilities", block, 0]
        assert (found - expected[0]).abs().max() < 1e-5
        assert (found.sum(-1) - 1).abs().max() < 1e-6
        scores = captured["self_attn.attention_scores", block, 0]
        assert torch.equal(scores.isneginf(), torch.ones_like(scores).triu(1).bool())


def test_patterns_are_computed_a_slice_of_heads_at_a_time(model, monkeypatch):
    whole = capture_prompts(model, ROWS, ["patterns", "states@all"])
    monkeypatch.setattr("kimicap.computed.SLICE_BYTES", 1)
    monkeypatch.setattr("kimicap.attention.SLICE_BYTES", 1)
    sliced = capture_prompts(model, ROWS, ["patterns", "states@all"])
    assert whole.keys() == sliced.keys()
    for place, expected in whole.items():
        assert torch.allclose(sliced[place], expected, atol=1e-6), place


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [("last", [-1]), ("every:4", slice(3, None, 4)), ("2:5", slice(2, 5)), ("all", slice(None))],
)
@pytest.mark.parametrize("value", ["layer_output", "states", "patterns", "linear_attn.decays", "router_logits"])
def test_selected_positions(model, selection, chosen, value):
    whole = capture_prompts(model, ROWS, [f"{value}@all"])
    some = capture_prompts(model, ROWS, [f"{value}@{selection}"])
    for (key, block, row), full in whole.items():
        axis = 1 if value == "patterns" else 0
        expected = full[:, chosen] if axis else full[chosen]
        if expected.shape[axis] == 0:
            assert (key, block, row) not in some
        else:
            assert torch.allclose(some[key, block, row], expected, atol=1e-5), (key, block, row)


def test_selected_layers_and_heads(model):
    whole = capture_prompts(model, ROWS, ["states@last", "patterns", "layer_output"])
    some = capture_prompts(model, ROWS, ["states@last@layers:0,4", "patterns@heads:1,3", "layer_output"], layers="3-5")
    assert {block for key, block, _ in some if key == "linear_attn.states"} == {0, 4}
    assert {block for key, block, _ in some if key == "layers.layer_output"} == {3, 4, 5}
    for (key, block, row), found in some.items():
        expected = whole[key, block, row]
        assert torch.equal(found, expected[[1, 3]] if "prob" in key else expected), (key, block, row)


def test_largest_logits(model):
    captured = capture_prompts(model, ROWS, ["logits@top:5"])
    whole = capture_prompts(model, ROWS, ["logits"])
    for row in range(len(ROWS)):
        values, ids = whole["model.logits", None, row].topk(5)
        assert torch.equal(captured["model.logits_top", None, row], values)
        assert torch.equal(captured["model.logits_top_ids", None, row], ids)


def test_the_models_outputs_are_bit_for_bit_those_without_hooks(model):
    ids = torch.tensor([ROWS[1]])
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
    seen = []

    def run(runner, recorder, tokens):
        recorder.rows = Rows.of_prompts([len(ROWS[1])])
        with torch.inference_mode():
            seen.append(model(ids, use_cache=False).logits)

    capture_prompts(model, [ROWS[1]], run=run)
    assert torch.equal(seen[0], plain)


def test_state_input_is_the_cache_before_the_call(model):
    prompt = torch.tensor([ROWS[1]])
    with torch.inference_mode():
        cache = model(prompt, use_cache=True).cache
    before = {block: cache.get_recurrent_state(block, state_idx=0).clone() for block in (0, 1, 2, 4)}

    def run(runner, recorder, tokens):
        recorder.rows = Rows(width_tokens=1, starts=(0,), counts=(1,), past=(len(ROWS[1]),))
        with torch.inference_mode():
            model(torch.tensor([[42]]), cache=cache, use_cache=True)

    captured = capture_prompts(model, [[42]], ["state_input", "state_output"], run=run)
    expected = reference(model, [*ROWS[1], 42])
    for block, state in before.items():
        assert torch.equal(captured["linear_attn.state_input", block, 0], state[0]), block
        assert_close(
            captured["linear_attn.state_output", block, 0],
            expected["linear_attn.state_output"][block],
            rel=2e-5,
            name="state_output",
            layer=block,
        )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_model_and_any_batch(data):
    need_kimi_linear()
    model = build_model(data.draw(properties.configs()))
    rows = data.draw(properties.batches())
    check_against_oracle(model, capture_prompts(model, rows), rows, rel=1e-4)


def test_fast_states_are_those_before_the_kernels_chunks(model, monkeypatch):
    """A stand-in for fla's kernel: the torch rule, with the states entering each chunk as a third result."""
    import transformers.models.kimi_linear.modeling_kimi_linear as modelling

    plain = modelling.chunk_kimi_delta_attention

    def kernel(query, key, value, g, beta, return_intermediate_states=False, **rest):
        outputs = plain(query, key, value, g=g, beta=beta, **rest)
        if not return_intermediate_states:
            return outputs
        entering = [
            plain(query[:, :n], key[:, :n], value[:, :n], g=g[:, :n], beta=beta[:, :n], **rest)[1]
            for n in range(64, key.shape[1], 64)
        ]
        return (*outputs, torch.stack([torch.zeros_like(outputs[1]), *entering], 1).bfloat16())

    monkeypatch.setattr(modelling, "chunk_kimi_delta_attention", kernel)
    rows = [list(range(3, 131)), list(range(90, 160)), [5] * 30]
    exact = capture_prompts(model, rows, ["states@every:64"])
    found = architecture(model)
    wanted = wants(found, ["states@every:64", "logits"])
    sink = Collector(wanted)
    recorder = Recorder(model, found, wanted, sink, fast=True)
    with recorder.attached():
        Runner(model, found, recorder, head=True).prompts([np.asarray(row, np.int32) for row in rows])
    fast = {place: tensor for place, tensor in sink.rows().items() if place[0] == "linear_attn.states"}
    assert fast.keys() == exact.keys()
    assert {fast["linear_attn.states", 0, row].shape[0] for row in (0, 1)} == {2, 1}
    for (key, block, row), expected in exact.items():
        assert_close(fast[key, block, row].float(), expected, rel=5e-3, rel_max=0.1, name=key, layer=block)
