"""The store, judged by plain zarr, xarray and numpy."""

import json
import math
import os
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xarray
import zarr
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import register_pipeline

from kimicap import records, store
from kimicap.errors import MismatchError, UsageError
from kimicap.layout import ArrayLayout
from tests import captures


class Own(BatchedCodecPipeline):
    """A pipeline that a user has told zarr to take."""

    read_from = 0

    async def read(self, *given, **more):
        Own.read_from += 1
        return await super().read(*given, **more)


register_pipeline(Own)


def one_array(path, dtype="float32", shape=(3, 4, 5), chunk=(1, 1, 5), shard=(2, 2, 10), codec="lz4"):
    fill = {"f": math.nan, "b": False}.get(np.dtype(dtype).kind, -1)
    layout = ArrayLayout(
        path="a/x",
        dims=("layer", "sequence", "position"),
        shape=shape,
        dtype=dtype,
        chunk=chunk,
        shard=shard,
        fill=fill,
    )
    return store.create(path, [layout], [], attributes={}, record={"blocks": 1}, codec=codec)


@pytest.fixture
def steps(monkeypatch) -> list[tuple[str, str, int]]:
    """What is synced, or put in a place by a rename, in order: which of them, the path, and its bytes at that time."""
    found: list[tuple[str, str, int]] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def synced(descriptor):
        fsync(descriptor)
        found.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    def put(real):
        def putting(source, target):
            real(source, target)
            found.append(("put", str(target), os.stat(target).st_size))

        return putting

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", put(replace))
    monkeypatch.setattr(os, "rename", put(rename))
    return found


def test_a_finished_capture_reads_back_bit_for_bit(tmp_path):
    captures.finished(tmp_path / "c.zarr")
    group = zarr.open_group(tmp_path / "c.zarr", mode="r")
    assert group.attrs["complete"] is True
    assert group.attrs["wall_s"] == 1.5
    assert group.attrs["model"] == "tiny"
    for name, whole in captures.contents().items():
        np.testing.assert_array_equal(group[name][...], whole)
        assert group[name].metadata.dimension_names == next(x.dims for x in captures.layouts() if x.path == name)
    record = json.loads((tmp_path / "c.zarr/.kimicap/blocks/00000002.json").read_text())
    assert record["block"] == 2
    assert record["sequences"] == 2
    assert [entry["index"] for entry in record["shards"]["mlp/router_logits"]] == [[i, 2, 0, 0] for i in range(3)]
    size = (tmp_path / "c.zarr/mlp/router_logits/c.1.2.0.0").stat().st_size
    assert record["shards"]["mlp/router_logits"][1]["bytes"] == size


