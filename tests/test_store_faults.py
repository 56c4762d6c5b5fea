"""The store killed at every step, failed by the disk, and taken over by another run."""

import os
import re
import shutil
import signal

import numpy as np
import pytest
import zarr

from kimicap import arrays, records, store
from kimicap.errors import KimicapError, MismatchError, RoomError, UsageError
from tests import captures


@pytest.mark.parametrize("hook", ["before", "after"])
def test_killed_around_the_rename_of_a_record(tmp_path, hook):
    captures.new(tmp_path / "c")
    script = f"""
import os, signal, sys, captures
from kimicap import store
capture = store.resume(sys.argv[1])
shards = captures.write_block(capture, 0)
real = os.replace
def replace(source, target):
    if {hook!r} == "after":
        real(source, target)
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
capture.commit(0, {{"shards": shards}})
"""
    assert captures.run_script(script, tmp_path / "c").returncode == -signal.SIGKILL
    capture = store.resume(tmp_path / "c")
    assert list(capture.committed()) == ([0] if hook == "after" else [])
    for block in range(3):
        if block not in capture.committed():
            capture.commit(block, {"shards": captures.write_block(capture, block)})
    capture.seal(3, {})
    for name, whole in captures.contents().items():
        np.testing.assert_array_equal(zarr.open_group(tmp_path / "c", mode="r")[name][...], whole)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_while_creating(tmp_path, nth, overwrite):
    if overwrite:
        captures.finished(tmp_path / "c")
    script = f"""
import os, signal, sys, captures
from kimicap import arrays
real, calls = os.rename, []
def rename(source, target):
    calls.append(target)
    if len(calls) == {nth}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
arrays.os.rename = rename
captures.new(sys.argv[1], overwrite={overwrite})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert captures.run_script(script, tmp_path / "c").returncode == -signal.SIGKILL
    if (tmp_path / "c").exists():
        store.resume(tmp_path / "c")
    captures.new(tmp_path / "c", overwrite=True)
    assert captures.leftovers(tmp_path) == []


def test_a_failed_rename_puts_the_old_capture_back(tmp_path, monkeypatch):
    captures.finished(tmp_path / "c")
    real, calls = os.rename, []

    def rename(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(arrays.os, "rename", rename)
    with pytest.raises(RoomError, match="is full"):
        captures.new(tmp_path / "c", overwrite=True)
    assert store.resume(tmp_path / "c").complete
    assert captures.leftovers(tmp_path) == []


def test_killed_while_writing_shards(tmp_path):
    captures.new(tmp_path / "c")
    script = """
import os, signal, sys, captures
from kimicap import store
capture = store.resume(sys.argv[1])
captures.write_block(capture, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert captures.run_script(script, tmp_path / "c").returncode == -signal.SIGKILL
    capture = store.resume(tmp_path / "c")
    for block in range(3):
        capture.commit(block, {"shards": captures.write_block(capture, block)})
    capture.seal(3, {})
    for name, whole in captures.contents().items():
        np.testing.assert_array_equal(zarr.open_group(tmp_path / "c", mode="r")[name][...], whole)


def test_storage_errors_become_sentences():
    text = "RESOURCE_EXHAUSTED: Error writing local file \"/d/c\": Failed [os_error_code='28']"
    full = records.storage_error(ValueError(text), "/d/c")
    assert type(full) is RoomError
    assert str(full) == "The disk holding /d/c is full; free some and go on with --resume."
    assert type(records.storage_error(OSError(122, "quota"), "/d")) is RoomError
    assert "no more memory or threads" in str(records.storage_error(MemoryError(), "/d"))
    denied = records.storage_error(PermissionError(13, "no"), "/d")
    assert type(denied) is UsageError
    assert "/d cannot be accessed: Permission denied. Mend its permissions" in str(denied)
    other = records.storage_error(OSError(5, "Input/output error"), "/d")
    assert type(other) is KimicapError
    assert re.search("Reading or writing /d failed: .*Input/output error. Every committed block is kept", str(other))
    assert records.storage_error(full, "/other") is full


def test_a_write_that_fails_says_so_and_is_not_committed(tmp_path):
    script = """
import resource, signal, sys, numpy as np, captures
from kimicap import store
from kimicap.errors import KimicapError
capture = captures.new(sys.argv[1])
shards = captures.write_block(capture, 0)
capture.commit(0, {"shards": shards})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
shards = captures.write_block(capture, 1)
try:
    capture.commit(1, {"shards": shards})
except KimicapError as error:
    print(error)
print(list(capture.committed()))
"""
    done = captures.run_script(script, tmp_path / "c")
    assert "failed:" in done.stdout, done.stderr
    assert "[0]" in done.stdout


@pytest.mark.parametrize("meanwhile", ["replaced", "removed"])
def test_a_capture_that_another_run_replaced_is_not_written_to(tmp_path, meanwhile):
    ours = captures.new(tmp_path / "c")
    shards = captures.write_block(ours, 0)
    shutil.rmtree(tmp_path / "c")
    if meanwhile == "replaced":
        captures.new(tmp_path / "c")
    before = sorted((tmp_path / "c").rglob("*"))
    with pytest.raises(MismatchError, match="was replaced or removed by another run; this one can write nothing more"):
        captures.write_block(ours, 1)
    with pytest.raises(MismatchError, match="was replaced or removed"):
        ours.commit(0, {"shards": shards})
    assert sorted((tmp_path / "c").rglob("*")) == before


@pytest.mark.parametrize("name", ["c" * 209, "d" * 255 + "/c"])
def test_a_name_as_long_as_the_disk_takes_is_taken(tmp_path, name):
    """One byte more, and a new capture could not lie beside its place."""
    captures.new(tmp_path / name)
    captures.new(tmp_path / name, overwrite=True)
    with pytest.raises(UsageError, match=r"The name c+ is longer than 209 bytes. Give a shorter --out."):
        arrays.check_target(tmp_path / "parent" / ("c" * 210), overwrite=False)


def test_a_mount_point_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays.os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(UsageError, match=r"is a mount point, .* Give a folder inside it as --out."):
        captures.new(tmp_path)
    captures.finished(tmp_path / "c")


def test_the_working_directory_is_never_replaced(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    refused = pytest.raises(UsageError, match=r"the working directory lies in it. Run it from elsewhere, or give")
    with refused:
        captures.new(".")
    captures.finished("../c")
    monkeypatch.chdir(tmp_path / "c/mlp")
    with refused:
        captures.new("..", overwrite=True)
    assert store.resume("..").complete
    shutil.rmtree(tmp_path / "empty")
    with monkeypatch.context() as gone:
        gone.setattr(os, "getcwd", lambda: os.stat(tmp_path / "empty"))
        with pytest.raises(UsageError, match=r"The working directory was removed. Run it from one that is there."):
            captures.new(tmp_path / "d")
