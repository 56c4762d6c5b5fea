"""Several processes, one capture."""

import shutil
from dataclasses import replace

import pytest

from kimicap import run, store
from kimicap.cluster import Rank, find_rank, wait_for
from kimicap.config import load_settings
from kimicap.errors import MismatchError, RoomError, UsageError
from kimicap.prepare import prepare
from kimicap.run import seal
from tests import small
from tests.driver import contents

BLOCKS = small.ROWS // small.BLOCK


def together(driver, out, world, *, resume=False, more=None):
    requests = [{"out": str(out), "rank": rank, "world": world, "resume": resume} for rank in range(world)]
    return driver.run_all(*({**request, **(more or {}).get(request["rank"], {})} for request in requests))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Rank()),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Rank(rank=3, world=4, local=1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Rank()),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, Rank(rank=5, world=8, local=1)),
        # torchrun inside a SLURM job: its processes are the ranks.
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Rank(rank=1, world=2)),
        # A batch script or shell inside an allocation is no step of several tasks.
        ({"SLURM_NTASKS": "8"}, Rank()),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Rank()),
        # A step of fewer tasks than the job has.
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"},
            Rank(rank=1, world=2),
        ),
        ({"RANK": "3"}, Rank()),
    ],
)
def test_rank_and_world_from_the_environment(environment, expected):
    assert find_rank(environment) == expected


@pytest.mark.parametrize(("rank", "world"), [("4", "4"), ("-1", "4"), ("x", "4"), ("0", "0")])
def test_a_rank_that_makes_no_sense_is_refused(rank, world):
    with pytest.raises(UsageError, match=f"RANK={rank} and WORLD_SIZE={world} name no process of a run"):
        find_rank({"RANK": rank, "WORLD_SIZE": world})


@pytest.mark.parametrize("world", [1, 2, 5, 17])
def test_every_block_has_one_rank(world):
    owned = [block for rank in range(world) for block in Rank(rank=rank, world=world).blocks(11, {3, 4})]
    assert sorted(owned) == [block for block in range(11) if block not in (3, 4)]


def test_waiting_ends():
    with pytest.raises(MismatchError, match=r"Waited 0 s for rank 0 to wake; look at the output of rank 0\."):
        wait_for(lambda: False, what="rank 0 to wake", limit_s=0.01)


@pytest.mark.parametrize("world", [2, 5])
def test_any_number_of_processes_gives_the_same_capture(driver, whole, tmp_path, world):
    out = tmp_path / "c.zarr"
    outcomes = together(driver, out, world)
    assert [outcome.status for outcome in outcomes] == ["done"] * world
    assert [sorted(outcome.committed) for outcome in outcomes] == [
        list(range(rank, BLOCKS, world)) for rank in range(world)
    ]
    assert contents(out) == whole


def test_a_killed_rank_leaves_its_blocks_to_another_number_of_processes(driver, whole, tmp_path):
    out = tmp_path / "c.zarr"
    step = {"at": "kimicap.records.write_block", "nth": 2}
    first, second = together(driver, out, 2, more={1: {"break": step}})
    assert first.status == "done"
    assert second.status == "killed"
    assert contents(out)["complete"] is False
    with pytest.raises(MismatchError, match=r"is not complete: block .* is not committed"):
        seal(out)
    outcomes = together(driver, out, 5, resume=True)
    assert all(outcome.status == "done" for outcome in outcomes)
    again = [block for outcome in outcomes for block in outcome.committed]
    assert sorted(again) == [3, 5, 7, 9]
    assert contents(out) == whole


def test_a_rank_without_blocks_loads_no_model(driver, whole, tmp_path):
    out = tmp_path / "c.zarr"
    outcomes = together(driver, out, BLOCKS + 2)
    assert all(outcome.status == "done" for outcome in outcomes)
    assert [outcome.loaded for outcome in outcomes] == [True] * BLOCKS + [False] * 2
    assert contents(out) == whole


