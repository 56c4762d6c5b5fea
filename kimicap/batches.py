"""Dataset rows as numbered sequences of tokens: the same numbers on every rank and every resume.

Tokenising is far cheaper than the forward, so all rows are tokenised before the run: every length is
known and the plan is exact. Rows are always read as a stream, and only their tokens are kept, in a
nameless file: nothing of a dataset is cached that a later change of the file could make stale.
"""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kimicap.errors import UsageError
from kimicap.sequences import Sequences, TableWriter, TokenTable, form_batches, make_sequences
from kimicap.sources import Source, explain, find_source
from kimicap.tokens import ByteTokenizer, Column, Tokenizer, choose_column, encode

__all__ = ["ByteTokenizer", "DataSettings", "Sequences", "Tokenizer", "form_batches", "read_sequences"]

# Rows tokenised at a time: few at first, so that a small --limit reads little, then more and more.
FIRST_ROWS, MOST_ROWS = 16, 1024


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to read and how to divide it into sequences.

    Attributes:
        dataset: Hub id, or a local jsonl, json, csv, txt, parquet or arrow file, a folder of one kind of
            them, or a folder written by ``Dataset.save_to_disk``.
        split: None for ``train``, or for the only split.
        subset: The hub's name for one of several configurations of a dataset.
        streaming: Read a hub dataset without downloading it whole. Local files are always streamed.
        text_column: Texts; ``text`` if none of the three columns is named.
        messages_column: Lists of chat messages.
        input_ids_column: Lists of token ids.
        seq_len: Tokens of the longest sequence; None cuts nothing.
        split_long: A row longer than ``seq_len`` goes on in the next sequence.
        pack: Rows are concatenated into windows of ``seq_len`` tokens; the last may be shorter.
        limit: Most sequences.
    """

    dataset: str
    split: str | None = None
    subset: str | None = None
    streaming: bool = False
    text_column: str | None = None
    messages_column: str | None = None
    input_ids_column: str | None = None
    seq_len: int | None = None
    split_long: bool = False
    pack: bool = False
    limit: int | None = None

    def problems(self) -> list[str]:
        """What is wrong with the settings taken alone, one sentence each."""
        columns = [self.text_column, self.messages_column, self.input_ids_column]
        problems = []
        if sum(column is not None for column in columns) > 1:
            problems.append(
                "Only one of --text-column, --messages-column and --input-ids-column can be read; name one."
            )
        if self.seq_len is not None and self.seq_len < 1:
            problems.append(f"--seq-len is {self.seq_len}, but a sequence has at least 1 token.")
        if self.limit is not None and self.limit < 1:
            problems.append(f"--limit is {self.limit}, but a run has at least 1 sequence.")
        if self.pack and self.split_long:
            problems.append("--pack already goes on with long rows in the next window; leave out --split-long.")
        for flag, given in (("--pack", self.pack), ("--split-long", self.split_long)):
            if given and self.seq_len is None:
                problems.append(f"{flag} needs --seq-len, the tokens of a full sequence.")
        return problems


def read_sequences(settings: DataSettings, tokenizer: Tokenizer, *, vocab_size: int | None) -> Sequences:
    """Tokenise a dataset and divide it into sequences.

    Args:
        settings: What to read.
        tokenizer: Makes token ids of texts and messages; knows which ids are special.
        vocab_size: Ids the model knows; None skips the check against it.

    Raises:
        UsageError: The settings contradict each other, the dataset cannot be read, or a row does not fit.
        RoomError: The folder for temporary files cannot hold the tokens, 4 bytes each.
    """
    if problems := settings.problems():
        raise UsageError(" ".join(problems))
    with _quiet():
        column, rows = _open(settings)
        writer = TableWriter()
        try:
            read, cut_rows = _fill(writer, settings, rows, column, tokenizer, vocab_size)
            table = _finish(writer, settings, read)
        finally:
            writer.close()
    return make_sequences(
        table,
        seq_len=settings.seq_len,
        split_long=settings.split_long,
        pack=settings.pack,
        limit=settings.limit,
        empty_rows=read - len(table.rows),
        cut_rows=cut_rows,
        special_ids=tokenizer.all_special_ids,
    )


def _finish(writer: TableWriter, settings: DataSettings, read: int) -> TokenTable:
    if not read:
        raise UsageError(f"The dataset {settings.dataset!r} holds no rows. Name another dataset or --split.")
    if not writer.tokens:
        raise UsageError(
            f"All {read} rows of the dataset {settings.dataset!r} are empty. Name another column or dataset."
        )
    return writer.finish()


def _fill(
    writer: TableWriter,
    settings: DataSettings,
    rows: Iterator[Any],
    column: Column,
    tokenizer: Tokenizer,
    vocab_size: int | None,
) -> tuple[int, int]:
    """Tokenise rows until there are none or --limit is reached; how many were read, and how many cut."""
    cut_at = None if settings.split_long or settings.pack else settings.seq_len
    read = cut_rows = sequences = 0
    size = FIRST_ROWS
    while settings.limit is None or sequences < settings.limit:
        # Unless packed, a row gives at least one sequence: read no more rows than sequences are left.
        left = size if settings.limit is None or settings.pack else settings.limit - sequences
        chunk = list(islice(rows, min(size, left)))
        values = [column.value(row, read + offset) for offset, row in enumerate(chunk)]
        if not values:
            break
        encoded = encode(values, first_row=read, column=column, tokenizer=tokenizer, vocab_size=vocab_size)
        for ids in encoded:
            read += 1
            if not len(ids):
                continue
            if cut_at is not None and len(ids) > cut_at:
                cut_rows += 1
                ids = ids[:cut_at]
            writer.add(read - 1, ids)
            sequences = _sequences_so_far(sequences, len(ids), writer.tokens, settings)
            if settings.limit is not None and sequences >= settings.limit:
                break
        size = min(2 * size, MOST_ROWS)
    return read, cut_rows


def _sequences_so_far(before: int, row_tokens: int, all_tokens: int, settings: DataSettings) -> int:
    """Whole sequences once a row of ``row_tokens`` has been added."""
    if settings.seq_len is None:
        return before + 1
    if settings.pack:
        return all_tokens // settings.seq_len
    return before + -(-row_tokens // settings.seq_len)


def _open(settings: DataSettings) -> tuple[Column, Iterator[Any]]:
    """The column to read and the rows of the split, each a dict."""
    source = find_source(settings.dataset)
    try:
        dataset = _choose_split(_load(source, settings), source, settings)
        names, rows = dataset.column_names, iter(dataset)
        if not names:  # a stream may not know before its first row
            first = list(islice(rows, 1))
            names, rows = list(first[0]) if first else [], chain(first, rows)
        column = choose_column(
            names,
            text=settings.text_column,
            messages=settings.messages_column,
            input_ids=settings.input_ids_column,
        )
        if dataset.column_names:
            rows = iter(dataset.select_columns([column.name]))
    except UsageError:
        raise
    except Exception as error:  # every loader fails in its own ways
        raise explain(source, error) from error
    return column, _explained(rows, source)


def _load(source: Source, settings: DataSettings) -> Any:
    """One split, or a dict of all splits, as ``datasets`` gives them."""
    import datasets

    if source.kind == "saved":
        return datasets.load_from_disk(os.fspath(source.path))
    if source.kind == "hub":
        if source.name.isidentifier() and find_spec(f"datasets.packaged_modules.{source.name}"):
            # Given the name of a loader, datasets would take in whatever lies in the working directory.
            raise UsageError(f"{source.name!r} names a file format, not a dataset. Name a file or a hub id.")
        # A slice or sum of splits, "train[:100]", is left to datasets; it prepares all splits anyway.
        made = settings.split if settings.split and _is_slice(settings.split) else None
        return datasets.load_dataset(source.name, settings.subset, split=made, streaming=settings.streaming)
    options: dict[str, Any] = {}
    if source.loader == "csv":
        # Otherwise pandas takes the texts "NA" and "null" for missing and "007" for a number.
        options |= {"converters": {settings.text_column or "text": str}, "keep_default_na": False}
    if source.kind == "file":
        files = {"train": [glob.escape(os.fspath(source.path.absolute()))]}
        return datasets.load_dataset(source.loader, data_files=files, streaming=True, **options)
    builder = datasets.load_dataset_builder(os.fspath(source.path.absolute()), settings.subset, **options)
    _refuse_left_out(source, builder)
    return builder.as_streaming_dataset()


def _refuse_left_out(source: Source, builder: Any) -> None:
    """Where one file's name tells its split, datasets silently leaves out those whose names don't."""
    if (source.path / "README.md").is_file():  # may say which files belong to which subset
        return
    taken = {Path(file).resolve() for files in builder.config.data_files.values() for file in files}
    left_out = [file.name for file in source.files if file.resolve() not in taken]
    if left_out:
        raise UsageError(
            f"The folder {source.name!r} has files named after splits, and others that belong to none: "
            f"{', '.join(left_out)}. Name all files after their split (train-…, test-…) or none."
        )


def _choose_split(loaded: Any, source: Source, settings: DataSettings) -> Any:
    if not isinstance(loaded, dict):
        sliced = source.kind == "hub"
        if settings.split is None or sliced or str(loaded.split) == settings.split:
            return loaded
        raise UsageError(f"The dataset {settings.dataset!r} is a single split; leave out --split {settings.split}.")
    names = list(loaded)
    if settings.split is None and len(names) == 1:
        return loaded[names[0]]
    split = settings.split or "train"
    if split not in loaded:
        raise UsageError(
            f"The dataset {settings.dataset!r} has no split {split!r}; it has {', '.join(names)}. "
            "Name one with --split."
        )
    return loaded[split]


def _is_slice(split: str) -> bool:
    return "[" in split or "+" in split


def _explained(rows: Iterator[Any], source: Source) -> Iterator[Any]:
    """The same rows; what goes wrong while they are read is told in a sentence."""
    try:
        yield from rows
    except Exception as error:
        raise explain(source, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, no log lines and no torch of ``datasets``: kimicap tells what went wrong itself."""
    import datasets

    log = datasets.utils.logging
    bars, verbosity = not datasets.are_progress_bars_disabled(), log.get_verbosity()
    log.set_verbosity(log.CRITICAL)
    # A stream imports torch, for seconds, to share its epoch with workers that there are none of.
    has_torch, datasets.config.TORCH_AVAILABLE = datasets.config.TORCH_AVAILABLE, False
    if bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.config.TORCH_AVAILABLE = has_torch
        log.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