def test_plain_readers_open_it_without_a_warning(tmp_path):
    captures.new(tmp_path / "c.zarr")
    script = """
import sys, xarray, zarr
path = sys.argv[1]
tree = xarray.open_datatree(path, engine="zarr")
assert tree["mlp/layer"].values.tolist() == [0, 1, 2, 4, 5]
assert tree["mlp"].coords["layer"].dims == ("layer",)
flat = xarray.open_zarr(path, group="mlp")
assert flat.router_logits.dims == ("layer", "sequence", "position", "expert")
assert flat.router_logits.isnull().all()
assert flat.router_logits.attrs["layout"] == ["sequence", "position", "expert"]
members = dict(zarr.open_group(path, mode="r").members(max_depth=None))
assert sorted(members) == ["attention_mask", "length", "mlp", "mlp/expert_indices", "mlp/layer", "mlp/position",
                           "mlp/router_logits", "position"], members
assert "kimicap" not in sys.modules
"""
    done = captures.run_script(script, tmp_path / "c.zarr")
    assert done.returncode == 0, done.stderr
    captures.finished(tmp_path / "d.zarr")
    done = captures.run_script(script.replace("assert flat.router_logits.isnull().all()", ""), tmp_path / "d.zarr")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("codec", ["lz4", "zstd", "none"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int16", "int32", "int64", "bool"])
def test_every_dtype_and_codec(tmp_path, dtype, codec):
    capture = one_array(tmp_path / "c", dtype, codec=codec)
    data = (np.random.default_rng(0).random((2, 2, 5)) * 3).astype(dtype)
    capture.write("a/x", (0, 2, 0), data).result()
    array = zarr.open_group(tmp_path / "c", mode="r")["a/x"]
    np.testing.assert_array_equal(array[:2, 2:], data)
    rest = array[2]
    assert np.isnan(rest).all() if data.dtype.kind == "f" else (rest == (-1 if data.dtype.kind == "i" else 0)).all()
    codecs = json.loads((tmp_path / "c/a/x/zarr.json").read_text())["codecs"][0]["configuration"]["codecs"]
    assert codecs[-1]["name"] == "crc32c"
    if codec != "none":
        assert codecs[1]["configuration"]["typesize"] == data.dtype.itemsize


def test_clipped_and_trimmed_shards(tmp_path):
    capture = one_array(tmp_path / "c")
    data = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    capture.write("a/x", (2, 0, 0), data).result()
    array = zarr.open_group(tmp_path / "c", mode="r")["a/x"][...]
    np.testing.assert_array_equal(array[2, :2, :3], data[0])
    assert np.isnan(array).sum() == array.size - 6


def test_a_stale_or_damaged_shard_is_never_merged(tmp_path):
    capture = one_array(tmp_path / "c")
    capture.write("a/x", (2, 0, 0), np.ones((1, 2, 5), np.float32)).result()
    small = np.full((1, 2, 2), 7, np.float32)
    capture.write("a/x", (2, 0, 0), small).result()
    (tmp_path / "c/a/x/c.0.0.0").write_bytes(b"rubbish")
    capture.write("a/x", (0, 0, 0), np.zeros((1, 2, 1), np.float32)).result()
    array = zarr.open_group(tmp_path / "c", mode="r")["a/x"][...]
    assert np.isnan(array[2, :2, 2:]).all()
    assert np.count_nonzero(~np.isnan(array)) == 4 + 2


@pytest.mark.parametrize(
    ("origin", "data"),
    [
        ((1, 0, 0), np.zeros((2, 2, 5), np.float32)),
        ((4, 0, 0), np.zeros((1, 2, 5), np.float32)),
        ((0, 0, 0), np.zeros((2, 1, 5), np.float32)),
        ((0, 0, 0), np.zeros((2, 3, 5), np.float32)),
        ((0, 0, 0), np.zeros((2, 2, 5), np.float64)),
        ((0, 0, 0), np.zeros((2, 2), np.float32)),
        ((0, 0, 0), np.zeros((2, 2, 0), np.float32)),
    ],
)
def test_what_is_not_a_shard_is_refused(tmp_path, origin, data):
    capture = one_array(tmp_path / "c")
    with pytest.raises(AssertionError, match="a/x"):
        capture.write("a/x", origin, data)


@pytest.mark.parametrize(("codec", "most"), [("lz4", 0.84), ("zstd", 0.84), ("none", 2.01)])
def test_widened_bfloat16_is_smaller_than_bfloat16(tmp_path, codec, most):
    capture = one_array(tmp_path / "c", shape=(1, 4, 65536), chunk=(1, 1, 65536), shard=(1, 4, 65536), codec=codec)
    bits = np.random.default_rng(0).standard_normal((1, 4, 65536)).astype(np.float32).view(np.uint32)
    data = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    capture.write("a/x", (0, 0, 0), data).result()
    stored = os.path.getsize(tmp_path / "c/a/x/c.0.0.0")
    assert stored <= most * data.size * 2, stored / (data.size * 2)
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "c", mode="r")["a/x"][...], data)


def test_a_shard_of_fill_has_no_file_and_a_null_size(tmp_path):
    capture = one_array(tmp_path / "c")
    capture.write("a/x", (0, 0, 0), np.full((2, 2, 5), np.nan, np.float32))
    capture.commit(0, {"shards": {"a/x": [[0, 0, 0]]}})
    assert capture.committed()[0]["shards"]["a/x"] == [{"index": [0, 0, 0], "bytes": None}]
    assert os.listdir(tmp_path / "c/a/x") == ["zarr.json"]
    capture.seal(1, {})


