"""The gates: what leaks fails, what settles or wobbles passes, and the power that a gate states is the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError
from rocm_dp.soak.counters import CAUSES, COUNTERS, Kind, counter_of, priority
from rocm_dp.soak.gates import MIN_SAMPLES, Series, Status, Verdict, judge
from rocm_dp.soak.inject import INJECTIONS
from rocm_dp.soak.trend import theil_sen, warmup_end

SAMPLES, EVERY = 80, 5
STEPS = np.arange(1, SAMPLES + 1) * EVERY
FLAT = np.full(SAMPLES, 12.0)


def gate(name: str, values: object, **limits: float) -> Verdict:
    found = tuple(float(value) for value in np.asarray(values))
    return judge(Series(0, name, tuple(map(int, STEPS[: len(found)])), found, 0.01), **limits)


def noise(seed: int, size: float = 1.0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(0.0, size, SAMPLES)


def test_a_counter_that_stays_or_comes_back_is_flat() -> None:
    assert gate("fds.file", FLAT).status is Status.FLAT
    busy = FLAT + (np.arange(SAMPLES) % 7)
    assert gate("fds.file", busy).status is Status.FLAT
    assert gate("fds.file", FLAT - (np.arange(SAMPLES) > 60)).status is Status.FLAT, "less is no leak"


def test_one_unit_that_never_comes_back_is_a_leak() -> None:
    verdict = gate("fds.file", FLAT + (np.arange(SAMPLES) >= 50))
    assert verdict.status is Status.LEAK
    assert (verdict.baseline, verdict.final) == (12.0, 13.0)
    assert "never back to 12 fds" in verdict.why


def test_a_slow_leak_is_a_leak_though_each_sample_looks_like_the_one_before() -> None:
    verdict = gate("fds.file", FLAT + np.floor(STEPS / 100))
    assert verdict.status is Status.LEAK
    assert verdict.per_million == pytest.approx(10_000, rel=0.3)


def test_what_a_warm_up_makes_is_no_leak_and_its_end_is_found() -> None:
    warming = FLAT.copy()
    warming[:17] = np.minimum(12, np.arange(17))
    verdict = gate("threads", warming)
    assert verdict.status is Status.FLAT
    assert verdict.warm_up == STEPS[12]
    assert gate("threads", FLAT).warm_up == STEPS[0], "a series that was level from the start has none"


def test_memory_that_settles_is_no_leak_memory_that_climbs_on_is() -> None:
    settling = 3e8 + 2e6 * (1 - np.exp(-STEPS / 60)) + noise(1, 5e3)
    assert gate("rss", settling).status is Status.FLAT
    climbing = settling + 8192.0 * STEPS
    verdict = gate("rss", climbing, limit=4e8)
    assert verdict.status is Status.LEAK
    assert verdict.slope == pytest.approx(8192, rel=0.3)
    hours = (4e8 - verdict.final) / verdict.slope * 0.01 / 3600
    assert verdict.hours_left == pytest.approx(hours)


def test_one_step_up_is_not_a_slope() -> None:
    for at in (30, 45, 55, 70):
        stepped = 3e8 + 1e6 * (np.arange(SAMPLES) >= at) + noise(2, 2e3)
        assert gate("rss", stepped).status is Status.FLAT, at


def test_a_leak_far_smaller_than_ten_per_cent_and_twenty_megabytes_is_a_leak() -> None:
    """A gate of another project asked for both (rocky#1255)."""
    assert gate("rss", 3e8 + 20e3 * STEPS + noise(3, 1e4)).status is Status.LEAK
    assert 20e3 * STEPS[-1] < 20e6


def test_a_longer_run_sees_a_slower_leak() -> None:
    longer = Series(0, "rss", tuple(map(int, STEPS * 100)), tuple(3e8 + noise(6, 1e4)))
    assert judge(longer).power < gate("rss", 3e8 + noise(6, 1e4)).power / 50


def test_latency_that_drifts_fails_latency_that_is_only_noisy_does_not() -> None:
    assert gate("latency.drift", 1 + noise(4, 0.2) ** 2).status is Status.FLAT
    assert gate("latency.drift", 1 + STEPS / STEPS[-1] + noise(4, 0.05)).status is Status.LEAK


def test_memory_reserved_far_over_what_was_ever_live_fails_though_it_is_flat() -> None:
    """149 GB for 0.96 GB, as fresh buffers with record_stream have it; the allocator's own slack is fine."""
    assert gate("torch.balloon", np.full(SAMPLES, 149 / 0.96)).status is Status.LEAK
    fine = gate("torch.balloon", np.full(SAMPLES, 1.4))
    assert fine.status is Status.FLAT
    assert gate("torch.balloon", 1.4 + 1.01 * fine.power * STEPS).status is Status.LEAK


def test_a_missing_sample_fails() -> None:
    holed = FLAT.copy()
    holed[40] = math.nan
    verdict = gate("fds.file", holed)
    assert verdict.status is Status.MISSING
    assert verdict.why == f"1 of {SAMPLES} samples lack it"
    assert not verdict.passed
    assert gate("fds.file", []).status is Status.MISSING


def test_too_few_samples_fail() -> None:
    verdict = gate("fds.file", FLAT[: MIN_SAMPLES - 1])
    assert verdict.status is Status.SHORT
    assert not verdict.passed
    assert gate("fds.file", FLAT[:MIN_SAMPLES]).passed


def test_what_belongs_to_others_too_is_only_shown() -> None:
    verdict = gate("torch.driver_used", STEPS * 1e6)
    assert verdict.status is Status.SHOWN
    assert verdict.passed


def test_steps_that_do_not_increase_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps must increase"):
        judge(Series(0, "fds.file", (1, 1), (2.0, 2.0)))


@given(seed=st.integers(0, 10_000), size=st.floats(1.0, 1e5), settling=st.floats(0.0, 1e7))
def test_the_power_of_a_slope_is_the_smallest_leak_that_is_caught(seed: int, size: float, settling: float) -> None:
    """Adding a leak to the very series: at the stated power it is caught, a little below it is not."""
    clean = 3e8 + settling * (1 - np.exp(-STEPS / 40)) + noise(seed, size)
    verdict = gate("rss", clean)
    if verdict.status is Status.FLAT:
        assert gate("rss", clean + 1.001 * verdict.power * STEPS).status is Status.LEAK
        assert gate("rss", clean + 0.99 * verdict.power * STEPS).status is Status.FLAT


@given(shift=st.floats(0.0, 1.0), wobble=st.integers(0, 3), seed=st.integers(0, 100))
def test_the_power_of_an_exact_gate_is_a_leak_that_is_caught_wherever_its_units_fall(
    shift: float, wobble: int, seed: int
) -> None:
    clean = FLAT + np.random.default_rng(seed).integers(0, wobble + 1, SAMPLES)
    verdict = gate("fds.file", clean)
    assert verdict.status is Status.FLAT
    leaking = clean + np.floor(verdict.power * STEPS + shift)
    assert gate("fds.file", leaking).status is Status.LEAK


@given(seed=st.integers(0, 10_000))
def test_noise_alone_is_never_a_leak(seed: int) -> None:
    assert gate("rss", 3e8 + noise(seed, 1e5)).status is Status.FLAT
    wandering = 3e8 + np.cumsum(noise(seed, 2e3))
    assert gate("rss", wandering).status is Status.FLAT


def test_the_end_of_the_warm_up_does_not_depend_on_how_fast_something_leaks() -> None:
    steps = STEPS.astype(np.float64)
    values = 1e6 * np.exp(-steps / 50) + noise(5, 1e3)
    ends = {warmup_end(steps, values + leak * steps) for leak in (0.0, 10.0, 1e3, 1e5)}
    assert len(ends) == 1


def test_the_slope_is_that_of_the_line_whatever_a_few_outliers_say() -> None:
    steps = STEPS.astype(np.float64)
    values = 3.0 * steps + 7
    values[[5, 30, 61]] += 1e6
    slope, low, high = theil_sen(steps, values)
    assert slope == pytest.approx(3.0)
    assert low <= slope <= high


def test_every_cause_can_be_injected_and_every_injection_is_a_cause() -> None:
    assert set(CAUSES) == set(INJECTIONS)


def test_every_judged_counter_names_a_cause_and_every_slope_states_its_least_effect() -> None:
    for counter in COUNTERS:
        assert bool(counter.cause) == (counter.kind is not Kind.SHOWN), counter
        assert (counter.effect > 0) == (counter.kind in (Kind.SLOPE, Kind.DRIFT, Kind.BOUND)), counter


def test_a_counter_that_nobody_knows_is_shown_last() -> None:
    assert counter_of("vendor.something").kind is Kind.SHOWN
    assert priority("vendor.something") == len(COUNTERS)
