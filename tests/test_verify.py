"""Every kind of damage is found, named, and taken back."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kimicap
from kimicap import arrays, cli, records, store
from kimicap.errors import MismatchError
from kimicap.verify import repair, restore, verify
from tests import captures

# Root reads whatever it likes, unless it gives that up.
WITHOUT_RIGHTS = (
    []
    if os.getuid()
    else ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
)

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
        (lambda file: file.write_text(""), "the record of this block is damaged"),
        (lambda file: file.write_text('{"block": 1}'), "the record of this block is damaged"),
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


def edit(file: Path, change) -> None:
    root = json.loads(file.read_text())
    change(root)
    file.write_text(json.dumps(root))


def members(root: dict) -> dict:
    return root["consolidated_metadata"]["metadata"]


def rewrite(capture: Path, block: int, change) -> None:
    """A block's record as a faulty kimicap might have written it."""
    record = records.read_blocks(capture)[0][block]
    change(record)
    records.write_block(capture, block, {key: value for key, value in record.items() if key != "sha256"})


def test_a_record_that_lacks_an_array_is_found(capture):
    rewrite(capture, 1, lambda record: record["shards"].pop("mlp/router_logits"))
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
    def change(record):
        record["shards"]["mlp/router_logits"][0]["index"] = [0, 0, 0, 0]
        record["shards"]["mlp/router_logits"][1]["index"] = [9, 1, 0, 0]
        record["shards"]["mlp/nothing"] = [{"index": [0], "bytes": 3}]

    rewrite(capture, 1, change)
    problems = {(damage.block, damage.problem) for damage in verify(capture)}
    assert (1, "blocks 0 and 1 both claim this shard") in problems
    assert (None, "the record names a shard that the capture's arrays do not have") in problems
    records.write_block(capture, 3, {"shards": {}})
    assert (3, "this block is not in the plan") in {(damage.block, damage.problem) for damage in verify(capture)}


@pytest.mark.parametrize("name", [".kimicap/run.json", ".kimicap/blocks/00000001.json"])
def test_any_changed_character_of_a_record_is_found(capture, name):
    text = (capture / name).read_text()
    for at in range(len(text)):
        if text[at].isspace():
            continue
        (capture / name).write_text(text[:at] + ("7" if text[at] != "7" else "8") + text[at + 1 :])
        if name.endswith("run.json"):
            with pytest.raises(MismatchError, match=r"run record|has format"):
                verify(capture)
        else:
            assert [damage.problem for damage in verify(capture)] == ["the record of this block is damaged"]


def test_changed_attributes_are_found_and_added_ones_are_not(capture):
    arrays.set_attributes(capture, {"note": "of mine"})
    assert verify(capture) == []
    arrays.set_attributes(capture, {"model": "another"})
    (damage,) = verify(capture)
    assert (damage.block, damage.shard, damage.problem) == (None, "zarr.json", "the attribute model was changed")
    assert restore(capture) == ["zarr.json"]
    attributes = store.resume(capture).attributes()
    assert (attributes["model"], attributes["note"], attributes["complete"]) == ("tiny", "of mine", True)
    assert verify(capture) == []


@pytest.mark.parametrize("name", ["mlp/expert_indices", "mlp/layer"])
def test_a_root_that_lacks_an_array_costs_no_block(capture, name):
    edit(capture / "zarr.json", lambda root: members(root).pop(name))
    damages = verify(capture)
    assert {(damage.value, damage.block, damage.problem) for damage in damages} == {
        (name, None, "its metadata in the root are not as they were made")
    }
    assert repair(capture, damages) == []
    assert sorted(records.read_blocks(capture)[0]) == [0, 1, 2]
    assert restore(capture) == ["zarr.json"]
    assert verify(capture) == []
    assert store.resume(capture).complete