def test_a_record_is_synced_whole_before_it_counts_and_its_name_after(tmp_path, steps):
    capture = captures.new(tmp_path / "c")
    shards = captures.write_block(capture, 1)
    steps.clear()
    capture.commit(1, {"shards": shards})
    file = records.block_file(tmp_path / "c", 1)
    temp, put, folder = steps
    assert (temp[0], Path(temp[1]).parent, temp[2]) == ("sync", tmp_path / "c/.kimicap", file.stat().st_size)
    assert put[:2] == ("put", str(file))
    assert folder[:2] == ("sync", str(file.parent))


def test_a_new_capture_is_synced_whole_before_it_is_put_in_place_and_its_name_after(tmp_path, steps):
    path = tmp_path / "c"
    captures.new(path)
    (at,) = (number for number, step in enumerate(steps) if step[:2] == ("put", str(path)))
    fresh = steps[at - 1][1].split(os.sep)[len(path.parts) - 1]  # the name that it had until then
    synced = {name.replace(fresh, path.name): size for kind, name, size in steps[:at] if kind == "sync"}
    for file in (path, *path.rglob("*")):
        assert str(file) in synced
        assert file.is_dir() or synced[str(file)] == file.stat().st_size
    assert [step[:2] for step in steps[at + 1 :]] == [("sync", str(tmp_path))]


def test_folders_made_for_a_capture_are_synced_into_their_own(tmp_path, steps):
    captures.new(tmp_path / "a/b/c")
    assert {name for kind, name, _ in steps if kind == "sync"} >= {
        str(tmp_path),
        str(tmp_path / "a"),
        str(tmp_path / "a/b"),
    }


def test_every_array_syncs_its_shards_and_locks_no_file(tmp_path):
    capture = captures.new(tmp_path / "c")
    for name in capture.layouts:
        place = capture._handle(name).kvstore.spec(retain_context=True).to_json(include_defaults=True)
        assert place["file_io_sync"] is True, name
        assert place["file_io_locking"] == {"mode": "none"}, name


def test_commit_takes_only_what_was_written(tmp_path):
    capture = one_array(tmp_path / "c")
    with pytest.raises(AssertionError, match="was not written"):
        capture.commit(0, {"shards": {"a/x": [[0, 0, 0]]}})
    assert capture.committed() == {}


def test_resume_rebuilds_layouts_and_record(tmp_path):
    captures.new(tmp_path / "c")
    again = store.resume(tmp_path / "c")
    assert again.layouts == {layout.path: layout for layout in captures.layouts()}
    assert again.record == {"blocks": 3, "block_sequences": 2, "seed": 1}
    assert not again.complete


def test_resume_goes_on_where_it_stopped(tmp_path):
    first = captures.new(tmp_path / "c")
    first.commit(1, {"shards": captures.write_block(first, 1)})
    captures.write_block(first, 0)
    again = store.resume(tmp_path / "c")
    assert list(again.committed()) == [1]
    for block in (0, 2):
        again.commit(block, {"shards": captures.write_block(again, block)})
    again.seal(3, {})
    for name, whole in captures.contents().items():
        np.testing.assert_array_equal(zarr.open_group(tmp_path / "c", mode="r")[name][...], whole)


def test_stray_and_broken_records_do_not_count(tmp_path):
    capture = captures.new(tmp_path / "c")
    folder = tmp_path / "c/.kimicap/blocks"
    for block in range(3):
        capture.commit(block, {"shards": captures.write_block(capture, block)})
    (folder / "00000009.json.1234.tmp").write_text("{}")
    (folder / "00000000.json").write_text("")
    text = (folder / "00000001.json").read_text()
    (folder / "00000001.json").write_text(text.replace('"block": 1', '"block": 2'))
    assert list(capture.committed()) == [2]


