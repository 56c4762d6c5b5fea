"""Whole runs of models that bring their own code: found by their config, loaded, captured, sealed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from transformers import AutoModelForCausalLM

from kimicap.architecture import family_of_config, read_architecture
from kimicap.check import check_model
from kimicap.config import load_settings
from kimicap.errors import UsageError
from kimicap.forwards import Decoding
from kimicap.models import load_model, own_code
from kimicap.notebook import capture
from kimicap.prepare import prepare
from kimicap.run import run
from kimicap.schema import load_schema
from tests.capturing import all_values, architecture, wants
from tests.compare import assert_close
from tests.oracle_k3 import reference
from tests.standins.build import k3_model, remote_model, save_with_code

MODELS = {
    "whole": (k3_model, {}, "kimi_k3"),
    "alone": (k3_model, {"alone": True}, "kimi_k3"),
    "remote": (remote_model, {}, "kimi_linear_remote"),
}
VALUES = ["residuals", "states@all", "router_logits", "patterns", "expert_outputs"]
K3_VALUES = ["attention_mix_weights", "stored_sums", "output_gate", "routed_latent", "mlp_mix"]


def settings(folder, tmp_path, values, **more):
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": "kimi " * n}) for n in (1, 3)))
    flags = {"model": str(folder), "dataset": str(data), "tokenizer": "bytes", "values": values,
             "out": str(tmp_path / "out.zarr"), "trust_remote_code": True, "device": "cpu"}  # fmt: skip
    return load_settings(None, {**flags, **more})


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("generate", [0, 2])
def test_a_run_stores_what_the_oracle_says(kind, generate, tmp_path):
    build, options, family = MODELS[kind]
    model = build(**options)
    folder = save_with_code(tmp_path / f"checkpoint_{kind}", model)
    values = [*VALUES, *(K3_VALUES if family == "kimi_k3" else [])]
    prepared = prepare(settings(folder, tmp_path, values, generate=generate))
    assert prepared.architecture.family.name == family
    for _ in run(prepared):
        pass
    tree = xarray.open_datatree(prepared.settings.out, engine="zarr")
    assert tree.attrs["complete"]
    blocks = (tmp_path / "out.zarr/.kimicap/blocks").glob("*.json")
    assert not any("nonfinite" in json.loads(block.read_text()) for block in blocks)
    for row in range(2):
        length = int(tree["length"][row])
        expected = reference(model, tree["input_ids"][row, :length].values.tolist())
        for key, name in {
            "layers.layer_output": "layers/layer_output",
            "linear_attn.states": "linear_attn/states",
        }.items():
            for at, block in enumerate(tree[name].layer.values.tolist()):
                found = tree[name].isel(layer=at, sequence=row).values[:length]
                assert_close(found, expected[key][block], rel=2e-4, name=key, layer=block)
        if family == "kimi_k3":
            weights = tree["layers/attention_mix_weights"][:, row, :length].values
            assert np.allclose(np.nansum(weights, -1), 1, atol=1e-6)
            assert_close(tree["stored_sums"][row, :length].values, expected["model.stored_sums"][None], rel=2e-4)
            assert tree["mlp/expert_outputs"].dims == ("layer", "sequence", "position", "slot", "latent")
            assert "where a group of blocks starts" in tree["layers/layer_output"].attrs["long_name"]


@pytest.mark.parametrize("kind", ["whole", "remote"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_check_passes(kind, dtype):
    build, options, family = MODELS[kind]
    model = build(dtype=dtype, **options)
    found, schema = architecture(model, family), load_schema()
    tokens = [np.arange(3, 3 + length) for length in (20, 7, 1)]
    decoding = Decoding(tokens=2, forced=False, temperature=0.0, seed=0, stop=())
    checks = check_model(model, found, schema, wants(found, all_values(found)), tokens, decoding=decoding)
    assert not [check for check in checks if not check.passed]
    assert {"latent_slots_add" if kind == "whole" else "mixer_adds", "router_chooses"} <= {c.name for c in checks}


def test_the_release_is_known_by_its_config():
    schema = load_schema()
    config = {"model_type": "kimi_k3"}
    assert family_of_config(schema, config, code="modeling_kimi_k3", model="m").name == "kimi_k3"
    config = {"model_type": "kimi_linear"}
    assert family_of_config(schema, config, code="modeling_kimi_linear", model="m").name == "kimi_k3"
    assert family_of_config(schema, config, code="modeling_kimi", model="m").name == "kimi_linear_remote"
    assert family_of_config(schema, config, code=None, model="m").name == "kimi_linear"


def test_the_release_has_the_sizes_of_its_config():
    config = json.loads((Path(__file__).parent / "data" / "kimi-k3-config.json").read_text())
    schema = load_schema()
    found = read_architecture(schema.families["kimi_k3"], config)
    assert (found.layers, len(found.blocks["kda"]), len(found.blocks["mla"])) == (93, 69, 24)
    assert (found.blocks["dense"], found.blocks["mla"][-2:]) == ((0,), (91, 92))
    sizes = {"model.hidden": 7168, "model.source": 9, "linear_attn.head": 96, "self_attn.qk_dim": 192,
             "self_attn.v_dim": 128, "self_attn.query_latent_dim": 1536, "mlp.latent": 3584, "mlp.expert": 896,
             "mlp.slot": 16}  # fmt: skip
    assert {key: found.size(*key.split(".")) for key in sizes} == sizes
    assert [key for key, value in schema.values.items() if found.why_missing(value)] == []


@pytest.mark.parametrize("kind", MODELS)
def test_a_notebook_captures_from_a_loaded_model(kind, tmp_path):
    build, options, _ = MODELS[kind]
    folder = save_with_code(tmp_path / f"notebook_{kind}", build(**options))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    model.config._attn_implementation = "eager"
    with torch.inference_mode(), capture(model, ["residuals", "decays"]) as captured:
        model(input_ids=torch.tensor([[5, 6, 7]]))
    expected = reference(model, [5, 6, 7])
    for block, found in captured["residuals"].items():
        assert_close(found[0], expected["layers.layer_output"][block], rel=2e-4)
    assert captured["decays"].keys() == expected["linear_attn.decays"].keys()


def test_the_file_with_the_code_is_read_off_the_config(tmp_path):
    config = {"auto_map": {"AutoModelForCausalLM": "someone/kimi--modeling_kimi.KimiLinearForCausalLM"}}
    trusting = settings(tmp_path, tmp_path, ["residuals"])
    assert own_code(trusting, config) == "modeling_kimi"
    assert own_code(trusting.model_copy(update={"trust_remote_code": False}), config) is None


def test_code_that_no_family_covers_is_named():
    with pytest.raises(UsageError, match=r"loaded by its checkpoint's own modeling_other\.py, which no family"):
        family_of_config(load_schema(), {"model_type": "kimi_linear"}, code="modeling_other", model="m")


@pytest.mark.parametrize(("asked", "found"), [(None, "eager"), ("sdpa", "sdpa")])
def test_attention_is_what_was_asked_for_although_the_code_forces_another(asked, found, tmp_path):
    folder = save_with_code(tmp_path / f"checkpoint_{found}", k3_model())
    prepared = prepare(settings(folder, tmp_path, ["residuals"], attention=asked))
    model = load_model(prepared.settings, prepared.architecture)
    assert model.language_model.config._attn_implementation == found
    with torch.inference_mode():
        assert model(input_ids=torch.tensor([[5, 6]])).logits.isfinite().all()
