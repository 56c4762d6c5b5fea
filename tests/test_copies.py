"""The copier on a stand-in for a GPU, whose copies come late: turns, order, bounds, failures, sources."""

import gc
import queue
import random
import threading
import time
import weakref
from contextlib import contextmanager
from itertools import groupby
from typing import ClassVar

import numpy as np
import pytest
import torch

from kimicap import assembly, copies
from kimicap.copies import Copier
from kimicap.errors import KimicapError
from kimicap.odd import Odd
from kimicap.pieces import Piece
from kimicap.writers import Pending
from tests.test_pipeline import VALUES, capture, expected, run, shards_of


class Event:
    """As CUDA's: done when its stream has come there."""

    def __init__(self, blocking=False):
        self.blocking = blocking
        self.done = threading.Event()

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        assert self.blocking
        self.done.wait()


class Stream:
    """Does what it is given in order and late, on a thread of its own."""

    current = threading.local()
    main = None

    def __init__(self, device=None):
        self.jobs = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while (job := self.jobs.get()) is not None:
            job()
            del job

    def wait_event(self, event):
        self.jobs.put(event.done.wait)

    def record_event(self, event=None):
        event = event or Event()
        self.jobs.put(event.done.set)
        return event

    def synchronize(self):
        self.record_event().done.wait()

    @contextmanager
    def entered(self):
        Stream.current.stream = self
        yield


class Target:
    """A part of a slot. Its copy comes late; a source that nobody holds by then may be anything.

    Attributes:
        begun: The stream and the bytes of every copy, as they came about.
    """

    begun: ClassVar = []
    wait_s = 1e-3

    def __init__(self, tensor):
        self.tensor = tensor

    def copy_(self, source, *, non_blocking):
        assert non_blocking
        assert self.tensor.is_contiguous()
        held, stream = weakref.ref(source.untyped_storage()), Stream.current.stream
        size, stride, offset, dtype = source.size(), source.stride(), source.storage_offset(), source.dtype
        wait_s = random.random() * Target.wait_s

        def copy():
            Target.begun.append((stream, self.tensor.nbytes))
            time.sleep(wait_s)
            there = held()
            if there is None:
                self.tensor.fill_(77)
            else:
                self.tensor.copy_(torch.empty(0, dtype=dtype).set_(there, offset, size, stride))

        assert source.shape == self.tensor.shape
        stream.jobs.put(copy)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    Target.begun.clear()
    main, parts = Stream(), copies._parts
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(Stream, "main", main)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Stream.entered)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**32, 2**33))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def late(target, source):  # calls itself for parts of parts
        return ((to if isinstance(to, Target) else Target(to), of) for to, of in parts(target, source))

    monkeypatch.setattr(copies, "_parts", late)
    monkeypatch.setattr(assembly, "_on_gpu", lambda tensor: True)
    yield
    main.jobs.put(None)


class Writers:
    def __init__(self):
        self.shards = []

    def submit(self, shard, events, pending):
        for event in events:
            event.done.wait()
        self.shards.append((shard, shard.target.clone()))


class Shard:
    def __init__(self, target, odd=None):
        self.target, self.odd = target, odd or Odd((), layers=1, sequences=1)


class Counts:
    """What is odd in a shard, on some devices: brought to the host late."""

    def __init__(self, *devices):
        self.devices = devices
        self.gathered = {device: torch.zeros(1) for device in devices}
        self.sent = {device: torch.zeros(1) for device in devices}

    def send(self, device):
        def copy():
            time.sleep(2e-3)
            self.sent[device].copy_(self.gathered[device])

        Stream.current.stream.jobs.put(copy)


class Elsewhere(torch.Tensor):
    """Says that it is on a second GPU."""

    device = torch.device("cuda", 1)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("lengths", [[5, 9, 20, 20, 1, 7, 7, 7], [12] * 8])
def test_every_bit_arrives(values, lengths, monkeypatch):
    monkeypatch.setattr(copies, "PART_BYTES", 2**10)
    with shards_of(2**13, 2**14, 2**10):
        model, store, _ = capture(lengths, values, block=4, batch_tokens=60, batch_size=None, memory=2**22)
        run(model)
        store.close()
    assert set(store.records) == {0, 1}
    for value in model.plan.values:
        np.testing.assert_array_equal(store.arrays[value.array.path], expected(model, value), err_msg=value.key)


