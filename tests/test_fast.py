"""``--states fast`` of models with their own code: the kernel's states before its chunks, against the exact ones."""

import json

import pytest
import torch
import xarray

from kimicap.config import load_settings
from kimicap.errors import UsageError
from kimicap.prepare import prepare
from kimicap.run import run
from tests.capturing import capture_prompts
from tests.compare import assert_close
from tests.standins import modeling_kimi, modeling_kimi_linear
from tests.standins.build import k3_model, remote_model, save_with_code
from tests.test_k3 import padded

DENSE = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
ROWS = [list(range(3, 131)), list(range(90, 160)), [5] * 30, list(range(200, 264))]
MODELS = {
    "kimi_k3": (k3_model, modeling_kimi_linear),
    "kimi_linear_remote": (remote_model, modeling_kimi),
}


@pytest.fixture(scope="module", params=MODELS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return MODELS[family][0](**DENSE)


def states_of(model, family, rows, **how):
    captured = capture_prompts(model, rows, ["states@every:64", "state_output"], family=family, **how)
    return {place: tensor for place, tensor in captured.items() if place[0] == "linear_attn.states"}


def check_fast(model, family, rows, **how):
    exact, fast = states_of(model, family, rows, **how), states_of(model, family, rows, fast=True, **how)
    assert {(block, row): len(tensor) for (_, block, row), tensor in fast.items()} == {
        (block, row): end for block in (0, 1) for row, end in enumerate([len(ids) // 64 for ids in rows]) if end
    }
    assert fast.keys() == exact.keys()
    for (name, block, row), expected in exact.items():
        found = fast[name, block, row]
        assert_close(found.float(), expected, rel=5e-3, rel_max=0.1, name=name, layer=block)


def test_states_of_mixed_lengths(model, family):
    check_fast(model, family, ROWS)


def test_states_of_one_length(model, family):
    check_fast(model, family, [ROWS[0], ROWS[0][::-1]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_states_where_the_mixer_drops_the_padding(model, family, side):
    for rows in (ROWS, ROWS[1:2]):
        check_fast(model, family, rows, run=padded(side, 3))


def test_states_are_the_kernels_own_in_bfloat16(model, family):
    found = states_of(model, family, ROWS[:2], fast=True)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_states_of_a_prompt_that_is_one_chunk(model, family):
    check_fast(model, family, ROWS[3:])  # Kimi-Linear's own code calls the recurrent kernel for it


def test_a_batch_too_short_for_any_state(model, family):
    assert states_of(model, family, ROWS[2:3], fast=True) == {}


def test_the_model_is_none_the_wiser(model, family):
    ids, seen = torch.tensor([ROWS[0]]), []
    with torch.inference_mode():
        plain = model(input_ids=ids, use_cache=True)

    def through(runner, recorder, tokens):
        runner.prompts(tokens)
        with torch.inference_mode():
            seen.append(model(input_ids=ids, use_cache=True))

    states_of(model, family, ROWS[:1], fast=True, run=through)
    assert torch.equal(seen[0].logits, plain.logits)
    assert torch.equal(seen[0].past_key_values.recurrent_states[0], plain.past_key_values.recurrent_states[0])


def test_a_kernel_that_has_no_such_states_is_named(model, family, monkeypatch):
    modelling = MODELS[family][1]
    kernel = modelling.chunk_kda

    def old(*args, return_intermediate_states=False, **kwargs):
        return kernel(*args, **kwargs)

    monkeypatch.setattr(modelling, "chunk_kda", old)
    with pytest.raises(UsageError, match="--states fast needs flash-linear-attention's kernels"):
        states_of(model, family, ROWS[:1], fast=True)


def test_a_run_stores_them(family, model, tmp_path):
    folder = save_with_code(tmp_path / f"fast_{family}", model)
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": "x" * n}) for n in (130, 20, 70)))
    flags = {"model": str(folder), "dataset": str(data), "tokenizer": "bytes", "values": ["states@every:64"],
             "trust_remote_code": True, "device": "cpu"}  # fmt: skip
    stored = {}
    for states in ("fast", "exact"):
        out = str(tmp_path / f"{states}.zarr")
        for _ in run(prepare(load_settings(None, {**flags, "states": states, "out": out}))):
            pass
        stored[states] = xarray.open_datatree(out, engine="zarr")["linear_attn/states"]
    assert stored["fast"].attrs["source_dtype"] == "bfloat16"
    assert stored["fast"].shape == stored["exact"].shape
    for row, count in enumerate((2, 0, 1)):
        found, expected = (stored[kind][:, row, :count].values for kind in ("fast", "exact"))
        if count:
            assert_close(found, expected, rel=5e-3, rel_max=0.1)
        assert stored["fast"][:, row, count:].isnull().all()
