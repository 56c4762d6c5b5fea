"""What the README shows works: the demo, the ways of reading, the table of values."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
import zarr
from typer.testing import CliRunner

import kimicap
from kimicap import kda
from kimicap.cli import app
from tests import readme
from tests.models import need_kimi_linear

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """The demo at two sequences, with the factors of its states."""
    need_kimi_linear()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("demo") / "demo.zarr"
    subprocess.run([sys.executable, "configs/topics.py"], check=True, cwd=ROOT)
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
    factors = ["linear_attn.attention_keys", "linear_attn.attention_values", "decays", "betas"]
    flags = [part for value in demo["values"] + factors for part in ("--values", value)]
    paths = ["--model", ROOT / demo["model"], "--dataset", ROOT / demo["dataset"], "--out", out]
    arguments = ["run", "--config", ROOT / "configs/demo.yaml", *paths, "--limit", "2", *flags]
    for again in ([], ["--overwrite"]):
        result = CliRunner().invoke(app, [str(argument) for argument in [*arguments, *again]])
        assert result.exit_code == 0, result.stderr
    return out


def test_the_demo_is_read_as_the_readme_says(capture):
    tree = kimicap.open(capture)
    length = int(tree["length"][1])
    logits = tree["mlp/router_logits"].sel(layer=3)
    one = logits.isel(sequence=1, position=slice(0, length)).values
    assert one.shape == (length, 16)
    assert not np.isnan(one).any()
    assert np.array_equal(zarr.open_group(capture, mode="r")["mlp/router_logits"][2, 1, :length], one)


def test_states_are_rebuilt_as_the_readme_says(capture):
    kda_of = kimicap.open(capture)["linear_attn"].sel(layer=0).isel(sequence=[1])
    names = ("attention_keys", "attention_values", "decays", "betas")
    factors = [torch.from_numpy(kda_of[name].values) for name in names]
    known = torch.from_numpy(kda_of["states"].isel(states_position=0).values)
    states, _ = kda.replay(*factors, initial=known, start=64, stop=128)
    assert kda_of["states_at"].values[0, :2].tolist() == [63, 127]
    stored = torch.from_numpy(kda_of["states"].isel(states_position=1).values)
    torch.testing.assert_close(states[:, -1], stored, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        ("residuals", []),
        ("residuals", ["--layer", "3"]),
        ("states", []),
        ("expert_indices", []),
        ("router_logits", ["--sequence", "1"]),
        ("linear_attn.decays", ["--layer", "4", "--head", "2"]),
        ("betas", []),
    ],
)
def test_pictures(capture, tmp_path, value, flags):
    out = tmp_path / "picture.png"
    result = CliRunner().invoke(app, ["plot", str(capture), "--value", value, "--out", str(out), *flags])
    assert (result.exit_code, result.stdout) == (0, f"{out}\n"), result.stderr
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--value", "zzz"], "The capture has no value 'zzz'. It has layers/layer_output, linear_attn/"),
        (["--value", "expert_index"], "Did you mean expert_indices"),
        (
            ["--value", "residuals", "--layer", "9"],
            "--layer 9 is not in the capture; layer_output has 0, 1, 2, 3, 4, 5.",
        ),
        (["--value", "decays", "--head", "9"], "--head 9 is not in the capture; decays has 0, 1, 2, 3."),
        (["--value", "residuals", "--sequence", "2"], "--sequence 2 lies outside the capture, which has 0 to 1."),
        (
            ["--value", "residuals", "--out", "picture.gif"],
            "A picture is a .png, .svg or .pdf, and picture.gif is none",
        ),
        (["--value", "residuals", "--out", "none/p.png"], "The picture none/p.png cannot be written: [Errno 2]"),
    ],
)
def test_what_cannot_be_drawn(capture, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plot", str(capture), "--out", "p.png", *flags])
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_told_where_it_is_drawn(capture, tmp_path):
    copy = tmp_path / "c.zarr"
    shutil.copytree(capture, copy)
    shard = next((copy / "mlp/router_logits").glob("c.*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    flags = ["--value", "router_logits", "--out", str(tmp_path / "p.png")]
    found = [CliRunner().invoke(app, ["plot", str(copy), *flags, "--sequence", number]) for number in ("0", "1")]
    damaged = [result for result in found if result.exit_code]
    assert damaged
    assert {result.exit_code for result in damaged} == {3}
    assert all(result.stderr.endswith("find the damage with `kimicap verify`.\n") for result in damaged)


def test_a_sequence_too_short_for_its_selection_is_not_drawn(tmp_path):
    need_kimi_linear()
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "short"}\n{"text": "a little longer"}\n')
    capture = tmp_path / "short.zarr"
    given = {"model": ROOT / "configs/demo-model", "dataset": data, "tokenizer": "bytes", "out": capture}
    flags = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    result = CliRunner().invoke(app, ["run", "--random-weights", "--values", "states@every:8", *flags])
    assert result.exit_code == 0, result.stderr
    picture = ["plot", str(capture), "--value", "states", "--out", str(tmp_path / "p.png")]
    empty = CliRunner().invoke(app, picture)
    assert (empty.exit_code, empty.stdout) == (2, "")
    assert empty.stderr == (
        "states has nothing of sequence 0: none of its 5 tokens was selected (every:8); choose a longer one with "
        "--sequence.\n"
    )
    assert CliRunner().invoke(app, [*picture, "--sequence", "1"]).exit_code == 0


def test_the_table_of_values_is_the_schema():
    assert readme.table() in readme.README.read_text(), "run `python -m tests.readme`"


def test_commands_and_flags_in_the_readme_exist():
    text = readme.README.read_text()
    commands = {command.name for command in app.registered_commands}
    assert all(f"kimicap {name}" in text for name in commands)


def test_the_48b_config_is_valid():
    from kimicap.config import load_settings

    assert load_settings(ROOT / "configs/kimi-linear-48b.yaml", {}).limit == 1000
