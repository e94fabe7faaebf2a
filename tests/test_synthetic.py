from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError
from rocm_dp.workload import CODE, CONVERSATION, Request, Trace, TraceModel, fit
from rocm_dp.workload.synthetic import KNOTS

COUNT = 20_000
MODELS = pytest.mark.parametrize("model", [CODE, CONVERSATION], ids=["code", "conversation"])


def contexts(trace: Trace) -> list[int]:
    return [request.context for request in trace.requests]


def generated(trace: Trace) -> list[int]:
    return [request.generated for request in trace.requests]


def gaps(trace: Trace) -> list[float]:
    return [after.arrival - before.arrival for before, after in pairwise(trace.requests)]


def rank_correlation(trace: Trace) -> float:
    first, second = (np.argsort(np.argsort(values)).astype(float) for values in (contexts(trace), generated(trace)))
    return float(np.corrcoef(first, second)[0, 1])


# Real figures: what the two Azure files hold. A p99 of 20,000 draws varies by a few per cent.
@pytest.mark.parametrize(
    ("model", "context", "answer", "mean_context", "mean_answer"),
    [
        (CODE, (1469, 7436, 7437), (13, 252, 1899), 2048, 27.9),
        (CONVERSATION, (1020, 4142, 14050), (129, 601, 1000), 1155, 211),
    ],
    ids=["code", "conversation"],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tokens_drawn_are_spread_as_in_the_real_trace(
    model: TraceModel,
    context: tuple[int, int, int],
    answer: tuple[int, int, int],
    mean_context: float,
    mean_answer: float,
    seed: int,
) -> None:
    trace = model.generate(COUNT, seed=seed)
    for drawn, (median, p99, largest) in ((contexts(trace), context), (generated(trace), answer)):
        assert np.median(drawn) == pytest.approx(median, rel=0.05)
        assert np.quantile(drawn, 0.99) == pytest.approx(p99, rel=0.10)
        assert max(drawn) <= largest
    assert np.mean(contexts(trace)) == pytest.approx(mean_context, rel=0.03)
    assert np.mean(generated(trace)) == pytest.approx(mean_answer, rel=0.06)


@pytest.mark.parametrize(
    ("model", "median", "p90", "mean", "mean_tolerance"),
    # The code trace pauses for minutes, so its mean gap over 100,000 draws still varies by 4 %.
    [(CODE, 0.0638, 0.273, 0.390, 0.15), (CONVERSATION, 0.1184, 0.421, 0.1808, 0.03)],
    ids=["code", "conversation"],
)
def test_gaps_drawn_are_spread_as_in_the_real_trace(
    model: TraceModel, median: float, p90: float, mean: float, mean_tolerance: float
) -> None:
    drawn = gaps(model.generate(100_000, seed=0))
    assert np.median(drawn) == pytest.approx(median, rel=0.03)
    assert np.quantile(drawn, 0.9) == pytest.approx(p90, rel=0.03)
    assert np.mean(drawn) == pytest.approx(mean, rel=mean_tolerance)


def test_code_comes_in_bursts_and_conversation_nearly_evenly() -> None:
    burstiness = {}
    for model in (CODE, CONVERSATION):
        arrivals = np.array([request.arrival for request in model.generate(COUNT, seed=0).requests])
        each_second = np.bincount(arrivals.astype(np.int64))
        burstiness[model.name] = each_second.var() / each_second.mean()
    assert 7 < burstiness[CODE.name] < 14
    assert 0.9 < burstiness[CONVERSATION.name] < 1.5


@pytest.mark.parametrize(
    ("model", "digest"),
    [(CODE, "9408c6eb3957d968"), (CONVERSATION, "5c73b1fbaa7d3154")],
    ids=["code", "conversation"],
)
def test_a_seed_gives_the_same_trace_on_every_machine(model: TraceModel, digest: str) -> None:
    trace = model.generate(1000, seed=7)
    assert hashlib.sha256(repr(trace).encode()).hexdigest()[:16] == digest


@MODELS
def test_another_seed_gives_another_trace(model: TraceModel) -> None:
    first, second = model.generate(100, seed=1), model.generate(100, seed=2)
    assert contexts(first) != contexts(second)
    assert gaps(first) != gaps(second)
    assert (first.name, second.name) == (f"{model.name}-1", f"{model.name}-2")


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 50), longer=st.integers(1, 50), seed=st.integers(0, 2**64))
def test_a_longer_trace_starts_with_the_shorter_one(count: int, longer: int, seed: int) -> None:
    trace = CODE.generate(count, seed=seed)
    assert len(trace.requests) == count
    assert trace.requests[0].arrival == 0
    assert CODE.generate(count + longer, seed=seed).requests[:count] == trace.requests


