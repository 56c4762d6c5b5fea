"""What lies on disk after whole runs, against the oracle of each row alone: any batch, packed, split, decoded."""

import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
import zarr
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from kimicap import grid
from kimicap.documents import plan_document
from kimicap.errors import RoomError, UsageError
from kimicap.events import Committed
from kimicap.run import run
from kimicap.schema import load_schema
from tests import properties
from tests.capturing import all_values, architecture, capture_prompts
from tests.compare import assert_close
from tests.models import KDA, build_model, tiny_model
from tests.oracle import reference
from tests.stored import captured, check_frame, check_rows, check_sequence, has, prepared

ROWS = [[2, 5, 300, 41, 9, 9, 1], list(range(3, 90)), [11], [2, *range(100, 117)]]
LONG = [[2, *range(20, 60)], [7, 1], list(range(100, 133))]
WINDOW = 16
SELECTIONS = ("", "@all", "@last", "@every:3", "@0:5", "@2:9")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Every value of mixed lengths, in two blocks of sequences."""
    folder = tmp_path_factory.mktemp("whole")
    plan = prepared(folder, model, ROWS, all_values(architecture(model)), block_sequences=2)
    for _ in run(plan):
        pass
    return plan


@pytest.fixture(scope="module")
def tree(whole):
    return xarray.open_datatree(whole.settings.out, engine="zarr")


def test_every_value_is_stored_as_each_row_alone_has_it(model, tree):
    keys = {key.removesuffix("@all").replace("model.", "").replace(".", "/") for key in all_values(architecture(model))}
    assert all(has(tree, path) for path in keys)
    assert check_rows(model, tree, ROWS) > 500
    assert tree["linear_attn/state_input"].isnull().all()


def test_planned_bytes_are_written_bytes_for_every_value(whole):
    group = zarr.open_group(whole.settings.out, mode="r")
    coordinates = {found.path for found in whole.plan.coordinates}
    written = {path: array.nbytes for path, array in group.members(max_depth=None) if isinstance(array, zarr.Array)}
    assert {path: size for path, size in written.items() if path not in coordinates} == {
        array.path: array.nbytes for array in whole.plan.arrays
    }
    assert whole.plan.nbytes == sum(array.nbytes for array in whole.plan.arrays)


@pytest.mark.parametrize("lengths", [(12, 12, 12, 12, 12), (12, 7, 2, 40, 1, 1)], ids=["of one length", "mixed"])
def test_planned_files_are_written_files_but_for_those_of_fill_alone(model, tmp_path, monkeypatch, lengths):
    monkeypatch.setitem(grid.plan_grid.__kwdefaults__, "target_bytes", 2**12)  # many shards an array, as at real sizes
    values = ["residuals", "states@every:4", "patterns", "logits@last", "expert_indices", "final_norm_output@2:6"]
    values += ["mlp_neurons"]  # of the dense block alone, on an axis of layers that mixtures share
    plan = prepared(tmp_path, model, [[2] * length for length in lengths], values, block_sequences=2)
    for _ in run(plan):
        pass
    written = {}
    for array in plan_document(plan)["arrays"]:
        path = Path(plan.settings.out, array["path"])
        written[array["path"]] = len(list(path.glob("c.*")))
        data, fill = zarr.open_array(path, mode="r"), layout_of(plan, array["path"]).fill
        corners = product(*(range(0, size, step) for size, step in zip(array["shape"], array["shard"], strict=True)))
        regions = [tuple(map(slice, at, np.add(at, array["shard"]))) for at in corners]
        full = sum(not np.array_equal(data[at], np.full_like(data[at], fill), equal_nan=True) for at in regions)
        assert written[array["path"]] == full <= array["files"], array["path"]
        assert (array["files"] < len(regions)) == (array["path"] == "mlp/mlp_neurons"), array["path"]
        assert full == array["files"] or len(set(lengths)) > 1, array["path"]
    assert max(written.values()) > 10
    assert sum(written.values()) <= plan.plan.files == sum(a["files"] for a in plan_document(plan)["arrays"])
    assert sum(written.values()) == plan.plan.files or len(set(lengths)) > 1


def layout_of(plan, path):
    return next(array for array in plan.plan.arrays if array.path == path)


def test_weights_of_the_chosen_experts_sum_to_the_scaling_factor(model, tree):
    weights = tree["mlp/expert_weights"].sel(layer=[1, 2, 3, 4, 5]).sum("slot", skipna=False).values
    weights = weights[:, tree["attention_mask"].values]
    assert model.config.routed_scaling_factor == pytest.approx(2.446)
    np.testing.assert_allclose(weights, 2.446, rtol=1e-6)
    assert weights.size == 5 * sum(map(len, ROWS))


def test_stored_router_logits_choose_the_stored_experts(model, tree):
    """The router computes its logits and throws them away; kept in float32, they choose the same experts."""
    logits = torch.from_numpy(tree["mlp/router_logits"].values)
    assert tree["mlp/router_logits"].attrs["source_dtype"] == "float32"
    for at, block in enumerate(tree["mlp"].layer.values):
        if block == 0:
            assert logits[at].isnan().all()
            continue
        bias = model.model.layers[block].mlp.gate.e_score_correction_bias
        mask = tree["attention_mask"].values
        best = (logits[at][mask].sigmoid() + bias).topk(2).indices.sort().values
        assert torch.equal(best, torch.from_numpy(tree["mlp/expert_indices"].values[at][mask]).long().sort().values)


def test_the_first_token_is_position_0_and_special_tokens_are_marked(model, tree):
    assert tree["input_ids"].values[:, 0].tolist() == [row[0] for row in ROWS]
    assert tree["position"].values[0] == 0
    special = tree["special_tokens_mask"].values
    assert [np.flatnonzero(row).tolist() for row in special] == [[0, 6], [], [], [0]]  # the tokenizer's 0, 1 and 2
    embeddings = model.model.embed_tokens.weight[[row[0] for row in ROWS]].numpy()
    np.testing.assert_array_equal(tree["layers/layer_input"].sel(layer=0).values[:, 0], embeddings)


def test_the_capture_says_which_kernels_ran(tree):
    kernels = tree.attrs["kernels"]
    assert kernels["delta_rule"].endswith("chunk_kimi_delta_attention")
    assert kernels["attention"].endswith("sdpa_attention_forward")
    assert kernels["experts"] in ("eager", "batched_mm", "grouped_mm")


def test_reading_needs_nothing_of_kimicap(whole, tree):
    """Plain xarray, in a process in which kimicap cannot be imported."""
    script = """
