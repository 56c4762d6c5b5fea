"""Settings from YAML and flags: strict, all problems at once, in sentences; and what of them decides the data."""

import math
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from kimicap.config import Settings, digest, load_settings, parse_bytes
from kimicap.errors import UsageError

BASE = {"model": "m", "dataset": "d.jsonl", "values": ["states"], "out": "o.zarr"}

NOT_DATA = "device device_map streaming batch_tokens batch_size memory out".split()
"""Settings that a resumed run may change."""


def with_file(tmp_path, text, **flags):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_settings(file, flags)


def problems(tmp_path, text, **flags):
    with pytest.raises(UsageError) as failure:
        with_file(tmp_path, text, **flags)
    return str(failure.value).replace(str(tmp_path / "run.yaml"), "FILE").splitlines()


def test_flags_override_the_file(tmp_path):
    found = with_file(tmp_path, "model: a\ndataset: d\nvalues: betas\nout: o\nseq_len: 7\npack: true\n", model="b")
    assert (found.model, found.seq_len, found.pack, found.values) == ("b", 7, True, ["betas"])
    assert load_settings(None, {**BASE, "seq_len": None}).seq_len is None
    assert load_settings(None, {"model": "b"}, defaults={**BASE, "seed": 3}).seed == 3


def test_defaults():
    found = load_settings(None, BASE)
    assert (found.dtype, found.codec, found.store_dtype, found.states) == ("auto", "lz4", "lossless", "exact")
    assert found.memory == 8 * 2**30
    assert found.schema_file is None
    with pytest.raises(ValidationError):
        found.model = "other"


@pytest.mark.parametrize("written", ["states@last@layers:0,4,betas", "\n- states@last@layers:0,4\n- betas"])
def test_values_as_text_or_list_are_the_same(tmp_path, written):
    found = with_file(tmp_path, f"model: m\ndataset: d\nout: o\nvalues: {written}\n")
    assert found.values == ["states@last@layers:0,4", "betas"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [("3", "3"), ("-1", "-1"), ("0-3,8,-1", "0-3,8,-1"), ("[0, 3]", "0,3"), ('"2"', "2")],
)
@pytest.mark.parametrize("name", ["layers", "heads"])
def test_numbers_as_yaml_reads_them(tmp_path, name, written, expected):
    assert getattr(with_file(tmp_path, f"{name}: {written}", **BASE), name) == expected


@pytest.mark.parametrize(("written", "expected"), [("true", "fresh"), ("false", None), ("continue", "continue")])
def test_split_long(tmp_path, written, expected):
    assert with_file(tmp_path, f"split_long: {written}", **BASE).split_long == expected


@pytest.mark.parametrize(("written", "expected"), [("0", 0.0), ("1", 1.0), ("0.7", 0.7)])
def test_a_whole_number_is_a_number(tmp_path, written, expected):
    assert with_file(tmp_path, f"temperature: {written}", **BASE).temperature == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5 gib", 3 * 2**29),
        ("2tb", 2 * 10**12),
        ("123456789", 123456789),
        ("999999999999999", 999999999999999),
        (" 64KiB ", 65536),
        (12, 12),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["4G", "GiB", "4 XB", "-4GiB", "1e9", "", "9" * 400, "4GiB4"])
