"""EventPool and RunAheadLimit: how many events are made, and how far the host may run ahead of a device."""

from __future__ import annotations

import re
from itertools import cycle, islice
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError, EventPoolExhausted
from rocm_dp.memory.events import FENCES, EventPool, InlineEvent, RunAheadLimit
from rocm_dp.options import MIN_IN_FLIGHT, RECORDS_PER_CALL, Options

if TYPE_CHECKING:
    from collections.abc import Sequence


class Device:
    """A device that reaches the records queued on it only when it is told to, or when the host waits."""

    def __init__(self, *, honest: bool = True) -> None:
        self.honest = honest  # False: waiting for an event returns at once, whatever the device has reached
        self.stuck = False  # True: never gets any further
        self.queued = self.reached = 0
        self.most_in_flight = 0
        self.fences: list[int] = []  # at which record each fence was queued, in order
        self.waited: list[tuple[int, int]] = []  # for each wait of the host: which fence, and the newest then
        self.in_flight_at_blocking_waits: list[int] = []
        self.streams: list[object] = []  # on which each fence was queued

    @property
    def in_flight(self) -> int:
        return self.queued - self.reached

    def record(self) -> int:
        self.queued += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return self.queued

    def advance(self, records: int) -> None:
        self.reached = min(self.queued, self.reached + records)


