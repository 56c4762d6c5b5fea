"""Datasets against a plain reading of the same files; the oracle never calls kimicap's own code."""

import csv
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from kimicap.batches import ByteTokenizer, DataSettings, read_sequences
from kimicap.errors import RoomError, UsageError
from kimicap.sequences import TableWriter

TEXTS = ["the first row", "", "zwei 🙂", None, "x", "NA", "007", "a longer row, with a comma\nand a break"]


# datasets 4.0 leaves a CSV file that it has read to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def ids_of(text):
    return [byte + 3 for byte in text.encode()]


def read(tokenizer=None, vocab_size=384, **settings):
    return read_sequences(DataSettings(**settings), tokenizer or ByteTokenizer(), vocab_size=vocab_size)


def lists(sequences):
    return [sequences.tokens(i).tolist() for i in range(len(sequences))]


def fails(**settings):
    with pytest.raises(UsageError) as caught:
        read(**settings)
    return str(caught.value)


def write_jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_as(kind, path, texts):
    if kind == "jsonl":
        write_jsonl(path, [{"text": text} for text in texts])
    elif kind == "json":
        Path(path).write_text(json.dumps([{"text": text} for text in texts]))
    elif kind == "csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["n", "text"], *([i, text] for i, text in enumerate(texts))])
    elif kind == "parquet":
        datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
    elif kind == "arrow":
        with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
            writer.write_batch({"text": texts})
            writer.finalize()


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_every_local_format_gives_the_same_sequences(kind):
    write_as(kind, f"data.{kind}", TEXTS)
    sequences = read(dataset=f"data.{kind}")
    expected = [(row, ids_of(text)) for row, text in enumerate(TEXTS) if text]
    assert lists(sequences) == [ids for _, ids in expected]
    assert sequences.rows.tolist() == [row for row, _ in expected]
    assert sequences.lengths.tolist() == [len(ids) for _, ids in expected]
    assert (sequences.rows.dtype, sequences.lengths.dtype) == (np.int64, np.int32)
    assert sequences.tokens(0).dtype == np.int32
    assert (sequences.empty_rows, sequences.cut_rows, sequences.packed) == (2, 0, False)
    assert os.listdir() == [f"data.{kind}"]


def test_a_text_file_is_one_row_a_line():
    Path("odd[1].txt").write_bytes("a\r\n\nb\u2028c\nlast".encode())
    sequences = read(dataset="odd[1].txt")
    assert lists(sequences) == [ids_of("a"), ids_of("b\u2028c"), ids_of("last")]
    assert sequences.rows.tolist() == [0, 2, 3]


def test_a_folder_of_one_kind_is_read_file_after_file():
    os.mkdir("folder")
    write_jsonl("folder/b.jsonl", [{"text": "second"}])
    write_jsonl("folder/a.jsonl", [{"text": "first"}])
    Path("folder/LICENSE").write_text("no data")
    assert lists(read(dataset="folder")) == [ids_of("first"), ids_of("second")]


def test_splits_named_by_files():
    os.mkdir("folder")
    write_jsonl("folder/train.jsonl", [{"text": "a"}])
    write_jsonl("folder/test.jsonl", [{"text": "b"}])
    assert lists(read(dataset="folder")) == [ids_of("a")]
    assert lists(read(dataset="folder", split="test")) == [ids_of("b")]
    assert fails(dataset="folder", split="dev") == (
        "The dataset 'folder' has no split 'dev'; it has train, test. Name one with --split."
    )
    write_jsonl("folder/more.jsonl", [{"text": "lost"}])
    assert "others that belong to none: more.jsonl" in fails(dataset="folder")


def test_saved_datasets():
    saved = datasets.Dataset.from_dict({"text": ["a", "bc"]})
    saved.save_to_disk("one")
    datasets.DatasetDict({"x": saved, "y": saved}).save_to_disk("two")
    assert lists(read(dataset="one")) == [ids_of("a"), ids_of("bc")]
    assert lists(read(dataset="two", split="y", limit=1)) == [ids_of("a")]
    assert "has no split 'train'; it has x, y" in fails(dataset="two")
    assert "is a single split; leave out --split train[:1]" in fails(dataset="one", split="train[:1]")


def test_rows_are_cut_and_counted():
    path = write_jsonl("a.jsonl", [{"text": text} for text in ("12345", "123", "1234")])
    sequences = read(dataset=path, seq_len=3)
    assert lists(sequences) == [ids_of("123")] * 3
    assert sequences.cut_rows == 2


