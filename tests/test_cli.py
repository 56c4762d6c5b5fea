"""The command line: results, exit codes, and the sentences of every error a person can cause."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kimicap
from kimicap import store
from kimicap.cli import app, told
from kimicap.config import Settings
from kimicap.documents import size_text
from kimicap.errors import KimicapError, MismatchError, RoomError, Stopped, UsageError
from tests.models import save_model, tiny_config

VALUES = "residuals,states@every:8,router_logits,expert_indices"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, a dataset and one capture of both."""
    here = tmp_path_factory.mktemp("cli")
    save_model(here / "model")
    rows = [json.dumps({"text": "hello world " * (number + 1), "ids": [number, 383]}) for number in range(6)]
    (here / "data.jsonl").write_text("\n".join(rows))
    result = CliRunner().invoke(app, ["run", *basics(here), "--out", str(here / "done.zarr"), "--block-sequences", "4"])
    assert result.exit_code == 0, result.stderr
    return here


def basics(here, **other):
    """Flags of a run; ``other`` replaces some, and drops those that are None."""
    given = {"model": here / "model", "dataset": here / "data.jsonl", "tokenizer": "bytes", "values": VALUES, **other}
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_run_prints_the_path_alone_on_stdout_and_talks_on_stderr(folder, tmp_path):
    out = tmp_path / "capture.zarr"
    result = call("run", *basics(folder), "--out", out, "--limit", 2)
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert "layers/layer_output" in result.stderr
    assert "2 sequences, 36 tokens, in 1 block of 2" in result.stderr
    assert "captured 2 sequences, 36 tokens" in result.stderr
    assert "states@all would take" in result.stderr
    assert kimicap.open(out).attrs["complete"] is True


def test_flags_override_the_config_file(folder, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {folder / 'model'}\ndataset: {folder / 'data.jsonl'}\nlimit: 5\nvalues: [logits]\n")
    result = call("plan", "--config", config, "--tokenizer", "bytes", "--limit", 3, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["sequences"] == 3
    assert [array["path"] for array in document["arrays"]][-1] == "logits"


def test_one_of_a_kind_is_not_many(folder):
    assert "1 sequence, 12 tokens, in 1 block of 1; at most" in call("plan", *basics(folder), "--limit", 1).stdout


def test_every_setting_is_a_flag_with_its_description():
    text = "".join(call("run", "--help").stdout.split())
    for name, field in Settings.model_fields.items():
        assert "--" + (field.alias or name).replace("_", "-") in text
        assert "".join((field.description or "").split()) in text


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_the_plan_goes_to_stdout_and_writes_nothing(folder, tmp_path, arguments):
    out = tmp_path / "o.zarr"
    command = "run" if arguments else "plan"
    result = call(command, *basics(folder), "--out", out, *arguments)
    assert result.exit_code == 0
    assert "mlp/expert_indices" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "check", "run"])
def test_urls_of_object_stores_are_refused(folder, command):
    result = call(command, *basics(folder), "--out", "s3://bucket/o.zarr")
    assert result.exit_code == 2
    assert (
        result.stderr == "s3://bucket/o.zarr is a URL, and object stores are not supported yet. Give a local folder.\n"
    )


def test_planned_bytes_are_those_of_the_arrays(folder):
    document = json.loads(call("plan", *basics(folder), "--json").stdout)
    found = json.loads(call("info", folder / "done.zarr", "--json").stdout)
    assert {a["path"]: a["bytes"] for a in document["arrays"]} == {n: a["bytes"] for n, a in found["arrays"].items()}
    assert document["bytes"] == sum(array["bytes"] for array in document["arrays"])
    assert document["fits"]


def test_values_of_a_model_and_of_the_schema(folder):
    document = json.loads(call("values", "--model", folder / "model", "--json").stdout)
    found = {f"{value['host']}.{value['name']}": value for value in document["values"]}
    assert found["linear_attn.states"]["bytes"] == 2 * 16 * 16 * 4
    assert found["linear_attn.states"]["all_bytes"] == 4 * 2 * 16 * 16 * 4
    assert found["linear_attn.states"]["unit"] == "state"
    assert found["mlp.expert_indices"]["bytes"] == 4
    assert found["mlp.router_logits"]["blocks"] == [1, 2, 3, 4, 5]
    assert found["layers.layer_output"]["short_name"] == "residuals"
    text = call("values", "--model", folder / "model").stdout
    assert "5: 1-5" in text
    bare = call("values")
    assert bare.exit_code == 0
    assert "Recurrent state after chosen tokens" in bare.stdout


