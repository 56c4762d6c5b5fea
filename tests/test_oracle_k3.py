"""The oracle for checkpoints' own code judged against the stand-ins' forwards, without kimicap."""

import pytest
import torch

from tests import oracle_k3
from tests.standins import build

BUILD = {"k3": build.k3_model, "remote": build.remote_model}


@pytest.fixture(params=["k3", "remote"])
def model(request):
    return BUILD[request.param]()


def ids_of(length, seed=1):
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(seed))


def close(found, expected, rel=2e-4):
    expected = expected.float()
    assert found.shape == expected.shape
    assert torch.linalg.norm(found - expected) <= rel * torch.linalg.norm(expected)


def outputs_of(model, ids, names):
    """Outputs of modules by name, in one forward at batch one."""
    found, handles = {}, []
    text = getattr(model, "language_model", model)
    for name in names:
        keep = lambda module, args, output, name=name: found.update({name: output})  # noqa: E731
        handles.append(text.get_submodule(name).register_forward_hook(keep))
    with torch.inference_mode():
        found["logits"] = model(input_ids=ids[None]).logits
    for handle in handles:
        handle.remove()
    return found


def test_the_oracle_agrees_with_the_logits_at_any_length(model):
    for length in (1, 3, 70):
        ids = ids_of(length)
        with torch.inference_mode():
            found = model(input_ids=ids[None], use_cache=True)
        values = oracle_k3.reference(model, ids.tolist())
        close(found.logits[0], values["model.logits"][None])
        first = found.past_key_values.recurrent_states[0][0]
        if hasattr(model, "language_model"):
            first = first.transpose(-1, -2)
        close(first, values["linear_attn.state_output"][0])


def test_the_oracle_agrees_with_the_outputs_of_modules(model):
    ids = ids_of(11)
    names = [f"model.layers.{n}{m}" for n in range(1, 5) for m in ("", ".self_attn", ".block_sparse_moe")]
    names += ["model.norm", "model.layers.2.self_attn.kv_a_layernorm", "model.layers.1.block_sparse_moe.gate"]
    found = outputs_of(model, ids, names)
    values = oracle_k3.reference(model, ids.tolist())
    for layer in range(1, 5):
        output = found[f"model.layers.{layer}"]
        close((output[0] if isinstance(output, tuple) else output)[0], values["layers.layer_output"][layer])
        close(found[f"model.layers.{layer}.block_sparse_moe"][0], values["mlp.mlp_output"][layer])
        host = (
            "linear_attn" if layer in (1, 3) or (layer == 4 and layer in values["linear_attn.betas"]) else "self_attn"
        )
        close(found[f"model.layers.{layer}.self_attn"][0], values[f"{host}.attention_output"][layer])
    close(found["model.norm"][0], values["model.final_norm_output"][None])
    close(found["model.layers.2.self_attn.kv_a_layernorm"][0], values["self_attn.kv_latent"][2])
    indices, weights = found["model.layers.1.block_sparse_moe.gate"]
    order = weights.argsort(dim=1)
    expected = values["mlp.expert_weights"][1]
    close(weights.gather(1, order), expected.sort(dim=1).values)
    assert torch.equal(indices.sort(dim=1).values, values["mlp.expert_indices"][1].sort(dim=1).values)


def test_the_oracle_agrees_with_every_inner_module_of_the_mixture_of_k3():
    model, ids = build.k3_model(), ids_of(9)
    base = "model.layers.1.block_sparse_moe"
    names = ("routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj", "shared_experts")
    found = outputs_of(model, ids, [f"{base}.{name}" for name in names])
    values = {name: by_layer.get(1) for name, by_layer in oracle_k3.reference(model, ids.tolist()).items()}
    close(found[f"{base}.routed_expert_down_proj"], values["mlp.routed_input"])
    close(found[f"{base}.routed_expert_up_proj"], values["mlp.routed_output"])
    close(found[f"{base}.shared_experts"][0], values["mlp.shared_expert_output"])


def test_the_mixes_of_k3_are_what_its_norms_read():
    model, ids = build.k3_model(), ids_of(9)
    seen, handles = {}, []
    for layer, block in enumerate(model.language_model.model.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            keep = lambda module, args, key=(layer, name): seen.update({key: args[0]})  # noqa: E731
            handles.append(block.get_submodule(name).register_forward_pre_hook(keep))
    with torch.inference_mode():
        model(input_ids=ids[None])
    values = oracle_k3.reference(model, ids.tolist())
    for (layer, name), tensor in seen.items():
        mix = "attention_mix" if name == "input_layernorm" else "mlp_mix"
        close(tensor[0], values[f"layers.{mix}"][layer])
        weights = values[f"layers.{mix}_weights"][layer]
        torch.testing.assert_close(weights.nansum(1), torch.ones(9).double())
        stored = layer // 2 + (mix == "mlp_mix" or layer % 2)
        assert weights.isnan().sum(1).unique().tolist() == [3 - stored]


def test_the_stored_sums_of_k3_are_block_inputs_where_groups_start():
    values = oracle_k3.reference(build.k3_model(), ids_of(5).tolist())
    inputs, running = values["layers.layer_input"], values["layers.layer_output"][5]
    expected = torch.stack([inputs[0], inputs[2], inputs[4], running], 1)
    assert torch.equal(values["model.stored_sums"][None], expected)
    mixed = (values["model.output_mix_weights"][None][..., None] * expected).sum(1)
    torch.testing.assert_close(mixed, values["model.output_mix"][None])


def test_padding_changes_nothing_in_the_stand_ins(model):
    ids = ids_of(14).view(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask).logits
    values = oracle_k3.reference(model, ids[0, 4:].tolist())
    close(logits[0, 4:], values["model.logits"][None])


def test_generate_uses_the_models_own_cache(model):
    ids = ids_of(6)
    with torch.inference_mode():
        found = model.generate(input_ids=ids[None], attention_mask=torch.ones(1, 6).long(), max_new_tokens=4,
                               do_sample=False, eos_token_id=None)  # fmt: skip
        again = model(input_ids=found[:, :-1]).logits[0, 5:].argmax(-1)
    assert torch.equal(found[0, 6:], again)


def test_the_parts_of_k3_that_hooks_cannot_reach_are_as_in_the_release():
    text = build.k3_model().language_model
    block = text.model.layers[1]
    assert block.self_attn.A_log.numel() > block.self_attn.num_heads
    assert build.k3_model(attention="eager").config.text_config._attn_implementation == "eager"
    called = []
    for name in ("self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj"):
        block.get_submodule(name).register_forward_hook(lambda *_: called.append(1))
    text(input_ids=ids_of(4)[None])
    assert not called