def test_long_rows_go_on():
    path = write_jsonl("a.jsonl", [{"text": text} for text in ("12345", "", "123", "1234")])
    sequences = read(dataset=path, seq_len=3, split_long=True)
    assert lists(sequences) == [ids_of(text) for text in ("123", "45", "123", "123", "4")]
    assert [sequences.continues(i) for i in range(5)] == [False, True, False, False, True]
    assert sequences.rows.tolist() == [0, 0, 2, 3, 3]
    assert (sequences.cut_rows, sequences.empty_rows) == (0, 1)
    assert lists(read(dataset=path, seq_len=3, split_long=True, limit=4)) == lists(sequences)[:4]


def test_packed_windows_know_their_documents():
    path = write_jsonl("a.jsonl", [{"text": text} for text in ("12345", "", "678", "9")])
    sequences = read(dataset=path, seq_len=4, pack=True)
    assert lists(sequences) == [ids_of(text) for text in ("1234", "5678", "9")]
    assert [sequences.documents(i).tolist() for i in range(3)] == [[0] * 4, [0, 2, 2, 2], [3]]
    assert sequences.documents(0).dtype == np.int32
    assert sequences.rows.tolist() == [0, 0, 3]
    assert sequences.packed
    assert not any(sequences.continues(i) for i in range(3))
    assert lists(read(dataset=path, seq_len=4, pack=True, limit=2)) == lists(sequences)[:2]


def test_the_limit_counts_sequences_and_reads_no_further():
    path = write_jsonl("a.jsonl", [{"text": text} for text in ("", "a", "b")] + [{"text": None}] * 9)
    sequences = read(dataset=path, limit=2)
    assert lists(sequences) == [ids_of("a"), ids_of("b")]
    assert sequences.empty_rows == 1
    # Bad bytes far behind the limit are never met; without it they are.
    Path("broken.txt").write_bytes((b"x" * 100_000 + b"\n") * 250 + b"\xff")
    assert len(read(dataset="broken.txt", limit=3, seq_len=4)) == 3
    assert "can't decode" in fails(dataset="broken.txt", seq_len=4)


def test_more_rows_than_one_chunk():
    texts = [f"row {i}" for i in range(3000)]
    sequences = read(dataset=write_jsonl("a.jsonl", [{"text": text} for text in texts]))
    assert lists(sequences) == [ids_of(text) for text in texts]


def test_a_hub_dataset_is_read_by_name(monkeypatch):
    asked = []
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})

    def load_dataset(*given, **options):
        asked.append((given, options))
        return datasets.IterableDatasetDict({"train": rows.to_iterable_dataset()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert lists(read(dataset="owner/name", subset="en", streaming=True, limit=2)) == [
        ids_of("a"),
        ids_of("b"),
    ]
    assert asked == [(("owner/name", "en"), {"split": None, "streaming": True})]


def test_a_stream_takes_no_more_rows_than_the_limit(monkeypatch):
    taken = []

    def rows():
        for i in range(100):
            taken.append(i)
            yield {"text": f"row {i}"}

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": stream})
    assert len(read(dataset="owner/name", streaming=True, limit=5)) == 5
    assert max(taken) <= 5  # the arrow side of datasets may look one row ahead


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            datasets.exceptions.DatasetNotFoundError("https://x?token=secret"),
            "No dataset 'owner/name' was found, neither as a local path nor on the hub. "
            "Check the spelling, and log in with `hf auth login` if it is private.",
        ),
        (
            datasets.exceptions.DatasetNotFoundError("Dataset is a gated dataset on the Hub."),
            "The dataset 'owner/name' is gated. Ask for access on its page of the hub, "
            "and log in with `hf auth login`.",
        ),
        (
            ConnectionError("secret"),
            "The hub could not be reached for the dataset 'owner/name'. Go online, or download it before "
            "and name the local copy.",
        ),
        (
            ValueError("Config name is missing.\nPlease pick one among: ['de', 'en']\nExample"),
            "The dataset 'owner/name' has several subsets; name one with --subset: ['de', 'en'].",
        ),
        (
            ValueError("Unknown split \"x\". Should be one of ['train']."),
            "The dataset 'owner/name' has no such split: Unknown split \"x\". Should be one of ['train'].",
        ),
        (
            RuntimeError("Dataset scripts are no longer supported, but found name.py"),
            "The dataset 'owner/name' is a script, which is never run. Name a copy of it in parquet or jsonl.",
        ),
        (OSError("secret"), "The dataset 'owner/name' could not be read from the hub (OSError)."),
    ],
)
def test_a_hub_failure_is_a_sentence(monkeypatch, error, text):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert fails(dataset="owner/name") == text