@pytest.mark.parametrize("text", [None, "", "{}", '{"attributes": {}}', "[]"])
def test_a_lost_root_is_written_again(capture, text):
    before = json.loads((capture / "zarr.json").read_text())
    (capture / "zarr.json").unlink() if text is None else (capture / "zarr.json").write_text(text)
    (damage,) = verify(capture)
    assert (damage.shard, damage.problem) == ("zarr.json", "the root's metadata are missing or broken")
    assert restore(capture) == ["zarr.json"]
    assert verify(capture) == []
    store.resume(capture).seal(captures.BLOCKS, {"wall_s": 1.5})
    assert json.loads((capture / "zarr.json").read_text()) == before


def rename(found: dict, old: str, new: str) -> None:
    for name, member in list(found.items()):
        del found[name]
        found[new if name == old else name] = member


ROOT_HARMS = {
    "sharded renamed": lambda root: rename(members(root), "mlp/router_logits", "mlp/router_lagits"),
    "coordinate renamed": lambda root: rename(members(root), "mlp/position", "mlp/xosition"),
    "group renamed": lambda root: rename(members(root), "mlp", "nlp"),
    "no complete": lambda root: root["attributes"].pop("complete"),
    "odd complete": lambda root: root["attributes"].update(complete="yes"),
    "kind": lambda root: root["consolidated_metadata"].update(kind="jnline"),
    "no kind": lambda root: root["consolidated_metadata"].pop("kind"),
    "node type": lambda root: root.update(node_type="array"),
    "zarr format": lambda root: root.pop("zarr_format"),
    "no attributes": lambda root: members(root)["mlp/router_logits"].update(attributes=[1]),
    "no dimensions": lambda root: members(root)["mlp/router_logits"].pop("dimension_names"),
    "no chunk": lambda root: members(root)["mlp/layer"]["chunk_grid"]["configuration"].update(chunk_shape=[0]),
    "fill": lambda root: members(root)["length"].update(fill_value=10**30),
    "member": lambda root: members(root).update({"mlp/layer": 3}),
    "no members": lambda root: root["consolidated_metadata"].update(metadata=[]),
}


@pytest.mark.parametrize("harm", ROOT_HARMS)
def test_any_harm_to_the_root_is_found_and_mended_and_costs_no_block(capture, harm):
    edit(capture / "zarr.json", ROOT_HARMS[harm])
    result = CliRunner().invoke(cli.app, ["verify", str(capture)])
    assert result.exit_code == 3, result.output
    repaired = CliRunner().invoke(cli.app, ["verify", str(capture), "--repair", "--json"])
    assert repaired.exit_code == 0, repaired.output
    assert (found := json.loads(repaired.stdout))["taken_back"] == [], found["damages"]
    assert verify(capture) == []
    assert set(kimicap.open(capture)["mlp"].coords) == {"layer", "position"}
    resume_all(capture)


