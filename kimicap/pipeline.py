"""The loop: blocks of sequences through the model, their pieces into shards, a commit when a block is on disk.

It yields events and prints nothing.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from kimicap.assembly import Assembler, Pending, assemble
from kimicap.batches import Sequences, form_batches
from kimicap.computed import Piece
from kimicap.errors import Stopped, UsageError
from kimicap.first_batch import FirstBatch
from kimicap.forwards import Decoding, Runner
from kimicap.hooks import Recorder
from kimicap.layout import ArrayLayout
from kimicap.outcome import Check, refuse_constant
from kimicap.plan import CapturePlan
from kimicap.slots import Slots
from kimicap.store import Store
from kimicap.value_plan import ValuePlan


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the run is, after each batch.

    Attributes:
        sequences: Sequences done in this run.
        tokens: Tokens done in this run.
        written_bytes: Bytes handed to the writers, uncompressed.
        elapsed_s: Seconds since the first batch.
        waited_s: Of them, seconds the loop waited for the disk.
    """

    sequences: int
    tokens: int
    written_bytes: int
    elapsed_s: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A block is on disk and recorded."""

    block: int
    sequences: int


Event = Progress | Committed


@dataclass(frozen=True, kw_only=True)
class Work:
    """How the loop goes about its blocks; none of it changes what is stored.

    Attributes:
        group: Sequences worked on at once.
        may_split: Whether a group may go through in several forwards.
        batch_tokens: Tokens of one forward.
        batch_size: Sequences of one forward at most, or None.
        rank: Stored in the block records, for people.
    """

    group: int
    may_split: bool
    batch_tokens: int
    batch_size: int | None
    rank: int = 0


@dataclass(eq=False)
class Block:
    """A block in hand."""

    number: int
    tokens: dict[int, np.ndarray] = field(default_factory=dict)
    pieces: dict[tuple[str, int | None, int], list[Piece]] = field(default_factory=dict)


class Loop:
    """One run over some blocks of a capture.

    It may be told to `stop` from a signal handler.
    """

    def __init__(
        self,
        *,
        plan: CapturePlan,
        store: Store,
        sequences: Sequences,
        work: Work,
        slots: Slots,
        decoding: Decoding | None = None,
        continued: bool = False,
        first: FirstBatch | None = None,
    ) -> None:
        self._stopping = False
        self._plan, self._store, self._sequences = plan, store, sequences
        self._work, self._slots = work, slots
        self._decoding, self._continued = decoding, continued
        self._first, self._checks = first, list[Check]()
        self._assembler = Assembler(plan, store, slots)
        self._values = {value.key: value for value in plan.values}
        self._numbers: Sequence[int] = ()
        self._seen: set[tuple[str, int | None, int]] = set()
        self._block = Block(number=-1)
        self._cache: tuple[int, Any] = (-1, None)

    def stop(self) -> None:
        """The loop drops the block in hand after its present batch, and raises `Stopped`."""
        self._stopping = True

    def sink(self, key: str, block: int | None, piece: Piece) -> None:
        """Takes a piece from the recorder: placed at once, or kept until the batch's decoding is over."""
        if self._first is not None:
            self._first.see(key, block, piece)
        sequence = self._numbers[piece.row]
        if self._decoding is None:
            self._assembler.put(key, block, sequence, piece)
            if piece.complete:
                self._seen.add((key, block, sequence))
            return
        kept = self._block.pieces.setdefault((key, block, sequence), [])
        value = self._values[key]
        if not any(dim.endswith("position") or dim.startswith("query") for dim in value.array.dims):
            kept.clear()
        kept.append(replace(piece, tensor=piece.tensor.clone()))

    def run(self, runner: Runner, recorder: Recorder, blocks: Iterable[int]) -> Iterator[Event]:
        """Works through ``blocks``, each committed when its shards are durable.

        Raises:
            Stopped: A signal asked for it; every committed block is kept.
            KimicapError: A write failed, a value did not appear, or one is the same number everywhere; likewise.
        """
        waiting: deque[tuple[Block, Pending, dict[str, Any]]] = deque()
        start, done, tokens = time.perf_counter(), 0, 0
        try:
            with recorder.attached():
                for number in blocks:
                    self._block = Block(number=number)
                    for batch in self._batches(number):
                        self._stop_if_asked(number)
                        self._run_batch(runner, recorder, batch)
                        done, tokens = done + len(batch), tokens + sum(len(self._block.tokens[i]) for i in batch)
                        yield from self._commit_ready(waiting)
                        yield Progress(
                            sequences=done,
                            tokens=tokens,
                            written_bytes=self._assembler.written_bytes,
                            elapsed_s=time.perf_counter() - start,
                            waited_s=self._slots.waited_s,
                        )
                    waiting.append(self._finish_block())
            while waiting:
                yield from self._commit(*waiting.popleft())
        except BaseException as failure:
            self._slots.fail(failure)
            raise
        finally:
            self._assembler.close()

    def _stop_if_asked(self, number: int) -> None:
        if self._stopping:
            raise Stopped(f"Stopped by a signal before block {number} was done; go on with --resume.")

    def _batches(self, number: int) -> Iterator[tuple[int, ...]]:
        lengths, work = self._sequences.lengths, self._work
        block = self._plan.block(number)
        for first in range(block.start, block.stop, work.group):
            group = range(first, min(first + work.group, block.stop))
            if self._continued:
                yield from ((sequence,) for sequence in group)
            elif work.may_split:
                yield from form_batches(lengths, group, batch_tokens=work.batch_tokens, batch_size=work.batch_size)
            else:
                yield from form_batches(lengths, group, batch_tokens=2**62, batch_size=None, max_padding=inf)

    def _run_batch(self, runner: Runner, recorder: Recorder, batch: tuple[int, ...]) -> None:
        tokens = [self._sequences.tokens(sequence) for sequence in batch]
        self._numbers = batch
        self._seen.clear()
        recorder.fired.clear()
        if self._decoding is not None:
            tokens = runner.decode(tokens, batch, self._decoding)
            self._flush()
        elif self._continued:
            self._run_continued(runner, batch[0], tokens[0])
        else:
            runner.prompts(tokens)
        self._assembler.check()
        if self._first is not None:
            self._checks, self._first = self._first.checks(), None
            refuse_constant(self._checks)
        self._block.tokens.update(zip(batch, tokens, strict=True))
        self._fill_absent(recorder, batch)

    def _run_continued(self, runner: Runner, sequence: int, tokens: np.ndarray) -> None:
        """A sequence that may go on from the one before it: with the state so far, rebuilt where it is not at hand."""
        at, cache = self._cache
        if not self._sequences.continues(sequence):
            cache = None
        elif at != sequence - 1:
            first = sequence - 1
            while self._sequences.continues(first):
                first -= 1
            cache = None
            for earlier in range(first, sequence):
                cache = runner.continued(self._sequences.tokens(earlier), cache, capture=False)
        self._cache = sequence, runner.continued(tokens, cache)

    def _flush(self) -> None:
        """Rows of a decoded batch, made whole and placed."""
        for (key, block, sequence), pieces in self._block.pieces.items():
            value = self._values[key]
            self._assembler.put(key, block, sequence, assemble(pieces, value, value.row_shape))
            self._seen.add((key, block, sequence))
        self._block.pieces.clear()

    def _fill_absent(self, recorder: Recorder, batch: tuple[int, ...]) -> None:
        """Rows that gave nothing: of short sequences for a selection, or of values that may be absent."""
        missing = recorder.missing()
        if missing:
            key, block = missing[0]
            raise UsageError(
                f"{key} of block {block} did not appear in the forward, though the schema has a site for it; "
                "the schema does not fit this model."
            )
        for value in self._plan.values:
            for block in value.want.blocks or (None,):
                for sequence in batch:
                    if (value.key, block, sequence) not in self._seen:
                        self._assembler.fill(value.key, block, sequence)

    def _finish_block(self) -> tuple[Block, Pending, dict[str, Any]]:
        odd: dict[str, Any] = self._assembler.odd_counts()
        if "overflow" in odd:
            key, blocks = next(iter(odd["overflow"].items()))
            raise UsageError(
                f"{key} of block {next(iter(blocks))} holds values beyond float16; capture it with "
                "--store-dtype lossless."
            )
        if self._checks:
            odd["checks"], self._checks = [check.data() for check in self._checks], []
        for array in self._plan.frame:
            self._write_frame(array)
        return self._block, self._assembler.take_pending(), odd

    def _write_frame(self, array: ArrayLayout) -> None:
        """The block's part of an array that every capture has, shard by shard."""
        block = self._plan.block(self._block.number)
        data = np.full((len(block), *array.shape[1:]), array.fill, array.dtype)
        for at, sequence in enumerate(block):
            entry = self._frame_entry(array.path, sequence)
            if data.ndim == 1:
                data[at] = entry
            else:
                data[at, : len(entry)] = entry
        for first in range(0, len(block), array.shard[0]):
            part = np.ascontiguousarray(data[first : first + array.shard[0]])
            self._assembler.write_frame(array.path, (block.start + first, *(0 for _ in array.shape[1:])), part)

    def _frame_entry(self, path: str, sequence: int) -> Any:
        tokens, given = self._block.tokens[sequence], int(self._sequences.lengths[sequence])
        held = self._decoding.tokens if self._decoding is not None and self._decoding.forced else 0
        if path == "input_ids":
            return tokens
        if path == "attention_mask":
            return np.ones(len(tokens), bool)
        if path == "special_tokens_mask":
            return np.isin(tokens, sorted(self._sequences.special_ids))
        if path == "generated":
            return np.arange(len(tokens)) >= given - held
        if path == "document":
            return self._sequences.documents(sequence)
        if path == "length":
            return len(tokens)
        if path == "row":
            return self._sequences.rows[sequence]
        value = self._selected(path)
        slots = value.array.shape[next(i for i, dim in enumerate(value.array.dims) if dim.endswith("_position"))]
        return value.want.request.positions.at(len(tokens), slots)

    def _selected(self, path: str) -> ValuePlan:
        name = path.removesuffix("_at")
        return next(value for value in self._plan.values if value.array.path.removesuffix("_top") == name)

    def _commit_ready(self, waiting: "deque[tuple[Block, Pending, dict[str, Any]]]") -> Iterator[Committed]:
        while waiting and all(write.done() for write in waiting[0][1].writes):
            yield from self._commit(*waiting.popleft())

    def _commit(self, block: Block, pending: Pending, odd: dict[str, Any]) -> Iterator[Committed]:
        numbers = self._plan.block(block.number)
        self._store.commit(
            block.number,
            {
                "sequences": [numbers.start, numbers.stop],
                "tokens": int(sum(len(tokens) for tokens in block.tokens.values())),
                "rank": self._work.rank,
                "shards": {array: [list(index) for index in indices] for array, indices in pending.shards.items()},
                **odd,
            },
        )
        yield Committed(block=block.number, sequences=len(numbers))