def test_a_value_that_the_model_lacks_is_listed_with_its_reason(tmp_path):
    config = tiny_config(mlp_layer_types=["dense"] * 6)
    config.save_pretrained(tmp_path)
    document = json.loads(call("values", "--model", tmp_path, "--json").stdout)
    missing = {value["name"]: value["missing"] for value in document["values"]}
    assert missing["router_logits"] == "no block of this model has a part of the kind dense or mixture"
    assert "not here: no block of this model" in call("values", "--model", tmp_path).stdout


def test_info_verify_and_seal(folder, tmp_path):
    text = call("info", folder / "done.zarr").stdout
    assert "2 of 2 blocks committed, complete" in text
    assert "linear_attn/states_at" in text
    whole = call("verify", folder / "done.zarr")
    assert (whole.exit_code, whole.stdout.strip()) == (0, f"{folder / 'done.zarr'} is whole")
    assert json.loads(call("verify", folder / "done.zarr", "--json").stdout)["whole"] is True
    assert call("seal", folder / "done.zarr").stdout == f"{folder / 'done.zarr'}\n"


def test_damage_is_found_taken_back_and_captured_again(folder, tmp_path):
    out = tmp_path / "o.zarr"
    shutil.copytree(folder / "done.zarr", out)
    shard = next((out / "mlp" / "router_logits").glob("c.*"))
    shard.write_bytes(shard.read_bytes()[:-3])
    found = call("verify", out)
    assert found.exit_code == 3
    assert shard.name in found.stdout
    assert found.stderr == (
        f"{out} is damaged in 1 place; --repair writes metadata again, and takes blocks back for `kimicap run "
        "--resume`.\n"
    )
    repaired = call("verify", out, "--repair")
    assert repaired.exit_code == 0
    assert "blocks taken back" in repaired.stdout
    sound = call("verify", out)
    assert sound.stdout.splitlines()[-1] == f"the committed blocks of {out} are whole"
    seal = call("seal", out)
    assert seal.exit_code == 3
    assert "is not complete" in seal.stderr
    again = call("run", *basics(folder), "--out", out, "--block-sequences", 4, "--resume")
    assert again.exit_code == 0, again.stderr
    assert "1 of 2 blocks committed, 1 to go\n" in again.stderr
    assert kimicap.open(out).equals(kimicap.open(folder / "done.zarr"))


def test_a_lost_root_is_found_and_written_again(folder, tmp_path):
    out = tmp_path / "o.zarr"
    shutil.copytree(folder / "done.zarr", out)
    (out / "zarr.json").unlink()
    remedy = "Write it again with kimicap verify --repair.\n"
    for command in (["info", out], ["run", *basics(folder), "--out", out, "--block-sequences", 4, "--resume"]):
        found = call(*command)
        assert (found.exit_code, found.stderr[-len(remedy) :]) == (3, remedy)
    found = call("verify", out, "--json")
    assert (found.exit_code, json.loads(found.stdout)["whole"]) == (3, False)
    repaired = call("verify", out, "--repair")
    assert repaired.exit_code == 0, repaired.stderr
    assert "metadata written again: zarr.json" in repaired.stdout
    assert "all blocks are there; `kimicap seal` completes the capture" in repaired.stdout
    assert call("seal", out).exit_code == 0
    assert json.loads((out / "zarr.json").read_text()) == json.loads((folder / "done.zarr/zarr.json").read_text())


def schema_file(tmp_path):
    file = tmp_path / "schema.yaml"
    file.write_text("values:\n  mlp:\n    mine: {layout: [nowhere], dtype: float99, about: x}\n")
    return file


