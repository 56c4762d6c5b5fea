"""What a run leaves behind about itself, and what a resume holds it to."""

import json
import shutil

import numpy as np
import pytest
import torch

from kimicap import open as open_capture
from kimicap import records, store
from kimicap.arrays import set_attributes
from kimicap.config import load_settings
from kimicap.errors import MismatchError, UsageError
from kimicap.prepare import prepare
from kimicap.run import run
from kimicap.verify import restore, verify
from tests.models import need_kimi_linear, save_config, save_model, tiny_model
from tests.stored import prepared

SCHEMA = """
values:
  linear_attn:
    gated_read_out: {layout: [position, head, value_dim], dtype: computed, about: %s}
families:
  kimi_linear:
    sites:
      kda:
        gated_read_out: {output: o_norm, axes: [batch, position, head, value_dim]}
"""

need_kimi_linear()


@pytest.fixture
def settings(tmp_path):
    save_config(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("hello", "world, hello")))

    def make(**given):
        common = {
            "model": str(tmp_path / "model"),
            "random_weights": True,
            "dataset": str(tmp_path / "rows.jsonl"),
            "tokenizer": "bytes",
            "out": str(tmp_path / "out.zarr"),
        }
        return load_settings(None, {**common, **given})

    return make


def test_a_schema_file_that_changed_is_not_resumed(settings, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(SCHEMA % "What the gated norm returns.")
    given = settings(values=["gated_read_out", "linear_attn.attention_premix"], schema=str(file))
    list(run(prepare(given)))
    group = open_capture(tmp_path / "out.zarr")["linear_attn"]
    assert group["gated_read_out"].equals(group["attention_premix"])
    list(run(prepare(given), resume=True))
    file.write_text(SCHEMA % "Something else.")
    with pytest.raises(MismatchError, match="the schema file has changed"):
        list(run(prepare(given), resume=True))


@pytest.mark.parametrize(
    ("at", "changed"),
    [
        ("layers/layer_mid", {"shape": [6, 2, 13, 64]}),
        ("layers/layer_mid", {"dimension_names": ["layer", "sequence", "position", "channel"]}),
        ("layers/layer_mid", {"data_type": "float16"}),
        ("layers/layer_mid", None),
        ("layers/other", {}),
    ],
    ids=["shape", "dimensions", "dtype", "missing", "unknown"],
)
def test_arrays_that_are_not_the_planned_ones_are_not_resumed(settings, tmp_path, at, changed):
    """As where another version of kimicap began the capture."""
    given = settings(values=["layer_mid"])
    list(run(prepare(given)))
    out = tmp_path / "out.zarr"
    record, root = records.read_run(out)
    arrays = root["consolidated_metadata"]["metadata"]
    if changed is None:
        del arrays[at]
    else:
        arrays[at] = {**arrays["layers/layer_mid"], **changed}
    blocks = shutil.move(out / ".kimicap", tmp_path / "before") / "blocks"
    records.write_run(out, record, root)
    shutil.copytree(blocks, out / ".kimicap/blocks", dirs_exist_ok=True)
    with pytest.raises(MismatchError) as failure:
        list(run(prepare(given), resume=True))
    told = str(failure.value)
    assert told.startswith(f"The array {at} of {tmp_path / 'out.zarr'} is ")
    assert told.endswith("is planned; resume with the version of kimicap that began the capture, or begin another.")


@pytest.mark.parametrize("name", ["zarr.json", "layers/layer_mid/zarr.json"])
def test_nothing_is_written_on_damaged_metadata(settings, tmp_path, name):
    given = settings(values=["layer_mid"])
    list(run(prepare(given)))
    out = tmp_path / "out.zarr"
    records.drop_blocks(out, [0])
    set_attributes(out, {"complete": False})
    (out / name).write_text((out / name).read_text().replace('"float32"', '"float16"'))
    before = sorted(out.rglob("*"))
    with pytest.raises(MismatchError, match=r"is damaged .*Write it again with kimicap verify --repair"):
        list(run(prepare(given), resume=True))
    assert sorted(out.rglob("*")) == before
    assert restore(out) == [name]
    list(run(prepare(given), resume=True))
    assert verify(out) == []


@pytest.mark.parametrize("codec", ["lz4", "zstd", "none"])
def test_chunks_are_packed_by_the_codec_asked_for(settings, tmp_path, codec):
    list(run(prepare(settings(values=["residuals", "expert_indices"], codec=codec))))
    for path in ("layers/layer_output", "mlp/expert_indices", "input_ids"):
        metadata = json.loads((tmp_path / "out.zarr" / path / "zarr.json").read_text())
        (sharding,) = metadata["codecs"]
        names = [
            step.get("configuration", {}).get("cname", step["name"]) for step in sharding["configuration"]["codecs"]
        ]
        assert names == ["bytes", *([] if codec == "none" else [codec]), "crc32c"]


def large_token(model):
    """Token 9, whose size goes on through the residual stream."""
    model.model.embed_tokens.weight[9] *= 1e6


def large_logits(model):
    model.lm_head.weight[:] *= 1e6


@pytest.mark.parametrize(
    ("spoil", "values", "place", "committed"),
    [
        (large_token, "residuals@layers:2-3", "layers.layer_output of block 2", [0]),
        (large_logits, "logits", "model.logits", []),
    ],
)
def test_values_beyond_float16_end_the_run_and_their_block_does_not_count(tmp_path, spoil, values, place, committed):
    model = tiny_model()
    with torch.no_grad():
        spoil(model)
    plan = prepared(tmp_path, model, [[5, 6, 7], [8, 9, 7]], [values], block_sequences=1, store_dtype="float16")
    with pytest.raises(UsageError) as failure:
        list(run(plan))
    assert str(failure.value) == f"{place} holds values beyond float16; capture it with --store-dtype lossless."
    assert store.info(plan.settings.out)["committed"] == committed
    tree = open_capture(plan.settings.out)
    assert not tree.attrs["complete"]
    assert [number for number, length in enumerate(tree["length"].values) if length >= 0] == committed


def test_every_function_that_ran_is_named(settings, tmp_path):
    list(run(prepare(settings(values=["decays", "patterns", "router_logits"], generate=2))))
    kernels = open_capture(tmp_path / "out.zarr").attrs["kernels"]
    assert "chunk_kimi_delta_attention" in kernels["delta_rule"]
    assert "recurrent_kimi_delta_attention" in kernels["delta_rule"]
    assert kernels["attention"].endswith("sdpa_attention_forward")
    assert kernels["experts"]


def test_elements_that_are_not_finite_are_stored_and_counted_by_value_and_block(settings, tmp_path):
    model = tiny_model(mlp_layer_types=["dense"] * 6)
    with torch.no_grad():
        model.lm_head.weight[7, 0] = torch.nan
        model.lm_head.weight[9] = torch.inf
        model.model.layers[5].self_attn.o_proj.weight[3, 0] = torch.nan
    save_model(tmp_path / "spoilt", model)
    given = settings(model=str(tmp_path / "spoilt"), random_weights=False, values=["logits", "residuals", "patterns"])
    list(run(prepare(given)))
    tree = open_capture(tmp_path / "out.zarr")
    (record,) = [
        json.loads(file.read_text()) for file in sorted((tmp_path / "out.zarr/.kimicap/blocks").glob("*.json"))
    ]
    counts = record["nonfinite"]
    tokens = int(tree["length"].sum())
    real = np.arange(tree.sizes["position"]) < tree["length"].values[:, None]
    assert counts.keys() == {"model.logits", "layers.layer_output"}
    assert counts["model.logits"]["model"] == int((~np.isfinite(tree["logits"].values))[real].sum()) >= 2 * tokens
    last = tree["layers/layer_output"].sel(layer=5).values
    assert counts["layers.layer_output"] == {"5": int((~np.isfinite(last))[real].sum())}


@pytest.mark.parametrize("positions", ["1:2", "every:4", "last", "all"])
def test_selected_queries_of_decoded_rows_are_those_of_the_rows_as_prompts(settings, tmp_path, positions):
    values = [f"{name}@{positions}" for name in ("patterns", "attention_scores", "states")]
    stored = []
    for number, decoding in enumerate(({}, {"generate": 3, "forced": True})):
        given = settings(values=values, out=str(tmp_path / f"{number}.zarr"), **decoding)
        list(run(prepare(given)))
        stored.append(open_capture(given.out))
    for path in ("self_attn/attention_probabilities", "self_attn/attention_scores", "linear_attn/states"):
        prompts, decoded = (tree[path].values for tree in stored)
        np.testing.assert_allclose(decoded, prompts, rtol=1e-4, atol=1e-5, err_msg=path)