def test_input_ids_rows_and_special_tokens():
    path = write_jsonl("a.jsonl", [{"ids": [1, 7, 2]}, {"ids": []}, {"ids": None}, {"ids": [9, 0]}])
    sequences = read(dataset=path, input_ids_column="ids")
    assert lists(sequences) == [[1, 7, 2], [9, 0]]
    assert sequences.special_ids >= {0, 1, 2}
    assert not sequences.special_ids & {7, 9}
    assert sequences.empty_rows == 2


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["[UNK]", "[BOS]", "user", "bot", "hi", "there", "|"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", bos_token="[BOS]")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'odd' %}"
        "{{ raise_exception('no odd') }}{% endif %}"
        " {{ m.role }} {{ m.content }} {% if 'name' in m %}there{% endif %} |{% endfor %}"
    )
    return tokenizer


def test_chat_messages_go_through_the_template(chat_tokenizer):
    hello = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "there"}]
    named = [{"role": "user", "content": "hi", "name": "x"}]
    path = write_jsonl("a.jsonl", [{"chat": hello}, {"chat": []}, {"chat": named}])
    sequences = read(chat_tokenizer, vocab_size=7, dataset=path, messages_column="chat")
    assert lists(sequences) == [[1, 2, 4, 6, 3, 5, 6], [1, 2, 4, 5, 6]]
    assert 1 in sequences.special_ids
    assert not sequences.special_ids & {2, 4, 5, 6}
    assert sequences.rows.tolist() == [0, 2]


def test_texts_go_through_a_transformers_tokenizer(chat_tokenizer):
    path = write_jsonl("a.jsonl", [{"text": "hi there what"}, {"text": ""}, {"text": "hi"}])
    sequences = read(chat_tokenizer, vocab_size=7, dataset=path, seq_len=3)
    # An empty text is an empty row, even where the tokenizer would put a first token before it.
    assert lists(sequences) == [[1, 4, 5], [1, 4]]
    assert (sequences.cut_rows, sequences.empty_rows) == (1, 1)


def test_chat_failures(chat_tokenizer):
    path = write_jsonl("a.jsonl", [{"chat": [{"role": "odd", "content": "hi"}]}])
    assert fails(tokenizer=chat_tokenizer, dataset=path, messages_column="chat") == (
        "The tokenizer's chat template refuses the messages of row 0: no odd. Mend or leave out that row."
    )
    assert fails(dataset=path, messages_column="chat") == (
        "The tokenizer has no chat template, which --messages-column needs. "
        "Name a tokenizer that has one with --tokenizer, or read texts with --text-column."
    )
    path = write_jsonl("b.jsonl", [{"chat": [{"from": "user", "content": "hi"}]}])
    assert fails(dataset=path, messages_column="chat") == (
        "Row 0 of column 'chat' is not a list of chat messages, each with 'role' and 'content'. "
        "Name a column of such lists with --messages-column."
    )


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[1], [-100, 3]], "Row 1 holds token id -100, and ids are never negative. "),
        ([[1], None, [384]], "Row 2 holds token id 384, but the vocabulary has 384 ids, 0 to 383. "),
        (
            [[0.5]],
            "Row 0 of column 'ids' holds a list with the number 0.5 where a list of integers was expected",
        ),
        ([[[1]]], "Row 0 of column 'ids' holds a list with a list where a list of integers was expected. "),
        ([[1, None]], "Row 0 of column 'ids' holds a list with nothing where a list of integers was"),
        (
            [[True]],
            "Row 0 of column 'ids' holds a list with a boolean where a list of integers was expected. ",
        ),
        ([3], "Row 0 of column 'ids' holds the number 3 where a list of integers was expected. "),
        (["1 2"], "Row 0 of column 'ids' holds a text where a list of integers was expected. "),
    ],
)
def test_bad_token_ids(rows, text):
    path = write_jsonl("a.jsonl", [{"ids": ids} for ids in rows])
    assert text in fails(dataset=path, input_ids_column="ids")


