"""Sequences as ranges of one flat run of tokens: packing, splitting, batch forming. Pure arithmetic."""

import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kimicap.errors import RoomError

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

# Tokens hashed at a time: 4 MiB, so that the digest of any dataset needs no more memory than that.
HASH_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTable:
    """The tokens of the dataset's rows that have any, one row after the other.

    Attributes:
        tokens: int32 [tokens], mapped from a nameless file that vanishes with the process.
        starts: int64 [rows], where each row's tokens begin in ``tokens``.
        rows: int64 [rows], each row's number in the dataset, rows without tokens counted too.
    """

    tokens: Ints
    starts: Ints
    rows: Ints


class TableWriter:
    """Takes rows of tokens one by one and keeps none of them in memory."""

    def __init__(self) -> None:
        # Nameless: another run cannot meet it, and even a killed one leaves nothing behind.
        self._file = tempfile.TemporaryFile(prefix="kimicap-tokens-")
        self._starts = array("q")
        self._rows = array("q")
        self.tokens = 0

    def add(self, row: int, ids: Ints) -> None:
        """Append one row.

        Args:
            row: The row's number in the dataset.
            ids: Integers [tokens], at least one, each in int32.

        Raises:
            RoomError: The folder for temporary files is full.
        """
        self._starts.append(self.tokens)
        self._rows.append(row)
        self.tokens += len(ids)
        try:
            self._file.write(ids.astype(np.int32).tobytes())
        except OSError as error:
            raise self._no_room(error) from error

    def finish(self) -> TokenTable:
        """The rows so far, at least one, as a table; the writer takes no more of them."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._no_room(error) from error
        tokens = np.memmap(self._file, dtype=np.int32, mode="r", shape=(self.tokens,))
        self._file.close()  # the mapping keeps the bytes
        return TokenTable(
            tokens=tokens,
            starts=np.array(self._starts, dtype=np.int64),
            rows=np.array(self._rows, dtype=np.int64),
        )

    def close(self) -> None:
        """Drop the file, unless a table still maps it."""
        # Closing flushes, which fails again on a full disk; that failure has been told already.
        try:
            self._file.close()
        except OSError:
            pass

    def _no_room(self, error: OSError) -> RoomError:
        return RoomError(
            f"No room for the dataset's tokens ({self.tokens * 4} bytes so far) in {tempfile.gettempdir()}: "
            f"{error.strerror}. Name a folder with more room in the variable TMPDIR."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """The numbered sequences of a run: the same numbers on every rank and every resume.

    Attributes:
        lengths: int32 [N], tokens of each sequence.
        rows: int64 [N], the dataset row of each sequence's first token, rows without tokens counted too.
        empty_rows: Rows read that had no tokens and so are in no sequence.
        cut_rows: Rows of which tokens beyond ``seq_len`` were dropped.
        digest: sha256, in hex, of all token ids, which of them are special, and where sequences and rows begin.
        packed: Whether sequences are windows over several rows.
    """

    lengths: Ints
    rows: Ints
    empty_rows: int
    cut_rows: int
    digest: str
    packed: bool
    starts: Ints
    table: TokenTable
    special_ids: frozenset[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, i: int) -> Ints:
        """Token ids of sequence ``i``: int32 [length], a copy."""
        start = int(self.starts[i])
        return np.array(self.table.tokens[start : start + int(self.lengths[i])])

    def documents(self, i: int) -> Ints:
        """The dataset row that each token of packed sequence ``i`` came from: int32 [length]."""
        assert self.packed, "only packed sequences hold several rows"
        at = int(self.starts[i]) + np.arange(int(self.lengths[i]))
        rows: Ints = self.table.rows[_entry(self.table, at)]
        return rows.astype(np.int32)

    def continues(self, i: int) -> bool:
        """Whether sequence ``i`` goes on, in the same row, from where sequence ``i - 1`` ended."""
        start = self.starts[i]
        return bool(not self.packed and start > self.table.starts[_entry(self.table, start)])


def make_sequences(
    table: TokenTable,
    *,
    seq_len: int | None,
    split_long: bool,
    pack: bool,
    limit: int | None,
    empty_rows: int,
    cut_rows: int,
    special_ids: Iterable[int],
) -> Sequences:
    """Divide a table's tokens into sequences.

    Without ``split_long`` and ``pack`` the rows of ``table`` are cut to ``seq_len`` already.
    """
    row_lengths = np.diff(table.starts, append=len(table.tokens))
    if pack:
        assert seq_len is not None
        starts, lengths = pack_rows(row_lengths, seq_len)
    elif split_long and seq_len is not None:
        starts, lengths = split_rows(row_lengths, seq_len)
    else:
        starts, lengths = table.starts, row_lengths
    starts, lengths = starts[:limit], lengths[:limit].astype(np.int32)
    special = frozenset(special_ids)
    return Sequences(
        lengths=lengths,
        rows=table.rows[_entry(table, starts)],
        empty_rows=empty_rows,
        cut_rows=cut_rows,
        digest=_digest(table, starts, lengths, special),
        packed=pack,
        starts=starts,
        table=table,
        special_ids=special,
    )


def split_rows(row_lengths: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Each row as pieces of ``seq_len`` tokens and a rest.

    Args:
        row_lengths: Integers [rows], each at least 1.
        seq_len: Tokens of a piece.

    Returns:
        Starts in the flat run of tokens and lengths, both int64 [pieces], in order.
    """
    pieces = -(-row_lengths // seq_len)
    ends = np.cumsum(row_lengths)
    number_in_row = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(ends - row_lengths, pieces) + number_in_row * seq_len
    return starts, np.minimum(seq_len, np.repeat(ends, pieces) - starts)


def pack_rows(row_lengths: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """All rows as one run, in windows of ``seq_len`` tokens; the last one may be shorter.

    Args:
        row_lengths: Integers [rows].
        seq_len: Tokens of a window.

    Returns:
        Starts in the flat run of tokens and lengths, both int64 [windows], in order.
    """
    total = int(row_lengths.sum())
    starts = np.arange(0, total, seq_len)
    return starts, np.minimum(seq_len, total - starts)


def form_batches(
    lengths: Ints | Sequence[int],
    indices: Iterable[int],
    *,
    batch_tokens: int,
    batch_size: int | None,
    max_padding: float = 0.1,
) -> list[tuple[int, ...]]:
    """Group sequences of like length into batches, the longest first.

    The longest come first so that a batch too large for the device fails at once, not at the end.

    Args:
        lengths: Tokens of every sequence, [N].
        indices: The sequences to group, each once.
        batch_tokens: Most tokens of a batch, its padding counted. A longer sequence is a batch of its own.
        batch_size: Most sequences of a batch; None for any number.
        max_padding: Most of a batch's tokens, as a fraction, that may be padding; a batch of up to an eighth of
            ``batch_tokens`` takes more, since so small a forward costs the same whatever is in it.

    Returns:
        Batches of sequence numbers; each of ``indices`` is in exactly one. The order in which
        ``indices`` come makes no difference.
    """
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    longest = real = 0
    for index in sorted(indices, key=lambda index: (-int(lengths[index]), index)):
        length = int(lengths[index])
        padded = longest * (len(batch) + 1)
        wasteful = padded > batch_tokens // 8 and padded - (real + length) > max_padding * padded
        full = padded > batch_tokens or len(batch) == batch_size or wasteful
        if batch and full:
            batches.append(tuple(batch))
            batch, real = [], 0
        if not batch:
            longest = length
        batch.append(index)
        real += length
    return [*batches, tuple(batch)] if batch else batches


def _entry(table: TokenTable, at: Any) -> Any:
    """The table's row that each place ``at`` in the flat run of tokens lies in."""
    return np.searchsorted(table.starts, at, side="right") - 1


def _digest(table: TokenTable, starts: Ints, lengths: Ints, special_ids: Iterable[int]) -> str:
    """sha256 of all that sequences hold, each part after its size: int64 and tokens int32, little-endian everywhere.

    The parts are the starts and lengths of the sequences, the starts and numbers of the rows that they use, the special
    ids in order, and the tokens up to the last one used.
    """
    used = int(starts[-1]) + int(lengths[-1])
    rows = table.starts < used
    digest = hashlib.sha256()
    for part in (starts, lengths, table.starts[rows], table.rows[rows], np.array(sorted(special_ids), np.int64)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part.astype("<i8").tobytes())
    digest.update(used.to_bytes(8, "little"))
    for start in range(0, used, HASH_TOKENS):
        digest.update(table.tokens[start : min(start + HASH_TOKENS, used)].astype("<i4").tobytes())
    return digest.hexdigest()