class DeviceEvent:
    """An event of a Device, recorded by the limiter only."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = 0
        self.polled = False

    def record(self, stream: object = None) -> None:
        self.place = self.device.record()
        self.polled = False
        self.device.fences.append(self.place)
        self.device.streams.append(stream)

    def wait(self, stream: object = None) -> None:
        raise AssertionError(f"a fence makes the host wait, never {stream}")

    def query(self) -> bool:
        """The host polls only while it waits; the device comes to the fence between two polls."""
        reached = not self.device.honest or self.device.reached >= self.place
        if not self.polled:
            self.polled = True
            self.device.waited.append((self.place, self.device.fences[-1]))
            if self.device.reached < self.place:
                self.device.in_flight_at_blocking_waits.append(self.device.in_flight)
        if not self.device.stuck:
            self.device.reached = (
                max(self.device.reached, self.place) if self.device.honest else self.device.reached
            )
        return reached


class Run:
    """A limiter on a Device, driven as the comm stream does: records are made, then noted."""

    def __init__(self, limit: int, *, honest: bool = True) -> None:
        self.device = Device(honest=honest)
        self.pool = EventPool(lambda: DeviceEvent(self.device), cap=256)
        self.limiter = RunAheadLimit(self.pool, limit=limit, timeout=0.2)
        self.most_claimed = 0
        self.most_unclaimed = 0  # records in flight that the limiter thought were done

    def steps(self, pattern: Sequence[tuple[int, int]], number: int) -> None:
        """For each (records, progress): make and note so many records, then the device reaches so many."""
        for records, progress in islice(cycle(pattern), number):
            for _ in range(records):
                self.device.record()
            self.limiter.note(records, None)
            self.most_claimed = max(self.most_claimed, self.limiter.in_flight)
            self.most_unclaimed = max(self.most_unclaimed, self.device.in_flight - self.limiter.in_flight)
            self.device.advance(progress)


# A limit, and steps (records made, records that the device then reaches) to be repeated.
LIMITS = st.integers(MIN_IN_FLIGHT, 4095) | st.integers(MIN_IN_FLIGHT, 100)
PATTERNS = st.lists(
    st.tuples(st.integers(1, RECORDS_PER_CALL), st.integers(0, 3)), min_size=1, max_size=30
) | st.lists(st.tuples(st.integers(1, RECORDS_PER_CALL), st.just(0)), min_size=1, max_size=30)
ANY = settings(max_examples=50, deadline=None)


@ANY
@given(limit=LIMITS, pattern=PATTERNS)
@example(limit=MIN_IN_FLIGHT, pattern=[(6, 0)])
@example(limit=MIN_IN_FLIGHT, pattern=[(2, 0)])
@example(limit=MIN_IN_FLIGHT, pattern=[(1, 0)])
@example(limit=MIN_IN_FLIGHT + 1, pattern=[(1, 0), (2, 0)])
@example(limit=1024, pattern=[(6, 0)])
@example(limit=4095, pattern=[(2, 0)])
@example(limit=4095, pattern=[(1, 0)])
def test_records_in_flight_never_exceed_the_limit(limit: int, pattern: list[tuple[int, int]]) -> None:
    run = Run(limit)
    run.steps(pattern, 2 * limit + 100)
    assert run.device.most_in_flight <= limit
    assert run.most_claimed <= limit


def test_without_the_waits_the_same_run_exceeds_the_limit() -> None:
    run = Run(1024, honest=False)
    run.steps([(1, 0), (2, 0)], 2 * 1024 + 100)
    assert run.device.waited
    assert run.device.most_in_flight > 2 * 1024
    assert run.most_unclaimed > 1024


@ANY
@given(limit=LIMITS, pattern=PATTERNS)
def test_no_record_in_flight_is_left_out_of_the_count(limit: int, pattern: list[tuple[int, int]]) -> None:
    run = Run(limit)
    run.steps(pattern, 2 * limit + 100)
    assert run.most_unclaimed == 0


@ANY
@given(limit=LIMITS, pattern=PATTERNS)
def test_the_host_waits_for_fences_oldest_first_and_never_for_the_newest(
    limit: int, pattern: list[tuple[int, int]]
) -> None:
    run = Run(limit)
    run.steps(pattern, 2 * limit + 100)
    waited, fences = run.device.waited, run.device.fences
    assert [fence for fence, _ in waited] == fences[: len(waited)]
    assert all(fence < newest for fence, newest in waited)


@ANY
@given(limit=st.integers(256, 4095), pattern=PATTERNS)
def test_the_host_never_blocks_while_less_than_a_third_of_the_limit_is_in_flight(
    limit: int, pattern: list[tuple[int, int]]
) -> None:
    run = Run(limit)
    run.steps(pattern, 2 * limit + 100)
    assert all(3 * in_flight >= limit for in_flight in run.device.in_flight_at_blocking_waits)


@ANY
@given(limit=LIMITS, records=st.lists(st.integers(1, RECORDS_PER_CALL), min_size=1, max_size=30))
def test_the_host_never_blocks_on_a_device_that_keeps_up(limit: int, records: list[int]) -> None:
    run = Run(limit)
    run.steps([(made, made + 2) for made in records], 2 * limit + 100)
    assert run.device.in_flight_at_blocking_waits == []


def test_the_host_blocks_on_a_device_that_stands_still() -> None:
    run = Run(64)
    run.steps([(2, 0)], 100)
    assert len(run.device.in_flight_at_blocking_waits) > 1


@ANY
@given(limit=LIMITS, pattern=PATTERNS)
def test_all_fences_are_made_at_the_start_and_given_back_at_the_end(
    limit: int, pattern: list[tuple[int, int]]
) -> None:
    run = Run(limit)
    made = run.pool.made
    assert made == run.pool.held == FENCES
    run.steps(pattern, 2 * limit + 100)
    assert (run.pool.made, run.pool.held) == (made, made)
    run.limiter.close()
    assert (run.pool.made, run.pool.held) == (made, 0)
    assert run.limiter.in_flight == 0


def test_the_host_gives_up_on_a_device_that_never_comes_to_the_fence() -> None:
    run = Run(64)
    run.device.stuck = True
    with pytest.raises(TimeoutError, match=r"in 0\.2 s"):
        run.steps([(2, 0)], 1000)
    assert run.limiter.in_flight <= 64


def test_every_fence_is_recorded_on_the_stream_that_is_noted() -> None:
    run = Run(MIN_IN_FLIGHT)
    stream = object()
    for _ in range(100):
        run.limiter.note(2, stream)  # type: ignore[arg-type]
    assert len(run.device.streams) > FENCES
    assert set(run.device.streams) == {stream}


@pytest.mark.parametrize("limit", [-1, 0, 62, 4096, 10_000])
def test_a_limit_out_of_range_is_refused_with_both_sides(limit: int) -> None:
    pool = EventPool(InlineEvent, cap=64)
    with pytest.raises(ConfigError, match=rf"^max_in_flight must lie in \[63, 4096\), got {limit}$"):
        RunAheadLimit(pool, limit=limit, timeout=1.0)
    assert pool.made == 0
    with pytest.raises(ConfigError, match=rf"^max_in_flight must lie in \[63, 4096\), got {limit}$"):
        Options(max_in_flight=limit)


@pytest.mark.parametrize("limit", [63, 4095])
def test_a_limit_that_the_options_take_is_taken(limit: int) -> None:
    options = Options(max_in_flight=limit)
    assert RunAheadLimit(EventPool(InlineEvent, cap=64), limit=options.max_in_flight, timeout=1.0).in_flight == 0


def test_a_pool_makes_an_event_only_when_none_is_free() -> None:
    pool = EventPool(InlineEvent, cap=8)
    assert (pool.made, pool.held) == (0, 0)
    first, second = pool.take("a"), pool.take("b")
    assert first is not second
    assert (pool.made, pool.held) == (2, 2)
    pool.give_back(first)
    assert (pool.made, pool.held) == (2, 1)
    assert pool.take("c") is first
    assert (pool.made, pool.held) == (2, 2)


@ANY
@given(takes=st.lists(st.booleans(), max_size=200))
def test_a_pool_never_makes_more_than_were_ever_held_at_once(takes: list[bool]) -> None:
    pool = EventPool(InlineEvent, cap=256)
    held: list[InlineEvent] = []
    peak = 0
    for take in takes:
        if take:
            event = pool.take("owner")
            assert isinstance(event, InlineEvent)
            assert all(event is not other for other in held)
            held.append(event)
        elif held:
            pool.give_back(held.pop(len(held) // 2))
        peak = max(peak, len(held))
        assert (pool.held, pool.made) == (len(held), peak)


def test_a_full_pool_names_who_holds_what() -> None:
    pool = EventPool(InlineEvent, cap=4)
    fence = pool.take("fences")
    of_slot = [pool.take("slot (gather, 0)") for _ in range(3)]
    message = "slot (combine, 0) needs an event, all 4 are held: slot (gather, 0) 3, fences 1"
    with pytest.raises(EventPoolExhausted, match="^" + re.escape(message) + "$"):
        pool.take("slot (combine, 0)")
    assert (pool.made, pool.held) == (4, 1 + len(of_slot))
    pool.give_back(fence)
    assert pool.take("slot (combine, 0)") is fence


def test_an_event_that_its_owner_dropped_is_still_held() -> None:
    # Else its id may come again, and the pool would forget the leak that it is there to show.
    pool = EventPool(InlineEvent, cap=256)
    for number in range(1, 101):
        pool.take("forgetful")
        assert pool.held == pool.made == number


def test_an_event_is_named_after_its_last_owner() -> None:
    pool = EventPool(InlineEvent, cap=1)
    pool.give_back(pool.take("first"))
    second = pool.take("second")
    assert pool.held == 1
    with pytest.raises(EventPoolExhausted, match=r"^third needs an event, all 1 are held: second 1$"):
        pool.take("third")
    pool.give_back(second)
    assert pool.held == 0


@pytest.mark.parametrize("cap", [-1, 0, 4096])
def test_a_cap_out_of_range_is_refused_with_both_sides(cap: int) -> None:
    with pytest.raises(ConfigError, match=rf"cap must lie in \[1, 4096\), got {cap}$"):
        EventPool(InlineEvent, cap=cap)
    with pytest.raises(ConfigError, match=rf"^max_events must lie in \[1, 4096\), got {cap}$"):
        Options(max_events=cap)


def test_the_event_of_the_cpu_is_done_at_once() -> None:
    event = InlineEvent()
    event.record()
    assert event.query()