import sys
from pathlib import Path
sys.modules["kimicap"] = None
import numpy as np, xarray
tree = xarray.open_datatree(sys.argv[1], engine="zarr")
assert tree.attrs["complete"]
logits = tree["mlp/router_logits"].sel(layer=3)
assert logits.dims == ("sequence", "position", "expert")
length = int(tree["length"][1])
one = logits.isel(sequence=1)
assert np.isfinite(one[:length]).all() and one[length:].isnull().all()
assert xarray.open_zarr(sys.argv[1], group="linear_attn").states.dims[2] == "states_position"
print(float(one[:length].sum()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, whole.settings.out], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = tree["mlp/router_logits"].sel(layer=3).isel(sequence=1)[: len(ROWS[1])].sum()
    assert float(done.stdout) == pytest.approx(float(expected), rel=1e-4)


def test_an_unfinished_capture_can_be_told_and_its_committed_part_read(model, tmp_path):
    values = ["residuals", "states@last"]
    ready = prepared(tmp_path, model, ROWS, values, block_sequences=2)
    events = run(ready)
    committed = next(event.block for event in events if type(event).__name__ == "Committed")
    events.close()
    tree = xarray.open_datatree(ready.settings.out, engine="zarr")
    assert tree.attrs["complete"] is False
    there = [2 * committed, 2 * committed + 1]
    assert np.flatnonzero(tree["length"].values >= 0).tolist() == there
    for sequence in there:
        assert check_sequence(model, tree, sequence, reference(model, ROWS[sequence])) == 6 + 4
    assert len(there) < len(ROWS)


def test_packed_windows(model, tmp_path):
    """A window is one sequence to the model; documents and special tokens inside it are marked."""
    tree = captured(tmp_path, model, LONG, all_values(architecture(model)), pack=True, seq_len=WINDOW)
    run_of = [token for row in LONG for token in row]
    windows = [run_of[at : at + WINDOW] for at in range(0, len(run_of), WINDOW)]
    assert check_rows(model, tree, windows) > 500
    documents = [number for number, row in enumerate(LONG) for _ in row]
    mask = tree["attention_mask"].values
    assert tree["document"].values[mask].tolist() == documents
    assert (tree["document"].values[~mask] == -1).all()
    assert tree["special_tokens_mask"].values[mask].tolist() == [token < 3 for token in run_of]
    assert np.flatnonzero(tree["special_tokens_mask"].values[2]).tolist() == [42 - 32]  # the end inside a window


def windows_of(rows):
    return [(number, at, row[at : at + WINDOW]) for number, row in enumerate(rows) for at in range(0, len(row), WINDOW)]


def test_long_rows_go_on_afresh(model, tmp_path):
    tree = captured(tmp_path, model, LONG, all_values(architecture(model)), split_long="fresh", seq_len=WINDOW)
    assert tree["row"].values.tolist() == [number for number, _, _ in windows_of(LONG)]
    assert check_rows(model, tree, [window for _, _, window in windows_of(LONG)]) > 500
    assert tree["linear_attn/state_input"].isnull().all()


def test_long_rows_go_on_with_their_state(model, tmp_path):
    values = [key for key in all_values(architecture(model)) if not key.endswith(("_scores", "_probabilities"))]
    tree = captured(tmp_path, model, LONG, values, split_long="continue", seq_len=WINDOW, block_sequences=3)
    check_frame(tree, [window for _, _, window in windows_of(LONG)])
    compared = 0
    for sequence, (number, first, window) in enumerate(windows_of(LONG)):
        expected = reference(model, LONG[number][: first + len(window)])
        compared += check_sequence(model, tree, sequence, expected, first=first)
        entering = tree["linear_attn/state_input"][:, sequence]
        if first == 0:
            assert entering.isnull().all()
            continue
        for at, block in enumerate(tree["linear_attn"].layer.values.tolist()):
            states = expected["linear_attn.states"][block]
            assert_close(entering.values[at], states[first - 1], rel=1e-4, name="state_input", layer=block)
    assert compared > 500


@pytest.mark.parametrize("forced", [False, True])
def test_decoded_tokens(model, tmp_path, forced):
    rows = [ROWS[0], ROWS[3]]
    values = all_values(architecture(model))
    tree = captured(tmp_path, model, rows, values, generate=3, forced=forced, block_sequences=2)
    stored = [tree["input_ids"].values[at, : int(tree["length"][at])].tolist() for at in range(2)]
    prompts = [len(row) - 3 if forced else len(row) for row in rows]
    assert [row[:length] for row, length in zip(stored, prompts, strict=True)] == [
        row[:length] for row, length in zip(rows, prompts, strict=True)
    ]
    assert not forced or stored == rows
    assert check_rows(model, tree, stored) > 250
    for at, length in enumerate(prompts):
        assert np.flatnonzero(tree["generated"].values[at]).tolist() == list(range(length, len(stored[at])))


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_expert_outputs_under_every_implementation(model, tmp_path, experts):
    values = ["expert_outputs", "expert_indices", "routed_output", "expert_weights"]
    tree = captured(tmp_path, model, ROWS[:1], values, experts=experts)
    assert tree.attrs["kernels"]["experts"] == experts
    assert check_rows(model, tree, ROWS[:1]) == 5 * 4
    gap = tree["mlp/expert_outputs"].sum("slot", skipna=False) - tree["mlp/routed_output"]
    assert abs(gap).max() < 1e-5


@st.composite
def requests(draw, model):
    """Some values of a model, each with a selection of positions and heads that it has."""
    values = load_schema().values
    keys = [key.removesuffix("@all") for key in all_values(architecture(model))]
    keys = [key for key in keys if key not in ("model.input_ids", "model.attention_mask")]
    asked = []
    for key in draw(st.lists(st.sampled_from(keys), min_size=1, max_size=8, unique=True)):
        layout, text = values[key].layout, key
        # The model does not define the order of the slots: all of them are asked for, with the indices that tell it.
        if {"position", "query"} & set(layout) and "slot" not in layout:
            text += draw(st.sampled_from(SELECTIONS))
        asked.append(text + ("@heads:-1" if "head" in layout and draw(st.booleans()) else ""))
    if any("slot" in values[text].layout for text in asked if text in values):
        asked = list(dict.fromkeys([*asked, "mlp.expert_indices"]))
    return asked


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_model_any_rows_any_selection(data, tmp_path_factory):
    """Lengths, batches, blocks, selections and sizes are drawn; everything between dataset and disk takes part."""
    model = build_model(data.draw(properties.configs(most_blocks=3)), attention=data.draw(properties.attentions()))
    rows = data.draw(properties.batches(most=5, longest=24))
    try:
        plan = prepared(
            tmp_path_factory.mktemp("any"),
            model,
            rows,
            data.draw(requests(model)),
            batch_tokens=data.draw(st.sampled_from([1, 30, 1000])),
            block_sequences=data.draw(st.sampled_from([1, 2, 4])),
            experts=data.draw(properties.experts()),
            layers=data.draw(st.sampled_from([None, None, "0", "-1"])),
        )
    except UsageError as error:
        reject_unless(error, "selects nothing", "lies outside", "layers")
        raise
    for _ in run(plan):
        pass
    check_rows(model, xarray.open_datatree(plan.settings.out, engine="zarr"), rows)


def reject_unless(error, *known):
    """What was drawn may select nothing at all; anything else is a failure."""
    if any(text in str(error) for text in known):
        reject()


def test_what_does_not_fit_is_refused_before_the_model_is_loaded(model, tmp_path, monkeypatch):
    plan = prepared(tmp_path, model, ROWS, ["residuals"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=plan.plan.disk_bytes - 1))
    monkeypatch.setattr("kimicap.run.load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(RoomError, match=r"The capture needs about \d+ kB, but \d+ kB are free"):
        next(run(plan))
    assert not (tmp_path / "out.zarr").exists()


def test_only_the_blocks_to_come_must_fit_on_the_disk(model, tmp_path, monkeypatch):
    plan = prepared(tmp_path, model, ROWS, ["residuals"], block_sequences=1)
    events = run(plan)
    assert any(isinstance(event, Committed) for event in events)  # one of the four blocks
    events.close()
    left, usage = plan.plan.disk_bytes * 3 // 4, shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=left - 1))
    with pytest.raises(RoomError, match="The capture needs about"):
        next(run(plan, resume=True))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=left))
    assert sum(isinstance(event, Committed) for event in run(plan, resume=True)) == 3


