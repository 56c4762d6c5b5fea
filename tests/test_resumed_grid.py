"""A capture resumed with other batches: its shards stay as they were first cut, and its arrays come out the same."""

import json

import numpy as np
import pytest
import zarr

from kimicap import grid
from kimicap.config import load_settings
from kimicap.events import Committed
from kimicap.prepare import prepare
from kimicap.run import run
from tests.models import save_model

LENGTHS = (20, 12, 20, 7, 20, 20)
VALUES = "residuals,states@every:4,router_logits,patterns@last"


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of some rows, as at real sizes, so that their grid follows the batches."""
    monkeypatch.setitem(grid.plan_grid.__kwdefaults__, "target_bytes", 2**15)


def prepared(folder, out, **flags):
    common = {"model": str(folder / "m"), "dataset": str(folder / "d.jsonl"), "tokenizer": "bytes", "device": "cpu"}
    common |= {"values": VALUES, "out": str(out), "block_sequences": 4}
    return prepare(load_settings(None, {**common, **flags}))


def arrays_of(path):
    group = zarr.open_group(path, mode="r")
    return {name: member for name, member in group.members(max_depth=None) if isinstance(member, zarr.Array)}


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("before", "after"), [(80, 20), (20, 80)])
def test_resumed_with_other_batches(tmp_path, before, after):
    save_model(tmp_path / "m")
    rows = "\n".join(json.dumps({"text": "x" * length}) for length in LENGTHS)
    (tmp_path / "d.jsonl").write_text(rows)

    whole = prepared(tmp_path, tmp_path / "whole.zarr", batch_tokens=before)
    list(run(whole))
    begun = run(prepared(tmp_path, tmp_path / "cut.zarr", batch_tokens=before))
    assert any(isinstance(event, Committed) for event in begun)
    begun.close()
    resumed = prepared(tmp_path, tmp_path / "cut.zarr", batch_tokens=after)
    differ = [
        ours.array.path
        for ours, theirs in zip(resumed.plan.values, whole.plan.values, strict=True)
        if ours.array.shard != theirs.array.shard
    ]
    assert differ  # else the test would show nothing
    list(run(resumed, resume=True))

    found, expected = arrays_of(tmp_path / "cut.zarr"), arrays_of(tmp_path / "whole.zarr")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shards == array.shards
        one, other = found[name][...], array[...]
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True, err_msg=name)
        else:
            np.testing.assert_array_equal(one, other, err_msg=name)
