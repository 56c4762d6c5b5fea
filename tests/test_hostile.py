"""What a hostile but realistic person does: each kind of fault found so, and the sentence that answers it."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kimicap.cli import _stoppable, app
from kimicap.config import load_settings
from kimicap.store import info
from tests.models import KDA, save_model, tiny_config, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    here = tmp_path_factory.mktemp("hostile")
    save_model(here / "model")
    (here / "data.jsonl").write_text("\n".join(json.dumps({"text": "hello " * number}) for number in (3, 4)))
    return here


def run(folder, *more, model=None, out, values="residuals"):
    flags = {"model": model or folder / "model", "dataset": folder / "data.jsonl", "tokenizer": "bytes"}
    parts = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return CliRunner().invoke(app, ["run", *parts, "--values", values, "--out", str(out), *map(str, more)])


def refused(result, text, code=2):
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    assert text in result.stderr
    assert "Unexpected" not in result.stderr


def broken(folder, tmp_path, change):
    """A copy of the model's folder whose weights went through ``change``."""
    save_model(tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "broken"


O_PROJ = "model.layers.2.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda weights: weights.pop(O_PROJ), f"lacks {O_PROJ}, which would be random numbers"),
        (lambda weights: weights.update({O_PROJ: torch.zeros(3, 3)}), "has other shapes than its config says for"),
        (lambda weights: weights.pop(next(key for key in weights if "experts" in key)), "or some are missing"),
    ],
)
def test_a_checkpoint_that_lacks_weights_is_never_filled_with_random_ones(folder, tmp_path, change, text):
    result = run(folder, model=broken(folder, tmp_path, change), out=tmp_path / "o.zarr")
    refused(result, text)
    assert not (tmp_path / "o.zarr").exists()


def test_what_stands_in_the_way_of_out_is_told_before_the_model_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kimicap.run.load_model", lambda *_: pytest.fail("loaded"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "keep").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(run(folder, out=tmp_path / "file"), "is a file")
    refused(run(folder, out=tmp_path / "file" / "o.zarr"), "is a file. Give another --out.")
    refused(run(folder, "--overwrite", out=tmp_path / "other"), "is not empty and not a capture")
    refused(run(folder, out=tmp_path / "loop"), "cannot be the path of a capture")
    refused(run(folder, out=tmp_path / ("x" * 300)), "cannot be the path of a capture")
    refused(run(folder, out="a\0b"), "it must be text without zero bytes")
    refused(run(folder, "--resume", "--overwrite", out=tmp_path / "o"), "give one of them")
    monkeypatch.setattr("os.access", lambda *_: False)
    refused(run(folder, out=tmp_path / "o.zarr"), "may not be written to")
    assert (tmp_path / "other" / "keep").read_text() == "x"


def test_home_is_meant_in_a_config_file_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "c.yaml"
    file.write_text("{model: ~/m, out: ~/o, tokenizer: ~/t, schema: ~/s, dataset: d, values: residuals}")
    found = load_settings(file, {})
    places = [found.model, found.out, found.tokenizer, str(found.schema_file)]
    assert places == [f"/home/me/{name}" for name in "mots"]


def test_a_resume_of_a_complete_capture_says_so_and_changes_nothing(folder, tmp_path):
    out = tmp_path / "o.zarr"
    assert run(folder, out=out).exit_code == 0
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    again = run(folder, "--resume", out=out)
    assert (again.exit_code, again.stdout) == (0, f"{out}\n")
    assert "Nothing was left to capture" in again.stderr
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before


def test_numbers_far_too_large_are_refused_or_harmless(folder, tmp_path):
    refused(run(folder, "--generate", 10**9, out=tmp_path / "o"), "it must be at most 1048576")
    assert run(folder, "--block-sequences", 2**31 - 1, out=tmp_path / "o").exit_code == 0


@pytest.mark.parametrize("device", ["meta", "xpu", "mps"])
def test_a_device_that_is_not_there(folder, tmp_path, device):
    refused(run(folder, "--device", device, out=tmp_path / "o"), f"--device {device!r} is not there")


def test_values_that_are_not_finite_are_told_of_and_the_run_goes_on(folder, tmp_path):
    def spoil(weights):
        weights[O_PROJ][0, 0] = torch.nan

    model = broken(folder, tmp_path, spoil)
    result = run(folder, model=model, out=tmp_path / "o")
    assert result.exit_code == 0
    assert "elements of layers.layer_output are NaN or infinite in the model's block(s) 2-5" in result.stderr
    assert info(tmp_path / "o")["complete"]
    sampled = run(folder, "--generate", 2, "--temperature", 1.0, model=model, out=tmp_path / "p")
    refused(sampled, "no token can be sampled", code=1)


@pytest.mark.parametrize("flags", [("--generate", 2), ("--split-long", "continue", "--seq-len", 4)])
def test_a_model_of_kda_alone_has_no_cache(folder, tmp_path, flags):
    sizes = {"num_hidden_layers": 2, "layer_types": [KDA] * 2, "mlp_layer_types": ["dense"] * 2}
    save_model(tmp_path / "kda", tiny_model(**sizes))
    refused(run(folder, *flags, model=tmp_path / "kda", out=tmp_path / "o"), f"{flags[0]}")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("change", [{"hidden_size": "x"}, {"vocab_size": [1]}, {"num_hidden_layers": -1}])
def test_a_config_with_numbers_that_are_none(folder, tmp_path, change):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({**tiny_config().to_dict(), **change}))
    refused(run(folder, "--random-weights", model=tmp_path / "m", out=tmp_path / "o"), f"{tmp_path / 'm'}")


def test_a_signal_whose_exception_is_lost_stops_the_run_at_the_next_event():
    seen = []
    with _stoppable() as until_asked:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            seen += until_asked(iter([1, 2]))
    assert seen == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
