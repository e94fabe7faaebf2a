from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count, islice, pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError
from rocm_dp.plan import Phase
from rocm_dp.workload import CODE, Request, Routing, SchedulerConfig, Step, Work, schedule

if TYPE_CHECKING:
    from collections.abc import Iterator


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 40), st.integers(1, 12)), max_size=25))
    arrivals = sorted(arrival / 4 for arrival, _, _ in sizes)
    return [
        Request(arrival, context, generated)
        for arrival, (_, context, generated) in zip(arrivals, sizes, strict=True)
    ]


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    token_budget = draw(st.integers(1, 24))
    return SchedulerConfig(
        dp_size=draw(st.integers(1, 4)),
        token_budget=token_budget,
        max_running=draw(st.integers(1, token_budget)),
        routing=draw(st.sampled_from(Routing)),
        max_context=draw(st.none() | st.integers(1, 50)),
        max_generated=draw(st.none() | st.integers(1, 15)),
        mix_phases=draw(st.booleans()),
        seconds_per_step=draw(st.sampled_from([0.0, 0.01, 0.5])),
        seconds_per_token=draw(st.sampled_from([0.0, 0.003])),
    )


def sizes(request: Request, config: SchedulerConfig) -> tuple[int, int]:
    """Prompt tokens and tokens generated after clipping."""
    return (
        min(request.context, config.max_context or request.context),
        min(request.generated, config.max_generated or request.generated),
    )


def is_decode(work: Work, requests: list[Request], config: SchedulerConfig) -> bool:
    return work.start >= sizes(requests[work.request], config)[0]


def homes(steps: list[Step]) -> dict[int, int]:
    """The dp rank of each request; a request on two ranks fails."""
    ranks: dict[int, int] = {}
    for step in steps:
        for rank, items in enumerate(step.work):
            for item in items:
                assert ranks.setdefault(item.request, rank) == rank
    return ranks


ANY = settings(max_examples=100, deadline=None)


@ANY
@given(requests=workloads(), config=configs())
def test_every_token_is_processed_once_and_in_order_on_one_rank(
    requests: list[Request], config: SchedulerConfig
) -> None:
    steps = list(schedule(requests, config))
    positions = Counter[int]()
    decodes = Counter[int]()
    for step in steps:
        for item in (item for items in step.work for item in items):
            prompt, _ = sizes(requests[item.request], config)
            assert item.start == positions[item.request]
            assert item.tokens >= 1
            if item.start >= prompt:
                assert item.tokens == 1
                decodes[item.request] += 1
            else:
                assert item.start + item.tokens <= prompt
            positions[item.request] += item.tokens
    for index, request in enumerate(requests):
        prompt, generated = sizes(request, config)
        assert positions[index] == prompt + generated - 1
        assert decodes[index] == generated - 1
    assert homes(steps).keys() == set(range(len(requests)))


@ANY
@given(requests=workloads(), config=configs())
def test_a_request_finishes_once_with_its_last_token(requests: list[Request], config: SchedulerConfig) -> None:
    positions = Counter[int]()
    finished: list[int] = []
    for step in schedule(requests, config):
        for item in (item for items in step.work for item in items):
            assert item.request not in finished
            positions[item.request] += item.tokens
        finished += step.finished
        for request in step.finished:
            prompt, generated = sizes(requests[request], config)
            assert positions[request] == prompt + generated - 1
    assert sorted(finished) == list(range(len(requests)))


@ANY
@given(requests=workloads(), config=configs())
def test_no_rank_exceeds_its_token_budget_or_its_running_requests(
    requests: list[Request], config: SchedulerConfig
) -> None:
    running: list[set[int]] = [set() for _ in range(config.dp_size)]
    for step in schedule(requests, config):
        assert max(step.counts) <= config.token_budget
        for under_way, items in zip(running, step.work, strict=True):
            under_way |= {item.request for item in items}
            assert len(items) == len({item.request for item in items})
            assert len(under_way) <= config.max_running
            under_way -= set(step.finished)


@ANY
@given(requests=workloads(), config=configs())
def test_phases_say_what_each_rank_does(requests: list[Request], config: SchedulerConfig) -> None:
    for step in schedule(requests, config):
        for phase, items in zip(step.phases, step.work, strict=True):
            decodes = [is_decode(item, requests, config) for item in items]
            assert phase is (Phase.IDLE if not items else Phase.DECODE if all(decodes) else Phase.PREFILL)
            assert decodes == sorted(decodes, reverse=True)
            if not config.mix_phases:
                assert len(set(decodes)) <= 1
        assert step.phase is (Phase.PREFILL if Phase.PREFILL in step.phases else Phase.DECODE)
        assert len(step.phases) == len(step.work) == len(step.counts) == config.dp_size
        assert step.counts == tuple(sum(item.tokens for item in items) for items in step.work)