def test_nothing_in_a_forward_waits_for_the_device(model, monkeypatch):
    """Every call that would make the host wait for a GPU is told, if kimicap makes it while the model runs."""
    called = []

    def told(name):
        original = getattr(torch.Tensor, name)

        def method(self, *args, **more):
            caller = sys._getframe(1).f_code.co_filename
            if "kimicap" in Path(caller).parts[-2:-1]:
                called.append((Path(caller).name, name))
            return original(self, *args, **more)

        monkeypatch.setattr(torch.Tensor, name, method)

    for name in ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        told(name)
    values = [key for key in all_values(architecture(model)) if not key.endswith("@all")]
    capture_prompts(model, ROWS, [*values, "states@every:4"])
    # On a GPU the states come from a kernel; the chunks that stand in for it on a CPU may look at their data.
    assert [call for call in called if not call[0].startswith("kda")] == []


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"generate": 2}, "--generate needs the model's cache, .* attention blocks; leave it out"),
        ({"split_long": "continue", "seq_len": 4}, "--split-long continue needs .*; use --split-long fresh"),
    ],
)
def test_models_without_attention_have_no_cache(tmp_path, flags, text):
    model = tiny_model(num_hidden_layers=2, layer_types=[KDA, KDA], mlp_layer_types=["dense", "sparse"])
    with pytest.raises(UsageError, match=text):
        prepared(tmp_path, model, ROWS, ["residuals"], **flags)
    tree = captured(tmp_path, model, ROWS[:1], ["residuals", "states@last"])
    assert check_rows(model, tree, ROWS[:1]) == 4