def test_ids_beyond_int32_are_refused_without_a_vocabulary():
    path = write_jsonl("a.jsonl", [{"ids": [2**40]}])
    assert str(2**40) in fails(dataset=path, input_ids_column="ids", vocab_size=None)


def test_a_tokenizer_of_another_model():
    path = write_jsonl("a.jsonl", [{"text": "a"}])
    assert fails(dataset=path, vocab_size=64) == (
        "Row 0 holds token id 100, but the vocabulary has 64 ids, 0 to 63. "
        "Use the model's own tokenizer, or token ids made with it."
    )


def test_columns():
    path = write_jsonl("a.jsonl", [{"body": "a", "number": 1}])
    flags = "Name the one to read with --text-column, --messages-column or --input-ids-column."
    assert fails(dataset=path) == f"The dataset has no column 'text'; it has body, number. {flags}"
    assert fails(dataset=path, text_column="bodi") == (
        f"The dataset has no column 'bodi'; it has body, number. Did you mean 'body'? {flags}"
    )
    assert fails(dataset=path, text_column="number") == (
        "Row 0 of column 'number' holds the number 1 where a text was expected. Name a column of texts with "
        "--text-column, or use --messages-column or --input-ids-column."
    )
    assert lists(read(dataset=path, text_column="body")) == [ids_of("a")]


def test_settings_that_contradict():
    assert fails(dataset="x.jsonl", text_column="a", input_ids_column="b", seq_len=0, limit=0) == (
        "Only one of --text-column, --messages-column and --input-ids-column can be read; name one. "
        "--seq-len is 0, but a sequence has at least 1 token. "
        "--limit is 0, but a run has at least 1 sequence."
    )
    assert fails(dataset="x.jsonl", seq_len=2, pack=True, split_long=True) == (
        "--pack already goes on with long rows in the next window; leave out --split-long."
    )
    assert fails(dataset="x.jsonl", pack=True) == "--pack needs --seq-len, the tokens of a full sequence."
    assert fails(dataset="x", split_long=True) == "--split-long needs --seq-len, the tokens of a full sequence."


def test_files_that_cannot_be_read():
    assert fails(dataset="no.jsonl") == (
        "There is no file or folder 'no.jsonl'. Check the path, or name a hub id like 'owner/name'."
    )
    Path("empty.jsonl").touch()
    assert fails(dataset="empty.jsonl") == "The file 'empty.jsonl' is empty; name one with rows."
    Path("a.xlsx").write_text("x")
    assert fails(dataset="a.xlsx") == (
        "The file 'a.xlsx' is of no known format; "
        "the extension must be one of .jsonl, .json, .csv, .txt, .parquet, .arrow."
    )
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": oops}\n')
    assert fails(dataset="bad.jsonl") == (
        "Line 2 of 'bad.jsonl' is not JSON: Expecting value: line 1 column 10 (char 9). Mend or leave out that line."
    )
    Path("list.jsonl").write_text('{"text": "a"}\n[1]\n')
    assert "Line 2 of 'list.jsonl' is not a JSON object." in fails(dataset="list.jsonl")
    for name in ("bad.parquet", "bad.arrow", "bad.txt"):
        Path(name).write_bytes(b"\xff\xfe\x00")
        assert fails(dataset=name).startswith(f"The file '{name}' could not be read as a dataset: ")
    Path("header.csv").write_text("text\n")
    assert fails(dataset="header.csv") == ("The dataset 'header.csv' holds no rows. Name another dataset or --split.")
    path = write_jsonl("blank.jsonl", [{"text": ""}] * 3)
    assert fails(dataset=path) == ("All 3 rows of the dataset 'blank.jsonl' are empty. Name another column or dataset.")
    assert fails(dataset="") == "--dataset is empty. Name a file, a folder or a hub id."
    assert "could not be looked at: File name too long." in fails(dataset="x" * 300)
    assert "names a file format, not a dataset" in fails(dataset="json")


def test_folders_that_cannot_be_read():
    os.mkdir("folder")
    assert fails(dataset="folder").startswith("The folder 'folder' holds no data files; the extension must")
    write_jsonl("folder/a.jsonl", [{"text": "a"}])
    write_jsonl("folder/b.jsonl", [{"txt": "a"}])
    # A file without the column is never taken for empty rows; datasets 4 and 5 differ in who notices.
    text = fails(dataset="folder")
    assert "do not all have the same columns" in text or "Row 1 has no column 'text'" in text
    Path("folder/c.csv").write_text("text\nb\n")
    assert fails(dataset="folder") == (
        "The folder 'folder' holds files of several kinds (.csv, .jsonl). "
        "Name one of its files, or a folder of one kind."
    )
    os.mkdir("f[1]")
    assert "a pattern to datasets" in fails(dataset="f[1]")


