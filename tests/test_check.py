"""The checks themselves: an honest model passes them all, and a run keeps what its first batch showed."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import yaml

from kimicap import invariants, outcome, schema_check
from kimicap.check import check_model, run_checks
from kimicap.config import load_settings
from kimicap.errors import CheckError
from kimicap.forwards import Decoding
from kimicap.outcome import Check, merged, refuse_constant
from kimicap.prepare import prepare
from kimicap.run import run
from kimicap.schema import BUILT_IN, load_schema
from tests.capturing import all_values, architecture, wants
from tests.models import save_model, tiny_model

DECODING = Decoding(tokens=4, forced=False, temperature=0.0, seed=0, stop=())


def rows(*lengths):
    random = np.random.default_rng(0)
    return [random.integers(2, 384, length).astype(np.int32) for length in lengths]


def check(model, values=None, *, lengths=(37, 70, 5, 1), **more):
    found = architecture(model)
    wanted = wants(found, values or all_values(found))
    return check_model(model, found, load_schema(), wanted, rows(*lengths), **more)


def capture_of(tmp_path, model, values, **flags):
    save_model(tmp_path / "model", model)
    texts = ["some words " * n for n in (3, 1, 5, 2, 4)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    given = {
        "model": str(tmp_path / "model"),
        "dataset": str(tmp_path / "data.jsonl"),
        "tokenizer": "bytes",
        "values": values,
        "out": str(tmp_path / "out.zarr"),
        "block_sequences": 2,
        "device": "cpu",
        **flags,
    }
    return prepare(load_settings(None, given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_honest_model_passes_every_check(dtype):
    found = check(tiny_model(dtype=dtype), decoding=DECODING)
    assert [one for one in found if not one.passed] == []
    names = {one.name for one in found}
    expected = {one.name for one in invariants.INVARIANTS} - {"latent_slots_add"}
    assert expected | {f"{name} (decoding)" for name in expected} <= names
    assert {"row_alone", "decoded_as_prompt", "hooks_change_nothing", "finite", "varied"} <= names


def test_forced_decoding_and_rows_too_short_for_it():
    found = check(tiny_model(), lengths=(9, 3), decoding=dataclasses.replace(DECODING, forced=True))
    assert all(one.passed for one in found)
    assert any(one.name == "decoded_as_prompt" for one in found)


def test_one_value_brings_the_companions_it_is_checked_against_but_no_checks_of_theirs():
    found = check(tiny_model(), ["linear_attn.states@last"])
    assert {one.name for one in found if one.value == "linear_attn.states"} == {
        *("states_replay", "finite", "varied", "no_row_of_zeros", "row_alone")
    }
    assert {one.value for one in found if one.name in ("finite", "varied", "row_alone")} == {"linear_attn.states"}


def test_identities_hold_only_where_the_family_states_them():
    model = tiny_model()
    found = architecture(model)
    silent = dataclasses.replace(found, family=dataclasses.replace(found.family, invariants=frozenset(), router=None))
    checks = check_model(model, silent, load_schema(), wants(found, ["residuals", "expert_indices"]), rows(9, 4))
    assert not {"mlp_adds", "blocks_chain", "router_chooses"} & {one.name for one in checks}
    assert "row_alone" in {one.name for one in checks}


def test_run_checks_loads_the_model_and_decodes_where_asked(tmp_path):
    prepared = capture_of(tmp_path, tiny_model(), ["residuals", "router_logits", "patterns"], generate=3)
    found = run_checks(prepared)
    assert all(one.passed for one in found)
    assert any(one.name == "decoded_as_prompt" for one in found)
    assert not (tmp_path / "out.zarr").exists()


def test_a_run_checks_its_first_batch_once_and_the_capture_says_so(tmp_path):
    values = ["residuals", "router_logits", "expert_indices", "patterns", "decays"]
    prepared = capture_of(tmp_path, tiny_model(), values)
    assert prepared.plan.blocks == 3
    list(run(prepared))
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "out.zarr").rglob("*0000000?.json"))]
    assert ["checks" in record for record in records] == [True, False, False]
    checks = json.loads((tmp_path / "out.zarr" / "zarr.json").read_text())["attributes"]["checks"]
    assert all(one["passed"] for one in checks)
    names = {one["name"] for one in checks}
    everywhere = {"finite", "varied", "no_row_of_zeros"}
    assert names == everywhere | {"patterns_sum", "decays_not_positive", "indices_in_range", "router_chooses"}


def test_a_run_stops_at_an_array_of_zeros(tmp_path):
    model = tiny_model()
    model.model.layers[2].self_attn.o_proj.weight.zero_()
    with pytest.raises(CheckError) as caught:
        list(run(capture_of(tmp_path, model, ["attention_output"])))
    assert str(caught.value).startswith(
        "linear_attn.attention_output of block 2 holds one value only in the first batch (from 0 to 0 in "
    )
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("generate", [0, 2])
def test_a_run_goes_on_where_values_are_not_finite_and_says_so(tmp_path, generate):
    model = tiny_model()
    model.model.layers[3].mlp.shared_experts.down_proj.weight[0, 0] = math.nan
    list(run(capture_of(tmp_path, model, ["shared_expert_output", "residuals", "patterns"], generate=generate)))
    checks = json.loads((tmp_path / "out.zarr" / "zarr.json").read_text())["attributes"]["checks"]
    failed = {(one["name"], one["value"]): one for one in checks if not one["passed"]}
    assert ("finite", "mlp.shared_expert_output") in failed
    assert failed["finite", "mlp.shared_expert_output"]["block"] in (3, 4, 5)
    assert not any(name == "varied" for name, _ in failed)


def test_one_number_where_it_is_right_is_no_fault():
    """One token attends to itself alone, and one expert of one has all the weight."""
    model = tiny_model(num_experts_per_tok=1)
    found = check(model, ["patterns", "expert_weights", "expert_indices", "expert_outputs"], lengths=(1, 1))
    assert all(one.passed for one in found)


def test_records_merge_to_the_worst_and_numbers_that_json_lacks_become_null():
    good = Check.of("finite", "a.b", 1, 0.0, 0.0, "")
    worse = Check.of("finite", "a.b", 2, math.inf, 0.0, "")
    assert not worse.passed
    assert not Check.of("finite", "a.b", 2, math.nan, 1.0, "").passed
    assert worse.data()["error"] is None
    blocks = {0: {"checks": [good.data()]}, 1: {}, 2: {"checks": [worse.data()]}}
    assert merged(blocks) == [worse.data()]
    refuse_constant([good, worse])
    assert outcome.merged({}) == []


def test_the_schema_may_name_only_invariants_that_there_are(tmp_path):
    assert set(schema_check.INVARIANTS) == {one.name for one in invariants.INVARIANTS if one.stated}
    tree = yaml.safe_load(BUILT_IN.read_text())
    family = tree["families"]["kimi_linear"]
    family["invariants"] = ["mixer_add"]
    family["router"] = {**family["router"], "part": "mixtur", "scaling": "2 +"}
    problems = schema_check.problems_of(tree)
    assert problems[0].startswith(
        "families.kimi_linear.invariants.0: no invariant is called 'mixer_add'; did you mean mixer_adds"
    )
    assert problems[1] == "families.kimi_linear.router.part: no part is called 'mixtur'; did you mean mixture?"
    assert problems[2].startswith("families.kimi_linear.router.scaling: cannot be read")
    del family["router"]["bias"]
    assert "families.kimi_linear.router.bias: missing" in schema_check.problems_of(tree)
