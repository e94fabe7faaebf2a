"""Soaks on real ranks: clean ones pass, leaks are found and named, a seed replays, nothing missing passes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pytest
import soak_cases as cases
from soak_cases import SMALL, soaked

from rocm_dp.errors import ConfigError
from rocm_dp.plan import PaddingMode
from rocm_dp.soak import log as log_module
from rocm_dp.soak.arguments import INJECTED
from rocm_dp.soak.config import SoakConfig
from rocm_dp.soak.gates import Status
from rocm_dp.soak.inject import INJECTIONS, NEEDS_GPU
from rocm_dp.soak.log import read_log
from rocm_dp.soak.outcome import conclude
from rocm_dp.soak.program import FULL, StepKind, draw_plan, program, tour_steps
from rocm_dp.soak.run import soak
from rocm_dp.soak.selftest import injections, self_test
from rocm_dp.testing import RankPool
from rocm_dp.workload import CONVERSATION

if TYPE_CHECKING:
    from pathlib import Path

Ranks = Callable[[int], RankPool]
# The memory of fresh ranks takes longer to settle than these short runs last, and time is shared with other tests.
NOT_SO_SHORT = {"heap.used", "rss", "maps", "latency.drift"}


def failed(outcome: object) -> set[tuple[int, str]]:
    return {(v.rank, v.name) for v in outcome.verdicts if not v.passed and v.name not in NOT_SO_SHORT}  # type: ignore[attr-defined]


def test_a_clean_soak_passes_on_every_rank_and_checks_results(ranks: Ranks) -> None:
    log, outcome = soaked(ranks(2), SMALL)
    assert failed(outcome) == set()
    assert not outcome.problems
    assert outcome.checks > 2 * 24
    assert outcome.steps == SMALL.steps
    gates = [verdict for verdict in outcome.verdicts if verdict.status is Status.FLAT]
    assert len(gates) > 60
    assert all(0 < verdict.power < float("inf") for verdict in gates)
    assert {"hsa", "torch", "kfd", "amdsmi", "nvml"} <= set(log.ranks[0].started.absent)  # type: ignore[union-attr]


def test_a_soak_with_attention_tp_sums_partial_rows_and_passes(ranks: Ranks) -> None:
    _, outcome = soaked(ranks(2), replace(SMALL, dp=1))
    assert failed(outcome) == set()
    assert not outcome.problems


# `make soak` injects every kind: the others with -m soak.
@pytest.mark.parametrize(
    "kind",
    [
        "buffer",
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("event", "fd", "shm", "thread", "object")),
    ],
)
def test_a_leak_on_the_last_rank_is_found_there_and_named(ranks: Ranks, kind: str) -> None:
    _, outcome = soaked(ranks(2), replace(SMALL, inject=kind))
    assert not outcome.passed
    assert outcome.cause == kind
    # A file in /dev/shm belongs to no process: every rank sees it.
    assert {rank for rank, _ in failed(outcome)} == ({0, 1} if kind == "shm" else {1})
    assert kind in outcome.headline


@pytest.mark.parametrize(
    ("kind", "counter"), [("rss", "rss"), pytest.param("latency", "latency.drift", marks=pytest.mark.soak)]
)
def test_a_leak_of_memory_or_of_time_is_found(ranks: Ranks, kind: str, counter: str) -> None:
    # Longer than the others: time is shared with other tests, and may be short for seconds.
    _, outcome = soaked(ranks(2), replace(SMALL, steps=360, sample_every=9, inject=kind))
    assert counter in {v.name for v in outcome.verdicts if v.status is Status.LEAK}
    assert {name for _, name in failed(outcome)} <= {counter}


def test_what_an_injection_held_is_given_back_and_the_next_soak_is_clean(ranks: Ranks) -> None:
    pool = ranks(2)
    soaked(pool, replace(SMALL, inject="thread"))
    _, outcome = soaked(pool, SMALL)
    assert failed(outcome) == set()
    assert not [v for v in outcome.verdicts if v.name == "threads" and v.baseline != v.final]


def test_a_wrong_result_fails_the_soak_and_names_rank_and_step(ranks: Ranks) -> None:
    _, outcome = soaked(ranks(2), SMALL, cases.with_wrong_results)
    assert not outcome.passed
    assert outcome.problems[0].startswith("rank 1, step 0: gather differs")


def test_a_sample_that_lacks_a_counter_fails_the_soak(ranks: Ranks) -> None:
    _, outcome = soaked(ranks(2), SMALL, cases.without_objects)
    missing = {(v.rank, v.name) for v in outcome.verdicts if v.status is Status.MISSING}
    assert (1, "objects.all") in missing
    assert not [name for rank, name in missing if rank == 0]
    assert any("no room to count" in problem for problem in outcome.problems)


def test_a_sampler_that_one_rank_never_had_fails_the_soak(ranks: Ranks) -> None:
    _, outcome = soaked(ranks(2), SMALL, cases.without_the_exchange_sampler)
    assert "rank 0: own is needed: OSError: not today" in outcome.problems
    assert (0, "own.slots") in {(v.rank, v.name) for v in outcome.verdicts if v.status is Status.MISSING}


def test_a_rank_that_said_nothing_fails_the_soak(ranks: Ranks) -> None:
    log, _ = soaked(ranks(2), SMALL)
    del log.ranks[1]
    outcome = conclude(log, ranks=2, required=SMALL.required)
    assert "rank 1 sent no sample" in outcome.problems
    assert not outcome.passed


def test_a_trace_is_replayed_and_is_clean(ranks: Ranks) -> None:
    trace = CONVERSATION.generate(100, seed=1)
    config = replace(SMALL, trace=trace, steps=400)
    _, outcome = soaked(ranks(2), config)
    assert failed(outcome) == set()
    steps = list(islice(program(config), 400))
    assert sum(step.plan.total for step in steps) > 0


def test_a_soak_of_minutes_ends_at_the_same_step_on_all_ranks(ranks: Ranks) -> None:
    log, outcome = soaked(ranks(2), replace(SMALL, steps=None, minutes=0.03))
    ends = {said.samples[-1].step for said in log.ranks.values()}
    assert len(ends) == 1
    assert outcome.steps > 5
    assert outcome.steps % 6 == 0


def test_the_same_seed_gives_the_same_steps_another_one_others() -> None:
    first, again = (list(islice(program(SMALL), 300)) for _ in range(2))
    assert first == again
    assert first != list(islice(program(replace(SMALL, seed=1)), 300))


def test_the_program_meets_every_kind_padding_batch_transport_and_idle_ranks() -> None:
    config = replace(SMALL, plans=0, dp=2)
    steps = list(islice(program(config), 600))
    assert {step.kind for step in steps} == set(StepKind)
    assert {step.plan.padding for step in steps} == set(PaddingMode)
    assert {step.batch for step in steps} == {0, 1}
    assert {step.transport for step in steps if step.kind is StepKind.LIFETIME} >= {
        None,
        "all_gather",
        "all_reduce",
    }
    counts = [step.plan.counts for step in steps]
    assert (0, 0) in counts
    assert any(a == 0 and b > 0 for a, b in counts)
    assert any(b == 0 and a > 0 for a, b in counts)
    assert max(max(pair) for pair in counts) == config.tokens


def test_after_the_tour_no_plan_is_new() -> None:
    steps = list(islice(program(SMALL), 1000))
    tour = tour_steps(SMALL)
    met = {(step.kind, step.plan, step.batch) for step in steps[:tour]}
    kinds = {StepKind.SERIAL, StepKind.MANY}
    assert all((s.kind, s.plan, s.batch) in met for s in steps[tour:] if s.kind in kinds)


def test_a_plan_of_the_program_fits_and_the_largest_comes_first() -> None:
    assert draw_plan(SMALL, FULL).counts == (SMALL.tokens,) * SMALL.dp
    assert next(iter(program(SMALL))).plan == draw_plan(SMALL, FULL)


def test_the_journal_holds_the_soak_and_a_cut_off_line_is_left_out(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    with path.open("w") as stream:
        log, outcome = soak(ranks(2), replace(SMALL, inject="fd"), journal=stream)
    again = read_log(path)
    assert again.ranks[1].samples == log.ranks[1].samples
    judged = conclude(again, ranks=2, required=SMALL.required)
    assert (judged.cause, judged.passed) == (outcome.cause, outcome.passed) == ("fd", False)
    text = path.read_text()
    kinds = [json.loads(line)["kind"] for line in text.splitlines()]
    assert kinds[0] == "config"
    assert kinds[-1] == "outcome"
    # As a soak that was killed leaves it.
    path.write_text(text[: len(text) * 3 // 4])
    cut = read_log(path)
    assert 0 < cut.step < outcome.steps
    assert conclude(cut, ranks=2, required=SMALL.required).cause == "fd"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no soak"),
        ('{"kind": "sample"}\n{}', "first line must be of kind config"),
        ("{\n{}", "line 1"),
        ("[" * 100_000 + "\n{}", "line 1"),
    ],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "it").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_log(tmp_path / "it")


def test_a_journal_is_read_to_a_bound_through_the_link_that_was_named_and_never_from_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last").symlink_to(tmp_path / "it")
    (tmp_path / "it").write_text('{"kind": "config", "ranks": 2}\n')
    assert read_log(tmp_path / "last").about == {"ranks": 2}
    monkeypatch.setattr(log_module, "MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        read_log(tmp_path / "it")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="must be a regular file"):
        read_log(tmp_path / "pipe")


def test_what_needs_a_gpu_says_so_on_cpu_ranks(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.refusals):
        assert said == [
            "--inject run-ahead needs a GPU: on the CPU a call is done when it returns: no records are in flight",
            "--inject record-stream needs a GPU: record_stream does nothing to CPU tensors",
            "--inject stream needs a GPU: there are no streams on the CPU",
            "--like-the-seed-system needs GPUs: record_stream does nothing to CPU tensors",
        ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": None}, "needs steps or minutes"),
        ({"steps": 0}, "steps must be an int of at least 1"),
        ({"minutes": -1.0}, "minutes must be above 0"),
        ({"plans": -1}, "plans must be an int of at least 0"),
        ({"dp": 3}, "must divide"),
    ],
)
def test_a_soak_that_can_not_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_every_injection_is_an_option_and_those_left_out_on_the_cpu_have_a_reason() -> None:
    assert tuple(INJECTIONS) == INJECTED
    kinds, left_out = injections(gpu=False)
    assert set(kinds) | set(left_out) == set(INJECTED)
    assert left_out == NEEDS_GPU
    assert injections(gpu=True) == (list(INJECTED), {})


def test_an_error_of_a_rank_ends_the_soak_and_the_report_says_what_had_run_out(ranks: Ranks) -> None:
    """The pool of events has 256: the injection goes on until it is empty."""
    _, outcome = soak(ranks(2), replace(SMALL, inject="event", steps=4000, sample_every=40))
    assert not outcome.passed
    assert outcome.problems[0].startswith("EventPoolExhausted")
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.cause == "events of the exchange"


@pytest.mark.soak
def test_the_self_test_has_no_false_alarm_in_20_seeds_and_misses_no_leak(ranks: Ranks) -> None:
    config = SoakConfig(ranks=2, dp=2, steps=400)
    trials = list(self_test(ranks(2), config, clean=20))
    assert [(trial.injected, trial.seed, trial.named) for trial in trials if not trial.right] == []
    assert len(trials) == 20 + len(INJECTED) - len(NEEDS_GPU)
