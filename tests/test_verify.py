"""Every kind of damage is found, named, and taken back."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from kimicap import store
from kimicap.errors import MismatchError
from kimicap.verify import repair, verify
from tests import captures

SHARD = "mlp/router_logits/c.1.2.0.0"  # layers 2 and 4, block 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "c"
    captures.finished(path)
    return path


@pytest.fixture
def capture(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "c"))


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def resume_all(path: Path) -> None:
    """Compute again what is not committed, and seal."""
    again = store.resume(path)
    committed = again.committed()
    for block in set(range(captures.BLOCKS)) - set(committed):
        again.commit(block, {"shards": captures.write_block(again, block)})
    again.seal(captures.BLOCKS, {})
    for name, expected in captures.contents().items():
        np.testing.assert_array_equal(zarr.open_group(path, mode="r")[name][...], expected)
    assert verify(path) == []


def test_a_whole_capture_has_no_damage(capture):
    steps = []
    assert verify(capture, progress=lambda done, total: steps.append((done, total))) == []
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert repair(capture, []) == []
    assert store.resume(capture).complete


@pytest.mark.parametrize(
    ("harm", "layers", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), (2, 4), "bytes, not"),
        (lambda file: file.unlink(), (2, 4), "the file is missing; it had"),
        (lambda file: flip(file, -1), (2, 4), "the file is damaged"),
        (lambda file: flip(file, -30), (2, 4), "the file is damaged"),
        (lambda file: file.write_bytes(b"\0" * file.stat().st_size), (2, 4), "the file is damaged"),
    ],
    ids=["truncated", "deleted", "index checksum", "index", "zeros"],
)
def test_a_damaged_shard_is_found_and_computed_again(capture, harm, layers, words):
    harm(capture / SHARD)
    (damage,) = verify(capture)
    assert (damage.value, damage.layers, damage.block) == ("mlp/router_logits", layers, 2)
    assert damage.shard == SHARD
    assert words in damage.problem
    assert repair(capture, [damage]) == [2]
    reader = store.resume(capture)
    assert not reader.complete
    assert list(reader.committed()) == [0, 1]
    resume_all(capture)


def test_a_damaged_chunk_names_its_own_layer(capture):
    flip(capture / SHARD, 30)
    found = [verify(capture)[0].layers]
    flip(capture / SHARD, 30)
    flip(capture / SHARD, (capture / SHARD).stat().st_size - 100)
    found.append(verify(capture)[0].layers)
    assert sorted(found) == [(2,), (4,)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(whole, data):
    shards = sorted(file for file in whole.rglob("c.*") if file.is_file())
    file = data.draw(st.sampled_from(shards))
    at = data.draw(st.integers(0, file.stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    flip(file, at, bit)
    try:
        damages = verify(whole)
    finally:
        flip(file, at, bit)
    name = str(file.parent.relative_to(whole))
    assert [damage.value for damage in damages] == [name]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda file: file.unlink(), "says complete, but this block has no record"),
        (lambda file: file.write_text(""), "the record of this block cannot be read"),
        (lambda file: file.write_text('{"block": 1}'), "the record of this block cannot be read"),
    ],
    ids=["deleted", "emptied", "wrong"],
)
def test_a_lost_record_is_found(capture, harm, words):
    harm(capture / ".kimicap/blocks/00000001.json")
    (damage,) = verify(capture)
    assert (damage.value, damage.block, damage.shard) == ("", 1, ".kimicap/blocks/00000001.json")
    assert words in damage.problem
    assert repair(capture, [damage]) == [1]
    resume_all(capture)


def test_a_record_that_lacks_an_array_is_found(capture):
    file = capture / ".kimicap/blocks/00000001.json"
    record = json.loads(file.read_text())
    del record["shards"]["mlp/router_logits"]
    file.write_text(json.dumps(record))
    (damage,) = verify(capture)
    assert (damage.value, damage.block) == ("mlp/router_logits", 1)
    assert damage.problem == "the record names no file of this array"
    with pytest.raises(MismatchError, match="block 1 names no file of mlp/router_logits"):
        store.resume(capture).seal(3, {})
    assert repair(capture, [damage]) == [1]
    resume_all(capture)


def test_missing_blocks_of_an_unfinished_capture_are_no_damage(tmp_path):
    capture = captures.new(tmp_path / "c")
    capture.commit(1, {"shards": captures.write_block(capture, 1)})
    assert verify(tmp_path / "c") == []
    assert store.info(tmp_path / "c")["missing"] == [0, 2]


def test_records_that_do_not_fit_the_arrays(capture):
    file = capture / ".kimicap/blocks/00000001.json"
    record = json.loads(file.read_text())
    record["shards"]["mlp/router_logits"][0]["index"] = [0, 0, 0, 0]
    record["shards"]["mlp/router_logits"][1]["index"] = [9, 1, 0, 0]
    record["shards"]["mlp/nothing"] = [{"index": [0], "bytes": 3}]
    file.write_text(json.dumps(record))
    problems = {damage.problem for damage in verify(capture) if damage.block == 1}
    assert "blocks 0 and 1 both claim this shard" in problems
    assert "the record names a shard that the capture's arrays do not have" in problems
    file.rename(capture / ".kimicap/blocks/00000003.json")
    file = capture / ".kimicap/blocks/00000003.json"
    file.write_text(json.dumps({"block": 3, "shards": {}}))
    assert "this block is not in the plan" in {damage.problem for damage in verify(capture)}


def test_a_file_where_nothing_was_stored(tmp_path):
    capture = captures.new(tmp_path / "c")
    shards = captures.write_block(capture, 0)
    capture.write("attention_mask", (0, 0), np.zeros((2, 6), bool))
    capture.commit(0, {"shards": shards})
    assert verify(tmp_path / "c") == []
    (tmp_path / "c/attention_mask/c.0.0").write_bytes(b"x")
    (damage,) = verify(tmp_path / "c")
    assert (damage.layers, damage.problem[:21]) == ((), "the file has 1 bytes,")


def test_damaged_metadata_and_coordinates_are_found(capture):
    (capture / "mlp/expert_indices/zarr.json").write_text("{}")
    flip(capture / "mlp/layer/c.0", 0)
    (capture / "position/c.0").unlink()
    (capture / "mlp/zarr.json").unlink()
    damages = {damage.value: damage for damage in verify(capture)}
    assert set(damages) == {"mlp/expert_indices", "mlp/layer", "position", "mlp"}
    assert "differ" in damages["mlp/expert_indices"].problem
    assert "damaged" in damages["mlp/layer"].problem
    assert "missing" in damages["position"].problem
    assert "missing" in damages["mlp"].problem
    assert repair(capture, list(damages.values())) == []
    assert store.resume(capture).complete
