"""Sizes and blocks, read off configs of every form, and requests resolved against them."""

import json

import pytest

from kimicap import expressions
from kimicap.architecture import family_of_config, ranges, read_architecture, resolve
from kimicap.errors import UsageError
from kimicap.schema import load_schema
from kimicap.selection import parse_values
from tests.models import KDA, MLA, KimiLinearConfig, need_kimi_linear, save_config, tiny_config

SCHEMA = load_schema()
FAMILY = SCHEMA.families["kimi_linear"]

HUB = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
    "hidden_size": 2304,
    "vocab_size": 163840,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
"""The form in which the 48B checkpoint's config.json is written, whose block numbers count from 1."""

MLA_48B = (3, 7, 11, 15, 19, 23, 26)
KDA_48B = tuple(layer for layer in range(27) if layer not in MLA_48B)
SIZES_48B = {
    "model.hidden": 2304,
    "model.vocab": 163840,
    "layers.hidden": 2304,
    "linear_attn.head": 32,
    "linear_attn.key_dim": 128,
    "linear_attn.value_dim": 128,
    "self_attn.head": 32,
    "self_attn.qk_dim": 192,
    "self_attn.v_dim": 128,
    "self_attn.latent": 512,
    "self_attn.premix": 4096,
    "mlp.expert": 256,
    "mlp.slot": 8,
    "mlp.neuron": 9216,
    "mlp.shared_neuron": 1024,
}


def sizes_of(architecture, keys):
    return {key: architecture.size(*key.split(".")) for key in keys}


def test_the_checkpoints_own_form():
    found = read_architecture(FAMILY, HUB)
    assert found.layers == 27
    assert found.blocks["kda"] == KDA_48B
    assert found.blocks["mla"] == MLA_48B
    assert found.blocks["dense"] == (0,)
    assert found.blocks["mixture"] == tuple(range(1, 27))
    assert found.blocks["block"] == tuple(range(27))
    assert found.blocks["model"] == ()
    assert sizes_of(found, SIZES_48B) == SIZES_48B


def test_transformers_form_of_the_same_model_says_the_same():
    need_kimi_linear()
    config = KimiLinearConfig(**{key: value for key, value in HUB.items() if key not in ("model_type", "auto_map")})
    found, expected = read_architecture(FAMILY, config.to_dict()), read_architecture(FAMILY, HUB)
    assert found.blocks == expected.blocks
    assert sizes_of(found, SIZES_48B) == SIZES_48B


def test_the_form_that_transformers_saves(tmp_path):
    config = json.loads((save_config(tmp_path) / "config.json").read_text())
    found = read_architecture(FAMILY, config)
    assert found.layers == 6
    assert found.blocks["kda"] == (0, 1, 2, 4)
    assert found.blocks["mla"] == (3, 5)
    assert found.blocks["dense"] == (0,)
    assert found.blocks["mixture"] == (1, 2, 3, 4, 5)
    expected = {"linear_attn.head": 2, "linear_attn.key_dim": 16, "self_attn.head": 4, "self_attn.qk_dim": 24}
    expected |= {"self_attn.premix": 64, "mlp.expert": 8, "mlp.slot": 2, "mlp.neuron": 96, "mlp.shared_neuron": 32}
    assert sizes_of(found, expected) == expected


def test_other_names_of_the_same_sizes():
    aliases = {"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"}
    aliases["num_shared_experts"] = "n_shared_experts"
    renamed = {aliases.get(key, key): value for key, value in HUB.items()}
    assert sizes_of(read_architecture(FAMILY, renamed), SIZES_48B) == SIZES_48B


@pytest.mark.parametrize(("kind", "part", "other"), [(KDA, "kda", "mla"), (MLA, "mla", "kda")])
def test_models_of_one_kind_of_mixer(kind, part, other):
    config = tiny_config(layer_types=[kind] * 6, mlp_layer_types=["sparse"] * 6).to_dict()
    found = read_architecture(FAMILY, config)
    assert found.blocks[part] == tuple(range(6))
    assert found.blocks[other] == found.blocks["dense"] == ()
    missing = SCHEMA.values["self_attn.attention_probabilities" if part == "kda" else "linear_attn.states"]
    assert found.why_missing(missing) == f"no block of this model has a part of the kind {other}"
    with pytest.raises(UsageError) as failure:
        resolve(found, parse_values([missing.key], SCHEMA))
    assert str(failure.value) == (
        f"This model has no {missing.key}: no block of this model has a part of the kind {other}. "
        "`kimicap values --model ...` lists what it has."
    )


