"""SlotPool: buffers made once for each (verb, batch), and kept while something may still use them."""

from __future__ import annotations

import gc
import re
import weakref
from typing import TYPE_CHECKING, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_dp.errors import CapacityError, EventPoolExhausted, SlotBusyError
from rocm_dp.memory.events import EventPool, InlineEvent
from rocm_dp.memory.slots import Slot, SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable

ANY = settings(max_examples=60, deadline=None)
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.bool, torch.uint8, torch.int64]


class DeviceEvent(InlineEvent):
    """An event that has passed only when the test says so."""

    def __init__(self) -> None:
        self.passed = False
        self.recorded: list[torch.cuda.Stream | None] = []

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        return self.passed


def make_pool(
    *, cap: int = 64, ordered: Callable[[], torch.cuda.Stream | None] = lambda: None
) -> tuple[SlotPool, EventPool]:
    events = EventPool(DeviceEvent, cap=cap)
    return SlotPool(torch.device("cpu"), events, ordered), events


def guard_of(events: EventPool) -> DeviceEvent:
    """The event behind which buffers that were outgrown may go."""
    [guard] = [event for event, owner in events._holders.values() if owner == "buffers outgrown"]
    assert isinstance(guard, DeviceEvent)
    return guard


@ANY
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["gather", "combine"]), st.integers(0, 2), st.integers(0, 100)),
        min_size=1,
        max_size=40,
    )
)
def test_each_verb_and_batch_has_one_buffer_made_once(calls: list[tuple[str, int, int]]) -> None:
    pool, events = make_pool()
    slots: dict[tuple[str, int], Slot] = {}
    places: dict[tuple[str, int], int] = {}
    for verb, batch, nbytes in calls:
        slot = pool.take(verb, batch, nbytes, reserve=100)
        assert slot.key == (verb, batch)
        assert slots.setdefault(slot.key, slot) is slot
        if nbytes or slot.key in places:
            assert slot.buffer.numel() == 100
            assert places.setdefault(slot.key, slot.buffer.data_ptr()) == slot.buffer.data_ptr()
        else:
            assert slot.buffer.numel() == 0
    assert len(set(places.values())) == len(places)
    assert (len(pool), pool.buffers_made, pool.growths) == (len(slots), len(places), 0)
    assert pool.nbytes == 100 * len(places)
    assert events.made == events.held == 2 * len(slots)


def test_each_use_of_a_slot_is_a_new_generation() -> None:
    pool, _ = make_pool()
    slot, other = pool.take("gather", 0, 8), pool.take("gather", 1, 8)
    generations = [slot.generation]
    for _ in range(4):
        slot.begin()
        generations.append(slot.generation)
    assert len(set(generations)) == 5
    assert other.generation == generations[0]
    other.begin()
    assert other.generation == generations[1]


@pytest.mark.parametrize("nbytes", [0, 8, 100])
def test_to_take_a_slot_is_not_to_use_it(nbytes: int) -> None:
    pool, _ = make_pool()
    slot = pool.take("gather", 0, 8)
    slot.begin()
    generation = slot.generation
    assert pool.take("gather", 0, nbytes) is slot
    assert slot.generation == generation
    assert pool.busy() == []


def test_a_slot_is_busy_until_its_inputs_are_let_go() -> None:
    pool, _ = make_pool()
    slot = pool.take("gather", 1, 8)
    slot.inputs = (torch.zeros(1),)
    assert pool.busy() == [slot]
    generation = slot.generation
    with pytest.raises(SlotBusyError, match=r"^gather of batch 1 is still in flight: wait\(\) for its Pending"):
        pool.take("gather", 1, 8)
    with pytest.raises(SlotBusyError, match=r"^gather of batch 1 is still in flight: wait\(\) for its Pending"):
        slot.begin()
    with pytest.raises(SlotBusyError, match=r"^gather of batch 1 is still in flight: wait\(\) for its Pending"):
        pool.check_free("gather", 1)
    assert slot.generation == generation
    for key in (("gather", 0), ("combine", 1)):
        pool.check_free(*key)
        assert pool.take(*key, 8) is not slot
    slot.inputs = None
    assert pool.busy() == []
    assert pool.take("gather", 1, 8) is slot
    slot.begin()
    assert slot.generation == generation + 1


def test_a_call_without_inputs_in_flight_is_busy_too() -> None:
    pool, _ = make_pool()
    slot = pool.take("gather", 0, 8)
    slot.inputs = ()
    with pytest.raises(SlotBusyError):
        pool.take("gather", 0, 8)
    with pytest.raises(SlotBusyError):
        slot.begin()


