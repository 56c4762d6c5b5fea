"""Plans: names, sizes, bytes, files and memory, at tiny sizes by hand and at the 48B shape within bounds."""

import time
from collections import Counter
from itertools import product
from math import ceil, prod
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicap.architecture import read_architecture, resolve
from kimicap.errors import RoomError, UsageError
from kimicap.plan import forward_group, plan_capture
from kimicap.schema import load_schema
from kimicap.selection import parse_values
from tests.models import tiny_config
from tests.test_architecture import HUB, KDA_48B

SCHEMA = load_schema()
FAMILY = SCHEMA.families["kimi_linear"]
TINY = read_architecture(FAMILY, MappingProxyType(tiny_config().to_dict()))
LARGE = read_architecture(FAMILY, HUB)
EVERYTHING = [value.key for value in SCHEMA.values.values() if FAMILY.sites_of(value)]
AT_TINY = [key for key in EVERYTHING if key != "linear_attn.states"] + ["states@every:4"]
LENGTHS = np.array([5, 9, 3, 9, 7], np.int32)


def plan_of(*text, architecture=TINY, lengths=LENGTHS, layers=None, heads=None, **options):
    wants = resolve(architecture, parse_values(text, SCHEMA), layers=layers, heads=heads)
    return plan_capture(architecture, wants, np.asarray(lengths, np.int32), **options)


def arrays_of(plan):
    return {array.path: array for array in plan.arrays}


def coordinates_of(plan):
    return {coordinate.path: coordinate.data.tolist() for coordinate in plan.coordinates}


TINY_ARRAYS = {
    "layers/layer_output": ("layer sequence position hidden", (6, 5, 9, 64), "float32"),
    "linear_attn/attention_queries": ("layer sequence position head key_dim", (4, 5, 9, 2, 16), "float32"),
    "linear_attn/betas": ("layer sequence position head", (4, 5, 9, 2), "float32"),
    "linear_attn/state_output": ("layer sequence head key_dim value_dim", (4, 5, 2, 16, 16), "float32"),
    "self_attn/attention_queries": ("layer sequence head position qk_dim", (2, 5, 4, 9, 24), "float32"),
    "self_attn/attention_values": ("layer sequence head position v_dim", (2, 5, 4, 9, 16), "float32"),
    "self_attn/kv_latent": ("layer sequence position latent", (2, 5, 9, 32), "float32"),
    "self_attn/attention_premix": ("layer sequence position premix", (2, 5, 9, 64), "float32"),
    "self_attn/attention_probabilities": ("layer sequence head query key", (2, 5, 4, 9, 9), "float32"),
    "mlp/router_logits": ("layer sequence position expert", (6, 5, 9, 8), "float32"),
    "mlp/expert_indices": ("layer sequence position slot", (6, 5, 9, 2), "int16"),
    "mlp/expert_outputs": ("layer sequence position slot hidden", (6, 5, 9, 2, 64), "float32"),
    "mlp/mlp_neurons": ("layer sequence position neuron", (6, 5, 9, 96), "float32"),
    "mlp/shared_mlp_neurons": ("layer sequence position shared_neuron", (6, 5, 9, 32), "float32"),
    "logits": ("sequence position vocab", (5, 9, 384), "float32"),
    "next_token_probs": ("sequence vocab", (5, 384), "float32"),
    "input_ids": ("sequence position", (5, 9), "int32"),
    "attention_mask": ("sequence position", (5, 9), "bool"),
    "special_tokens_mask": ("sequence position", (5, 9), "bool"),
    "length": ("sequence", (5,), "int32"),
    "row": ("sequence", (5,), "int64"),
}


def test_names_sizes_and_dtypes_of_arrays():
    plan = plan_of(*AT_TINY)
    found = {path: (" ".join(a.dims), a.shape, a.dtype) for path, a in arrays_of(plan).items() if path in TINY_ARRAYS}
    assert found == TINY_ARRAYS
    for array in plan.arrays:
        expected = {"float32": "nan", "int16": "-1", "int32": "-1", "int64": "-1", "bool": "False"}[array.dtype]
        assert str(array.fill) == expected, array.path
    assert coordinates_of(plan) == {
        "position": list(range(9)),
        "layers/layer": [0, 1, 2, 3, 4, 5],
        "layers/position": list(range(9)),
        "linear_attn/layer": [0, 1, 2, 4],
        "linear_attn/position": list(range(9)),
        "self_attn/layer": [3, 5],
        "self_attn/position": list(range(9)),
        "mlp/layer": [0, 1, 2, 3, 4, 5],
        "mlp/position": list(range(9)),
    }


