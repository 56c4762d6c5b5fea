"""Full disks, lost permissions, failing writers, damaged files: a sentence at once, and a capture to go on with."""

import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zarr

from kimicap import pipeline, run, store
from kimicap.config import load_settings
from kimicap.errors import KimicapError, MismatchError, RoomError, UsageError
from kimicap.prepare import prepare
from kimicap.verify import repair, verify
from tests import small
from tests.driver import contents

BLOCKS = small.ROWS // small.BLOCK


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    torch.set_num_threads(1)
    return prepare(load_settings(None, {**small.settings(tmp_path_factory.mktemp("data")), "out": "unset"}))


@pytest.fixture(scope="module")
def model():
    return small.model()


@pytest.fixture
def capture(prepared, model, monkeypatch):
    """Runs the capture at a path, and gives its events; ``seen`` is called after each."""
    monkeypatch.setattr(run, "load_model", lambda *_: model)

    def capture(out: Path, *, resume: bool = False, seen=lambda event: None, memory: int = 2**26):
        settings = prepared.settings.model_copy(update={"out": str(out), "memory": memory})
        events = []
        for event in run.run(replace(prepared, settings=settings), resume=resume):
            events.append(event)
            seen(event)
        return events

    return capture


@pytest.fixture(scope="module")
def whole(prepared, model, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "c.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "load_model", lambda *_: model)
        list(run.run(replace(prepared, settings=prepared.settings.model_copy(update={"out": str(out)}))))
    return contents(out)


def mount(*options: str | Path) -> None:
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=16m", "none", folder)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


class Once:
    """Calls something after the first block is committed."""

    def __init__(self, call):
        self.call, self.blocks, self.sequences = call, 0, 0

    def __call__(self, event):
        if isinstance(event, pipeline.Progress):
            self.sequences = event.sequences
            return
        self.blocks += 1
        if self.blocks == 1:
            self.call()


def fill_up(folder: Path) -> None:
    with open(folder / "ballast", "wb", buffering=0) as ballast:
        for size in (2**20, 2**12):
            while True:
                try:
                    ballast.write(bytes(size))
                except OSError:
                    break


def no_writers() -> bool:
    return not any(thread.name == "kimicap-writer" for thread in threading.enumerate())


def test_a_disk_that_fills_up_and_is_enlarged(capture, whole, disk):
    out, once = disk / "c.zarr", Once(lambda: fill_up(disk))
    with pytest.raises(RoomError, match=r"The disk holding .* is full; free some and go on with --resume\."):
        capture(out, seen=once)
    assert once.sequences < small.ROWS
    assert no_writers()
    assert contents(out)["complete"] is False
    with pytest.raises(RoomError, match="The capture needs about"):
        capture(out, resume=True)
    mount("-o", "remount,size=32m", disk)
    capture(out, resume=True)
    assert contents(out) == whole


def test_a_disk_that_turns_read_only(capture, whole, disk):
    def turn() -> None:
        for _ in range(1000):  # while shards are being written it refuses
            if not subprocess.run(["mount", "-o", "remount,ro", disk], capture_output=True, check=False).returncode:
                return

    out, once = disk / "c.zarr", Once(turn)
    with pytest.raises(UsageError, match=r"cannot be accessed: Read-only file system\. Mend its permissions"):
        capture(out, seen=once)
    assert once.sequences < small.ROWS
    assert no_writers()
    mount("-o", "remount,rw", disk)
    capture(out, resume=True)
    assert contents(out) == whole


@pytest.mark.parametrize("path", ["layers/layer_output", "input_ids"])
def test_a_writer_that_fails_stops_the_run_at_once(capture, whole, tmp_path, monkeypatch, path):
    out, write, calls = tmp_path / "c.zarr", store.Store.write, []

    def failing(self, array, origin, data):
        calls.append(array)
        if calls.count(path) == 3:
            raise RuntimeError("boom")
        return write(self, array, origin, data)

    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "write", failing)
        once = Once(lambda: None)
        with pytest.raises(KimicapError, match=r"failed: boom\. Every committed block is kept; go on with --resume\."):
            capture(out, seen=once)
    assert once.sequences <= 4 * small.BLOCK
    assert no_writers()
    capture(out, resume=True)
    assert contents(out) == whole


def test_a_consumer_that_walks_away_leaves_nothing_behind(capture, whole, tmp_path):
    out = tmp_path / "c.zarr"

    def leave() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture(out, seen=Once(leave))
    assert no_writers()
    capture(out, resume=True)
    assert contents(out) == whole


