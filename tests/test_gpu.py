"""On a CUDA device: real kernels, pinned slots and the side stream. Skipped, with that reason, where there is none."""

import json

import numpy as np
import pytest
import torch
import xarray

from kimicap import copies, kda
from kimicap.config import load_settings
from kimicap.prepare import prepare
from kimicap.run import run
from tests.capturing import all_values, architecture, capture_decoded, capture_prompts
from tests.compare import assert_close
from tests.models import save_model, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = {"hidden_size": 256, "linear_num_heads": 4, "linear_head_dim": 64, "mlp_layer_types": ["dense"] * 6}
ROWS = [[7, 5, 300, 41, 9, 9, 12], list(range(3, 203)), [11], list(range(100, 170))]


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.bfloat16, **SIZES).cuda()


def test_rows_of_mixed_lengths_equal_each_row_alone(model):
    together = capture_prompts(model, ROWS)
    for number, row in enumerate(ROWS):
        for (key, block, _), expected in capture_prompts(model, [row]).items():
            found = together[key, block, number]
            assert_close(found.cpu(), expected.cpu(), rel=3e-2, rel_max=0.5, name=key, layer=block)


def test_states_follow_the_recurrence_over_the_captured_factors(model):
    names = ["attention_keys", "attention_values", "decays", "betas"]
    wanted = [*(f"linear_attn.{n}" for n in names), "states@all", "state_output"]
    captured = capture_prompts(model, ROWS, wanted)
    for number in range(len(ROWS)):
        for block in (0, 1, 2, 4):
            factors = [captured[f"linear_attn.{name}", block, number][None] for name in names]
            states, _ = kda.replay(*factors)
            found = captured["linear_attn.states", block, number]
            assert_close(found.cpu(), states[0].cpu(), rel=1e-5, name="states", layer=block)
            final = captured["linear_attn.state_output", block, number]
            assert_close(final.cpu(), states[0, -1].cpu(), rel=2e-2, rel_max=0.2, name="state_output", layer=block)


def test_decoding_equals_the_same_tokens_as_one_prompt(model):
    captured, rows = capture_decoded(model, ROWS, tokens=4)
    for number, row in enumerate(rows):
        for (key, block, _), expected in capture_prompts(model, [row]).items():
            if key == "linear_attn.state_input":
                continue
            found = captured[key, block, number]
            assert_close(found.cpu(), expected.cpu(), rel=5e-2, rel_max=0.8, name=key, layer=block)


@pytest.mark.parametrize("part_bytes", [copies.PART_BYTES, 2**12], ids=["parts", "short_parts"])
@pytest.mark.parametrize("mlps", [["dense"] * 6, ["dense", *["sparse"] * 5]], ids=["dense", "mixture"])
def test_stored_arrays_are_what_the_hooks_saw(tmp_path, monkeypatch, mlps, part_bytes):
    # Short parts come one after another as those of large values do.
    monkeypatch.setattr(copies, "PART_BYTES", part_bytes)
    # grouped_mm sums the slots in one order; eager's atomic additions would differ from run to run.
    model = tiny_model(dtype=torch.bfloat16, experts="grouped_mm", **{**SIZES, "mlp_layer_types": mlps})
    save_model(tmp_path / "model", model)
    lines = [json.dumps({"input_ids": row}) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    values = [value for value in all_values(architecture(model)) if "input_ids" not in value and "mask" not in value]
    settings = load_settings(
        None,
        {
            "model": str(tmp_path / "model"),
            "dataset": str(tmp_path / "rows.jsonl"),
            "input_ids_column": "input_ids",
            "values": values,
            "out": str(tmp_path / "out.zarr"),
            "tokenizer": "bytes",
            "batch_size": 4,
            "experts": "grouped_mm",
            "memory": "2GiB",
        },
    )
    list(run(prepare(settings)))
    tree = xarray.open_datatree(tmp_path / "out.zarr", engine="zarr")
    # The batch that kimicap forms: longest first.
    order = sorted(range(len(ROWS)), key=lambda row: (-len(ROWS[row]), row))
    captured = capture_prompts(model.cuda(), [ROWS[row] for row in order], values)
    assert tree.attrs["complete"] is True
    for (key, block, at), expected in captured.items():
        host, name = key.split(".")
        array = tree[name if host == "model" else f"{host}/{name}"]
        stored = array.isel(sequence=order[at])
        stored = stored.values if block is None else stored.sel(layer=block).values
        cut = stored[tuple(slice(size) for size in expected.shape)]
        same = np.array_equal(cut, expected.float().cpu().numpy(), equal_nan=True)
        assert same, f"{key} of block {block}, row {order[at]}"
        rest = np.isnan(stored).sum() if stored.dtype.kind == "f" else (stored == -1).sum()
        assert rest == stored.size - cut.size, key