@pytest.mark.parametrize(
    ("key", "missing"),
    [
        ("hidden_size", "hidden_size"),
        ("num_hidden_layers", "num_hidden_layers"),
        ("num_experts", "num_experts or num_local_experts"),
        ("linear_attn_config", "linear_attn_config.num_heads or linear_num_heads|layer_types or linear_attn_config"),
        ("v_head_dim", "v_head_dim"),
        ("first_k_dense_replace", "mlp_layer_types or first_k_dense_replace"),
    ],
)
@pytest.mark.parametrize("null", [True, False])
def test_a_missing_key_is_named(key, missing, null):
    config = {**HUB, key: None} if null else {name: value for name, value in HUB.items() if name != key}
    with pytest.raises(expressions.MissingKey, match=missing):
        read_architecture(FAMILY, config)


def test_lists_that_are_too_short_and_sizes_of_another_kind():
    config = tiny_config().to_dict()
    with pytest.raises(expressions.MissingKey, match="fitting values for layer_types"):
        read_architecture(FAMILY, {**config, "layer_types": [KDA]})
    with pytest.raises(expressions.MissingKey, match="fitting values for qk_nope_head_dim"):
        read_architecture(FAMILY, {**config, "qk_nope_head_dim": "wide"})


def test_a_size_that_the_family_lacks():
    with pytest.raises(UsageError) as failure:
        read_architecture(FAMILY, HUB).size("mlp", "vocabulary")
    assert str(failure.value) == (
        "The family kimi_linear has no size for the dimension vocabulary of mlp; add mlp.vocabulary to its sizes in "
        "the schema."
    )


def test_the_family_of_a_config():
    assert family_of_config(SCHEMA, HUB, code=None, model="m") is FAMILY
    with pytest.raises(UsageError) as failure:
        family_of_config(SCHEMA, {"model_type": "llama"}, code=None, model="some/llama")
    assert str(failure.value).startswith(
        "The model some/llama has model_type 'llama' in transformers' own code, which no family of the schema covers: "
        "kimi_linear (model_type kimi_linear)"
    )
    assert str(failure.value).endswith("Choose a model of one of these, or add a family with --schema.")
    with pytest.raises(UsageError, match=r"model_type None loaded by its checkpoint's own modeling\.py"):
        family_of_config(SCHEMA, {}, code="modeling", model="m")


def wants(*text, layers=None, heads=None):
    found = resolve(read_architecture(FAMILY, HUB), parse_values(text, SCHEMA), layers=layers, heads=heads)
    return {want.value.key: (want.blocks, want.heads) for want in found}


def test_blocks_and_heads_of_requests():
    assert wants("residuals")["layers.layer_output"] == (tuple(range(27)), None)
    assert wants("states", layers="0-3,-2")["linear_attn.states"] == ((0, 1, 2, 25), None)
    assert wants("states@layers:4", layers="0")["linear_attn.states"] == ((4,), None)
    assert wants("patterns@heads:0,-1", heads="5")["self_attn.attention_probabilities"] == (MLA_48B, (0, 31))
    assert wants("betas", "router_logits", heads="5") == {
        "linear_attn.betas": (KDA_48B, (5,)),
        "mlp.router_logits": (tuple(range(1, 27)), None),
    }
    assert wants("logits", layers="0") == {"model.logits": ((), None)}
    assert wants("mlp_output")["mlp.mlp_output"] == (tuple(range(27)), None)
    assert wants("mlp_neurons")["mlp.mlp_neurons"] == ((0,), None)


def test_values_that_every_capture_has_are_passed_over():
    assert list(wants("input_ids", "betas")) == ["linear_attn.betas"]
    with pytest.raises(UsageError, match=r"^input_ids is whole in every capture; drop @last\.$"):
        wants("input_ids@last")


def test_a_bare_name_is_dropped_from_a_host_that_has_none_of_the_layers():
    assert wants("attention_output", layers="0-2") == {"linear_attn.attention_output": ((0, 1, 2), None)}
    assert wants("attention_output@layers:3") == {"self_attn.attention_output": ((3,), None)}
    assert len(wants("attention_output", layers="2-3")) == 2
    with pytest.raises(UsageError):
        wants("linear_attn.attention_output", "self_attn.attention_output", layers="0-2")


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("patterns", {"layers": "0-2"}, "--layers 0-2 holds no self_attn.attention_probabilities; it exists in "),
        ("patterns", {"layers": "0-2"}, "it exists in 3,7,11,15,19,23,26. Choose among these."),
        ("router_logits@layers:0", {}, "router_logits@layers:0 holds no mlp.router_logits; it exists in 1-26."),
        ("residuals", {"layers": "27"}, "--layers 27 lies outside the model, which has 0 to 26."),
        ("betas@heads:32", {}, "betas@heads 32 lies outside the model, which has 0 to 31."),
        ("betas", {"heads": "x"}, "--heads 'x' cannot be read at 'x'"),
        ("logits@top:163841", {}, "logits@top:163841 asks for more than the vocabulary of 163840; choose fewer."),
    ],
)
def test_selections_outside_the_model(text, options, sentence):
    with pytest.raises(UsageError) as failure:
        wants(text, **options)
    assert sentence in str(failure.value)


def test_ranges_are_written_short():
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2,4,6-7"
