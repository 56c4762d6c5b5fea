"""The loop: blocks of sequences through the model, their pieces into shards, a commit when a block is on disk.

It yields events and prints nothing.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from kimicap.assembly import Assembler
from kimicap.batches import Sequences, form_batches
from kimicap.errors import Stopped, UsageError
from kimicap.events import Committed, Event, Progress
from kimicap.first_batch import FirstBatch
from kimicap.forwards import Decoding, Runner
from kimicap.frame import Frame
from kimicap.hooks import Recorder
from kimicap.outcome import Check, refuse_constant
from kimicap.pieces import Piece, join
from kimicap.plan import CapturePlan
from kimicap.reading import refuse_missing
from kimicap.selection import position_axis
from kimicap.slots import Slots
from kimicap.store import Store
from kimicap.writers import Pending

MOST_WAITING = 32
"""Blocks that may be on their way to the disk: small ones would pile up long before their bytes fill the slots."""


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


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A block that only the disk is not done with.

    Attributes:
        lengths: Shards of the array of lengths: where each begins, and its data.
    """

    number: int
    tokens: int
    pending: Pending
    lengths: list[tuple[tuple[int, ...], np.ndarray]]
    checks: list[dict[str, Any]]


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
        self._seen: dict[tuple[str, int | None], set[int]] = {}
        self._empty: dict[str, list[int]] = {}
        self._block = Block(number=-1)
        self._cache: tuple[int, Any] = (-1, None)
        held = decoding.tokens if decoding is not None and decoding.forced else 0
        self._frame = Frame(plan, sequences, held_tokens=held)
        self._forward_s = self._commit_s = 0.0
        self._last_seconds = self._seconds()

    def stop(self) -> None:
        """The loop drops the block in hand after its present batch, and raises `Stopped`."""
        self._stopping = True

    def sink(self, key: str, block: int | None, piece: Piece) -> None:
        """Takes a piece from the recorder: placed at once, or kept until the batch's decoding is over.

        Several rows in one piece stay together where their sequences follow each other.
        """
        if piece.rows is not None:
            numbers = self._numbers[piece.row : piece.row + piece.rows]
            adjoin = list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
            if not adjoin or self._first is not None or self._decoding is not None:
                for part in piece.split():
                    self.sink(key, block, part)
                return
        if self._first is not None:
            self._first.see(key, block, piece)
        sequence = self._numbers[piece.row]
        if self._decoding is None:
            self._put(key, block, sequence, piece)
            return
        kept = self._block.pieces.setdefault((key, block, sequence), [])
        value = self._values[key]
        if position_axis(value.want.value) is None or value.want.request.positions.kind == "last":
            kept[:] = [earlier for earlier in kept if earlier.head != piece.head]
        kept.append(replace(piece, tensor=piece.tensor.clone()))

    def run(self, runner: Runner, recorder: Recorder, blocks: Iterable[int]) -> Iterator[Event]:
        """Works through ``blocks``, each committed when its shards are durable.

        Raises:
            Stopped: A signal asked for it; every block that was done is committed.
            KimicapError: A write failed, a value did not appear, or one is the same number everywhere; every
                committed block is kept.
        """
        waiting: deque[Finished] = deque()
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
                        yield self._progress(done, tokens, time.perf_counter() - start)
                    waiting.append(self._finish_block())
            while waiting:
                yield from self._commit(waiting.popleft())
        except Stopped:
            self._assembler.drop()
            while waiting:  # computed already, so only seconds away
                yield from self._commit(waiting.popleft())
            raise
        except BaseException as failure:
            self._slots.fail(failure)
            self._assembler.drop()
            raise
        finally:
            self._assembler.close()

    def _progress(self, sequences: int, tokens: int, elapsed_s: float) -> Progress:
        seconds = self._seconds()
        return Progress(
            sequences=sequences,
            tokens=tokens,
            written_bytes=self._assembler.written_bytes,
            elapsed_s=elapsed_s,
            waited_s=seconds["disk"],
            seconds=seconds,
        )

    def _seconds(self) -> dict[str, float]:
        """Seconds so far, by stage; see `Progress`."""
        return {
            "forward": self._forward_s,
            "device": self._device_s(),
            "disk": self._slots.disk_s + self._commit_s,
            "writing": self._assembler.writers.busy_s,
        }

    def _device_s(self) -> float:
        """Seconds so far that a forward's hooks waited for a GPU's copies."""
        return self._slots.device_s + self._assembler.copier.waited_s

    def _waited_s(self) -> float:
        """Seconds so far that they waited, for those or for the disk."""
        return self._slots.disk_s + self._device_s()

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
        self._empty = {} if self._decoding is not None else self._empty_rows(batch)
        recorder.fired.clear()
        start, waited_s = time.perf_counter(), self._waited_s()
        if self._decoding is not None:
            tokens = runner.decode(tokens, batch, self._decoding)
            self._flush({number: len(row) for number, row in zip(batch, tokens, strict=True)})
        elif self._continued:
            self._run_continued(runner, batch[0], tokens[0])
        else:
            runner.prompts(tokens)
        self._forward_s += time.perf_counter() - start - (self._waited_s() - waited_s)
        self._assembler.writers.check()
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

    def _flush(self, lengths: Mapping[int, int]) -> None:
        """Rows of a decoded batch, by sequence of so many tokens, made whole and placed."""
        for (key, block, sequence), pieces in self._block.pieces.items():
            self._put(key, block, sequence, join(pieces, self._values[key].row_dims, keys=lengths[sequence]))
        self._block.pieces.clear()

    def _put(self, key: str, block: int | None, sequence: int, piece: Piece) -> None:
        """Places a piece. The first of a value and block has the rows that will give nothing filled beside it.

        Left until the forward is over, those would keep the shards of all blocks of the model open.
        """
        self._assembler.put(key, block, sequence, piece)
        seen = self._seen.get((key, block))
        if seen is None:
            seen = self._seen[key, block] = set()
            for empty in self._empty.get(key, ()):
                self._assembler.fill(key, block, empty)
                seen.add(empty)
        if piece.complete:
            seen.update(range(sequence, sequence + (piece.rows or 1)))

    def _empty_rows(self, batch: Sequence[int]) -> dict[str, list[int]]:
        """By value, the sequences too short for the positions that were asked for."""
        empty = {}
        for value in self._plan.values:
            positions = value.want.request.positions
            if position_axis(value.want.value) is not None and positions.kind in ("every", "range"):
                lengths = ((sequence, int(self._sequences.lengths[sequence])) for sequence in batch)
                empty[value.key] = [number for number, length in lengths if not positions.window(0, length, length)[1]]
        return empty

    def _fill_absent(self, recorder: Recorder, batch: tuple[int, ...]) -> None:
        """Rows that gave nothing: of short sequences for a selection, or of values that may be absent."""
        refuse_missing(recorder.missing())
        for value in self._plan.values:
            for block in value.want.blocks or (None,):
                seen = self._seen.get((value.key, block), set())
                for sequence in batch if len(seen) < len(batch) else ():
                    if sequence not in seen:
                        self._assembler.fill(value.key, block, sequence)

    def _finish_block(self) -> Finished:
        checks, self._checks = [check.data() for check in self._checks], []
        block, tokens = self._plan.block(self._block.number), self._block.tokens
        pending = self._assembler.take_pending()
        frame = {array.path: list(self._frame.shards(array, block, tokens)) for array in self._plan.frame}
        lengths = frame.pop("length")
        for array, shards in frame.items():
            self._assembler.write_frame(array, shards, pending)
        count = sum(map(len, tokens.values()))
        return Finished(number=self._block.number, tokens=count, pending=pending, lengths=lengths, checks=checks)

    def _commit_ready(self, waiting: deque[Finished]) -> Iterator[Committed]:
        """Commits what is durable, and waits for the oldest where too many are not."""
        while waiting and (len(waiting) >= MOST_WAITING or self._assembler.writers.ready(waiting[0].pending)):
            yield from self._commit(waiting.popleft())

    def _commit(self, finished: Finished) -> Iterator[Committed]:
        start = time.perf_counter()
        pending, numbers = finished.pending, self._plan.block(finished.number)
        self._assembler.writers.wait_handed_over(pending)
        odd = pending.odd
        _refuse_overflow(odd)
        pending.wait()
        self._assembler.writers.check()
        self._assembler.write_frame("length", finished.lengths, pending)  # who finds these finds all else
        pending.wait()
        self._commit_s += time.perf_counter() - start
        seconds = self._seconds()
        since = {stage: round(seconds[stage] - before, 6) for stage, before in self._last_seconds.items()}
        self._last_seconds = seconds
        self._store.commit(
            finished.number,
            {
                "sequences": [numbers.start, numbers.stop],
                "tokens": finished.tokens,
                "rank": self._work.rank,
                "seconds": since,
                "shards": {array: [list(index) for index in indices] for array, indices in pending.shards.items()},
                **odd,
                **({"checks": finished.checks} if finished.checks else {}),
            },
        )
        yield Committed(block=finished.number, sequences=len(numbers), nonfinite=odd.get("nonfinite", {}))


def _refuse_overflow(odd: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    """Raises UsageError where a value did not fit in a lossy dtype."""
    if "overflow" in odd:
        key, blocks = next(iter(odd["overflow"].items()))
        where = "" if (block := next(iter(blocks))) == "model" else f" of block {block}"
        raise UsageError(f"{key}{where} holds values beyond float16; capture it with --store-dtype lossless.")