@pytest.mark.parametrize(
    "more",
    [{"shards": (4, 4), "dimension_names": ("sequence", "k")}, {"shards": (4, 4)}, {"dimension_names": ("a", "b")}],
)
def test_arrays_and_attributes_that_somebody_added_are_left_alone(capture, more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(capture, mode="a")
        group.create_array("mlp/probe", shape=(20, 4), chunks=(2, 2), dtype="f4", **more)[:] = 1
        zarr.consolidate_metadata(capture)
        zarr.open_group(capture, mode="a")["mlp/router_logits"].attrs["note"] = "mine"
        zarr.open_group(capture, mode="a")["mlp"].attrs["note"] = "mine"
    assert verify(capture) == []
    assert "mlp/probe" not in store.info(capture)["arrays"]
    edit(capture / "zarr.json", lambda root: root["attributes"].update(model="x"))
    edit(capture / "mlp/router_logits/zarr.json", lambda own: own.update(shape=[1]))
    assert restore(capture) == ["mlp/router_logits/zarr.json", "zarr.json"]
    assert verify(capture) == []
    group = zarr.open_group(capture, mode="r", use_consolidated=False)
    assert group["mlp/probe"][0, 0] == 1
    assert (group["mlp/router_logits"].attrs["note"], group["mlp"].attrs["note"]) == ("mine", "mine")
    resume_all(capture)


def test_a_lost_group_is_made_again_but_for_its_coordinates(capture):
    shutil.rmtree(capture / "mlp")
    damages = verify(capture)
    assert len(restore(capture)) == 5
    again = verify(capture)
    assert repair(capture, [*damages, *again]) == [0, 1, 2]
    assert {damage.value for damage in verify(capture)} == {"mlp/layer", "mlp/position"}


def test_the_good_copy_of_metadata_wins(capture):
    """A bit of the root's copy of an array's shape: the array's own file is right."""
    edit(capture / "zarr.json", lambda root: members(root)["mlp/router_logits"]["shape"].__setitem__(3, 9))
    assert {damage.value for damage in verify(capture)} == {"mlp/router_logits"}
    assert restore(capture) == ["zarr.json"]
    resume_all(capture)


def test_what_broken_metadata_hide_is_found_when_they_are_mended(capture):
    (capture / "mlp/router_logits/zarr.json").write_text("{}")
    flip(capture / SHARD, 30)
    result = CliRunner().invoke(cli.app, ["verify", str(capture), "--repair", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["rewritten"], found["taken_back"]) == (["mlp/router_logits/zarr.json"], [2])
    assert [damage["shard"] for damage in found["damages"]] == ["mlp/router_logits/zarr.json", SHARD]
    resume_all(capture)


UNREADABLE = [
    "mlp/router_logits/c.1.2.0.0",
    "mlp/expert_indices",
    "mlp/layer/c.0",
    "mlp/layer/zarr.json",
    "zarr.json",
    ".kimicap",
    ".kimicap/run.json",
    ".kimicap/blocks",
    ".kimicap/blocks/00000001.json",
]


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_may_not_be_read_is_not_taken_for_damage(capture, name):
    before = sorted((capture / ".kimicap/blocks").iterdir())
    mode = (capture / name).stat().st_mode
    (capture / name).chmod(0)
    try:
        code = f"import kimicap.cli; kimicap.cli.app(['verify', {str(capture)!r}, '--repair'])"
        done = subprocess.run(
            [*WITHOUT_RIGHTS, sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
    finally:
        (capture / name).chmod(mode)
    assert done.returncode == 2, done
    assert re.fullmatch(r".* cannot be accessed: Permission denied\. Mend its permissions .*\n", done.stderr), (
        done.stderr
    )
    assert sorted((capture / ".kimicap/blocks").iterdir()) == before
    assert verify(capture) == []


def test_a_lost_folder_of_records_is_as_if_no_block_was_computed(capture):
    shutil.rmtree(capture / ".kimicap/blocks")
    assert store.info(capture)["missing"] == [0, 1, 2]
    assert repair(capture, verify(capture)) == [0, 1, 2]
    resume_all(capture)


def test_a_block_taken_back_is_hidden_from_readers(capture):
    (capture / ".kimicap/blocks/00000001.json").write_text("")
    assert repair(capture, verify(capture)) == [1]
    length = zarr.open_group(capture, mode="r")["length"][...]
    assert (length == -1).tolist() == [False, False, True, True, False]
    resume_all(capture)


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
    assert damages["mlp/expert_indices"].problem == "its metadata are not as they were made"
    assert "damaged" in damages["mlp/layer"].problem
    assert damages["position"].problem == "the file of this coordinate is missing"
    assert damages["mlp"].problem == "its metadata are missing or broken"
    assert repair(capture, list(damages.values())) == []
    assert restore(capture) == ["mlp/expert_indices/zarr.json", "mlp/zarr.json"]
    assert {damage.value for damage in verify(capture)} == {"mlp/layer", "position"}
    assert store.resume(capture).complete
