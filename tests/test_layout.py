"""RankLayout: every rank of every factorisation of up to 8 ranks, and layouts that can't be."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from rocm_dp.errors import ConfigError
from rocm_dp.layout import RankLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = [(dp, cp, tp) for dp, cp, tp in product(range(1, 9), repeat=3) if dp * cp * tp <= 8]
SHAPE = pytest.mark.parametrize(("dp", "cp", "tp"), SHAPES)


def every_rank(dp: int, cp: int, tp: int, moe_dp: int = 1) -> Iterator[RankLayout]:
    world = dp * cp * tp
    return (RankLayout(rank, world, dp, cp, moe_dp) for rank in range(world))


def assert_partition(groups: set[tuple[int, ...]], world: int) -> None:
    """Every rank of the world is in exactly one of the groups."""
    assert sorted(rank for group in groups for rank in group) == list(range(world))


def test_the_shapes_are_all_factorisations_of_1_to_8() -> None:
    assert len(SHAPES) == 38
    assert {dp * cp * tp for dp, cp, tp in SHAPES} == set(range(1, 9))


@SHAPE
def test_a_rank_is_found_again_from_its_place(dp: int, cp: int, tp: int) -> None:
    places = []
    for layout in every_rank(dp, cp, tp):
        place = (layout.dp_rank, layout.cp_rank, layout.tp_rank)
        assert (place[0] * cp + place[1]) * tp + place[2] == layout.rank
        places.append(place)
    assert places == list(product(range(dp), range(cp), range(tp)))


@SHAPE
def test_sizes_multiply_to_the_world(dp: int, cp: int, tp: int) -> None:
    for layout in every_rank(dp, cp, tp):
        assert (layout.dp_size, layout.cp_size, layout.tp_size) == (dp, cp, tp)
        assert layout.replicas == cp * tp
        assert layout.replica_rank == layout.cp_rank * tp + layout.tp_rank


@SHAPE
def test_tp_groups_partition_the_world_with_each_rank_at_its_tp_rank(dp: int, cp: int, tp: int) -> None:
    layouts = list(every_rank(dp, cp, tp))
    groups = [layout.tp_ranks(layout.dp_rank, layout.cp_rank) for layout in layouts]
    assert_partition(set(groups), dp * cp * tp)
    for layout, group in zip(layouts, groups, strict=True):
        assert len(group) == tp
        assert group[layout.tp_rank] == layout.rank


@SHAPE
def test_cp_groups_partition_the_world_with_each_rank_at_its_cp_rank(dp: int, cp: int, tp: int) -> None:
    layouts = list(every_rank(dp, cp, tp))
    groups = [layout.cp_ranks(layout.dp_rank, layout.tp_rank) for layout in layouts]
    assert_partition(set(groups), dp * cp * tp)
    for layout, group in zip(layouts, groups, strict=True):
        assert len(group) == cp
        assert group[layout.cp_rank] == layout.rank


@SHAPE
def test_every_rank_names_the_same_groups_for_one_place(dp: int, cp: int, tp: int) -> None:
    first, *others = every_rank(dp, cp, tp)
    for other in others:
        for d in range(dp):
            assert [other.tp_ranks(d, c) for c in range(cp)] == [first.tp_ranks(d, c) for c in range(cp)]
            assert [other.cp_ranks(d, t) for t in range(tp)] == [first.cp_ranks(d, t) for t in range(tp)]


@SHAPE
def test_moe_groups_partition_the_world_for_every_number_of_moe_copies(dp: int, cp: int, tp: int) -> None:
    world = dp * cp * tp
    for moe_dp in (size for size in range(1, world + 1) if world % size == 0):
        layouts = list(every_rank(dp, cp, tp, moe_dp))
        groups = [layout.moe_dp_ranks() for layout in layouts]
        assert_partition(set(groups), world)
        for layout, group in zip(layouts, groups, strict=True):
            assert layout.rank in group
            assert list(group) == sorted(group)
            assert len(group) == max(cp, moe_dp)


def test_moe_groups_are_the_cp_groups_when_cp_is_larger() -> None:
    assert RankLayout(5, 8, dp_size=2, cp_size=4, moe_dp_size=2).moe_dp_ranks() == (4, 5, 6, 7)


def test_moe_groups_are_the_same_place_of_every_copy_when_cp_is_not_larger() -> None:
    assert RankLayout(5, 8, dp_size=2, cp_size=2, moe_dp_size=2).moe_dp_ranks() == (1, 5)


def test_defaults_leave_the_world_to_attention_tp() -> None:
    layout = RankLayout(3, 4)
    assert (layout.dp_size, layout.cp_size, layout.tp_size, layout.tp_rank) == (1, 1, 4, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 8}, r"rank must lie in \[0, world_size 8\), got 8"),
        ({"rank": -1}, r"rank must lie in \[0, world_size 8\), got -1"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"dp_size": 0}, "dp_size must be at least 1, got 0"),
        ({"cp_size": -2}, "cp_size must be at least 1, got -2"),
        ({"moe_dp_size": 0}, "moe_dp_size must be at least 1, got 0"),
        ({"dp_size": 3}, r"dp_size 3 \* cp_size 1 must divide world_size 8"),
        ({"dp_size": 4, "cp_size": 4}, r"dp_size 4 \* cp_size 4 must divide world_size 8"),
        ({"dp_size": 16}, r"dp_size 16 \* cp_size 1 must divide world_size 8"),
        ({"moe_dp_size": 3}, "moe_dp_size 3 must divide world_size 8"),
        ({"rank": 1.0}, "rank must be an int, got 1.0"),
        ({"rank": True}, "rank must be an int, got True"),
        ({"world_size": "8"}, "world_size must be an int, got '8'"),
        ({"dp_size": None}, "dp_size must be an int, got None"),
        ({"cp_size": 2.0}, "cp_size must be an int, got 2.0"),
        ({"moe_dp_size": "1"}, "moe_dp_size must be an int, got '1'"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_layout_that_cannot_be_is_told_with_both_sides(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        RankLayout(**{"rank": 0, "world_size": 8, **fields})


def test_a_layout_is_frozen_and_hashable() -> None:
    layout = RankLayout(5, 8, dp_size=2, cp_size=2)
    with pytest.raises(FrozenInstanceError):
        layout.rank = 0  # type: ignore[misc]
    assert len({layout, replace(layout), replace(layout, rank=4)}) == 2
