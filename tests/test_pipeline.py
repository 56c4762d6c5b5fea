"""The loop, the assembler and the slots with a model made by hand: memory bound, no deadlock, every bit in place."""

import random
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimicap import grid, odd, pipeline
from kimicap.architecture import family_of_config, read_architecture, resolve
from kimicap.errors import KimicapError, RoomError, UsageError
from kimicap.events import Committed
from kimicap.pieces import Piece
from kimicap.pipeline import Loop, Work
from kimicap.plan import forward_group, plan_capture
from kimicap.schema import load_schema
from kimicap.selection import parse_values, position_axis
from kimicap.slots import Slots
from tests.models import tiny_config

SCHEMA = load_schema(None)
CONFIG = tiny_config().to_dict()
ARCHITECTURE = read_architecture(family_of_config(SCHEMA, CONFIG, code=None, model="tiny"), CONFIG)


class Rows:
    """Sequences of given lengths."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths, np.int32)
        self.rows = np.arange(len(lengths))
        self.special_ids = frozenset({0, 1})

    def tokens(self, sequence):
        return np.full(self.lengths[sequence], sequence % 100, np.int32)


class Disk:
    """A store in memory that takes its time: what it writes is what the slot holds at the end of the write."""

    def __init__(self, plan, *, delay_s=0.0, fail_after=None):
        self.layouts = {array.path: array for array in plan.arrays}
        self.path = Path("disk")
        self.arrays = {path: np.full(a.shape, a.fill, a.dtype) for path, a in self.layouts.items()}
        self.shards, self.records = set(), {}
        self._pool, self._delay_s, self._fail_after = ThreadPoolExecutor(2), delay_s, fail_after

    def write(self, array, origin, data):
        shard = (array, tuple(origin))
        assert shard not in self.shards, f"{shard} written twice"
        self.shards.add(shard)
        return self._pool.submit(self._write, array, origin, data, len(self.shards))

    def _write(self, array, origin, data, number):
        time.sleep(self._delay_s)
        if self._fail_after is not None and number > self._fail_after:
            raise KimicapError("The disk is gone.")
        self.arrays[array][tuple(slice(at, at + size) for at, size in zip(origin, data.shape, strict=True))] = data

    def commit(self, block, body):
        for array, indices in body["shards"].items():
            for index in indices:
                origin = tuple(at * size for at, size in zip(index, self.layouts[array].shard, strict=True))
                assert (array, origin) in self.shards
        self.records[block] = body

    def close(self):
        self._pool.shutdown()


class Model:
    """Runner and recorder in one: hands over pieces as forwards do, block of the model by block."""

    def __init__(self, plan, rows, draw):
        self.plan, self.rows, self.draw, self.loop = plan, rows, draw, None
        self.fired = set()

    @contextmanager
    def attached(self):
        yield

    def missing(self):
        return []

    def prompts(self, tokens):
        with torch.inference_mode():
            for block in [*range(6), None]:
                for value in self.plan.values:
                    if block in (value.want.blocks or (None,)):
                        self._give(value, block, tokens)

    def _give(self, value, block, tokens):
        for row in range(len(tokens)):
            whole, slot = self.row(value, block, self.loop._numbers[row])
            if whole is None:
                continue
            if "head" not in value.row_dims or self.draw.random() < 0.5:
                self.loop.sink(value.key, block, Piece(row=row, tensor=whole, slot=slot))
                continue
            axis, heads = value.row_dims.index("head"), whole.shape[value.row_dims.index("head")]
            for head in range(heads):
                part = whole.narrow(axis, head, 1)
                piece = Piece(row=row, tensor=part, slot=slot, head=head, complete=head == heads - 1)
                self.loop.sink(value.key, block, piece)

    def row(self, value, block, sequence):
        """What a value is for one block of the model and one sequence, and its first slot; None where it is empty."""
        length, shape, slot = int(self.rows.lengths[sequence]), list(value.row_shape), 0
        own = position_axis(value.want.value)
        for axis, dim in enumerate(value.row_dims):
            if dim == own:
                _, shape[axis], slot = value.want.request.positions.window(0, length, length)
            elif dim == "key":
                shape[axis] = length
        if 0 in shape:
            return None, 0
        seed = zlib.crc32(repr((value.key, block, sequence)).encode())
        data = np.random.default_rng(seed).integers(0, 8, shape)
        return torch.from_numpy(data.astype(value.array.dtype)), slot


def expected(model, value):
    whole = np.full(value.array.shape, value.array.fill, value.array.dtype)
    for layer, block in enumerate(value.layers or (None,)):
        for sequence in range(len(model.rows.lengths)):
            if block not in (value.want.blocks or (None,)):
                continue
            row, slot = model.row(value, block, sequence)
            if row is None:
                continue
            target = whole[layer, sequence] if value.leading == 2 else whole[sequence]
            own = position_axis(value.want.value)
            place = tuple(
                slice(slot, slot + size) if dim == own else slice(size)
                for dim, size in zip(value.row_dims, row.shape, strict=True)
            )
            target[place] = row.numpy()
    return whole


@contextmanager
def shards_of(target, largest, chunk):
    """Grids of so few bytes that small arrays have many shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid.plan_grid, "__kwdefaults__", {"target_bytes": target})
        patch.setattr(grid, "SHARD_BYTES", target)
        patch.setattr(grid, "LARGEST_SHARD_BYTES", largest)
        patch.setattr(grid, "CHUNK_BYTES", chunk)
        patch.setattr(grid, "SMALL_CHUNK_BYTES", chunk // 4)
        yield


def capture(lengths, values, *, block, batch_tokens, batch_size, memory, seed=0, **disk):
    """A capture of hand-made values; raises RoomError if the plan refuses, before anything runs."""
    wants = resolve(ARCHITECTURE, parse_values([values], SCHEMA), layers=None, heads=None)
    rows, draw = Rows(lengths), random.Random(seed)
    together = max(1, batch_tokens // max(lengths))
    plan = plan_capture(ARCHITECTURE, wants, rows.lengths, block_sequences=block, together=together)
    group, split = forward_group(plan, batch_tokens=batch_tokens, batch_size=batch_size, memory=memory, whole=False)
    work = Work(group=group, may_split=split, batch_tokens=batch_tokens, batch_size=batch_size)
    slots, store, model = Slots(memory, pinned=False), Disk(plan, **disk), Model(plan, rows, draw)
    model.loop = Loop(plan=plan, store=store, sequences=rows, work=work, slots=slots)
    return model, store, slots


def run(model, blocks=None):
    return list(model.loop.run(model, model, range(model.plan.blocks) if blocks is None else blocks))


VALUES = [
    "residuals",
    "residuals@layers:1-2,router_logits",
    "router_logits,mlp_output@last",
    "states@every:5,state_output",
    "states@every:3,residuals@2:6,expert_indices",
    "attention_probabilities,attention_queries",
    "self_attn.attention_keys@every:4,decays@layers:0-1",
    "logits@last,residuals@every:7@layers:0-4",
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=26),
    values=st.sampled_from(VALUES),
    block=st.sampled_from([1, 2, 4, 6, 8, 12]),
    batch_tokens=st.integers(1, 200),
    batch_size=st.none() | st.integers(1, 5),
    memory=st.integers(10, 22).map(lambda bits: int(2 ** (bits + 0.3))),
    target=st.sampled_from([2**10, 2**13, 2**16, 2**20]),
    chunk=st.sampled_from([2**8, 2**10, 2**12]),
)
def test_whatever_the_plan_takes_fits_and_is_exact(
    lengths, values, block, batch_tokens, batch_size, memory, target, chunk
):
    with shards_of(target, 2 * target, chunk):
        try:
            model, store, slots = capture(
                lengths, values, block=block, batch_tokens=batch_tokens, batch_size=batch_size, memory=memory
            )
        except (RoomError, UsageError):  # the plan refuses: too little memory, or nothing selected
            return
        events = run(model)
        store.close()
    assert slots.peak_bytes <= memory
    assert {event.block for event in events if isinstance(event, Committed)} == set(range(ceil(len(lengths) / block)))
    for value in model.plan.values:
        np.testing.assert_array_equal(store.arrays[value.array.path], expected(model, value), err_msg=value.key)
    files = {
        (array, index)
        for body in store.records.values()
        for array, s in body["shards"].items()
        for index in map(tuple, s)
    }
    assert len(files) == len(store.shards)


def test_lengths_are_written_when_all_else_of_their_sequences_is_durable(monkeypatch):
    """Of blocks that wait for the disk nobody may read as there what is not: a reader goes by the lengths."""
    with shards_of(2**12, 2**13, 2**10):
        model, store, _ = capture(
            [20] * 24, "residuals", block=4, batch_tokens=80, batch_size=None, memory=2**20, delay_s=0.002
        )
        log, write = [], store.write

        def watched(array, origin, data):
            log.append(("given", array, tuple(origin)))
            done = write(array, origin, data)
            done.add_done_callback(lambda _: log.append(("durable", array, tuple(origin))))
            return done

        monkeypatch.setattr(store, "write", watched)
        run(model)
    store.close()
    assert len(store.records) == 6
    for block, body in store.records.items():
        places = {
            (array, tuple(at * size for at, size in zip(index, store.layouts[array].shard, strict=True)))
            for array, indices in body["shards"].items()
            for index in indices
        }
        last = max(log.index(("durable", *place)) for place in places if place[0] != "length")
        assert last < log.index(("given", "length", (4 * block,)))


@pytest.mark.parametrize("fails", [False, True])
def test_rows_are_placed_by_one_thread_and_the_model_keeps_its_own(monkeypatch, fails):
    seen, see = set(), odd.Odd.see

    def watched(*given):
        seen.add(torch.get_num_threads())
        if fails:
            raise KimicapError("No.")
        see(*given)

    monkeypatch.setattr(odd.Odd, "see", watched)
    model, store, _ = capture([20] * 4, "residuals", block=4, batch_tokens=80, batch_size=None, memory=2**22)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KimicapError, match="No") if fails else nullcontext():
            run(model)
        assert (seen, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)
        store.close()