def test_seal_lists_what_is_missing(tmp_path):
    capture = captures.new(tmp_path / "c")
    capture.commit(0, {"shards": captures.write_block(capture, 0)})
    (tmp_path / "c/mlp/router_logits/c.0.0.0.0").unlink()
    with pytest.raises(MismatchError) as caught:
        capture.seal(3, {})
    told = str(caught.value)
    assert told.startswith(f"{tmp_path}/c is not complete: block 1 is not committed; block 2 is not committed; ")
    assert "mlp/router_logits/c.0.0.0.0 of block 0 has None bytes, not " in told
    assert told.endswith("Go on with --resume, or look with kimicap verify.")
    assert not capture.complete


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"], ids=["shorter", "longer"])
def test_seal_refuses_a_shard_of_another_size(tmp_path, change):
    capture = captures.new(tmp_path / "c")
    for block in range(3):
        capture.commit(block, {"shards": captures.write_block(capture, block)})
    file = tmp_path / "c/mlp/router_logits/c.1.2.0.0"
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    told = f"c.1.2.0.0 of block 2 has {len(change(whole))} bytes, not {len(whole)}. Go on"
    with pytest.raises(MismatchError, match=re.escape(told)):
        capture.seal(3, {})
    assert not capture.complete
    file.write_bytes(whole)
    capture.seal(3, {})


def test_seal_may_be_done_twice_and_at_once(tmp_path):
    capture = captures.finished(tmp_path / "c")
    stray = tmp_path / "c/mlp/router_logits/c.0.0.0.0_0123456789abcdef.__lock"
    stray.write_bytes(b"left by a kill")
    capture.seal(3, {})
    assert not stray.exists()
    others = [store.resume(tmp_path / "c") for _ in range(4)]
    failed = []

    def seal(one, number):
        try:
            one.seal(3, {"wall_s": number})
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=seal, args=(one, n)) for n, one in enumerate(others)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failed == []
    assert store.resume(tmp_path / "c").complete
    assert xarray.open_zarr(tmp_path / "c", group="mlp").layer.values.tolist() == captures.LAYERS


def test_processes_commit_different_blocks_at_once(tmp_path):
    captures.new(tmp_path / "c")
    script = """
import sys, captures
from kimicap import store
capture = store.resume(sys.argv[1])
block = int(sys.argv[2])
capture.commit(block, {"shards": captures.write_block(capture, block)})
try:
    capture.seal(3, {})
except store.MismatchError:
    pass
"""
    threads = [threading.Thread(target=captures.run_script, args=(script, tmp_path / "c", n)) for n in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    store.resume(tmp_path / "c").seal(3, {})
    for name, whole in captures.contents().items():
        np.testing.assert_array_equal(zarr.open_group(tmp_path / "c", mode="r")[name][...], whole)


def test_an_existing_capture_is_refused_unless_overwritten(tmp_path):
    captures.finished(tmp_path / "c")
    with pytest.raises(UsageError, match=r"already holds a capture. Go on with it by --resume, or replace"):
        captures.new(tmp_path / "c")
    captures.new(tmp_path / "c", overwrite=True)
    assert not (tmp_path / "c/mlp/router_logits/c.0.0.0.0").exists()
    assert captures.leftovers(tmp_path) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_things_are_never_deleted(tmp_path, overwrite):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not empty and not a capture"):
        captures.new(tmp_path / "thesis", overwrite=overwrite)
    with pytest.raises(UsageError, match=r"chapter.tex is a file. Give a folder"):
        captures.new(tmp_path / "thesis/chapter.tex", overwrite=overwrite)
    assert (tmp_path / "thesis/chapter.tex").read_text() == "years of work"


def test_parents_are_made_and_an_empty_folder_is_taken(tmp_path):
    captures.new(tmp_path / "a/b/c")
    (tmp_path / "empty").mkdir()
    captures.new(tmp_path / "empty")
    with pytest.raises(UsageError, match="object stores are not supported yet"):
        captures.new("s3://bucket/c")


def test_a_path_that_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be the path of a capture: its bytes are not UTF-8"):
        captures.new(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))


def test_nan_attributes_are_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.create(tmp_path / "c", [], [], attributes={"loss": math.nan}, record={"blocks": 0})
    assert os.listdir(tmp_path) == []