def test_layers_of_a_group_are_those_of_its_values():
    assert coordinates_of(plan_of("router_logits"))["mlp/layer"] == [1, 2, 3, 4, 5]
    assert coordinates_of(plan_of("router_logits,mlp_neurons"))["mlp/layer"] == [0, 1, 2, 3, 4, 5]
    assert coordinates_of(plan_of("mlp_output", layers="2,0"))["mlp/layer"] == [0, 2]


def test_selected_positions_get_an_axis_of_their_own():
    plan = plan_of("states@every:2,layer_output@1:4,patterns@last,layer_input")
    arrays = arrays_of(plan)
    states, output = arrays["linear_attn/states"], arrays["layers/layer_output"]
    patterns = arrays["self_attn/attention_probabilities"]
    assert states.dims == ("layer", "sequence", "states_position", "head", "key_dim", "value_dim")
    assert states.shape == (4, 5, 4, 2, 16, 16)
    assert states.attributes["layout"] == ["layer", "sequence", "position", "head", "key_dim", "value_dim"]
    assert states.attributes["positions"] == "every:2"
    assert output.dims == ("layer", "sequence", "layer_output_position", "hidden")
    assert output.shape == (6, 5, 3, 64)
    assert patterns.dims == ("layer", "sequence", "head", "attention_probabilities_position", "key")
    assert patterns.shape == (2, 5, 4, 1, 9)
    assert arrays["layers/layer_input"].dims == ("layer", "sequence", "position", "hidden")
    for path, dim, slots in [
        ("linear_attn/states_at", "states_position", 4),
        ("layers/layer_output_at", "layer_output_position", 3),
        ("self_attn/attention_probabilities_at", "attention_probabilities_position", 1),
    ]:
        at = arrays[path]
        assert (at.dims, at.shape, at.dtype, at.fill) == (("sequence", dim), (5, slots), "int32", -1)


def test_states_at_all_positions_keep_their_own_axis():
    arrays = arrays_of(plan_of("states@all"))
    assert arrays["linear_attn/states"].shape == (4, 5, 9, 2, 16, 16)
    assert arrays["linear_attn/states_at"].shape == (5, 9)


def test_selected_layers_and_heads_get_an_axis_of_their_own_beside_others():
    plan = plan_of("betas@layers:0,4@heads:1,decays", heads="0-1")
    arrays, coordinates = arrays_of(plan), coordinates_of(plan)
    assert arrays["linear_attn/betas"].dims == ("betas_layer", "sequence", "position", "betas_head")
    assert arrays["linear_attn/betas"].shape == (2, 5, 9, 1)
    assert arrays["linear_attn/decays"].dims == ("layer", "sequence", "position", "head", "key_dim")
    assert coordinates["linear_attn/betas_layer"] == [0, 4]
    assert coordinates["linear_attn/layer"] == [0, 1, 2, 4]
    assert coordinates["linear_attn/betas_head"] == [1]
    assert coordinates["linear_attn/head"] == [0, 1]
    alone = plan_of("betas@layers:0,4")
    assert arrays_of(alone)["linear_attn/betas"].dims[0] == "layer"
    assert coordinates_of(alone)["linear_attn/layer"] == [0, 4]


def test_the_largest_of_a_vocabulary():
    arrays = arrays_of(plan_of("logits@top:3@last,lm_head_output@top:2"))
    assert arrays["logits_top"].dims == arrays["logits_top_ids"].dims == ("sequence", "logits_position", "top")
    assert arrays["logits_top"].shape == arrays["logits_top_ids"].shape == (5, 1, 3)
    assert arrays["logits_top_ids"].dtype == "int32"
    assert arrays["logits_at"].dims == ("sequence", "logits_position")
    assert arrays["lm_head_output_top_ids"].dims == ("sequence", "position", "top")
    assert "logits" not in arrays


