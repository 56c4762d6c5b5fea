"""The memory bound: buffers of a fixed total size."""

import threading
import time

import pytest
import torch

from kimicap.errors import KimicapError, RoomError
from kimicap.slots import Slots


def test_buffers_are_used_again_and_never_exceed_the_budget():
    slots = Slots(100, pinned=False)
    first = slots.take(60, held=0)
    place = first.data_ptr()
    slots.give(first)
    assert slots.take(60, held=0).data_ptr() == place
    assert slots.peak_bytes == 60


def test_free_buffers_of_other_sizes_make_way():
    slots = Slots(100, pinned=False)
    for size in (10, 20, 30, 40):
        slots.give(slots.take(size, held=0))
    held = slots.take(90, held=0)
    assert held.numel() == 90
    assert slots.peak_bytes <= 100


def test_what_can_never_fit_is_an_error_at_once():
    slots = Slots(3 * 2**20, pinned=False)
    slots.take(2 * 2**20, held=0)
    with pytest.raises(RoomError) as error:
        slots.take(2 * 2**20, held=1)
    assert str(error.value) == (
        "The shards open at once need more than the 3 MiB that --memory has for them; give more memory and go on with "
        "--resume."
    )


@pytest.mark.parametrize("writing", [True, False])
def test_who_waits_gets_the_buffer_and_notes_what_for(writing):
    slots = Slots(100, pinned=False)
    lent = slots.take(100, held=0)
    if writing:
        slots.begin_write()
    timer = threading.Timer(0.05, lambda: slots.give(lent, written=writing))
    timer.start()
    assert slots.take(80, held=0).numel() == 80
    timer.join()
    waited, other = (slots.disk_s, slots.device_s) if writing else (slots.device_s, slots.disk_s)
    assert waited > 0.01
    assert other == 0


def test_a_failure_wakes_who_waits():
    slots = Slots(100, pinned=False)
    slots.take(100, held=0)
    failure = KimicapError("The disk is gone.")
    threading.Timer(0.05, lambda: slots.fail(failure)).start()
    with pytest.raises(KimicapError, match=r"The disk is gone\."):
        slots.take(10, held=0)
    with pytest.raises(KimicapError, match=r"The disk is gone\."):
        slots.take(10, held=0)


def test_buffers_taken_in_a_forward_may_be_written_to_outside():
    slots = Slots(100, pinned=False)
    with torch.inference_mode():
        buffer = slots.take(10, held=0)
    buffer.fill_(1)


def test_many_threads_keep_the_budget():
    slots = Slots(1000, pinned=False)

    def work(size: int) -> None:
        for _ in range(50):
            buffer = slots.take(size, held=0)
            time.sleep(0)
            slots.give(buffer)

    threads = [threading.Thread(target=work, args=(size,)) for size in (100, 300, 500, 700, 900)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert slots.peak_bytes <= 1000


def test_closing_lets_go_of_everything():
    slots = Slots(100, pinned=False)
    slots.take(10, held=0)
    slots.give(slots.take(20, held=0))
    slots.close()
    assert slots.take(100, held=0).numel() == 100
