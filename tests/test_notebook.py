"""`kimicap.capture` against plain hooks, the model's outputs, and each row alone."""

import pytest
import torch

import kimicap
from kimicap.errors import UsageError
from tests.models import tiny_model

IDS = torch.arange(3, 3 + 24).reshape(2, 12) % 380


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_model()


def hook_count(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_values_are_those_of_plain_hooks_and_outputs(model):
    seen = {}
    handle = model.model.layers[2].register_forward_hook(lambda m, a, out: seen.update(out=out))
    with kimicap.capture(model, ["residuals", "logits", "router_logits", "expert_indices", "patterns"]) as captured:
        output = model(IDS)
    handle.remove()
    assert torch.equal(captured["residuals"][2], seen["out"])
    assert torch.equal(captured["layers.layer_output"][2], captured["layer_output"][2])
    assert torch.equal(captured["logits"][None], output.logits)
    assert list(captured["mlp.router_logits"]) == [1, 2, 3, 4, 5]
    assert captured["expert_indices"][1].shape == (2, 12, 2)
    assert captured["patterns"][3].shape == (2, 4, 12, 12)
    assert torch.allclose(captured["patterns"][3].sum(-1), torch.ones(2, 4, 12), atol=1e-6)


def test_a_block_that_lacks_the_value_is_told(model):
    with kimicap.capture(model, ["router_logits", "logits"]) as captured:
        model(IDS)
    with pytest.raises(UsageError, match=r"^The value was not captured in block 0; there are those of 1-5\.$"):
        captured["router_logits"][0]
    with pytest.raises(
        UsageError, match=r"^The value was not captured in block 3; there are \[None\], of the whole model\.$"
    ):
        captured["logits"][3]
    assert 0 not in captured["router_logits"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_cut_off_and_position_0_is_the_first_real_token(model, side):
    values = ["residuals", "states@all", "state_output", "patterns", "expert_indices"]
    short = IDS[1:, :7]
    pad = torch.zeros(1, 5, dtype=torch.long)
    row = torch.cat([pad, short] if side == "left" else [short, pad], 1)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, (slice(0, 5) if side == "left" else slice(7, 12))] = 0
    with kimicap.capture(model, values) as captured:
        model(torch.cat([IDS[:1], row]), attention_mask=mask)
        padded = {key: captured[key] for key in captured}
        model(short)
        alone = {key: captured[key] for key in captured}
    for key, blocks in alone.items():
        for block, tensor in blocks.items():
            found = padded[key][block][1:]
            inside = found[tuple(slice(0, size) for size in tensor.shape)]
            torch.testing.assert_close(inside, tensor, atol=2e-5, rtol=1e-4)
            beyond = found.clone()
            beyond[tuple(slice(0, size) for size in tensor.shape)] = -1 if beyond.dtype == torch.int64 else torch.nan
            assert bool((beyond == -1).all() if beyond.dtype == torch.int64 else beyond.isnan().all()), key


def test_a_cache_goes_on_with_the_sequence(model):
    with kimicap.capture(model, ["residuals", "states@all", "patterns"], layers="0,3") as captured:
        model(IDS)
        whole = {key: captured[key] for key in captured}
        cache = model(IDS[:, :9], use_cache=True)["cache"]
        model(IDS[:, 9:], cache=cache, use_cache=True)
        torch.testing.assert_close(
            captured["residuals"][0], whole["layers.layer_output"][0][:, 9:], atol=2e-5, rtol=1e-4
        )
        torch.testing.assert_close(captured["states"][0], whole["linear_attn.states"][0][:, 9:], atol=2e-5, rtol=1e-4)
        patterns = whole["self_attn.attention_probabilities"][3][:, :, 9:]
        torch.testing.assert_close(captured["patterns"][3], patterns, atol=2e-5, rtol=1e-4)


def test_the_trunk_alone_and_generate(model):
    with kimicap.capture(model, "residuals", layers="5") as captured:
        with torch.inference_mode():
            model.model(input_ids=IDS)
        assert captured["residuals"][5].shape == (2, 12, 64)
        model.generate(IDS, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(IDS), eos_token_id=383)
        assert captured["residuals"][5].shape == (2, 1, 64)


HEAD = ["logits", "lm_head_output", "next_token_probs", "residuals"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kept", [1, 5, 12, 40, 0, -4])
def test_logits_of_the_last_tokens_alone(model, kept, side):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, (slice(0, 3) if side == "left" else slice(9, 12))] = 0
    with kimicap.capture(model, HEAD) as captured:
        output = model(IDS, attention_mask=mask)
        whole = {key: captured[key][5 if key == "layers.layer_output" else None] for key in captured}
        model(IDS, attention_mask=mask, logits_to_keep=kept)
        found = {key: captured[key][5 if key == "layers.layer_output" else None] for key in captured}
    here = torch.zeros(2, 12, dtype=torch.bool)
    here[:, -kept:] = True
    moved = torch.stack([here[0], here[1].roll(-3) if side == "left" else here[1]])  # position 0 is the first real one
    moved &= torch.arange(12) < torch.tensor([[12], [9]])
    assert torch.equal(whole["model.logits"][0], output.logits[0])
    for key in ("model.logits", "model.lm_head_output"):
        assert torch.equal(found[key].isnan().any(-1), ~moved), key
        torch.testing.assert_close(found[key][moved], whole[key][moved], atol=1e-5, rtol=1e-5)
    last = moved[torch.arange(2), torch.tensor([11, 8])]
    assert last.tolist() == [True, side == "left" or not 1 <= kept <= 3]
    torch.testing.assert_close(
        found["model.next_token_probs"][last], whole["model.next_token_probs"][last], atol=1e-6, rtol=1e-5
    )
    assert bool(found["model.next_token_probs"][~last].isnan().all())
    assert torch.equal(found["layers.layer_output"].isnan(), whole["layers.layer_output"].isnan())


def test_logits_while_a_prompt_is_generated_from(model):
    mask = torch.ones_like(IDS)
    with kimicap.capture(model, "logits@last") as captured:
        model.generate(IDS, max_new_tokens=1, do_sample=False, attention_mask=mask, eos_token_id=383)
        last = captured["logits"][None]
    torch.testing.assert_close(last, model(IDS).logits[:, -1:], atol=1e-5, rtol=1e-5)
    with kimicap.capture(model, "logits@top:3") as captured:
        model(IDS, logits_to_keep=2)
        ids = captured["logits_top_ids"][None]
    assert torch.equal(ids[:, 10:], model(IDS).logits.topk(3).indices[:, 10:])
    assert bool((ids[:, :10] == -1).all())


def test_logits_of_positions_by_number_are_refused_and_other_values_are_not(model):
    with kimicap.capture(model, "logits"), pytest.raises(UsageError, match="logits_to_keep that is no number"):
        model(IDS, logits_to_keep=torch.tensor([0, 3]))
    with kimicap.capture(model, "residuals") as captured:
        model(IDS, logits_to_keep=torch.tensor([0, 3]))
    assert captured["residuals"][0].shape == (2, 12, 64)


def test_a_value_with_nothing_in_the_forward_says_so(model):
    with kimicap.capture(model, ["states", "state_input"]) as captured:
        model(IDS)
    for name in ("states", "state_input"):
        assert captured[name] == {}
        with pytest.raises(UsageError, match="has nothing in the latest forward: none of the chosen positions"):
            captured[name][0]


def test_selections(model):
    with kimicap.capture(model, ["states@every:5@heads:1", "logits@top:3", "layer_input@last"]) as captured:
        output = model(IDS)
    assert captured["states"][0].shape == (2, 2, 1, 16, 16)
    assert torch.equal(captured["logits_top"][None], output.logits.topk(3).values)
    assert captured["layer_input"][0].shape == (2, 1, 64)
    assert len(captured) == 4


def test_hooks_are_gone_after_exit_and_after_an_exception(model):
    before = hook_count(model)
    with kimicap.capture(model, ["states", "patterns"]) as captured:
        assert hook_count(model) > before
        model(IDS)
    assert hook_count(model) == before
    kept = captured["patterns"][3]
    model(IDS)
    assert torch.equal(kept, captured["patterns"][3])
    with pytest.raises(IndexError), kimicap.capture(model, ["states"]):
        model(IDS + 10_000)
    assert hook_count(model) == before


def test_a_failed_forward_leaves_the_one_before(model):
    with kimicap.capture(model, ["residuals"]) as captured:
        model(IDS)
        before = captured["residuals"][0]
        with pytest.raises(IndexError):
            model(IDS + 10_000)
        assert torch.equal(captured["residuals"][0], before)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda c, m: c["residuals"], "not there yet"),
        (lambda c, m: c["layer_outputs"], "Did you mean"),
        (lambda c, m: m(IDS, attention_mask=torch.tensor([[1] * 12, [1, 0] * 6])), "row 1 has holes"),
        (lambda c, m: m(IDS, attention_mask=torch.ones(2, 20, dtype=torch.long)), "has shape [2, 20]"),
        (lambda c, m: c["attention_output"], "linear_attn.attention_output or self_attn.attention_output"),
    ],
)
def test_errors_are_sentences(model, call, sentence):
    with kimicap.capture(model, ["residuals", "attention_output"]) as captured, pytest.raises(UsageError) as error:
        call(captured, model)
    assert sentence in str(error.value)


def test_a_model_of_no_family_is_refused():
    with (
        pytest.raises(UsageError, match=r"The model is a Linear of torch.*no family"),
        kimicap.capture(torch.nn.Linear(1, 1), ["states"]),
    ):
        pass
