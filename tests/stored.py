"""Whole captures in this process, from rows of token ids to arrays, and those arrays against the oracle."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray

from kimicap.config import load_settings
from kimicap.prepare import Prepared, prepare
from kimicap.run import run
from kimicap.schema import load_schema
from kimicap.selection import position_axis
from tests.compare import assert_close, same_experts, slots_like
from tests.models import save_model
from tests.oracle import Values, reference

FRAME = ("input_ids", "attention_mask", "special_tokens_mask", "length", "row", "document", "generated")
SLOTTED = ("mlp.expert_indices", "mlp.expert_weights", "mlp.expert_outputs")


def prepared(folder: Path, model: Any, rows: Sequence[Sequence[int]], values: Sequence[str], **more: Any) -> Prepared:
    """A plan for a model, saved in ``folder``, and rows of token ids."""
    shutil.rmtree(folder, ignore_errors=True)
    save_model(folder / "model", model)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"input_ids": list(row)}) for row in rows))
    settings: dict[str, Any] = {
        "model": str(folder / "model"),
        "dataset": str(folder / "rows.jsonl"),
        "input_ids_column": "input_ids",
        "tokenizer": "bytes",
        "values": list(values),
        "out": str(folder / "out.zarr"),
        "device": "cpu",
        **more,
    }
    return prepare(load_settings(None, settings))


def captured(*given: Any, **more: Any) -> xarray.DataTree:
    """A finished capture, as plain xarray opens it; takes what `prepared` takes."""
    plan = prepared(*given, **more)
    for _ in run(plan):
        pass
    return xarray.open_datatree(plan.settings.out, engine="zarr")


def check_sequence(
    model: Any, tree: xarray.DataTree, sequence: int, expected: Values, *, first: int = 0, rel: float = 1e-4
) -> int:
    """Compares every value stored of one sequence with an oracle's values of the row it is part of.

    Args:
        model: The model, for its router's biases.
        tree: The capture.
        sequence: Number of the sequence.
        expected: What the oracle says of a row of tokens, of which the sequence is a part.
        first: Place in that row of the sequence's first token.
        rel: Largest relative error.

    Returns:
        How many arrays, a block each, were compared.
    """
    length, compared = int(tree["length"][sequence]), 0
    for value in load_schema().values.values():
        path = value.name if value.host == "model" else f"{value.host}/{value.name}"
        if value.name in FRAME or value.key == "linear_attn.state_input" or not has(tree, path):
            continue
        array = tree[path].isel(sequence=sequence)
        layer = next((dim for dim in map(str, array.dims) if dim == "layer" or dim.endswith("_layer")), None)
        for at, block in enumerate([None] if layer is None else tree[path][layer].values.tolist()):
            found = torch.from_numpy((array if layer is None else array[at]).values)
            if block not in expected[value.key]:
                assert _empty(found), f"{path} of block {block}, which has no such value"
                continue
            chosen = _chosen(tree, path, value, sequence, length)
            _compare(model, tree, value, (block, sequence), found, expected, chosen=chosen, first=first, rel=rel)
            compared += 1
    return compared


def _chosen(tree: xarray.DataTree, path: str, value: Any, sequence: int, length: int) -> list[int]:
    """Positions of the sequence that the entries along the value's position axis stand for, -1 for none."""
    own = f"{path}_at"
    if has(tree, own):
        return [int(at) for at in tree[own][sequence].values]
    axis = position_axis(value)
    slots = 0 if axis is None else tree[path].sizes[axis]
    return [at if at < length else -1 for at in range(slots)]


def _compare(
    model: Any,
    tree: xarray.DataTree,
    value: Any,
    place: tuple[int | None, int],
    found: torch.Tensor,
    expected: Values,
    *,
    chosen: Sequence[int],
    first: int,
    rel: float,
) -> None:
    block, sequence = place
    wanted = expected[value.key][block]
    layout = list(value.layout)
    stored = tree[value.name if value.host == "model" else f"{value.host}/{value.name}"]
    heads = next((dim for dim in map(str, stored.coords) if dim == "head" or dim.endswith("_head")), None)
    if heads is not None:
        wanted = wanted.index_select(layout.index("head"), torch.tensor(stored[heads].values.tolist()))
    axis = position_axis(value)
    if axis is None:
        assert_close(found, wanted, rel=rel, rel_max=20 * rel, name=value.key, layer=block)
        return
    at = layout.index(axis)
    real = [slot for slot, position in enumerate(chosen) if position >= 0]
    beyond = [slot for slot, position in enumerate(chosen) if position < 0]
    assert _empty(found.index_select(at, torch.tensor(beyond, dtype=torch.long))), f"{value.key} beyond the sequence"
    places = torch.tensor([first + chosen[slot] for slot in real], dtype=torch.long)
    found, wanted = found.index_select(at, torch.tensor(real, dtype=torch.long)), wanted.index_select(at, places)
    if "key" in layout:
        keys = wanted.shape[-1]
        assert _empty(found[..., keys:]), f"{value.key} beyond the keys"
        found = found[..., :keys]
    if value.key in SLOTTED and real:
        logits = expected["mlp.router_logits"][block][places]
        indices = torch.from_numpy(tree["mlp/expert_indices"].sel(layer=block)[sequence].values[: len(real)])
        gate = model.model.layers[block].mlp.gate
        bias, top = gate.e_score_correction_bias, model.config.num_experts_per_tok
        assert same_experts(indices, logits, bias, top, 1e-5), f"{value.key} of block {block}"
        wanted = slots_like(indices, expected["mlp.expert_indices"][block][places], wanted)
    if value.dtype == "index":
        found, wanted = found.long(), wanted.long()
    assert_close(found, wanted, rel=rel, rel_max=20 * rel, name=value.key, layer=block)


def has(tree: xarray.DataTree, path: str) -> bool:
    """Whether an array is in the capture; ``in`` alone looks at the root."""
    group, _, name = path.rpartition("/")
    return (not group or group in tree) and name in (tree[group] if group else tree)


def _empty(found: torch.Tensor) -> bool:
    """Whether all is the fill value."""
    return bool((found.isnan() if found.is_floating_point() else found == -1).all())


def check_frame(tree: xarray.DataTree, rows: Sequence[Sequence[int]]) -> None:
    """Compares tokens, masks and lengths with the sequences that were to be captured."""
    longest = max(map(len, rows))
    assert tree["length"].values.tolist() == [len(row) for row in rows]
    ids = np.full((len(rows), longest), -1, np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    np.testing.assert_array_equal(tree["input_ids"].values, ids)
    np.testing.assert_array_equal(tree["attention_mask"].values, ids >= 0)


def check_rows(model: Any, tree: xarray.DataTree, rows: Sequence[Sequence[int]], **more: Any) -> int:
    """Compares a whole capture with the oracle of each row alone; returns how many arrays were compared."""
    check_frame(tree, rows)
    return sum(check_sequence(model, tree, n, reference(model, list(row)), **more) for n, row in enumerate(rows))