def test_attributes_of_arrays():
    array = arrays_of(plan_of("router_logits,expert_indices,residuals", model_dtype="bfloat16"))
    assert array["mlp/router_logits"].attributes == {
        "long_name": SCHEMA.values["mlp.router_logits"].about,
        "site": "mixture gate output 0",
        "layout": ["layer", "sequence", "position", "expert"],
        "source_dtype": "float32",
        "positions": "all",
    }
    assert array["layers/layer_output"].attributes["source_dtype"] == "bfloat16"
    assert array["mlp/expert_indices"].attributes["source_dtype"] == "int64"


def test_decoded_and_packed_captures_have_their_marks():
    assert "generated" not in arrays_of(plan_of("betas"))
    decoded = plan_of("betas", generate=4, decodes=True)
    assert arrays_of(decoded)["generated"].shape == (5, 13)
    assert decoded.lengths.tolist() == [9, 13, 7, 13, 11]
    assert arrays_of(plan_of("betas", packed=True))["document"].dtype == "int32"


def test_a_lossy_dtype_narrows_floats_alone():
    dtypes = {path: array.dtype for path, array in arrays_of(plan_of(*AT_TINY, store_dtype="float16")).items()}
    assert dtypes["layers/layer_output"] == dtypes["linear_attn/states"] == "float16"
    assert dtypes["mlp/expert_indices"] == "int16"
    assert dtypes["input_ids"] == "int32"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("states", "states@every:64 selects nothing: the longest sequence has 9 tokens. Choose other positions."),
        ("layer_output@9:12", "layer_output@9:12 selects nothing: the longest sequence has 9 tokens."),
    ],
)
def test_a_selection_that_leaves_nothing(text, sentence):
    with pytest.raises(UsageError) as failure:
        plan_of(text)
    assert sentence in str(failure.value)


def bytes_by_hand(plan):
    sizes = {"float32": 4, "float16": 2, "int16": 2, "int32": 4, "int64": 8, "bool": 1}
    return sum(prod(array.shape) * sizes[array.dtype] for array in plan.arrays)


SMALL = st.lists(st.integers(1, 40), min_size=1, max_size=30)
SELECTIONS = st.sampled_from(
    [
        "residuals",
        "states@last,betas@0:1",
        "states@all,layer_output@last",
        "router_logits,expert_indices@layers:2",
        "patterns,attention_scores@heads:0,1",
        "logits@top:5,next_token_probs",
        "state_output,attention_output",
        ",".join(key for key in EVERYTHING if key != "linear_attn.states"),  # every:64 needs 64 tokens
    ]
)


@given(text=SELECTIONS, lengths=SMALL, block=st.none() | st.integers(1, 9), together=st.integers(1, 9))
def test_bytes_files_and_blocks_of_any_plan(text, lengths, block, together):
    plan = plan_of(text, lengths=lengths, block_sequences=block, together=together)
    assert plan.nbytes == bytes_by_hand(plan)
    assert 0 < plan.disk_bytes <= plan.nbytes
    assert plan.block_sequences == (min(block, len(lengths)) if block else plan.block_sequences)
    assert [i for number in range(plan.blocks) for i in plan.block(number)] == list(range(len(lengths)))
    files = 0
    for array in plan.arrays:
        sequence = array.dims.index("sequence")
        assert plan.block_sequences % array.shard[sequence] == 0, array.path
        assert all(shard % chunk == 0 for shard, chunk in zip(array.shard, array.chunk, strict=True))
        assert len(array.dims) == len(set(array.dims)) == len(array.shape) == len(array.shard)
        layers = next((value.layers for value in plan.values if value.array is array), ())
        known = next((value.want.blocks for value in plan.values if value.array is array), ())
        corners = product(*(range(0, size, extent) for size, extent in zip(array.shape, array.shard, strict=True)))
        files += sum(not layers or bool({*layers[at[0] : at[0] + array.shard[0]]} & {*known}) for at in corners)
    assert plan.files == files
    sizes = {}
    for array in plan.arrays:  # xarray wants one size a dimension, in each group and in the root above it
        folder = array.path.rpartition("/")[0]
        for dim, size in zip(array.dims, array.shape, strict=True):
            assert sizes.setdefault((folder, dim), size) == size, (array.path, dim)
            if folder and dim in ("position", "sequence"):
                assert sizes.setdefault(("", dim), size) == size
    for coordinate in plan.coordinates:
        folder, _, name = coordinate.path.rpartition("/")
        assert sizes.get((folder, name), len(coordinate.data)) == len(coordinate.data)