def test_a_slow_disk_holds_the_loop_and_is_told():
    with shards_of(2**12, 2**13, 2**10):
        model, store, slots = capture(
            [20] * 24, "residuals", block=4, batch_tokens=80, batch_size=None, memory=2**17, delay_s=0.005
        )
        events = run(model)
        store.close()
    assert slots.peak_bytes <= 2**17
    assert slots.disk_s > 0.02
    told = [event for event in events if not isinstance(event, Committed)]
    assert told[-1].waited_s == told[-1].seconds["disk"] > 0.02
    assert told[-1].seconds["writing"] > told[-1].seconds["device"]
    assert sum(body["seconds"]["disk"] for body in store.records.values()) >= slots.disk_s - 1e-4


def test_a_block_has_the_seconds_since_the_one_before():
    with shards_of(2**12, 2**13, 2**10):
        model, store, _ = capture(
            [20] * 24, "residuals", block=4, batch_tokens=80, batch_size=None, memory=2**17, delay_s=0.002
        )
        *_, last = (event for event in run(model) if not isinstance(event, Committed))
        store.close()
    assert len(store.records) == 6
    for stage, whole_s in last.seconds.items():
        sum_s = sum(body["seconds"][stage] for body in store.records.values())
        if stage in ("forward", "device"):  # of which nothing comes after the last step
            assert sum_s == pytest.approx(whole_s, abs=1e-5), stage
        else:
            assert whole_s - 1e-5 <= sum_s <= model.loop._seconds()[stage] + 1e-5, stage