def test_a_busy_slot_is_not_grown() -> None:
    pool, events = make_pool()
    slot = pool.take("gather", 0, 8)
    slot.inputs = ()
    place, held = slot.buffer.data_ptr(), events.held
    with pytest.raises(SlotBusyError):
        pool.take("gather", 0, 800)
    assert (slot.buffer.data_ptr(), slot.buffer.numel(), events.held) == (place, 8, held)
    assert (pool.buffers_made, pool.growths) == (1, 0)


def test_reserve_allocates_just_that_once() -> None:
    pool, _ = make_pool()
    for nbytes in (1, 4096, 0, 17, 4096):
        assert pool.take("gather", 0, nbytes, reserve=4096).buffer.numel() == 4096
    assert (pool.buffers_made, pool.growths, pool.nbytes) == (1, 0, 4096)


def test_what_was_reserved_is_allocated_when_bytes_are_first_needed() -> None:
    pool, events = make_pool()
    slot = pool.take("gather", 0, 0, reserve=4096)
    ready, done = slot.ready, slot.done
    assert pool.take("gather", 0, 0, reserve=4096) is slot
    assert (slot.buffer.numel(), len(pool), pool.buffers_made, pool.nbytes) == (0, 1, 0, 0)
    assert pool.take("gather", 0, 1, reserve=4096) is slot
    assert (slot.buffer.numel(), len(pool), pool.buffers_made, pool.nbytes) == (4096, 1, 1, 4096)
    assert pool.growths == 0
    assert slot.ready is ready
    assert slot.done is done
    assert events.made == events.held == 2


def test_the_first_buffer_of_a_slot_taken_for_no_bytes_is_no_growth() -> None:
    pool, events = make_pool()
    slot = pool.take("gather", 0, 0)
    done = slot.done
    assert (pool.buffers_made, pool.nbytes) == (0, 0)
    assert pool.take("gather", 0, 100) is slot
    assert (slot.buffer.numel(), pool.buffers_made, pool.growths, pool.nbytes) == (100, 1, 0, 100)
    assert slot.done is done
    assert events.held == 2


@pytest.mark.parametrize("used_before", [False, True])
def test_more_than_was_reserved_is_refused_with_both_sides_and_allocates_nothing(used_before: bool) -> None:
    pool, events = make_pool()
    if used_before:
        pool.take("gather", 0, 10, reserve=100)
    before = (len(pool), pool.buffers_made, pool.nbytes, events.held)
    with pytest.raises(CapacityError, match=r"^gather needs 101 bytes, 100 are reserved$"):
        pool.take("gather", 0, 101, reserve=100)
    assert (len(pool), pool.buffers_made, pool.nbytes, events.held) == before


def test_a_buffer_grows_only_when_it_is_too_small() -> None:
    pool, _ = make_pool()
    slot = pool.take("gather", 0, 100)
    assert slot.buffer.numel() == 100
    assert pool.take("gather", 0, 100) is slot
    assert (pool.buffers_made, pool.growths) == (1, 0)
    assert pool.take("gather", 0, 1000) is slot
    assert slot.buffer.numel() == 1000
    assert (pool.buffers_made, pool.growths) == (2, 1)


def test_slowly_rising_sizes_grow_a_buffer_a_few_times_only() -> None:
    pool, _ = make_pool()
    for nbytes in range(1000, 10_000):
        assert pool.take("gather", 0, nbytes).buffer.numel() >= nbytes
    assert pool.growths <= 6  # 1000 * 1.5 ** 6 > 10_000
    assert pool.take("gather", 0, 0).buffer.numel() < 2 * 10_000


def test_outgrown_buffers_are_kept_until_the_device_has_come_to_the_last_growth() -> None:
    pool, events = make_pool()
    old = weakref.ref(pool.take("gather", 0, 100).buffer)
    pool.take("gather", 0, 1000)
    pool.take("gather", 0, 10_000)
    gc.collect()
    assert old() is not None
    assert pool.nbytes == 100 + 1000 + 10_000
    guard_of(events).passed = True
    pool.take("gather", 0, 100_000)
    gc.collect()
    assert old() is None
    assert pool.nbytes == 10_000 + 100_000


def test_outgrown_buffers_are_kept_behind_the_calls_of_every_stream() -> None:
    streams = [cast("torch.cuda.Stream", object()) for _ in range(2)]
    behind_all = iter(streams)
    pool, events = make_pool(ordered=lambda: next(behind_all))
    for nbytes in (0, 1, 10, 100):  # the first buffer has no bytes that could be in use
        pool.take("gather", 0, nbytes)
    assert guard_of(events).recorded == streams