def test_sizes_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="write a size like 4GiB or 500MB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("sequence_len: 3", "FILE: sequence_len is not a setting. Did you mean seq_len?"),
        ("schema_file: x", "FILE: schema_file is not a setting. Did you mean schema?"),
        ("zzz: 3", "FILE: zzz is not a setting. `kimicap run --help` lists the settings."),
        ("1: 3", "FILE: 1 is not a setting. `kimicap run --help` lists the settings."),
        ("seq_len: many", "FILE: seq_len is 'many'; it must be a whole number."),
        ("seq_len: 0", "FILE: seq_len is 0; it must be at least 1."),
        ("seq_len: 2.5", "FILE: seq_len is 2.5; it must be a whole number."),
        ("limit: true", "FILE: limit is True; it must be a whole number."),
        ("limit: -3", "FILE: limit is -3; it must be at least 1."),
        (f"limit: {10**30}", f"FILE: limit is {10**30}; it must be at most 2147483647."),
        ("seed: -1", "FILE: seed is -1; it must be at least 0."),
        ("generate: -1", "FILE: generate is -1; it must be at least 0."),
        ("temperature: hot", "FILE: temperature is 'hot'; it must be a number."),
        ("temperature: .inf", "FILE: temperature is inf; it must be a finite number."),
        ("temperature: true", "FILE: temperature is True; it must be a number."),
        ("pack: yes please", "FILE: pack is 'yes please'; it must be true or false."),
        ("pack:", "FILE: pack is empty; it must be true or false."),
        ("dtype: fp8", "FILE: dtype is 'fp8'; it must be 'auto', 'float32', 'bfloat16' or 'float16'."),
        ("split_long: often", "FILE: split_long is 'often'; it must be 'fresh' or 'continue'."),
        ("revision: ''", "FILE: revision is empty; it must not be empty."),
        ("revision: 3", "FILE: revision is 3; it must be text."),
        ("layers: 1.5", "FILE: layers is 1.5; write numbers and ranges like 0-3,8,-1."),
        ("layers: [a]", "FILE: layers is ['a']; write numbers and ranges like 0-3,8,-1."),
        ("memory: 4G", "FILE: memory is '4G'; write a size like 4GiB or 500MB."),
        ("memory: 8", "FILE: memory is 8; write a size like 4GiB or 500MB, at least 1MiB."),
        ("memory: 1.5", "FILE: memory is 1.5; write a size like 4GiB or 500MB, at least 1MiB."),
        ("schema: 3", "FILE: schema is 3; it must be a path."),
    ],
)
def test_one_wrong_setting(tmp_path, line, sentence):
    assert problems(tmp_path, line, **BASE) == [sentence]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"seq_len": 0}, "--seq-len is 0; it must be at least 1."),
        ({"values": 3}, "--values is 3; it must be a list, or text with commas."),
        ({"values": [3]}, "--values is 3; it must be text."),
        ({"model": ""}, "--model is empty; it must not be empty."),
        ({"sede": 3}, "--sede is not a setting. Did you mean seed?"),
    ],
)
def test_one_wrong_flag(flags, sentence):
    with pytest.raises(UsageError) as failure:
        load_settings(None, {**BASE, **flags})
    assert str(failure.value) == sentence


def test_a_flag_that_overrides_a_wrong_line_mends_it_and_is_named_where_it_is_wrong_itself(tmp_path):
    assert with_file(tmp_path, "seq_len: many", **BASE, seq_len=4).seq_len == 4
    assert problems(tmp_path, "seq_len: 4", **BASE, seq_len=-4) == ["--seq-len is -4; it must be at least 1."]


def test_all_problems_at_once(tmp_path):
    assert problems(tmp_path, "sed: 3\nseq_len: 0\ncodec: zip\ndataset: [a]\nout: o\n", model="m", batch_size=0) == [
        "FILE: dataset is ['a']; it must be text.",
        "FILE: seq_len is 0; it must be at least 1.",
        "--values is missing; give it as a flag or in a config file.",
        "--batch-size is 0; it must be at least 1.",
        "FILE: codec is 'zip'; it must be 'lz4', 'zstd' or 'none'.",
        "FILE: sed is not a setting. Did you mean seed?",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a", "holds no settings; write lines like `seq_len: 2048`."),
        ("", "holds no settings"),
        ("a: [", "is not valid YAML; mend it: "),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_files_that_hold_no_settings(tmp_path, text, sentence):
    (line, *_) = problems(tmp_path, text)
    assert line.startswith(f"The config file FILE {sentence}")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\); check the path\."):
        load_settings(tmp_path / "none.yaml", {})


def test_what_decides_the_data():
    settings = load_settings(None, {**BASE, "schema": Path("my.yaml"), "memory": "1GiB"})
    names = {field.alias or name for name, field in Settings.model_fields.items()}
    assert set(settings.data()) == names - set(NOT_DATA)
    assert settings.data()["schema"] == "my.yaml"


def test_the_digest_is_of_the_data_alone():
    ours = digest(load_settings(None, BASE).data())
    assert re.fullmatch("[0-9a-f]{64}", ours)
    same = {"batch_size": 3, "memory": "1GiB", "device": "cpu", "out": "elsewhere", "values": "states"}
    assert digest(load_settings(None, {**BASE, **same}).data()) == ours
    for change in ({"seed": 1}, {"values": "states@last"}, {"seq_len": 9}, {"pack": True}, {"store_dtype": "float16"}):
        assert digest(load_settings(None, {**BASE, **change}).data()) != ours
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1, "b": [2]}) == "ae8a9a50524642753023cd4de34447191a8651989979c60bbcc5b0eeebb6e1dc"


def test_every_setting_says_what_it_is():
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_not_a_number_is_refused():
    with pytest.raises(UsageError, match=r"^--temperature is nan; it must be "):
        load_settings(None, {**BASE, "temperature": math.nan})
