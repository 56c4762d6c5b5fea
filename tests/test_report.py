"""What people are shown: sizes, bottlenecks, progress with and without a terminal, checks."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from kimicap import report
from kimicap.cluster import Rank
from kimicap.config import size_text
from kimicap.events import Committed, Progress


def step(number, *, elapsed_s, waited_s=0.0, device_s=0.0):
    return Progress(
        sequences=number,
        tokens=100 * number,
        written_bytes=number * 10**6,
        elapsed_s=elapsed_s,
        waited_s=waited_s,
        seconds={"device": device_s, "disk": waited_s},
    )


def prepared(tmp_path, sequences=10):
    plan = SimpleNamespace(
        blocks=5, lengths=np.zeros(sequences), block=lambda number: range(2 * number, 2 * number + 2)
    )
    return SimpleNamespace(plan=plan, settings=SimpleNamespace(out=str(tmp_path / "o.zarr")))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (254e9, "254 GB"), (30.06e12, "30.1 TB")],
)
def test_sizes(size_bytes, text):
    assert size_text(size_bytes) == text


def test_the_bottleneck_follows_the_waiting():
    stage = report.Bottleneck()
    assert stage(step(1, elapsed_s=1)) == "model"
    assert stage(step(2, elapsed_s=2, waited_s=0.5)) == "disk"
    assert stage(step(3, elapsed_s=3, waited_s=0.5)) == "model"
    assert stage(step(4, elapsed_s=4, waited_s=0.5, device_s=0.5)) == "device"
    assert stage(step(5, elapsed_s=5, waited_s=0.5, device_s=0.55)) == "model"
    assert stage(step(6, elapsed_s=6, waited_s=1.0, device_s=1.0)) == "disk"


def test_a_line_every_30_s_without_a_terminal(tmp_path, capsys):
    events = [step(1, elapsed_s=10), Committed(block=0, sequences=2), step(4, elapsed_s=35), step(9, elapsed_s=50)]
    report.follow(events, prepared(tmp_path), Rank(), resume=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "4 of 10 sequences, 11 tokens/s, 4 MB written, 52 s left, waiting for: model",
        "captured 9 sequences, 900 tokens, 9 MB in 50.0 s, 18 tokens/s",
    ]


def test_a_resumed_run_says_once_what_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kimicap.run.committed_at", lambda settings, *, resume: {0: {}, 3: {}, 4: {}} if resume else {})
    report.follow([step(1, elapsed_s=35)], prepared(tmp_path), Rank(), resume=True)
    assert capsys.readouterr().err.splitlines() == [
        "3 of 5 blocks committed, 2 to go",
        "1 of 4 sequences, 3 tokens/s, 1 MB written, 105 s left, waiting for: model",
        "captured 1 sequence, 100 tokens, 1 MB in 35.0 s, 3 tokens/s",
    ]
    report.follow([], prepared(tmp_path), Rank(rank=1, world=2), resume=True)
    assert capsys.readouterr().err == ""


def test_another_rank_says_which_it_is_and_no_more(tmp_path, capsys):
    report.follow([step(4, elapsed_s=35)], prepared(tmp_path), Rank(rank=1, world=2), resume=False)
    line = "[rank 1] 4 of 4 sequences, 11 tokens/s, 4 MB written, 0 s left, waiting for: model\n"
    assert capsys.readouterr().err == line


def test_live_progress_on_a_terminal(tmp_path, monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(report, "_console", lambda err=False: console)
    report.follow([step(4, elapsed_s=2, waited_s=1.5)], prepared(tmp_path), Rank(), resume=False)
    for part in ("4/10 sequences", "200 tokens/s 4 MB", "left, waiting for: disk"):
        assert part in shown.getvalue()


def test_checks_are_a_table_of_pass_and_fail(capsys):
    check = {"name": "sum", "value": "patterns", "block": 3, "error": 1e-7, "tolerance": 1e-5, "passed": True}
    check["about"] = "sum of each row with 1"
    report.show_checks([check, {**check, "block": None, "error": None, "passed": False}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:6] == ["pass", "sum", "patterns", "3", "1.0e-07", "1.0e-05"]
    assert lines[2].split()[:6] == ["FAIL", "sum", "patterns", "-", "no", "number"]