@pytest.mark.parametrize("passed", [False, True])
def test_growths_take_one_event_in_all_whether_or_not_the_device_keeps_up(*, passed: bool) -> None:
    pool, events = make_pool()
    slots = [pool.take(verb, 0, 1) for verb in ("gather", "combine")]
    before = [(slot.ready, slot.done) for slot in slots]
    for growth in range(12):
        for verb in ("gather", "combine"):
            pool.take(verb, 0, 2 * 2**growth)
            guard_of(events).passed = passed
            assert (events.held, events.made) == (5, 5)
    assert (pool.growths, pool.buffers_made) == (24, 26)
    assert [(slot.ready, slot.done) for slot in slots] == before


def test_close_gives_back_every_event_and_drops_every_buffer() -> None:
    pool, events = make_pool()
    pool.take("gather", 0, 100)
    pool.take("combine", 0, 100)
    pool.take("gather", 0, 1000)
    buffer = weakref.ref(pool.take("gather", 0, 0).buffer)
    assert events.held == 5
    pool.close()
    gc.collect()
    assert events.held == 0
    assert (len(pool), pool.nbytes, pool.busy()) == (0, 0, [])
    assert buffer() is None


def test_a_pool_without_events_left_names_the_slots_that_hold_them() -> None:
    pool, _ = make_pool(cap=4)
    pool.take("gather", 0, 8)
    pool.take("combine", 1, 8)
    message = "slot (gather, 1) needs an event, all 4 are held: slot (gather, 0) 2, slot (combine, 1) 2"
    with pytest.raises(EventPoolExhausted, match="^" + re.escape(message) + "$"):
        pool.take("gather", 1, 8)


@pytest.mark.parametrize("nbytes", [0, 8])
def test_a_buffer_holds_what_lies_in_it_and_no_address_beside_it(nbytes: int) -> None:
    pool, _ = make_pool()
    slot = pool.take("gather", 0, nbytes)
    start = slot.buffer.data_ptr()
    assert slot.range == (start, start + nbytes)
    assert [at for at in range(nbytes) if slot.holds(slot.buffer[at:])] == list(range(nbytes))
    assert not slot.holds(slot.buffer[:0])
    assert not slot.holds(torch.zeros(8))


def test_in_a_capture_only_a_buffer_that_was_reserved_and_made_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, events = make_pool()
    made = pool.take("gather", 0, 8, reserve=100)
    pool.take("gather", 1, 0, reserve=100)
    before = (len(pool), pool.buffers_made, pool.nbytes, events.held)
    assert not pool.capturing
    pool.check_not_capturing("gather", 0)
    monkeypatch.setattr(SlotPool, "capturing", True)
    assert pool.take("gather", 0, 100, reserve=100) is made
    assert pool.take("gather", 1, 0, reserve=100).buffer.numel() == 0
    for batch, nbytes, reserve in ((0, 8, None), (1, 8, 100), (2, 8, 100), (2, 0, 100), (2, 8, None)):
        message = f"gather of batch {batch} in a graph needs max_rows and reserve() before the capture"
        with pytest.raises(CapacityError, match="^" + re.escape(message) + "$"):
            pool.take("gather", batch, nbytes, reserve=reserve)
        with pytest.raises(CapacityError, match="^" + re.escape(message) + "$"):
            pool.check_not_capturing("gather", batch)
    assert (len(pool), pool.buffers_made, pool.nbytes, events.held) == before


@ANY
@given(rows=st.integers(0, 20), width=st.integers(1, 20), dtype=st.sampled_from(DTYPES), spare=st.integers(0, 64))
def test_a_view_is_the_contiguous_start_of_the_buffer(
    rows: int, width: int, dtype: torch.dtype, spare: int
) -> None:
    pool, _ = make_pool()
    nbytes = rows * width * dtype.itemsize
    slot = pool.take("gather", 0, nbytes + spare)
    slot.buffer.fill_(0xAB)
    view = slot.view(rows, width, dtype)
    assert view.shape == (rows, width)
    assert view.dtype == dtype
    assert view.is_contiguous()
    view.view(torch.uint8).fill_(1)
    assert slot.buffer.tolist() == [1] * nbytes + [0xAB] * spare


@pytest.mark.parametrize("sizes", [(16,), (16, 64), (0, 16)], ids=["made", "grown", "made at first need"])
def test_a_buffer_made_in_inference_mode_can_be_written_outside_it(sizes: tuple[int, ...]) -> None:
    pool, _ = make_pool()
    with torch.inference_mode():
        for nbytes in sizes:
            slot = pool.take("gather", 0, nbytes)
    slot.buffer.fill_(0)
    slot.view(2, 2, torch.float32).fill_(3.0)
    assert slot.view(2, 2, torch.float32).tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_an_ordinary_tensor_made_in_inference_mode_cannot() -> None:
    with torch.inference_mode():
        tensor = torch.empty(4)
    with pytest.raises(RuntimeError, match="inference tensor"):
        tensor.fill_(3.0)