def test_a_fit_keeps_the_quantiles_of_the_trace() -> None:
    trace = Trace("even", tuple(Request(index / 4, 1 + index, 2001 - index) for index in range(2001)))
    model = fit(trace)
    assert model.name == "even"
    assert set(model.gaps) == {250_000_000}
    assert model.contexts == tuple(1 + (2000 * knot + 500_000) // 1_000_000 for knot in KNOTS)
    assert (model.generated[0], model.generated[-1]) == (1, 2001)
    assert model.correlation == -1.0


def test_a_trace_drawn_from_a_fit_of_a_trace_drawn_is_spread_alike() -> None:
    again = fit(CONVERSATION.generate(COUNT, seed=3)).generate(COUNT, seed=4)
    for values in (contexts, generated, gaps):
        first, second = values(CONVERSATION.generate(COUNT, seed=5)), values(again)
        assert np.quantile(first, [0.25, 0.5, 0.75]) == pytest.approx(
            np.quantile(second, [0.25, 0.5, 0.75]), rel=0.06
        )


@pytest.mark.parametrize("correlation", [-1.0, -0.4, 0.0, 0.4, 1.0])
def test_the_rank_correlation_asked_for_is_drawn_and_fitted_again(correlation: float) -> None:
    table = tuple(1 + knot for knot in KNOTS)
    trace = TraceModel("t", table, table, table, correlation).generate(COUNT, seed=0)
    assert rank_correlation(trace) == pytest.approx(correlation, abs=0.02)
    assert fit(trace).correlation == pytest.approx(rank_correlation(trace), abs=0.001)


def test_equal_values_share_a_rank_and_a_constant_has_no_correlation() -> None:
    # Ranks 0, 1.5, 1.5, 3 and 0.5, 0.5, 2.5, 2.5, whose correlation is the root of a half.
    ties = Trace("ties", tuple(Request(0.0, *tokens) for tokens in ((1, 1), (2, 1), (2, 2), (3, 2))))
    constant = Trace("constant", tuple(Request(0.0, tokens, 5) for tokens in (1, 2, 3)))
    assert fit(ties).correlation == 0.7071
    assert fit(constant).correlation == 0.0


def test_the_widest_tables_do_not_overflow() -> None:
    widest = (2**31 - 1) * 10**9
    table = (0,) * (len(KNOTS) - 1) + (widest,)
    tokens = (1,) * (len(KNOTS) - 1) + (2**31 - 1,)
    model = TraceModel("wide", table, tokens, tokens)
    drawn = model.generate(50_000, seed=0)
    assert max(contexts(drawn)) > 2**30
    assert 0 <= min(gaps(drawn)) <= max(gaps(drawn)) <= 2**31


def test_a_fit_takes_two_requests() -> None:
    with pytest.raises(ConfigError, match="at least 2 requests, got 1"):
        fit(Trace("one", (Request(0.0, 1, 1),)))


@pytest.mark.parametrize(("count", "seed"), [(0, 0), (1.0, 0), (True, 0), (1, -1), (1, 0.5)])
def test_a_count_or_seed_that_is_no_int_in_range_is_refused(count: int, seed: int) -> None:
    with pytest.raises(ConfigError, match=r"(count|seed) must be an int"):
        CODE.generate(count, seed=seed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gaps": CODE.gaps[1:]}, f"gaps must be {len(KNOTS)} ints"),
        ({"gaps": tuple(map(float, CODE.gaps))}, f"gaps must be {len(KNOTS)} ints"),
        ({"gaps": (-1, *CODE.gaps[1:])}, "gaps must not decrease and lie in"),
        ({"contexts": (0, *CODE.contexts[1:])}, "contexts must not decrease and lie in"),
        ({"generated": CODE.generated[::-1]}, "generated must not decrease"),
        ({"generated": (*CODE.generated[:-1], 2**31)}, "generated must not decrease and lie in"),
        ({"correlation": 1.5}, r"correlation must lie in \[-1, 1\]"),
        ({"correlation": float("nan")}, r"correlation must lie in \[-1, 1\]"),
    ],
)
def test_a_model_that_can_not_be_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(CODE, **change)  # type: ignore[arg-type]