@ANY
@given(requests=workloads(), config=configs())
def test_the_clock_follows_the_busiest_rank_and_jumps_only_when_nothing_is_left(
    requests: list[Request], config: SchedulerConfig
) -> None:
    steps = list(schedule(requests, config))
    assert [step.index for step in steps] == list(range(len(steps)))
    finished: set[int] = set()
    for step, after in pairwise(steps):
        finished |= set(step.finished)
        ends = step.time + (config.seconds_per_step + config.seconds_per_token * max(step.counts))
        arrived = {index for index, request in enumerate(requests) if request.arrival <= ends}
        arrivals = [request.arrival for request in requests if request.arrival > ends]
        assert after.time == (ends if arrived - finished else min(arrivals))
    if steps:
        assert steps[0].time == requests[0].arrival
        assert all(
            requests[item.request].arrival <= step.time for step in steps for items in step.work for item in items
        )


@ANY
@given(requests=workloads(), config=configs())
def test_each_rank_starts_its_requests_in_order_of_arrival(
    requests: list[Request], config: SchedulerConfig
) -> None:
    started: list[list[int]] = [[] for _ in range(config.dp_size)]
    for step in schedule(requests, config):
        for order, items in zip(started, step.work, strict=True):
            order += [item.request for item in items if item.start == 0]
    assert all(order == sorted(order) for order in started)


@ANY
@given(requests=workloads(), config=configs())
def test_a_rank_is_idle_only_when_it_has_nothing_to_do(requests: list[Request], config: SchedulerConfig) -> None:
    steps = list(schedule(requests, config))
    ranks = homes(steps)
    finished: set[int] = set()
    for step in steps:
        assert any(step.counts)
        for rank, items in enumerate(step.work):
            waiting = {
                index
                for index, request in enumerate(requests)
                if ranks[index] == rank and request.arrival <= step.time and index not in finished
            }
            assert bool(items) == bool(waiting)
        finished |= set(step.finished)


@ANY
@given(requests=workloads(), config=configs())
def test_a_mixed_step_decodes_every_request_that_can_and_still_prefills(
    requests: list[Request], config: SchedulerConfig
) -> None:
    config = replace(config, mix_phases=True)
    positions = Counter[int]()
    finished: set[int] = set()
    for step in schedule(requests, config):
        in_step = {item.request for items in step.work for item in items}
        for request in positions.keys() - finished:
            prompt, _ = sizes(requests[request], config)
            assert request in in_step or positions[request] < prompt
        for items in step.work:
            for item in items:
                positions[item.request] += item.tokens
        for rank, items in enumerate(step.work):
            chunks = [item for item in items if not is_decode(item, requests, config)]
            cut = [c for c in chunks if c.start + c.tokens < sizes(requests[c.request], config)[0]]
            assert len(cut) <= 1
            assert not cut or step.counts[rank] == config.token_budget
        finished |= set(step.finished)


@ANY
@given(requests=workloads(), config=configs())
def test_round_robin_takes_the_ranks_in_turn(requests: list[Request], config: SchedulerConfig) -> None:
    ranks = homes(list(schedule(requests, replace(config, routing=Routing.ROUND_ROBIN))))
    assert ranks == {index: index % config.dp_size for index in range(len(requests))}


@ANY
@given(requests=workloads(), config=configs())
def test_least_loaded_takes_the_rank_with_the_fewest_tokens_left(
    requests: list[Request], config: SchedulerConfig
) -> None:
    config = replace(config, routing=Routing.LEAST_LOADED)
    steps = list(schedule(requests, config))
    ranks = homes(steps)
    left = [0] * config.dp_size
    upcoming = 0
    for step in steps:
        while upcoming < len(requests) and requests[upcoming].arrival <= step.time:
            assert left[ranks[upcoming]] == min(left)
            assert ranks[upcoming] == left.index(min(left))
            prompt, generated = sizes(requests[upcoming], config)
            left[ranks[upcoming]] += prompt + generated - 1
            upcoming += 1
        left = [before - tokens for before, tokens in zip(left, step.counts, strict=True)]


