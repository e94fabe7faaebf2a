"""TokenPlan: where each rank's rows lie, for any counts; and the rules that choose a padding."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError
from rocm_dp.plan import MAX_ROWS, PaddingMode, Phase, TokenPlan, choose_padding, split_rows

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LEN, SUM_LEN = PaddingMode.MAX_LEN, PaddingMode.SUM_LEN
PREFILL, DECODE, IDLE = Phase.PREFILL, Phase.DECODE, Phase.IDLE
ANY = hypothesis_settings(max_examples=100, deadline=None)


def one_busy_rank(ranks: int, place: int, count: int) -> tuple[int, ...]:
    return tuple(count if rank == place % ranks else 0 for rank in range(ranks))


COUNTS = st.one_of(
    st.lists(st.integers(0, 40), min_size=1, max_size=8).map(tuple),
    st.lists(st.integers(0, MAX_ROWS), min_size=1, max_size=8).map(tuple),
    st.lists(st.integers(MAX_ROWS - 3, MAX_ROWS), min_size=1, max_size=8).map(tuple),
    st.integers(1, 8).map(lambda ranks: (0,) * ranks),
    st.builds(one_busy_rank, st.integers(1, 8), st.integers(0, 7), st.integers(1, 5000)),
)
ALIGNS = st.integers(1, 16) | st.sampled_from([64, 128, MAX_ROWS])
PLANS = st.builds(
    TokenPlan, COUNTS, st.sampled_from(PaddingMode), st.sampled_from([PREFILL, DECODE]), ALIGNS
) | st.builds(TokenPlan, st.integers(1, 8).map(lambda n: (0,) * n), st.sampled_from(PaddingMode), st.just(IDLE))
WIDE = TokenPlan(tuple((7 * rank) % 19 for rank in range(72)), SUM_LEN, DECODE, 4)  # one rack of 72 ranks


def any_plan(test: Callable[[TokenPlan], None]) -> Callable[[], None]:
    wide = example(plan=replace(WIDE, padding=MAX_LEN))(example(plan=WIDE)(test))
    return ANY(given(plan=PLANS)(wide))


@any_plan
def test_every_size_is_the_multiple_of_align_that_just_holds_its_rows(plan: TokenPlan) -> None:
    assert len(plan.sizes) == len(plan.counts)
    for size, count in zip(plan.sizes, plan.counts, strict=True):
        held = max(plan.counts) if plan.padding is MAX_LEN else count
        assert size % plan.align == 0
        assert held <= size < held + plan.align


@any_plan
def test_starts_are_the_exclusive_prefix_sums_of_the_sizes(plan: TokenPlan) -> None:
    assert plan.starts == tuple(sum(plan.sizes[:rank]) for rank in range(len(plan.sizes)))


@any_plan
def test_the_segments_tile_the_buffer_in_rank_order(plan: TokenPlan) -> None:
    end = 0
    for start, size in zip(plan.starts, plan.sizes, strict=True):
        assert start == end
        end = start + size
    assert end == plan.rows == sum(plan.sizes)


@any_plan
def test_total_counts_real_rows_and_fits_the_buffer(plan: TokenPlan) -> None:
    assert plan.total == sum(plan.counts) <= plan.rows


@any_plan
def test_skew_is_the_largest_count_over_the_mean(plan: TokenPlan) -> None:
    mean = Fraction(sum(plan.counts), len(plan.counts))
    assert plan.skew == (float(max(plan.counts) / mean) if mean else 1.0)


def test_max_len_gives_every_rank_the_room_of_the_largest() -> None:
    plan = TokenPlan((3, 0, 5), MAX_LEN, align=4)
    assert (plan.sizes, plan.starts, plan.rows, plan.total) == ((8, 8, 8), (0, 8, 16), 24, 8)


def test_sum_len_gives_an_idle_rank_no_room() -> None:
    plan = TokenPlan((3, 0, 5), SUM_LEN, align=4)
    assert (plan.sizes, plan.starts, plan.rows, plan.total) == ((4, 0, 8), (0, 4, 4), 12, 8)


@pytest.mark.parametrize("padding", PaddingMode)
def test_a_step_where_all_are_idle_has_an_empty_buffer(padding: PaddingMode) -> None:
    plan = TokenPlan((0, 0, 0), padding, IDLE, align=8)
    assert (plan.sizes, plan.starts, plan.rows, plan.total, plan.skew) == ((0, 0, 0), (0, 0, 0), 0, 0, 1.0)


def test_the_global_buffer_may_have_more_rows_than_fit_an_int32() -> None:
    plan = TokenPlan((MAX_ROWS, MAX_ROWS, 1), SUM_LEN)
    assert plan.starts == (0, 2_147_483_647, 4_294_967_294)
    assert plan.rows == 4_294_967_295


@any_plan
def test_halves_add_up_and_the_first_is_larger_by_at_most_one(plan: TokenPlan) -> None:
    first, second = plan.halves()
    for whole, a, b in zip(plan.counts, first.counts, second.counts, strict=True):
        assert a + b == whole
        assert 0 <= b <= a <= b + 1
    for half in (first, second):
        assert (half.padding, half.phase, half.align) == (plan.padding, plan.phase, plan.align)


@ANY
@given(rows=st.integers(0, 10**12), parts=st.integers(1, 80))
def test_split_rows_cuts_all_rows_in_order_and_almost_equally(rows: int, parts: int) -> None:
    shares = split_rows(rows, parts)
    assert len(shares) == parts
    assert [start for start, _ in shares] == [0, *(stop for _, stop in shares[:-1])]
    assert shares[-1][1] == rows
    sizes = [stop - start for start, stop in shares]
    assert set(sizes) <= {rows // parts, -(-rows // parts)}


@ANY
@given(plan=PLANS)
def test_equal_plans_are_equal_in_hash_and_digest_and_after_pickling(plan: TokenPlan) -> None:
    again = TokenPlan(plan.counts, plan.padding, plan.phase, plan.align)
    travelled = pickle.loads(pickle.dumps(plan))
    for other in (again, travelled):
        assert other == plan
        assert hash(other) == hash(plan)
        assert other.digest == plan.digest
        assert (other.sizes, other.starts, other.rows) == (plan.sizes, plan.starts, plan.rows)


@ANY
@given(counts=st.lists(st.integers(0, MAX_ROWS), min_size=2, max_size=8, unique=True), data=st.data())
def test_digest_differs_when_only_the_order_of_counts_does(counts: list[int], data: st.DataObject) -> None:
    turned = data.draw(st.integers(1, len(counts) - 1))
    plan = TokenPlan(tuple(counts), data.draw(st.sampled_from(PaddingMode)))
    other = replace(plan, counts=(*counts[turned:], *counts[:turned]))
    assert other.total == plan.total
    assert other != plan
    assert other.digest != plan.digest


@ANY
@given(plan=PLANS, align=ALIGNS)
def test_digest_differs_when_only_padding_phase_or_align_does(plan: TokenPlan, align: int) -> None:
    assume(align != plan.align)
    changed = [
        replace(plan, padding=SUM_LEN if plan.padding is MAX_LEN else MAX_LEN),
        replace(plan, phase=DECODE if plan.phase is PREFILL else PREFILL),
        replace(plan, align=align),
        replace(plan, counts=(*plan.counts, 0)),
    ]
    for other in changed:
        assert other != plan
        assert other.digest != plan.digest


@any_plan
def test_digest_is_a_signed_64_bit_int(plan: TokenPlan) -> None:
    assert -(2**63) <= plan.digest < 2**63


def test_the_digest_of_a_plan_never_changes() -> None:
    assert TokenPlan((3, 0, 2), MAX_LEN, align=2).digest == 6295975788005671050
    assert TokenPlan((MAX_ROWS,), SUM_LEN, DECODE).digest == 8638364552550899302


def test_the_digest_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    code = (
        "import sys; from rocm_dp.plan import *; "
        "print(sys.flags.hash_randomization, TokenPlan((3, 0, 2), PaddingMode.MAX_LEN, align=2).digest)"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("0", "4242")
    ]
    assert printed == [["0", "6295975788005671050"], ["1", "6295975788005671050"]]


# (counts, phase, capturing, hybrid_ssm, sum_len_in_graphs) -> padding, row by row from the rule in words.
TABLE = {
    "prefill of several dp ranks": ((4096, 1024), PREFILL, False, False, False, SUM_LEN),
    "prefill, equal counts": ((8, 8), PREFILL, False, False, False, SUM_LEN),
    "prefill, one rank idle": ((8, 0), PREFILL, False, False, False, SUM_LEN),
    "prefill of a hybrid SSM, one rank idle": ((8, 0), PREFILL, False, True, False, MAX_LEN),
    "prefill of a hybrid SSM, first rank idle": ((0, 9, 9), PREFILL, False, True, False, MAX_LEN),
    "prefill of a hybrid SSM, none idle": ((8, 1), PREFILL, False, True, False, SUM_LEN),
    "prefill of one dp rank": ((8,), PREFILL, False, False, False, MAX_LEN),
    "prefill of one dp rank with sum_len_in_graphs": ((8,), PREFILL, False, False, True, MAX_LEN),
    "decode, equal counts": ((32, 32), DECODE, False, False, False, MAX_LEN),
    "decode, uneven": ((32, 17), DECODE, False, False, False, MAX_LEN),
    "decode of two, one idle: exactly half is real": ((5, 0), DECODE, False, False, False, MAX_LEN),
    "decode of four, exactly half is real": ((4, 4, 0, 0), DECODE, False, False, False, MAX_LEN),
    "decode of four, one row under half": ((4, 3, 0, 0), DECODE, False, False, False, SUM_LEN),
    "decode of four, one row over half": ((4, 3, 1, 1), DECODE, False, False, False, MAX_LEN),
    "decode of three, exactly half is real": ((2, 1, 0), DECODE, False, False, False, MAX_LEN),
    "decode of three, one rank busy": ((0, 0, 7), DECODE, False, False, False, SUM_LEN),
    "decode of a hybrid SSM, one rank busy": ((0, 0, 7), DECODE, False, True, False, SUM_LEN),
    "decode of one dp rank": ((1,), DECODE, False, False, False, MAX_LEN),
    "decode at the largest counts, under half": ((MAX_ROWS, 0, 0), DECODE, False, False, False, SUM_LEN),
    "all idle": ((0, 0, 0), IDLE, False, False, False, MAX_LEN),
    "graph of skewed decode": ((0, 0, 7), DECODE, True, False, False, MAX_LEN),
    "graph of skewed decode with sum_len_in_graphs": ((0, 0, 7), DECODE, True, False, True, SUM_LEN),
    "graph of even decode with sum_len_in_graphs": ((7, 7), DECODE, True, False, True, SUM_LEN),
    "graph of prefill": ((8, 1), PREFILL, True, False, False, MAX_LEN),
    "graph of prefill with sum_len_in_graphs": ((8, 1), PREFILL, True, False, True, SUM_LEN),
    "graph of a hybrid SSM with sum_len_in_graphs": ((8, 0), PREFILL, True, True, True, SUM_LEN),
    "graph of one dp rank with sum_len_in_graphs": ((8,), DECODE, True, False, True, SUM_LEN),
    "sum_len_in_graphs outside a graph": ((32, 32), DECODE, False, False, True, MAX_LEN),
}


@pytest.mark.parametrize(
    ("counts", "phase", "capturing", "hybrid_ssm", "sum_len_in_graphs", "padding"), TABLE.values(), ids=TABLE
)
def test_padding_is_chosen_as_the_rule_says(
    counts: tuple[int, ...],
    phase: Phase,
    capturing: bool,
    hybrid_ssm: bool,
    sum_len_in_graphs: bool,
    padding: PaddingMode,
) -> None:
    chosen = choose_padding(
        counts, phase=phase, capturing=capturing, hybrid_ssm=hybrid_ssm, sum_len_in_graphs=sum_len_in_graphs
    )
    assert chosen is padding


def test_eager_decode_is_max_len_just_while_half_of_the_padded_buffer_is_real() -> None:
    for counts in product(range(5), repeat=4):
        real = Fraction(sum(counts), 4 * max(counts)) if any(counts) else Fraction(1)
        expected = MAX_LEN if real >= Fraction(1, 2) else SUM_LEN
        assert choose_padding(counts, phase=DECODE) is expected


@ANY
@given(counts=COUNTS, flags=st.tuples(st.booleans(), st.booleans(), st.booleans()), order=st.randoms())
def test_padding_does_not_depend_on_which_rank_has_which_count(
    counts: tuple[int, ...], flags: tuple[bool, bool, bool], order: Any
) -> None:
    shuffled = list(counts)
    order.shuffle(shuffled)
    capturing, hybrid_ssm, sum_len_in_graphs = flags
    for phase in (PREFILL, DECODE):
        chosen = [
            choose_padding(
                c,
                phase=phase,
                capturing=capturing,
                hybrid_ssm=hybrid_ssm,
                sum_len_in_graphs=sum_len_in_graphs,
            )
            for c in (counts, shuffled)
        ]
        assert chosen[0] is chosen[1]


@pytest.mark.parametrize("name", [field.name for field in fields(TokenPlan)])
def test_no_field_of_a_plan_can_be_set(name: str) -> None:
    plan = TokenPlan((3, 0, 2), SUM_LEN)
    with pytest.raises(FrozenInstanceError):
        setattr(plan, name, getattr(plan, name))


def test_plans_are_keys() -> None:
    plan = TokenPlan((3, 0, 2), SUM_LEN)
    assert {plan: "seen"}[TokenPlan((3, 0, 2), SUM_LEN)] == "seen"
    assert TokenPlan((3, 0, 2), MAX_LEN) not in {plan: "seen"}


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_counts_make_the_same_plan_as_ints(kind: Callable[[int], Any]) -> None:
    plan = TokenPlan(tuple(kind(count) for count in (3, 0, 2)), SUM_LEN)
    assert plan == TokenPlan((3, 0, 2), SUM_LEN)
    assert plan.digest == TokenPlan((3, 0, 2), SUM_LEN).digest
    assert {type(count) for count in plan.counts} == {int}
    assert choose_padding([kind(5), kind(0)], phase=DECODE) is MAX_LEN


@pytest.mark.parametrize(
    "counts", [[3, 0, 2], iter([3, 0, 2]), np.array([3, 0, 2])], ids=["list", "iterator", "array"]
)
def test_counts_of_any_kind_of_sequence_are_kept_as_a_tuple(counts: Any) -> None:
    assert TokenPlan(counts, SUM_LEN).counts == (3, 0, 2)


BAD_COUNTS = {
    "negative": ((3, -1), r"counts\[1\] must lie in \[0, 2147483647\], got -1"),
    "too large": ((2**31, 0), r"counts\[0\] must lie in \[0, 2147483647\], got 2147483648"),
    "float": ((3, 4, 2.0), r"counts\[2\] must be an int, got 2\.0"),
    "nan": ((float("nan"),), r"counts\[0\] must be an int, got nan"),
    "str": (("3",), r"counts\[0\] must be an int, got '3'"),
    "None": ((3, None), r"counts\[1\] must be an int, got None"),
    "empty": ((), "counts must name at least one dp rank, got none"),
}


@pytest.mark.parametrize(("counts", "message"), BAD_COUNTS.values(), ids=BAD_COUNTS)
def test_counts_that_cannot_be_are_told_with_both_sides(counts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        TokenPlan(counts, MAX_LEN)
    with pytest.raises(ConfigError, match=f"^{message}$"):
        choose_padding(counts, phase=DECODE)


BAD_FIELDS = {
    "align 0": ({"align": 0}, r"align must be an int in \[1, 2147483647\], got 0"),
    "align negative": ({"align": -4}, r"align must be an int in \[1, 2147483647\], got -4"),
    "align float": ({"align": 2.0}, r"align must be an int in \[1, 2147483647\], got 2\.0"),
    "align True": ({"align": True}, r"align must be an int in \[1, 2147483647\], got True"),
    "padding str": ({"padding": "MAX_LEN"}, "padding must be a PaddingMode, got 'MAX_LEN'"),
    "padding None": ({"padding": None}, "padding must be a PaddingMode, got None"),
    "phase int": ({"phase": 1}, "phase must be a Phase, got 1"),
    "idle with rows": ({"phase": IDLE}, r"an IDLE plan has no rows, got counts \(3, 0\)"),
}


@pytest.mark.parametrize(("changed", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_plan_that_cannot_be_is_told_with_both_sides(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        TokenPlan(**{"counts": (3, 0), "padding": MAX_LEN, **changed})
