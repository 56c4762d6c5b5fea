"""Killed anywhere and resumed, a capture ends bit for bit like one never killed. Real processes, real kills."""

import random
import signal
import time
from contextlib import contextmanager

import pytest

from kimicap.session import signals
from kimicap.verify import repair, verify
from tests import small
from tests.driver import contents

BLOCKS = small.ROWS // small.BLOCK
KILLS = 50


def finish(driver, out, known=()):
    """Resumes (or begins) until done; what is committed already is not computed again."""
    outcome = driver.run(out, resume=out.exists())
    assert outcome.status == "done", outcome
    again = {sequence // small.BLOCK for batch in outcome.batches for sequence in batch}
    assert not again & set(known)
    return outcome


def records(out):
    return {int(file.stem) for file in (out / ".kimicap/blocks").glob("*.json")}


def test_killed_at_random_instants(driver, whole, tmp_path):
    draw = random.Random(11)
    start = time.monotonic()
    assert driver.run(tmp_path / "timed.zarr").status == "done"
    span_s = time.monotonic() - start  # of one run on this machine, now
    kills = captures = 0
    while kills < KILLS:
        out = tmp_path / f"{captures}.zarr"
        captures += 1
        outcome = driver.run(out, kill_after_s=draw.uniform(0.0, span_s))
        while outcome.status == "killed":
            kills += 1
            known = records(out) if out.exists() else set()
            outcome = driver.run(out, resume=out.exists(), kill_after_s=draw.uniform(0.0, span_s))
            assert not known & {sequence // small.BLOCK for batch in outcome.batches for sequence in batch}
        assert outcome.status == "done", outcome
        assert contents(out) == whole
    assert captures >= 3


WRITE = "kimicap.store.Store.write"


@pytest.mark.parametrize(
    ("step", "least"),
    [
        ({"at": WRITE, "nth": 1, "when": "after"}, 0),
        ({"at": WRITE, "nth": 40, "when": "after"}, 0),
        ({"at": "kimicap.records.write_block", "nth": 1}, 0),
        ({"at": "kimicap.records.write_block", "nth": 5}, 4),
        ({"at": "kimicap.records.write_block", "nth": 10, "when": "after"}, 10),
        ({"at": "os.replace", "nth": 1, "match": "blocks"}, 0),
        ({"at": "os.replace", "nth": 6, "match": "blocks"}, 5),
        ({"at": "os.replace", "nth": 6, "match": "blocks", "when": "after"}, 6),
        ({"at": "kimicap.store.set_attributes"}, 10),
        ({"at": "os.replace", "match": ".kimicap/zarr.json"}, 10),
        ({"at": "os.replace", "match": ".kimicap/zarr.json", "when": "after"}, 10),
    ],
    ids=lambda step: "-".join(map(str, step.values())) if isinstance(step, dict) else str(step),
)
def test_killed_at_a_named_step(driver, whole, tmp_path, step, least):
    out = tmp_path / "c.zarr"
    assert driver.run(out, **{"break": step}).status == "killed"
    known = records(out)
    assert len(known) >= least
    outcome = finish(driver, out, known)
    assert len(outcome.committed) == BLOCKS - len(known)
    assert outcome.loaded == (len(known) < BLOCKS)
    assert contents(out) == whole


@pytest.mark.parametrize("step", [{"at": "kimicap.records.write_run"}, {"at": "os.rename", "match": "kimicap-new"}])
def test_killed_while_creating(driver, whole, tmp_path, step):
    out = tmp_path / "c.zarr"
    assert driver.run(out, **{"break": step}).status == "killed"
    assert not out.exists()
    finish(driver, out)
    assert contents(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["c.zarr"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal(driver, whole, tmp_path, number):
    out = tmp_path / "c.zarr"
    step = {"at": "kimicap.forwards.Runner.prompts", "nth": 7, "number": number}  # the first is the probe
    outcome = driver.run(out, **{"break": step})
    assert outcome.status == "Stopped"
    assert "Stopped by a signal before block" in outcome.message
    assert "go on with --resume" in outcome.message
    known = records(out)
    # Whatever was computed is kept, but for the block in hand.
    done = {sequence for batch in outcome.batches for sequence in batch}
    assert known == {block for block in range(BLOCKS) if {2 * block, 2 * block + 1} <= done}
    assert known == set(outcome.committed)
    assert contents(out)["complete"] is False
    finish(driver, out, known)
    assert contents(out) == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_acts_as_if_nobody_listened(number):
    stops, others = [], []

    def other(*_):
        others.append(number)

    first = signal.SIGINT if number == signal.SIGTERM else signal.SIGTERM  # of another kind too
    before = signal.signal(number, other)
    try:
        with signals(lambda: stops.append(number)):
            signal.raise_signal(first)
            assert (stops.pop(), others) == (number, [])
            signal.raise_signal(number)
            assert (stops, others.pop()) == ([], number)
        assert signal.getsignal(number) is other
        with signals(lambda: stops.append(number)):
            signal.raise_signal(number)
            assert (stops, others) == ([number], [])
            signal.raise_signal(number)
            assert (stops, others) == ([number], [number])
        assert signal.getsignal(number) is other
    finally:
        signal.signal(number, before)


def test_a_finished_capture_is_left_as_it_is(driver, whole, tmp_path):
    out = tmp_path / "c.zarr"
    finish(driver, out)
    outcome = finish(driver, out)
    assert not outcome.loaded
    assert not outcome.batches
    assert contents(out) == whole


def test_without_resume_an_existing_capture_is_refused(driver, tmp_path):
    out = tmp_path / "c.zarr"
    finish(driver, out)
    outcome = driver.run(out)
    assert outcome.status == "UsageError"
    assert outcome.message == (
        f"{out} holds a capture already; go on with it by --resume, or replace it by --overwrite."
    )


def test_resume_begins_where_nothing_was_begun(driver, whole, tmp_path):
    """A job that was stopped while it loaded the model, and is started again with --resume."""
    assert driver.run(tmp_path / "c.zarr", resume=True).status == "done"
    assert contents(tmp_path / "c.zarr") == whole


def half(driver, out):
    assert driver.run(out, **{"break": {"at": "kimicap.records.write_block", "nth": 5}}).status == "killed"
    return records(out)


def test_other_settings_are_refused_and_listed(driver, tmp_path):
    out = tmp_path / "c.zarr"
    half(driver, out)
    changed = {"values": ["residuals"], "store_dtype": "float16", "seed": 3}
    outcome = driver.run(out, resume=True, settings=changed)
    assert outcome.status == "MismatchError"
    assert not outcome.loaded
    for told in ("seed is 3, was 0", "store_dtype is 'float16', was 'lossless'", "values is ['residuals'], was ["):
        assert told in outcome.message
    assert outcome.message.startswith(f"{out} was begun with other settings: ")
    assert outcome.message.endswith("Resume with the same ones, or begin another capture.")


@contextmanager
def changed(file, old, new):
    """A file with other text inside."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    try:
        yield
    finally:
        file.write_text(text)


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("rows.jsonl", "x", "y", "the dataset or tokenizer gives other tokens than it did"),
        ("rows.jsonl", "{", '{"text": ""}\n{', "the dataset or tokenizer gives other tokens than it did"),
        ("model/config.json", '"rms_norm_eps": 1e-05', '"rms_norm_eps": 0.5', "the model's config, code or weights"),
    ],
)
def test_a_changed_dataset_or_model_is_refused(driver, tmp_path, name, old, new, told):
    out = tmp_path / "c.zarr"
    half(driver, out)
    with changed(driver.folder / name, old, new):
        # Settings that no other test has, so that the dataset is read again.
        outcome = driver.run(out, resume=True, settings={"memory": 2**22 + len(new) + len(name)})
    assert outcome.status == "MismatchError"
    assert not outcome.loaded
    assert told in outcome.message
    finish(driver, out)


def test_lengths_of_blocks_without_a_record_are_gone_before_anything_is_written(driver, whole, tmp_path):
    """A reader of an unfinished capture knows by them which sequences are there."""
    import zarr

    out = tmp_path / "c.zarr"
    assert driver.run(out, **{"break": {"at": "kimicap.records.write_block", "nth": 5}}).status == "killed"
    known = records(out)
    assert {int(file.name[2:]) for file in (out / "length").glob("c.*")} == {*known, max(known) + 1}
    assert driver.run(out, resume=True, **{"break": {"at": WRITE}}).status == "killed"
    length = zarr.open_group(out, mode="r")["length"][...]
    assert {sequence // small.BLOCK for sequence in range(small.ROWS) if length[sequence] >= 0} == known
    finish(driver, out, known)
    assert contents(out) == whole


def test_a_complete_capture_that_lost_a_record_is_told(driver, whole, tmp_path):
    out = tmp_path / "c.zarr"
    finish(driver, out)
    (out / ".kimicap/blocks/00000003.json").unlink()
    outcome = driver.run(out, resume=True)
    assert outcome.status == "MismatchError"
    assert outcome.message == (
        f"{out} was complete, but block 3 is not committed. Take such blocks back with kimicap verify --repair, and go "
        "on with --resume."
    )
    assert repair(out, verify(out)) == [3]
    finish(driver, out)
    assert contents(out) == whole


@pytest.mark.parametrize(
    "changed", [{"memory": 2**20}, {"device": "cpu"}, {"batch_tokens": 25}, {"batch_size": 1}, {"batch_tokens": 1}]
)
def test_how_the_work_is_batched_may_change(driver, whole, tmp_path, changed):
    """Rows of other batches round otherwise in the last bit or two: the same arrays up to that, the same files."""
    import numpy as np

    out = tmp_path / "c.zarr"
    known = half(driver, out)
    outcome = driver.run(out, resume=True, settings=changed)
    assert outcome.status == "done", outcome
    assert not known & {sequence // small.BLOCK for batch in outcome.batches for sequence in batch}
    found = contents(out)
    assert found["files"] == whole["files"]
    assert found["complete"] is True
    same = not any(name.startswith("batch") for name in changed)
    for name in set(found) - {"files", "complete"}:
        if found[name] != whole[name]:
            assert not same, name
            ours, theirs = (np.frombuffer(data[name], np.float32) for data in (found, whole))
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