def test_requests_that_come_together_are_spread_within_one_request_of_each_other() -> None:
    requests = list(CODE.generate(200, seed=0).requests)
    together = [replace(request, arrival=0.0) for request in requests]
    config = SchedulerConfig(4, routing=Routing.LEAST_LOADED)
    loads = [0] * 4
    for step in schedule(together, config):
        loads = [load + tokens for load, tokens in zip(loads, step.counts, strict=True)]
    assert max(loads) - min(loads) <= max(request.context + request.generated for request in requests)


def test_a_prompt_is_cut_at_the_budget_and_decodes_ride_along() -> None:
    requests = [Request(0.0, 3, 3), Request(0.0, 6, 1)]
    steps = list(schedule(requests, SchedulerConfig(1, token_budget=4, max_running=2)))
    assert [step.work for step in steps] == [
        ((Work(0, 0, 3), Work(1, 0, 1)),),
        ((Work(0, 3, 1), Work(1, 1, 3)),),
        ((Work(0, 4, 1), Work(1, 4, 2)),),
    ]
    assert [step.finished for step in steps] == [(), (), (0, 1)]
    assert {step.phase for step in steps} == {Phase.PREFILL}


def test_without_mixing_decodes_wait_for_the_prompts() -> None:
    requests = [Request(0.0, 3, 3), Request(0.0, 6, 1)]
    config = SchedulerConfig(1, token_budget=4, max_running=2, mix_phases=False)
    steps = list(schedule(requests, config))
    assert [step.work for step in steps] == [
        ((Work(0, 0, 3), Work(1, 0, 1)),),
        ((Work(1, 1, 4),),),
        ((Work(1, 5, 1),),),
        ((Work(0, 3, 1),),),
        ((Work(0, 4, 1),),),
    ]
    assert [step.phase for step in steps] == [Phase.PREFILL] * 3 + [Phase.DECODE] * 2


def test_one_generated_token_takes_no_decode() -> None:
    (step,) = schedule([Request(5.0, 10, 1)], SchedulerConfig(2))
    assert step == Step(0, 5.0, (Phase.PREFILL, Phase.IDLE), ((Work(0, 0, 10),), ()), (0,))


def test_requests_are_clipped() -> None:
    config = SchedulerConfig(1, max_context=4, max_generated=2)
    steps = list(schedule([Request(0.0, 10_000, 500)], config))
    assert [step.work for step in steps] == [((Work(0, 0, 4),),), ((Work(0, 4, 1),),)]


def test_a_step_with_work_nowhere_is_idle() -> None:
    step = Step(0, 0.0, (Phase.IDLE, Phase.IDLE), ((), ()), ())
    assert step.phase is Phase.IDLE
    assert step.counts == (0, 0)


def test_no_requests_take_no_step() -> None:
    assert list(schedule([], SchedulerConfig(3))) == []


def test_steps_of_an_endless_stream_are_yielded_as_it_comes() -> None:
    taken = []

    def stream() -> Iterator[Request]:
        for index in count():
            taken.append(index)
            yield Request(float(index), 5, 2)

    steps = list(islice(schedule(stream(), SchedulerConfig(2)), 10))
    assert steps[-1].time == 4.02025
    assert len(taken) == 6


def test_the_same_requests_give_the_same_steps() -> None:
    requests = CODE.generate(300, seed=1).requests
    config = SchedulerConfig(4, routing=Routing.LEAST_LOADED)
    assert list(schedule(requests, config)) == list(schedule(iter(requests), config))


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"requests\[1\] must not arrive before requests\[0\] \(2.0 s\), got 1.0 s"
    ):
        list(schedule([Request(2.0, 1, 1), Request(1.0, 1, 1)], SchedulerConfig(1)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dp_size": 0}, "dp_size must be an int of at least 1, got 0"),
        ({"dp_size": 2.0}, "dp_size must be an int of at least 1, got 2.0"),
        ({"dp_size": True}, "dp_size must be an int of at least 1, got True"),
        ({"token_budget": 0}, "token_budget must be an int"),
        ({"token_budget": None}, "token_budget must be an int"),
        ({"max_running": 0}, "max_running must be an int"),
        ({"max_running": 513}, r"max_running must not exceed token_budget \(512\), got 513"),
        ({"max_context": 0}, "max_context must be an int"),
        ({"max_generated": -1}, "max_generated must be an int"),
        ({"routing": "least"}, "routing must be a Routing, got 'least'"),
        ({"seconds_per_step": -0.1}, "seconds_per_step must be finite and at least 0"),
        ({"seconds_per_token": float("nan")}, "seconds_per_token must be finite and at least 0"),
    ],
)
def test_a_config_out_of_range_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(SchedulerConfig(2), **change)  # type: ignore[arg-type]