def test_the_digest_is_of_all_that_sequences_hold():
    path = write_jsonl("a.jsonl", [{"text": "ab"}, {"text": ""}, {"text": "c"}])
    special = sorted(ByteTokenizer().all_special_ids)
    parts = [2, 0, 2, 2, 2, 1, 2, 0, 2, 2, 0, 2, len(special), *special, 3]
    expected = hashlib.sha256(np.array(parts, "<i8").tobytes() + np.array([100, 101, 102], "<i4").tobytes())
    assert read(dataset=path).digest == expected.hexdigest()


def test_the_same_tokens_in_other_rows_have_another_digest():
    def digests(name, *texts, **settings):
        return read(dataset=write_jsonl(name, [{"text": text} for text in texts]), **settings).digest

    for settings in ({}, {"seq_len": 4, "split_long": True}, {"seq_len": 4, "pack": True}, {"limit": 2}):
        found = [
            digests("a.jsonl", "abcdefgh", "ijklmnop", **settings),
            digests("b.jsonl", "abcd", "efgh", "ijkl", "mnop", **settings),
            digests("c.jsonl", "", "abcdefgh", "ijklmnop", **settings),
            digests("d.jsonl", "abcdefgh", "", "ijklmnop", **settings),
        ]
        assert len(set(found)) == 4, settings
    assert digests("e.jsonl", "ab", "cd", "ef", limit=2) == digests("f.jsonl", "ab", "cd", "gh", limit=2)


def test_another_set_of_special_tokens_has_another_digest():
    path = write_jsonl("a.jsonl", [{"text": "ab"}])

    class Other(ByteTokenizer):
        @property
        def all_special_ids(self):
            return [1]

    assert read_sequences(DataSettings(dataset=path), Other(), vocab_size=384).digest != read(dataset=path).digest


def test_a_changed_file_or_tokenizer_is_never_stale(chat_tokenizer):
    path = write_jsonl("a.jsonl", [{"text": "hi"}])
    stamp = os.stat(path)
    assert lists(read(dataset=path)) == [ids_of("hi")]
    write_jsonl("a.jsonl", [{"text": "ho"}])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size, same time, other content
    assert lists(read(dataset=path)) == [ids_of("ho")]
    assert lists(read(chat_tokenizer, dataset=path)) == [[1, 0]]


def _digest_of(path):
    return read_sequences(DataSettings(dataset=path), ByteTokenizer(), vocab_size=384).digest


def test_three_processes_read_one_file():
    path = write_jsonl("a.jsonl", [{"text": f"row {i}"} for i in range(500)])
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        digests = pool.map(_digest_of, [path] * 3, chunksize=1)
    assert set(digests) == {read(dataset=path).digest}
    assert os.listdir() == ["a.jsonl"]


def test_a_full_disk_is_a_sentence(monkeypatch):
    writer = TableWriter()
    writer._file.close()
    writer._file = open("/dev/full", "wb")
    ids = np.zeros(1 << 16, dtype=np.int32)
    with pytest.raises(RoomError, match=r"No room for the dataset's tokens \(262144 bytes so far\) in .*TMPDIR"):
        writer.add(0, ids)
    writer.close()


def test_progress_bars_and_logs_come_back():
    log = datasets.utils.logging
    before = datasets.are_progress_bars_disabled(), log.get_verbosity()
    read(dataset=write_jsonl("a.jsonl", [{"text": "a"}]))
    fails(dataset="no.jsonl")
    assert (datasets.are_progress_bars_disabled(), log.get_verbosity()) == before


def test_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer(["aé"], truncation=False, max_length=None) == {"input_ids": [[100, 198, 172]]}
    assert tokenizer(["abc"], truncation=True, max_length=2) == {"input_ids": [[100, 101]]}
    assert tokenizer.decode([0, *ids_of("zwei 🙂"), 1, 383]) == "zwei 🙂"
    assert tokenizer.all_special_ids == [0, 1, 2]
    assert (tokenizer.name, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("bytes", 0, 1)


def test_importing_is_cheap():
    heavy = "{'torch', 'transformers', 'datasets', 'pandas', 'pyarrow'}"
    code = f"import sys, kimicap.batches; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