def test_all_killed_before_sealing_can_be_sealed_alone(driver, whole, tmp_path):
    out = tmp_path / "c.zarr"
    step = {"at": "kimicap.store.Store.seal"}
    outcomes = together(driver, out, 2, more={rank: {"break": step} for rank in range(2)})
    assert "killed" in [outcome.status for outcome in outcomes]
    assert contents(out)["complete"] is False
    seal(out)
    assert contents(out) == whole
    seal(out)
    assert contents(out) == whole


def test_a_rank_that_starts_late_needs_room_for_what_is_left_alone(tmp_path, monkeypatch):
    given = {**small.settings(tmp_path, rows=40), "values": ["residuals"], "out": str(tmp_path / "c.zarr")}
    prepared = prepare(load_settings(None, given))
    monkeypatch.setattr(run, "load_model", lambda *_: small.model())
    list(run.run(prepared, rank=Rank(rank=0, world=2)))
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((0.49, False), (0.51, True)):
        left = usage._replace(free=int(prepared.plan.disk_bytes * free))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, left=left: left)
        if fits:
            list(run.run(prepared, rank=Rank(rank=1, world=2)))
        else:
            with pytest.raises(RoomError, match="The capture needs about"):
                list(run.run(prepared, rank=Rank(rank=1, world=2)))
    assert store.resume(tmp_path / "c.zarr").complete


def test_a_hub_model_that_has_moved_on_is_resumed_by_the_recorded_commit(tmp_path, monkeypatch):
    old, new = "1" * 40, "2" * 40
    given = {**small.settings(tmp_path), "values": ["residuals"], "out": str(tmp_path / "c.zarr")}
    prepared = prepare(load_settings(None, given))

    def begun_by(revision):
        settings = prepared.settings.model_copy(update={"model": "some/model", "revision": revision})
        return list(run.run(replace(prepared, settings=settings), resume=True, rank=Rank(rank=0, world=2)))

    monkeypatch.setattr(run, "load_model", lambda *_: small.model())
    monkeypatch.setattr(run, "model_digest", lambda settings: settings.revision or old)
    begun_by(None)
    monkeypatch.setattr(run, "model_digest", lambda settings: settings.revision or new)
    for revision, told in (
        (None, f"its newest commit was {old}, which --revision takes"),
        (new, f"revision is '{new}'"),
    ):
        with pytest.raises(MismatchError, match=told):
            begun_by(revision)
    assert begun_by(old) == []  # all blocks of rank 0 are there


def test_an_old_capture_is_not_computed_again_by_other_ranks(driver, whole, tmp_path):
    """Started without --resume where a capture is: rank 0 refuses, and the others spoil nothing."""
    out = tmp_path / "c.zarr"
    assert driver.run(out).status == "done"
    first, second = together(driver, out, 2)
    assert first.status == "UsageError"
    assert not second.batches
    assert contents(out) == whole


def test_a_rank_with_other_settings_than_rank_0_is_refused(driver, tmp_path):
    out = tmp_path / "c.zarr"
    first, second = together(driver, out, 2, more={1: {"settings": {"seed": 3}}})
    assert first.status == "done"
    assert second.status == "MismatchError"
    assert second.message == (
        f"{out} was begun with other settings: seed is 3, was 0. Resume with the same ones, or begin another capture."
    )
    assert not second.batches
    assert contents(out)["complete"] is False
    assert sorted(store.resume(out).committed()) == first.committed == list(range(0, BLOCKS, 2))


def test_processes_that_resume_begin_where_nothing_was_begun(driver, whole, tmp_path):
    outcomes = together(driver, tmp_path / "c.zarr", 2, resume=True)
    assert [outcome.status for outcome in outcomes] == ["done"] * 2
    assert contents(tmp_path / "c.zarr") == whole


def test_stage_times_are_stored(driver, tmp_path):
    import zarr

    out = tmp_path / "c.zarr"
    assert all(outcome.status == "done" for outcome in together(driver, out, 2))
    stages = zarr.open_group(out, mode="r").attrs["stages"]
    assert set(stages) == {"forward", "device", "disk", "writing"}
    assert stages["forward"] > 0
    assert stages["writing"] > 0