@pytest.mark.parametrize("bound", [2**30, 2**10])
def test_streams_take_turns_and_a_shard_follows_its_own(bound, monkeypatch):
    monkeypatch.setattr(copies, "PART_BYTES", 64)
    monkeypatch.setattr(copies, "HELD_BYTES", bound)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**33))
    writers = Writers()
    copier, target = Copier(writers), torch.zeros(3, 2, 40)
    for row in range(3):
        copier.copy(target[row, :, :30], torch.full((2, 30), float(row + 1)))
    copier.submit(Shard(target), Pending())
    copier.copy(target, torch.full((3, 2, 40), 9.0))
    copier.close()
    ((_, seen),) = writers.shards
    assert seen[:, :, :30].mean((1, 2)).tolist() == [1, 2, 3]
    assert (seen[:, :, 30:] == 0).all()
    assert (target == 9).all()
    assert max(nbytes for _, nbytes in Target.begun) == 64
    assert len({stream for stream, _ in Target.begun}) == 2
    assert max(sum(nbytes for _, nbytes in turn) for turn in turns()) < 2 * 64


def turns():
    """Copies that followed each other on one stream."""
    return [list(turn) for _, turn in groupby(Target.begun, key=lambda copy: copy[0])]


def test_small_copies_share_a_turn(monkeypatch):
    monkeypatch.setattr(copies, "PART_BYTES", 400)
    copier, target = Copier(Writers()), torch.zeros(101, 4)
    for row in range(101):
        copier.copy(target[row], torch.full((4,), float(row)))
    copier.close()
    assert target[:, 0].tolist() == list(range(101))
    assert [len(turn) for turn in turns()] == [25] * 4 + [1]


def test_a_turn_has_so_many_sources_at_most(monkeypatch):
    monkeypatch.setattr(copies, "TURN_SOURCES", 10)
    copier, target = Copier(Writers()), torch.zeros(100)
    for row in range(100):
        copier.copy(target[row : row + 1], torch.full((1,), float(row)))
    copier.close()
    assert target.tolist() == list(range(100))
    assert [len(turn) for turn in turns()] == [10] * 10


def test_close_waits_for_every_stream_though_one_fails(monkeypatch):
    monkeypatch.setattr(Target, "wait_s", 0.1)
    copier, target = Copier(Writers()), torch.zeros(3)
    copier.copy(target[:1], torch.ones(1).as_subclass(Elsewhere))
    copier.copy(target[1:2], torch.ones(1))
    monkeypatch.setattr(Target, "wait_s", 0)
    broken, turned = copier._turns[Elsewhere.device], copier._turns[torch.device("cpu")]
    turned.stream, turned._other = turned._other, turned.stream  # a turn that was broken off
    copier.copy(target[2:], torch.ones(1))

    def fail():
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(broken.stream, "synchronize", fail)
    with pytest.raises(RuntimeError, match="the device is lost"):
        copier.close()
    assert target[1:].tolist() == [1, 1]


def test_copies_come_one_after_the_other(monkeypatch):
    monkeypatch.setattr(copies, "PART_BYTES", 16)
    copier, target = Copier(Writers()), torch.zeros(4)
    for number in range(50):  # all to one place
        copier.copy(target, torch.full((4,), float(number)))
    copier.close()
    assert target.tolist() == [49.0] * 4
    assert [len(turn) for turn in turns()] == [1] * 50


def test_copies_and_counts_follow_the_models_stream_on_every_device(monkeypatch):
    monkeypatch.setattr(copies, "PART_BYTES", 16)
    writers, one, two = Writers(), torch.zeros(2, 10), torch.zeros(2, 10)
    copier, counts = Copier(writers), Counts(torch.device("cuda", 1), torch.device("cpu"))

    def model():
        time.sleep(0.1)
        one.fill_(3)
        two.fill_(4)

    def count():
        time.sleep(0.1)
        counts.gathered[counts.devices[0]].fill_(5)

    Stream.main.jobs.put(model)
    shard = Shard(torch.zeros(4, 10), counts)
    copier.copy(shard.target[:2], one)
    copier.copy(shard.target[2:], two.as_subclass(Elsewhere))
    Stream.main.jobs.put(count)
    copier.submit(shard, Pending())
    ((_, seen),) = writers.shards
    assert seen.mean(1).tolist() == [3, 3, 4, 4]
    assert [sent.item() for sent in counts.sent.values()] == [5, 0]
    assert len({stream for stream, _ in Target.begun}) == 4
    monkeypatch.setattr(Target, "wait_s", 0.1)
    copier.copy(shard.target[3], torch.full((10,), 7.0).as_subclass(Elsewhere))
    copier.close()
    assert shard.target.mean(1).tolist() == [3, 3, 4, 7]