def test_what_is_no_capture_cannot_be_resumed(tmp_path):
    with pytest.raises(UsageError, match=r"There is no capture at .*Check the path\."):
        store.resume(tmp_path / "none")
    with pytest.raises(UsageError, match=r"is not a capture: it has no .kimicap/run.json"):
        store.resume(tmp_path)
    captures.new(tmp_path / "c")
    run = tmp_path / "c/.kimicap/run.json"
    body = json.loads(run.read_text())
    for text in ("", "[]", '{"format": 1, "record": {}}'):
        run.write_text(text)
        with pytest.raises(MismatchError, match=r"run.json is broken, or was not written by this version"):
            store.resume(tmp_path / "c")
    run.write_text(json.dumps({**body, "format": 2}))
    with pytest.raises(MismatchError, match=r"has format 2, and this kimicap knows formats up to 1. Update"):
        store.open_capture(tmp_path / "c")
    run.write_text(json.dumps(body))
    (tmp_path / "c/zarr.json").write_text("{")
    with pytest.raises(MismatchError, match=r"zarr.json is missing or broken"):
        store.resume(tmp_path / "c")


def test_many_writes_leak_no_files(tmp_path):
    capture = one_array(tmp_path / "c")
    data = np.ones((2, 2, 5), np.float32)
    capture.write("a/x", (0, 0, 0), data).result()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        capture.write("a/x", (0, 0, 0), data).result()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_write_holds_its_data_without_a_copy_and_tells_when_done(tmp_path):
    capture = one_array(tmp_path / "c")
    seen = threading.Event()
    write = capture.write("a/x", (0, 0, 0), np.ones((2, 2, 5), np.float32))
    write.add_done_callback(lambda which: which is write and seen.set())
    write.result(timeout_s=30)
    assert write.done()
    assert seen.wait(10)


def test_open_and_info(tmp_path):
    capture = captures.new(tmp_path / "c")
    capture.commit(1, {"shards": captures.write_block(capture, 1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = store.open_capture(tmp_path / "c")
    logits = captures.contents()["mlp/router_logits"]
    np.testing.assert_array_equal(tree["mlp/router_logits"].sel(layer=4).values[2:4], logits[3, 2:4])
    told = store.info(tmp_path / "c")
    assert told["attributes"] == {"model": "tiny", "format": 1, "complete": False}
    assert (told["blocks"], told["committed"], told["missing"], told["complete"]) == (3, [1], [0, 2], False)
    assert told["arrays"]["mlp/router_logits"]["bytes"] == logits.nbytes
    assert told["arrays"]["mlp/router_logits"]["shape"] == [5, 5, 6, 8]
    on_disk = sum(file.stat().st_size for file in (tmp_path / "c").rglob("*") if file.is_file())
    assert told["stored_bytes"] == on_disk
    json.dumps(told)


def test_a_pipeline_of_ones_own_reads_the_arrays(tmp_path):
    captures.new(tmp_path / "c")
    name = f"{Own.__module__}.{Own.__name__}"
    with zarr.config.set({"codec_pipeline.path": name}):
        tree = store.open_capture(tmp_path / "c")
    Own.read_from = 0
    _ = tree["mlp/router_logits"].values
    assert Own.read_from


def test_a_capture_reads_as_with_xarray_alone_and_zarr_is_left_as_it_was(tmp_path):
    capture = captures.new(tmp_path / "c")
    capture.commit(1, {"shards": captures.write_block(capture, 1)})  # of the others nothing is there: fill
    before = dict(zarr.config.get("codec_pipeline"))
    tree = store.open_capture(tmp_path / "c")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.open_capture(tmp_path / "c"), range(40)))
    assert zarr.config.get("codec_pipeline") == before
    assert tree.identical(xarray.open_datatree(tmp_path / "c", engine="zarr"))
    shard = next(file for file in (tmp_path / "c/mlp/router_logits").iterdir() if file.name.startswith("c."))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        _ = store.open_capture(tmp_path / "c")["mlp/router_logits"].values


def test_as_many_threads_encode_as_the_process_may_use_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5}, raising=False)
    opened = one_array(tmp_path / "c.zarr")
    assert opened._context["data_copy_concurrency"].to_json() == {"limit": 3}