def test_forwards_do_not_take_the_seconds_that_they_wait():
    """Each second is of one stage: on top of each other they are no more than the run took."""
    with shards_of(2**12, 2**13, 2**10):
        model, store, slots = capture(
            [20] * 24, "residuals", block=4, batch_tokens=80, batch_size=None, memory=2**15, delay_s=0.005
        )
        *_, last = (event for event in run(model) if not isinstance(event, Committed))
        store.close()
    assert slots.disk_s > 0.1  # else the test would show nothing
    assert sum(last.seconds[stage] for stage in ("forward", "device", "disk")) <= last.elapsed_s


def test_waiting_for_the_device_is_told_apart_from_the_forward(monkeypatch):
    model, store, _ = capture([20] * 4, "residuals", block=2, batch_tokens=40, batch_size=None, memory=2**22)
    prompts = model.prompts

    def waiting(tokens):
        start = time.perf_counter()
        time.sleep(0.2)
        model.loop._assembler.copier.waited_s += time.perf_counter() - start
        prompts(tokens)

    monkeypatch.setattr(model, "prompts", waiting)
    *_, last = (event for event in run(model) if not isinstance(event, Committed))
    store.close()
    assert last.seconds["device"] >= 0.4
    assert last.seconds["forward"] <= last.elapsed_s - last.seconds["device"]


def test_no_more_blocks_wait_for_the_disk_than_may(monkeypatch):
    model, store, _ = capture([4] * 40, "residuals@last", block=1, batch_tokens=4, batch_size=None, memory=2**22)
    monkeypatch.setattr(model.loop._assembler.writers, "ready", lambda pending: False)
    ahead, committed = [], 0
    for event in run(model):
        if isinstance(event, Committed):
            committed += 1
        else:
            ahead.append(event.sequences - committed)
    store.close()
    assert max(ahead) == pipeline.MOST_WAITING < 40
    assert list(store.records) == list(range(40))


@pytest.mark.parametrize("memory", [2**16, 2**22])
def test_a_write_that_fails_wakes_a_waiting_loop(memory):
    with shards_of(2**12, 2**13, 2**10):
        model, store, _ = capture(
            [20] * 24,
            "residuals",
            block=4,
            batch_tokens=80,
            batch_size=None,
            memory=memory,
            delay_s=0.005,
            fail_after=20,
        )
        failed = []

        def work():
            with pytest.raises(KimicapError, match="The disk is gone") as error:
                run(model)
            failed.append(error.value)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive()
        store.close()
    assert str(failed[0]) == "The disk is gone."
    assert not any(thread.name == "kimicap-writer" for thread in threading.enumerate())
    assert len(store.records) < model.plan.blocks


def test_short_sequences_do_not_keep_shards_open(monkeypatch):
    """Sequences that a selection leaves empty are filled as the model goes, not when it is done."""
    with shards_of(2**10, 2**13, 2**9):
        model, store, slots = capture(
            [7, 7, 7, 8], "residuals@every:8", block=4, batch_tokens=32, batch_size=None, memory=2**20
        )
        take, opened = slots.take, []
        monkeypatch.setattr(
            slots, "take", lambda nbytes, *, held: opened.append(held) or take(nbytes, held=held), raising=True
        )
        run(model)
        store.close()
    assert model.plan.values[0].shard_sequences == 4
    assert len(opened) == 6
    assert max(opened) == 0