def test_a_shard_whose_counts_cannot_be_sent_is_never_taken_for_whole():
    class Broken:
        devices = (torch.device("cuda"),)

        def send(self, device):
            raise RuntimeError("no pinned memory")

    writers = Writers()
    copier, shard = Copier(writers), Shard(torch.zeros(4), Broken())
    copier.copy(shard.target, torch.ones(4))
    with pytest.raises(RuntimeError, match="no pinned memory"):
        copier.submit(shard, Pending())
    copier.close()
    assert not writers.shards


def test_sources_that_are_not_copied_yet_are_bounded(monkeypatch):
    monkeypatch.setattr(copies, "HELD_BYTES", 64)
    monkeypatch.setattr(copies, "PART_BYTES", 32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 2**33))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1400)
    copier, target, sources, alive = Copier(Writers()), torch.zeros(100, 8), [], []
    for row in range(100):
        source = torch.full((8,), float(row))
        sources.append(weakref.ref(source.untyped_storage()))
        copier.copy(target[row], source)
        del source
        alive.append(32 * sum(held() is not None for held in sources))
    assert max(alive) == max(alive[50:]) == 96
    assert copier.waited_s > 0
    copier.copy(target[:50].view(-1), torch.full((400,), 7.0))  # more than the bound, so alone
    alive = sum(held() is not None for held in sources)
    copier.close()
    assert alive == 0
    waited_s = copier.waited_s
    copier.copy(target[99], torch.full((8,), 99.0))
    copier.close()
    assert copier.waited_s >= waited_s
    assert target[:, 0].tolist() == [7.0] * 50 + [float(row) for row in range(50, 100)]


def test_a_shard_is_handed_on_before_its_copies_are_done(monkeypatch):
    monkeypatch.setattr(copies, "PART_BYTES", 16)
    monkeypatch.setattr(copies, "HELD_BYTES", 64)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**33))
    writers, copied = Writers(), threading.Event()
    monkeypatch.setattr(writers, "submit", lambda shard, events, pending: writers.shards.append(events))
    Stream.main.jobs.put(copied.wait)
    copier, target = Copier(writers), torch.zeros(40)
    copier.copy(target, torch.ones(40))  # more than may be held
    copier.submit(Shard(target), Pending())
    assert not any(event.query() for event in writers.shards[0])
    copied.set()
    copier.close()
    assert all(event.query() for event in writers.shards[0])
    assert (target == 1).all()


def test_a_failed_copy_ends_the_run(monkeypatch):
    def broken(target, source):
        raise KimicapError("The copy is broken.")

    monkeypatch.setattr(copies, "_parts", broken)
    model, store, _ = capture([20] * 8, "residuals", block=4, batch_tokens=80, batch_size=None, memory=2**24)
    with pytest.raises(KimicapError, match=r"^The copy is broken\.$"):
        run(model)
    store.close()
    assert not store.records


@pytest.mark.parametrize("submits", [False, True])
def test_a_source_is_held_until_it_is_copied_and_then_let_go(submits, monkeypatch):
    monkeypatch.setattr(copies, "PART_BYTES", 16)
    copier, target, sources = Copier(Writers()), torch.zeros(20, 6), []
    for number in range(20):
        source = torch.full((6,), float(number))
        sources.append(weakref.ref(source.untyped_storage()))
        copier.copy(target[number], source)
        del source
    while len(Target.begun) < 40:  # in two parts each
        time.sleep(0.01)
    time.sleep(0.05)
    small, last = torch.zeros(1), torch.full((1,), 20.0)
    held = weakref.ref(last.untyped_storage())
    if submits:
        copier.submit(Shard(target), Pending())
    else:
        copier.copy(small, last)
    del last
    gc.collect()
    assert not any(source() is not None for source in sources)
    copier.close()
    gc.collect()
    assert held() is None
    assert target.mean(1).tolist() == list(range(20))
    assert small.item() == (0 if submits else 20)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_models_own_tensor_may_change_after_the_forward(fresh, monkeypatch):
    started = []

    def late(target, source):
        time.sleep(0.05)
        started.append(source)
        yield target, source

    monkeypatch.setattr(copies, "_parts", late)
    model, store, _ = capture([4] * 4, "layer_output@layers:0", block=4, batch_tokens=16, batch_size=None, memory=2**22)
    (value,) = model.plan.values
    tensor = torch.ones(4, *value.row_shape)
    assembler = model.loop._assembler
    assembler.put(value.key, 0, 0, Piece(row=0, rows=4, tensor=tensor, fresh=fresh))
    if not fresh:
        tensor.fill_(7)
    assembler.close()
    store.close()
    assert (store.arrays[value.array.path] == 1).all()
    assert (started[0].data_ptr() == tensor.data_ptr()) == fresh