VALUE_SETS = {
    "residuals": "residuals",
    "routing": "router_logits,expert_indices",
    "final states": "state_output",
    "states": "states@every:64",
    "patterns": "patterns",
    "the readme's": "residuals,states,router_logits,expert_indices",
    "everything": ",".join(EVERYTHING),
}


def full(count, tokens=2048):
    return np.full(count, tokens, np.int32)


@pytest.mark.parametrize("name", VALUE_SETS)
@pytest.mark.parametrize("together", [1, 8, 32])
def test_a_terabyte_is_thousands_of_files(name, together):
    plan = plan_of(
        VALUE_SETS[name], architecture=LARGE, lengths=full(20_000), together=together, model_dtype="bfloat16"
    )
    assert plan.nbytes > 10**11
    assert plan.files / plan.nbytes * 10**12 <= 16_000
    for value in plan.values:
        rows_of_block = value.row_bytes * max(1, len(value.layers)) * plan.block_sequences
        largest = max(512 * 2**20, value.row_bytes if "head" not in value.row_dims else 0)
        assert min(rows_of_block, 60 * 2**20) <= value.array.shard_nbytes <= largest, value.key


def test_expected_bytes_on_disk():
    lengths = full(100, 512)
    lengths[:50] = 256
    tokens = 50 * 256 + 50 * 512

    def values_on_disk(text, **options):
        plan = plan_of(text, architecture=LARGE, lengths=lengths, **options)
        return plan.disk_bytes - sum(array.nbytes for array in plan.frame)

    assert values_on_disk("residuals", model_dtype="float32") == 27 * tokens * 2304 * 4
    assert values_on_disk("residuals", model_dtype="bfloat16") == 27 * tokens * 2304 * 2
    assert values_on_disk("residuals", model_dtype="bfloat16", store_dtype="float16") == 27 * tokens * 2304 * 2
    assert values_on_disk("router_logits", model_dtype="bfloat16") == 26 * tokens * 256 * 4
    assert values_on_disk("states@last") == len(KDA_48B) * 100 * 32 * 128 * 128 * 4
    assert values_on_disk("states@every:256") == len(KDA_48B) * (50 + 100) * 32 * 128 * 128 * 4
    assert values_on_disk("patterns") == 7 * 32 * 50 * (256**2 + 512**2) * 4
    assert values_on_disk("residuals", model_dtype="bfloat16", codec="none") == 27 * 100 * 512 * 2304 * 4


def test_a_plan_of_many_sequences_is_quick():
    lengths = np.random.default_rng(0).integers(1, 2049, 100_000).astype(np.int32)
    lengths[0] = 2048
    start = time.perf_counter()
    plan = plan_of(*EVERYTHING, architecture=LARGE, lengths=lengths, model_dtype="bfloat16")
    assert time.perf_counter() - start < 0.5
    assert plan.disk_bytes < plan.nbytes / 2


def nominal_bytes(plan, size, *, layer_by_layer):
    """Most bytes of slots that are lent at once in a block, by going through it a step at a time.

    Each shard takes a whole slot when its first row comes and gives it back after its last. A step is one block of
    the model for all sequences of a group, or, where a group goes through in forwards of any order, the whole group.
    """
    steps = []
    for first in range(0, plan.block_sequences, size):
        group = range(first, first + size)
        rows = [[(layer, sequence) for sequence in group] for layer in range(27)]
        steps += rows if layer_by_layer else [[row for rows_of_layer in rows for row in rows_of_layer]]
    touched = [[shard for row in step for value in plan.values for shard in shards_of(value, *row)] for step in steps]
    left = Counter(shard for step in touched for shard in step)
    bytes_of = {value.key: min(value.array.shard_nbytes, value.array.nbytes) for value in plan.values}
    lent, held, most = set(), 0, 0
    for step in touched:
        new = set(step) - lent
        lent |= new
        held += sum(bytes_of[shard[0]] for shard in new)
        most = max(most, held)
        left.subtract(step)
        done = {shard for shard in step if not left[shard]}
        lent -= done
        held -= sum(bytes_of[shard[0]] for shard in done)
    assert held == 0
    return most