def test_too_little_memory_is_a_sentence(capture, tmp_path, prepared, model, monkeypatch):
    slots = []
    take = pipeline.Slots.take

    def noted(self, nbytes, *, held):
        self.budget_bytes = 1000
        slots.append(self)
        return take(self, nbytes, held=held)

    monkeypatch.setattr(pipeline.Slots, "take", noted)
    with pytest.raises(RoomError, match="The shards open at once need more than the"):
        capture(tmp_path / "c.zarr")
    assert no_writers()
    assert slots[0].peak_bytes <= 1000


def a_shard(out: Path) -> Path:
    return sorted((out / "layers/layer_output").glob("c.*"))[4]


def truncate(out: Path) -> None:
    os.truncate(a_shard(out), a_shard(out).stat().st_size // 2)


def flip(out: Path) -> None:
    data = bytearray(a_shard(out).read_bytes())
    data[len(data) // 3] ^= 4
    a_shard(out).write_bytes(data)


def delete(out: Path) -> None:
    a_shard(out).unlink()


def forget(out: Path) -> None:
    (out / ".kimicap/blocks/00000004.json").unlink()


@pytest.mark.parametrize("damage", [truncate, flip, delete, forget])
def test_damage_is_found_and_mended(capture, whole, tmp_path, damage):
    out = tmp_path / "c.zarr"
    capture(out)
    assert verify(out) == []
    committed = store.resume(out).committed()
    damage(out)
    found = verify(out)
    assert len(found) == 1
    assert repair(out, found) == [found[0].block]
    if damage is not forget:
        lengths = zarr.open_array(out / "length", mode="r")
        assert (lengths[slice(*committed[found[0].block]["sequences"])] == -1).all()
        with pytest.raises(MismatchError, match="is not complete"):
            run.seal(out)
    events = capture(out, resume=True)
    assert [event.block for event in events if isinstance(event, pipeline.Committed)] == [found[0].block]
    assert verify(out) == []
    assert contents(out) == whole


class Crash(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("crash_at", range(1, 7))
def test_a_crash_within_repair_leaves_what_tells_of_it(capture, whole, tmp_path, monkeypatch, crash_at):
    """Who says complete has every record; and of a block without a record readers find no lengths."""
    out, steps = tmp_path / "c.zarr", []
    capture(out)
    for file in ("c.0.3.0.0", "c.0.6.0.0"):
        (out / "layers/layer_output" / file).unlink()
    found = verify(out)
    assert [damage.block for damage in found] == [3, 6]

    def stepping(real):
        def step(*given, **more):
            steps.append(given)
            if len(steps) == crash_at:
                raise Crash
            return real(*given, **more)

        return step

    with monkeypatch.context() as patch, suppress(Crash):
        patch.setattr(os, "replace", stepping(os.replace))
        patch.setattr(os, "unlink", stepping(os.unlink))
        repair(out, found)
    assert (len(steps) >= crash_at) == (crash_at <= 5)  # the root is replaced, and of each block two files go
    lost = set(range(BLOCKS)) - set(store.resume(out).committed())
    assert not lost or contents(out)["complete"] is False
    lengths = zarr.open_array(out / "length", mode="r")[...].reshape(BLOCKS, small.BLOCK)
    assert (lengths[sorted(lost)] == -1).all()
    repair(out, verify(out))
    events = capture(out, resume=True)
    assert [event.block for event in events if isinstance(event, pipeline.Committed)] == [3, 6]
    assert contents(out) == whole


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_slots_and_records_stay_flat_over_a_long_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load_model", lambda *_: model)
    files, made = [], []
    monkeypatch.setattr(
        "kimicap.session.Slots", lambda *args, **more: made.append(pipeline.Slots(*args, **more)) or made[0]
    )
    settings = small.settings(tmp_path, rows=2000, values=["residuals", "router_logits"], block_sequences=50)
    ready = prepare(load_settings(None, {**settings, "memory": 2**20, "out": str(tmp_path / "c.zarr")}))
    for event in run.run(ready):
        if isinstance(event, pipeline.Committed):
            files.append((open_files(), len(made[0]._lent), made[0]._allocated_bytes))
    assert len(files) == 40
    assert max(number for number, _, _ in files[20:]) <= max(number for number, _, _ in files[:20]) + 8
    assert max(lent for _, lent, _ in files) < 40
    assert made[0].peak_bytes <= 2**20
    assert made[0]._allocated_bytes == 0