ERRORS = {
    "unknown value": (2, {"values": "router_logit"}, "No value is called 'router_logit'. Did you mean router_logits"),
    "no model": (2, {"model": "/nowhere/model"}, "The model folder /nowhere/model is not there; check --model."),
    "no dataset": (2, {"dataset": "/nowhere/data.jsonl"}, "/nowhere/data.jsonl"),
    "no column": (2, {"text-column": "txt"}, "text"),
    "layers outside": (2, {"layers": "4-9"}, "--layers 4-9 lies outside the model, which has 0 to 5."),
    "heads outside": (2, {"values": "states@heads:7"}, "states@heads 7 lies outside the model, which has 0 to 1."),
    "no values": (2, {"values": None}, "--values is missing; give it as a flag or in a config file."),
    "no size": (2, {"memory": "lots"}, "write a size like 4GiB or 500MB"),
    "little memory": (4, {"memory": "1MiB", "values": "patterns,states@all,logits"}, "--memory"),
    "wrong choice": (2, {"codec": "gzip"}, "--codec is 'gzip'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_sentences_and_leave_nothing(folder, tmp_path, case):
    code, other, sentence = ERRORS[case]
    result = call("run", *basics(folder, **other), "--out", tmp_path / "o.zarr")
    assert (result.exit_code, result.stdout) == (code, "")
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_results_arrive_where_the_reader_is_late_and_stdout_does_not_block():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-m", "kimicap", "values", "--json"]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
        os.close(writer)
        time.sleep(1.5)
        with open(reader, encoding="utf-8") as results:
            assert len(json.load(results)["values"]) > 50
        assert process.wait(30) == 0


def test_a_token_beyond_the_vocabulary(folder, tmp_path):
    (tmp_path / "in").mkdir()
    data = tmp_path / "in" / "d.jsonl"
    data.write_text('{"ids": [1, 384]}\n')
    flags = basics(folder, dataset=data, **{"input-ids-column": "ids"})
    result = call("run", *flags, "--out", tmp_path / "o.zarr")
    assert result.exit_code == 2
    assert "384" in result.stderr
    assert not (tmp_path / "o.zarr").exists()


def test_unknown_keys_of_a_config_file(folder, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("seq_length: 5\nlimits: 3\n")
    result = call("run", "--config", config, *basics(folder), "--out", tmp_path / "o.zarr")
    assert result.exit_code == 2
    assert f"{config}: seq_length is not a setting. Did you mean seq_len" in result.stderr
    assert f"{config}: limits is not a setting. Did you mean limit" in result.stderr


def test_a_broken_schema_file_lists_every_problem(folder, tmp_path):
    file = schema_file(tmp_path)
    result = call("plan", *basics(folder, schema=file))
    assert result.exit_code == 2
    for path in ("values.mlp.mine.dtype", "values.mlp.mine.layout.0"):
        assert path in result.stderr


def test_rows_not_captured_whole_are_told(folder, tmp_path):
    rows = [{"text": text} for text in ("long enough to be cut", "", "short", "日本語です", "")]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    result = call("plan", *basics(folder, dataset=data, values="states@last"), "--seq-len", 8, "--generate", 3)
    assert "3 sequences, 30 tokens, up to 9 of them decoded, in 1 block of" in result.stdout
    assert "Rows without tokens, passed over: 2.\nRows cut to 8 tokens: 2.\n" in result.stdout
    forced = call("plan", *basics(folder, dataset=data, values="states@last"), "--generate", 3, "--forced")
    assert "3 sequences, 41 tokens, in 1 block" in forced.stdout


def test_sizes_in_the_note_on_states_are_those_of_the_table(folder):
    notes, sizes = [], []
    for values in ("states@every:8", "states@all"):
        document = json.loads(call("plan", *basics(folder, values=values), "--json").stdout)
        notes += document["notes"]
        sizes += [size_text(array["bytes"]) for array in document["arrays"] if array["path"].endswith("/states")]
    assert notes == [f"states@all would take {sizes[1]}; states@every:8 takes {sizes[0]}."]


@pytest.mark.parametrize("command", ["plan", "values", "info"])
def test_tables_in_files_have_no_trailing_blanks(folder, command):
    given = {"plan": basics(folder), "values": ["--model", folder / "model"], "info": [folder / "done.zarr"]}
    lines = call(command, *given[command]).stdout.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line != line.rstrip()] == []


def test_resuming_a_complete_capture_says_that_nothing_is_left(folder):
    done = folder / "done.zarr"
    result = call("run", *basics(folder), "--out", done, "--block-sequences", "4", "--resume")
    assert (result.exit_code, result.stdout) == (0, f"{done}\n")
    assert result.stderr.endswith(f"Nothing was left to capture: {done} has every block.\n")


def test_an_existing_capture_and_other_settings(folder, tmp_path):
    done = folder / "done.zarr"
    there = call("run", *basics(folder), "--out", done)
    assert there.exit_code == 2
    # Nothing but the sentence: no plan of what will not be run.
    assert there.stderr == f"{done} holds a capture already; go on with it by --resume, or replace it by --overwrite.\n"
    other = call("run", *basics(folder, values="logits"), "--out", done, "--resume")
    assert other.exit_code == 3
    assert "was begun with other settings" in other.stderr
    assert "values is ['logits'], was" in other.stderr
    fresh = call("run", *basics(folder), "--out", tmp_path / "o.zarr", "--resume")  # a job that is always resumed
    assert fresh.exit_code == 0, fresh.stderr
    assert store.info(tmp_path / "o.zarr")["complete"]
    assert store.info(done)["complete"]


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_disk_too_small_is_refused_with_the_plan(folder, tmp_path, monkeypatch, command):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    result = call(command, *basics(folder), "--out", tmp_path / "o.zarr")
    assert result.exit_code == 4
    assert "1 kB are free where" in result.stderr
    assert "1 kB free" in (result.stdout if command == "plan" else result.stderr)
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_the_one_that_a_link_leads_to(folder, tmp_path, monkeypatch):
    asked, usage = [], shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(Path(path)) or usage)
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far/o.zarr")
    assert call("plan", *basics(folder), "--out", tmp_path / "near").exit_code == 0
    assert set(asked) == {tmp_path / "far"}


def test_what_overwrite_deletes_makes_room(folder, tmp_path, monkeypatch):
    out = tmp_path / "o.zarr"
    assert call("run", *basics(folder), "--out", out).exit_code == 0
    stored, usage = store.info(out)["stored_bytes"], shutil.disk_usage(tmp_path)
    needed = json.loads(call("plan", *basics(folder), "--out", out, "--json").stdout)["disk_bytes"]
    for free, code in ((needed - stored, 0), (needed - stored - 1, 4)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        assert call("run", *basics(folder), "--out", out, "--overwrite", "--dry-run").exit_code == code
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert call("run", *basics(folder), "--out", out, "--resume", "--dry-run").exit_code == 0  # nothing is to come


@pytest.mark.parametrize("arguments", [["nonsense"], ["run", "--vlaues", "x"], ["run", "--limit", "many"], ["info"]])
def test_wrong_usage(arguments):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_unexpected_failures(folder, monkeypatch):
    def fail(path):
        raise RuntimeError("boom")

    monkeypatch.setattr(store, "info", fail)
    result = call("info", folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Unexpected RuntimeError: boom." in result.stderr
    assert "run again with --debug" in result.stderr
    assert "Traceback" not in result.stderr
    assert "in fail" in call("info", folder, "--debug").stderr


def test_one_table_from_errors_to_exit_codes():
    classes = {UsageError: 2, MismatchError: 3, RoomError: 4, Stopped: 75, KimicapError: 1}
    assert {kind: told(kind("x")).exit_code for kind in classes} == classes
    assert told(KeyboardInterrupt()).exit_code == 75
    assert told(RuntimeError()).exit_code == 1


LACKS = [
    MemoryError(),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("can't start new thread"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
]


@pytest.mark.parametrize("error", LACKS, ids=lambda error: str(error).partition(":")[0])
def test_a_lack_of_memory_is_told_as_such_whatever_it_becomes_on_its_way(folder, monkeypatch, error):
    """Here while the dataset is opened, whose errors are those of its files otherwise."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("datasets.load_dataset", fail)
    result = call("plan", *basics(folder))
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr == (
        f"The system gives this process no more memory or threads ({str(error) or 'MemoryError'}). Free some, raise "
        "its limits (ulimit -v and -u, or those of its job), or give a smaller --memory or --batch-tokens.\n"
    )
    first = RoomError("The disk is full.")
    first.__context__ = error
    assert told(first) is first


def test_other_ranks_keep_quiet(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = call("run", *basics(folder, values="nonsense"), "--out", tmp_path / "o.zarr")
    assert result.stderr.startswith("[rank 1] No value is called")


PROGRAM = [sys.executable, "-c", "from kimicap.cli import main; main()"]
PLACE = {"cwd": Path(__file__).parents[1], "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True}


def program(*arguments, stdout=subprocess.PIPE):
    return subprocess.Popen([*PROGRAM, *map(str, arguments)], stdout=stdout, stderr=subprocess.PIPE, **PLACE)


def shell(redirected, *arguments, **options):
    """The program with its streams as a shell redirects them."""
    command = ["sh", "-c", f'exec "$@" {redirected}', "sh", *PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, **PLACE, **options)


@pytest.mark.parametrize("arguments", [["--help"], ["values", "--model", "MODEL"], ["plan", "--limit", "2"]])
def test_what_needs_no_weights_imports_no_torch(folder, arguments):
    flags = [str(folder / "model") if part == "MODEL" else part for part in arguments]
    if "plan" in flags:
        flags += basics(folder)
    code = (
        "import sys, kimicap\n"
        "assert not {'torch', 'zarr', 'xarray'} & set(sys.modules), 'import kimicap'\n"
        "from kimicap.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, *flags], check=True, capture_output=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_capture_to_resume(folder, tmp_path, number):
    data, out = tmp_path / "d.jsonl", tmp_path / "o.zarr"
    data.write_text("\n".join(json.dumps({"text": "hello world " * 20}) for _ in range(60)))
    flags = [*basics(folder, dataset=data), "--out", out, "--block-sequences", 1, "--batch-size", 1]
    process = program("run", *flags)
    blocks = out / ".kimicap" / "blocks"
    while process.poll() is None and not (blocks.is_dir() and list(blocks.iterdir())):
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (75, ""), stderr
    assert "go on with --resume" in stderr
    assert "Traceback" not in stderr
    found = store.info(out)
    assert not found["complete"]
    assert 0 < len(found["committed"]) < 60
    if number == signal.SIGTERM:
        assert call("run", *flags, "--resume").exit_code == 0
        assert store.info(out)["complete"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_exits_with_75_wherever_the_signal_comes_and_whatever_follows(folder, tmp_path, number):
    """CPython under -m ends by the signal itself if a KeyboardInterrupt went through an exec(), as in many imports."""
    (tmp_path / "interrupted.py").write_text(
        "import atexit, signal\n"
        "from kimicap import cli, run\n"
        f"run.check_place = lambda *_, **__: exec('import signal; signal.raise_signal({number:d})')\n"
        f"atexit.register(signal.raise_signal, {number:d})\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "interrupted", "run", *basics(folder), "--out", tmp_path / "o.zarr"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == "Stopped; what was committed is kept, and --resume goes on.\n"


@pytest.mark.parametrize("arguments", [["--help"], ["values"], ["info", "DONE"], ["info", "DONE", "--json"]])
def test_a_reader_of_stdout_that_goes_away_is_no_fault(folder, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    process = program(*[folder / "done.zarr" if part == "DONE" else part for part in arguments], stdout=writer)
    os.close(writer)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-", "2>&0"])
def test_a_run_whose_progress_nobody_can_read_goes_on(folder, tmp_path, redirected):
    reader, writer = os.pipe()
    os.close(reader)
    done = shell(redirected, "run", *basics(folder), "--out", tmp_path / "o.zarr", stdin=writer)
    refused = shell(redirected, "run", *basics(folder), "--out", tmp_path / "o.zarr", stdin=writer)
    os.close(writer)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'o.zarr'}\n", "")
    assert store.info(tmp_path / "o.zarr")["complete"]
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", "")


def test_results_that_cannot_be_written_are_told_of_and_closed_streams_take_them(folder, tmp_path):
    full = shell(">/dev/full", "run", *basics(folder), "--out", tmp_path / "o.zarr")
    assert full.returncode == 1
    sentence = (
        "The results could not be written to stdout (No space left on device), which harms no capture; send them "
    )
    assert full.stderr.endswith(f"tokens/s\n{sentence}elsewhere.\n")
    assert store.info(tmp_path / "o.zarr")["complete"]
    also = shell(">/dev/full", "--help")
    assert (also.returncode, also.stderr) == (1, f"{sentence}elsewhere.\n")
    closed = shell(">&-", "info", tmp_path / "o.zarr")
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_model_known_by_its_own_code_alone_needs_leave_to_run_it():
    result = call("values", "--model", Path(__file__).parents[1] / "configs/kimi-k3-model")
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "has model_type 'kimi_k3', which kimicap knows by its checkpoint's own code; add --trust-remote-code.\n"
    )