def shards_of(value, layer, sequence):
    """Keys of the shards that a value's row of a layer and sequence lies in; values of the model come last."""
    if (value.layers and layer not in value.layers) or (not value.layers and layer != 26):
        return []
    at = value.layers.index(layer) // value.shard_layers if value.layers else 0
    heads = 1
    if "head" in value.row_dims:
        axis = value.leading + value.row_dims.index("head")
        heads = ceil(value.array.shape[axis] / value.array.shard[axis])
    return [(value.key, at, sequence // value.shard_sequences, head) for head in range(heads)]


@pytest.mark.parametrize("name", [name for name in VALUE_SETS if name != "everything"])
@pytest.mark.parametrize("count", [3, 500])
@pytest.mark.parametrize(
    ("tokens", "batch_tokens", "block"), [(2048, 16384, None), (300, 1000, 12), (100, 16384, 64), (2048, 2048, 6)]
)
@pytest.mark.parametrize("memory_gib", [2, 8])
@pytest.mark.parametrize("whole", [False, True])
def test_a_group_never_takes_more_memory_than_there_is(name, count, tokens, batch_tokens, block, memory_gib, whole):
    plan = plan_of(
        VALUE_SETS[name],
        architecture=LARGE,
        lengths=full(count, tokens),
        together=max(1, batch_tokens // tokens),
        block_sequences=block,
    )
    memory = memory_gib * 2**30
    try:
        group, may_split = forward_group(plan, batch_tokens=batch_tokens, batch_size=None, memory=memory, whole=whole)
    except RoomError:
        return
    assert plan.block_sequences % group == 0
    assert may_split or not whole or group == 1
    assert nominal_bytes(plan, group, layer_by_layer=not may_split) <= memory
    if not may_split:
        assert group * plan.longest_tokens <= max(batch_tokens, plan.longest_tokens)


def test_what_does_not_fit_is_refused():
    plan = plan_of("patterns,residuals", architecture=LARGE, lengths=full(100))
    with pytest.raises(RoomError) as failure:
        forward_group(plan, batch_tokens=2048, batch_size=None, memory=2**28, whole=False)
    assert str(failure.value) == (
        f"The shards open at once are {least_gb(plan):.3g} GB, more than the 268 MB that --memory has for them; "
        "give more memory, shorter sequences, or fewer values, layers, heads or positions."
    )


def least_gb(plan):
    """Of one sequence a forward: residuals of 8 sequences wait for each other at all layers, patterns do not."""
    residuals = next(value for value in plan.values if value.want.value.name == "layer_output").array
    pattern = next(value for value in plan.values if value.want.value.name == "attention_probabilities").array
    layers = ceil(27 / residuals.shard[0])
    return (layers * residuals.shard_nbytes + 2 * pattern.shard_nbytes) / 1e9


def test_batch_size_bounds_a_group_that_cannot_be_split():
    plan = plan_of("states@every:64", architecture=LARGE, lengths=full(500), together=2)
    group, may_split = forward_group(plan, batch_tokens=16384, batch_size=2, memory=4 * 2**30, whole=False)
    assert (group, may_split) == (2, False)


def test_a_plan_on_arrays_that_exist_keeps_their_shards():
    begun = plan_of("residuals", architecture=LARGE, lengths=full(100), together=8)
    other = plan_of("residuals", architecture=LARGE, lengths=full(100), together=2)
    assert begun.values[0].array.shard != other.values[0].array.shard
    found = other.with_layouts({array.path: array for array in begun.arrays})
    assert found.arrays == begun.arrays


def test_source_dtypes_that_were_seen():
    plan = plan_of("residuals,betas").with_source_dtypes({"linear_attn.betas": "bfloat16"})
    found = {path: array.attributes.get("source_dtype") for path, array in arrays_of(plan).items()}
    assert found["linear_attn/betas"] == "bfloat16"
    assert found["layers/layer_output"] == "float32"
