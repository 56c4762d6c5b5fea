"""The oracle judged against transformers' own forward, without kimicap."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import oracle
from tests.compare import assert_close, same_experts, slots_like
from tests.models import KDA, MLA, need_kimi_linear, save_config, save_model, tiny_config, tiny_model

need_kimi_linear()

REL = 1e-5  # float32 models differ from the float64 oracle by 1e-6 to 4e-6

MODELS = {
    "sdpa": {},
    "eager": {"attention": "eager"},
    "batched_mm": {"experts": "batched_mm"},
    "grouped_mm": {"experts": "grouped_mm"},
    "query_rank_and_biases": {"q_lora_rank": 24, "attention_bias": True, "attention": "eager"},
    "four_slots": {"num_experts_per_tok": 4, "n_shared_experts": 2},
    "groups": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "odd_widths": {"v_head_dim": 12, "qk_rope_head_dim": 4, "linear_conv_kernel_dim": 2},
    "kda_only": {"num_hidden_layers": 2, "layer_types": [KDA] * 2, "mlp_layer_types": ["dense", "sparse"]},
    "mla_only": {"num_hidden_layers": 2, "layer_types": [MLA] * 2, "mlp_layer_types": ["sparse", "dense"]},
}


def token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 384, (length,), generator=generator).tolist()


def run(model, ids, **flags):
    with torch.inference_mode():
        return model(torch.tensor([ids]), **{"use_cache": False, **flags})


@pytest.mark.parametrize("kind", MODELS)
def test_the_oracle_agrees_with_every_output_of_the_model(kind):
    model, ids = tiny_model(**MODELS[kind]), token_ids(19)
    eager = model.config._attn_implementation == "eager"
    values = oracle.reference(model, ids)
    outputs = run(model, ids, output_hidden_states=True, output_router_logits=True, output_attentions=eager)

    assert_close(outputs.logits[0], values["model.logits"][None], rel=REL, name="logits")
    streams = values["layers.layer_output"]
    last = model.config.num_hidden_layers - 1
    for layer, found in enumerate(outputs.hidden_states[1:last]):
        assert_close(found[0], streams[layer], rel=REL, name="layer_output", layer=layer)
    final = values["model.final_norm_output"][None]  # transformers' last hidden state is the normed one
    assert_close(outputs.hidden_states[-1][0], final, rel=REL, name="final_norm_output")
    routers = values.get("mlp.router_logits", {})
    assert len(outputs.router_logits) == len(routers)
    for found, layer in zip(outputs.router_logits, routers, strict=True):
        assert_close(found, routers[layer], rel=REL, name="router_logits", layer=layer)
    if eager:
        patterns = values["self_attn.attention_probabilities"]
        for found, layer in zip(outputs.attentions, patterns, strict=True):
            assert_close(found[0], patterns[layer], rel=REL, name="attention_probabilities", layer=layer)


def test_the_oracle_agrees_with_the_expert_outputs_and_routes_of_the_model():
    model, ids = tiny_model(num_experts_per_tok=4), token_ids(19)
    seen = {}
    block = model.model.layers[2].mlp
    handles = [
        block.gate.register_forward_hook(lambda _m, _a, out: seen.update(route=out)),
        block.experts.register_forward_hook(lambda _m, _a, out: seen.update(routed=out)),
        block.shared_experts.register_forward_hook(lambda _m, _a, out: seen.update(shared=out[0])),
    ]
    run(model, ids)
    for handle in handles:
        handle.remove()
    values = {name: by_layer.get(2) for name, by_layer in oracle.reference(model, ids).items()}
    _, weights, indices = seen["route"]
    assert same_experts(indices, values["mlp.router_logits"], block.gate.e_score_correction_bias, 4)
    expected = slots_like(indices, values["mlp.expert_indices"], values["mlp.expert_weights"])
    assert_close(weights, expected, rel=REL, name="expert_weights")
    assert_close(seen["routed"], values["mlp.routed_output"], rel=REL, name="routed_output")
    assert_close(seen["shared"], values["mlp.shared_expert_output"], rel=REL, name="shared_expert_output")


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 65, 130])
def test_states_are_those_of_the_models_cache_at_any_length(length):
    model, ids = tiny_model(), token_ids(length)
    values = oracle.reference(model, ids)
    outputs = run(model, ids, use_cache=True)
    assert_close(outputs.logits[0], values["model.logits"][None], rel=REL, name="logits")
    for layer, state in values["linear_attn.state_output"].items():
        found = outputs.cache.layers[layer].recurrent_states[0][0]
        assert_close(found, state, rel=REL, name="state_output", layer=layer)


@pytest.mark.parametrize("part", ["embed_tokens", "k_proj", "q_proj", "kv_a_proj_with_mqa", "q_a_proj", "v_proj"])
def test_the_small_number_under_each_root_is_the_models(part):
    """At order one the epsilons are below the tolerance; here what is normed is as small as they are."""
    model, ids = tiny_model(q_lora_rank=24), token_ids(9)
    for name, weight in model.named_parameters():
        if f".{part}." in name:
            weight.mul_(1e-3)
    expected = oracle.reference(model, ids)["model.logits"][None]
    assert_close(run(model, ids).logits[0], expected, rel=REL, name="logits")


@pytest.mark.parametrize("prompt", [1, 3, 9])
def test_decoded_tokens_are_those_of_the_whole_sequence(prompt):
    model, ids = tiny_model(), token_ids(prompt + 4)
    values = oracle.reference(model, ids)
    cache = run(model, ids[:prompt], use_cache=True).cache
    for position in range(prompt, len(ids)):
        outputs = run(model, ids[position : position + 1], cache=cache, use_cache=True)
        expected = values["model.logits"][None][position]
        assert_close(outputs.logits[0, 0], expected, rel=REL, name=f"logits at {position}")
        for layer, states in values["linear_attn.states"].items():
            found = cache.layers[layer].recurrent_states[0][0]
            assert_close(found, states[position], rel=REL, name=f"states at {position}", layer=layer)


@pytest.mark.parametrize("kind", MODELS)
def test_the_values_of_the_oracle_add_up(kind):
    model = tiny_model(**MODELS[kind])
    config = model.config
    values = oracle.reference(model, token_ids(11))
    stream = values["model.token_embeddings"][None]
    for layer in range(config.num_hidden_layers):
        here = {name: by_layer[layer] for name, by_layer in values.items() if layer in by_layer}
        host = "linear_attn" if config.layer_types[layer] == KDA else "self_attn"
        assert torch.equal(here["layers.layer_input"], stream)
        middle = here["layers.layer_input"] + here[f"{host}.attention_output"]
        assert_close(here["layers.layer_mid"], middle, rel=1e-12)
        stream = here["layers.layer_output"]
        assert_close(stream, here["layers.layer_mid"] + here["mlp.mlp_output"], rel=1e-12)
        _check_mixer(host, here)
        if config.mlp_layer_types[layer] == "sparse":
            _check_mixture(config, here)
    assert_close(values["model.next_token_probs"][None].sum(), torch.tensor(1.0), rel=1e-12)


def _check_mixer(host, here):
    if host == "linear_attn":
        assert (here["linear_attn.decays"] <= 0).all()
        assert ((here["linear_attn.betas"] > 0) & (here["linear_attn.betas"] < 1)).all()
        query = here["linear_attn.attention_queries"]
        query = query / (query.square().sum(-1, keepdim=True) + 1e-6).sqrt() / query.shape[-1] ** 0.5
        read = (here["linear_attn.states"] * query[..., None]).sum(-2)
        assert_close(here["linear_attn.attention_head_outputs"], read, rel=1e-12)
        assert torch.equal(here["linear_attn.state_output"], here["linear_attn.states"][-1])
        return
    pattern = here["self_attn.attention_probabilities"]
    assert_close(pattern.sum(-1), torch.ones(pattern.shape[:2]), rel=1e-12)
    assert (pattern.triu(1) == 0).all()
    assert_close(here["self_attn.attention_scores"].softmax(-1), pattern, rel=1e-12)
    heads = (pattern @ here["self_attn.attention_values"]).transpose(0, 1)
    assert_close(here["self_attn.attention_head_outputs"], heads, rel=1e-12)


def _check_mixture(config, here):
    assert_close(here["mlp.expert_outputs"].sum(1), here["mlp.routed_output"], rel=1e-12)
    both = here["mlp.routed_output"] + here["mlp.shared_expert_output"]
    assert_close(here["mlp.mlp_output"], both, rel=1e-12)
    assert "mlp.mlp_neurons" not in here
    if config.norm_topk_prob:
        sums = here["mlp.expert_weights"].sum(1)
        assert_close(sums, torch.full_like(sums, config.routed_scaling_factor), rel=1e-12)


def test_float32_arithmetic_is_near_float64():
    model, ids = tiny_model(), token_ids(19)
    single, double = (oracle.reference(model, ids, dtype=d) for d in (torch.float32, torch.float64))
    for name, by_layer in double.items():
        for layer, expected in by_layer.items():
            assert_close(single[name][layer], expected, rel=REL, name=name, layer=layer)


def test_a_model_is_a_function_of_its_seed_and_leaves_the_random_state_alone():
    before = torch.random.get_rng_state()
    first, again, other = tiny_model(seed=3), tiny_model(seed=3), tiny_model(seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_as_it_was(tmp_path, dtype):
    model = tiny_model(dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, model), dtype=dtype)
    for name, weight in model.state_dict().items():
        found = loaded.state_dict()[name]
        assert found.dtype == weight.dtype, name
        assert torch.equal(found, weight), name


def test_a_saved_config_has_no_weights(tmp_path):
    save_config(tmp_path, tiny_config(num_local_experts=16))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_misspelt_override_is_an_error():
    with pytest.raises(TypeError, match="no hidden_sizes"):
        tiny_config(hidden_sizes=3)
