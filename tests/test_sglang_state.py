"""Ranks, padding and sizes as SGLang asks for them; no ranks are needed."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_cases import batch_class, forward_batch

from rocm_dp import RankLayout, rocm
from rocm_dp.errors import ConfigError, TensorError, TransportRefusedError
from rocm_dp.integrations.sglang import (
    DpAttention,
    DpPaddingMode,
    Settings,
    compute_dp_attention_local_info,
    compute_dp_attention_world_info,
)

MAX_LEN, SUM_LEN = DpPaddingMode.MAX_LEN, DpPaddingMode.SUM_LEN


def layer(rank: int = 0, world: int = 8, dp: int = 4, cp: int = 1, **chosen: Any) -> DpAttention:
    """A layer whose exchange is never called."""
    exchange = SimpleNamespace(
        layout=RankLayout(rank, world, dp, cp), hidden=16, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    dense, enabled = chosen.pop("moe_dense_tp_size", None), chosen.pop("enabled", True)
    return DpAttention(
        exchange,  # type: ignore[arg-type]
        enabled=enabled,
        moe_dense_tp_size=dense,
        settings=Settings(**chosen),
    )


def test_the_place_of_every_rank_is_that_of_the_layout() -> None:
    for world, dp, cp in product((1, 2, 4, 6, 8, 16), (1, 2, 4), (1, 2)):
        if world % (dp * cp):
            with pytest.raises(ConfigError, match=f"must divide tp_size {world}"):
                compute_dp_attention_world_info(True, 0, world, dp, cp)
            continue
        for rank in range(world):
            at = RankLayout(rank, world, dp, cp)
            got = compute_dp_attention_world_info(True, rank, world, dp, cp)
            assert got == (at.tp_rank, at.tp_size, at.dp_rank, dp)
            assert compute_dp_attention_world_info(False, rank, world, dp) == (rank, world, 0, 1)


def test_the_place_within_a_dense_group_counts_from_its_first_rank() -> None:
    # 8 ranks, dp 4: dense groups of 4 ranks hold 2 dp ranks of 2; dense groups of 1 hold one each.
    assert [compute_dp_attention_local_info(True, rank, 8, 4, 4) for rank in (0, 1, 2, 5, 7)] == [
        (0, 2, 0),
        (1, 2, 0),
        (0, 2, 1),
        (1, 2, 0),
        (1, 2, 1),
    ]
    assert compute_dp_attention_local_info(True, 5, 8, 4, 1) == (0, 1, 0)
    assert compute_dp_attention_local_info(True, 5, 8, 4, None) == (1, 2, 2)
    assert compute_dp_attention_local_info(False, 5, 8, 4, 4) == (5, 8, 0)
    for dense in (None, 1, 4, 8):
        one = layer(5, moe_dense_tp_size=dense)
        assert one.get_local_attention_dp_rank() == compute_dp_attention_local_info(True, 5, 8, 4, dense)[2]
    assert [layer(moe_dense_tp_size=dense).get_local_attention_dp_size() for dense in (None, 1, 4)] == [4, 1, 2]
    off = layer(5, dp=1, enabled=False)
    assert (off.get_local_attention_dp_rank(), off.get_local_attention_dp_size()) == (0, 1)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.booleans(), st.booleans())
def test_padding_is_the_cheaper_one_and_prefill_is_packed(counts: list[int], extend: bool, hybrid: bool) -> None:
    wanted = SUM_LEN if 2 * sum(counts) < 4 * max(counts) else MAX_LEN
    if extend:
        wanted = MAX_LEN if hybrid and min(counts) == 0 else SUM_LEN
    one = layer(hybrid_ssm=hybrid)
    assert one.get_dp_padding_mode(extend, counts) is wanted
    with one.disable_dp_size():
        assert one.get_dp_padding_mode(extend, counts) is MAX_LEN


def test_a_step_that_brings_its_own_count_alone_is_padded_like_one_with_idle_ranks() -> None:
    assert layer(hybrid_ssm=True).get_dp_padding_mode(True, [3]) is SUM_LEN
    assert layer(dp=2, world=2).get_dp_padding_mode(False, [3]) is MAX_LEN
    assert layer().get_dp_padding_mode(False, [3]) is SUM_LEN


def test_captured_steps_are_max_len_unless_rocm_needs_sum_len() -> None:
    assert layer().get_default_mode_in_cuda_graph([1, 2, 3, 4]) is MAX_LEN
    on = rocm.Workaround(on=True, reason="asked")
    assert layer(sum_len_in_graphs=on).get_default_mode_in_cuda_graph() is SUM_LEN


def test_modes_say_what_they_are() -> None:
    assert (MAX_LEN.is_max_len(), MAX_LEN.is_sum_len(), SUM_LEN.is_max_len(), SUM_LEN.is_sum_len()) == (
        True,
        False,
        False,
        True,
    )
    assert (MAX_LEN, SUM_LEN) == (1, 2)


def test_before_the_first_step_every_question_has_an_answer() -> None:
    one = layer()
    assert (one.get_global_dp_buffer_len(), one.get_local_dp_buffer_len()) == (0, 0)
    assert (one.get_dp_global_num_tokens(), one.is_dp_max_padding(), one.get_is_extend_in_batch()) == (
        None,
        False,
        False,
    )
    assert not one.is_allocation_symmetric()
    assert layer(dp=1, enabled=False).is_allocation_symmetric()
    assert one.get_global_dp_buffer(None).shape == (0, 16)
    one.mask_dp_pad_moe_topk_ids(ids := torch.ones(3, 2, dtype=torch.int32))
    assert ids.eq(1).all()


def test_a_step_sets_the_buffers_and_what_is_known_of_the_counts() -> None:
    one = layer(3)
    one.set_dp_buffer_len(12, 3, True, [3, 3, 3, 3])
    one.set_is_extend_in_batch(True)
    assert (one.get_global_dp_buffer_len(), one.get_local_dp_buffer_len()) == (12, 3)
    assert (one.get_dp_global_num_tokens(), one.is_dp_max_padding(), one.get_is_extend_in_batch()) == (
        [3] * 4,
        True,
        True,
    )
    assert one.is_allocation_symmetric()
    whole, own, wide = one.get_global_dp_buffer(), one.get_local_dp_buffer(), one.get_local_dp_buffer(None, 5)
    assert (whole.shape, own.shape, wide.shape) == ((12, 16), (3, 16), (3, 5))
    assert (whole.dtype, whole.device) == (one.get_dp_dtype(), one.get_dp_device())
    one.set_local_dp_buffer_len(2)
    assert one.get_local_dp_buffer().shape == (2, 16)
    one.init_dp_gathered_buffer(SimpleNamespace(hidden_size=7, dtype=torch.float32))
    assert (one.get_dp_hidden_size(), one.get_global_dp_buffer().dtype) == (7, torch.float32)
    one.set_dp_buffer_len(6, 2, False)
    assert one.get_dp_global_num_tokens() is None


def test_a_batch_brings_its_padded_counts_or_the_plain_ones_when_captured() -> None:
    one, batch = layer(3), forward_batch([1, 2, 3, 4], SUM_LEN)
    one.set_dp_buffer_len_from_batch(batch)
    assert (one.get_global_dp_buffer_len(), one.get_local_dp_buffer_len()) == (10, 2)
    batch.global_num_tokens_padded_cpu, batch.dp_padding_mode = [4] * 4, MAX_LEN
    one.set_dp_buffer_len_from_batch(batch)
    assert (one.get_local_dp_buffer_len(), one.is_dp_max_padding()) == (4, True)
    assert one.get_dp_global_num_tokens() == [4] * 4


def test_places_on_the_device_and_the_host_agree_and_idle_ranks_have_one() -> None:
    counts = [2, 0, 3, 0]
    for rank in range(8):
        one, batch = layer(rank), forward_batch(counts, SUM_LEN)
        start, count = one.get_dp_local_info(batch)
        dp = rank // 2
        assert (start.item(), count.item()) == (sum(counts[:dp]), counts[dp])
        assert (start.dim(), count.dim()) == (0, 0)
        assert one.get_dp_local_info(batch)[0] is start, "kept on the batch"
        assert one.get_dp_local_slice_cpu(batch, False, None) == (start.item(), count.item())
        assert one.get_dp_local_slice_cpu(batch, True, 6) == (6 * dp, counts[dp])
    with pytest.raises(TensorError, match="cuda_graph_batch must be the rows"):
        one.get_dp_local_slice_cpu(batch, True, None)


def test_a_rank_finds_itself_in_sequences_of_all_dp_ranks_or_of_itself() -> None:
    one = layer(6)
    assert (one.dp_slot_in([1, 2, 3, 4]), one.dp_slot_in([9]), one.dp_gather_slot()) == (3, 0, 3)
    with pytest.raises(ConfigError, match="each of 4 dp ranks is needed, got 3 entries"):
        one.dp_slot_in([1, 2, 3])


def test_draft_workers_see_one_dp_rank_and_an_error_restores_the_rest() -> None:
    one = layer(6, gatherv=True)

    def draft() -> None:
        with one.disable_dp_size(), one.disable_dp_size():
            assert (one.get_attention_dp_size(), one.dp_gather_width(), one.deployment_attn_dp_size()) == (1, 1, 4)
            raise KeyError

    with pytest.raises(KeyError):
        draft()
    assert (one.get_attention_dp_size(), one.get_attention_dp_rank(), one.dp_gather_width()) == (4, 3, 4)


def test_collectives_of_varying_size_are_offered_for_one_rank_a_dp_rank_in_sum_len_only() -> None:
    alone = layer(world=4, gatherv=True)
    assert alone.is_dp_gatherv_active()
    alone.set_dp_buffer_len(4, 1, True)
    assert not alone.is_dp_gatherv_active()
    assert not layer(world=8, gatherv=True).is_dp_gatherv_active()
    assert not layer(world=4).is_dp_gatherv_active()


def test_layout_questions_are_answered_from_the_layout() -> None:
    one = layer(5, world=8, dp=2, cp=2)
    assert (one.get_attention_tp_rank(), one.get_attention_tp_size()) == (1, 2)
    assert (one.get_attention_cp_rank(), one.get_attention_cp_size()) == (0, 2)
    assert one.is_dp_attention_enabled()
    assert one.can_use_dp_reduce_scatter()


@given(st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_expert_ids_of_padding_rows_are_dropped_and_no_others(counts: list[int]) -> None:
    one = layer()
    one.set_dp_buffer_len(20, 5, True, [5] * 4, torch.tensor(counts, dtype=torch.int32))
    ids = torch.arange(40, dtype=torch.int32).view(20, 2)
    want = ids.clone()
    for row in range(20):
        if row % 5 >= counts[row // 5]:
            want[row] = -1
    one.mask_dp_pad_moe_topk_ids(ids)
    assert torch.equal(ids, want)
    one.mask_dp_pad_moe_topk_ids(other := torch.ones(7, 2, dtype=torch.int32))
    assert other.eq(1).all(), "another layout is left as it is"
    one.set_dp_buffer_len(20, 5, False, [5] * 4, torch.tensor(counts, dtype=torch.int32))
    one.mask_dp_pad_moe_topk_ids(packed := torch.ones(20, 2, dtype=torch.int32))
    assert packed.eq(1).all(), "packed rows have no padding"


def test_persistent_buffers_grow_and_never_shrink() -> None:
    one = layer()
    first = one.get_tbo_persistent_buffer(("g", 0), 4, 8, torch.float32, "cpu")
    assert one.get_tbo_persistent_buffer(("g", 0), 3, 8, torch.float32, "cpu").data_ptr() == first.data_ptr()
    assert one.get_tbo_persistent_buffer(("g", 1), 3, 8, torch.float32, "cpu").data_ptr() != first.data_ptr()
    grown = one.get_tbo_persistent_buffer(("g", 0), 9, 8, torch.float32, "cpu")
    assert one.get_tbo_persistent_buffer(("g", 0), 5, 8, torch.float32, "cpu").data_ptr() == grown.data_ptr()
    assert one.get_tbo_persistent_buffer(("g", 0), 2, 8, torch.bfloat16, "cpu").dtype == torch.bfloat16
    assert one.get_tbo_persistent_buffer(("g", 0), 9, 4, torch.bfloat16, "cpu").shape == (9, 4)


def test_wrong_tensors_are_refused_with_both_sides() -> None:
    one, batch = layer(), forward_batch([1, 1, 1, 1], MAX_LEN)
    rows = torch.zeros(4, 16, dtype=torch.bfloat16)
    with pytest.raises(TensorError, match="4 equal blocks, got 3 local rows and 4 global rows"):
        one.dp_gather_replicate(rows, torch.zeros(3, 16, dtype=torch.bfloat16), batch)
    with pytest.raises(TensorError, match=r"must be alike: torch.bfloat16 \[\*, 16\]"):
        one.dp_gather_partial(rows, torch.zeros(1, 8, dtype=torch.bfloat16), batch)
    with pytest.raises(TensorError, match="contiguous with rows in dimension 0"):
        one.dp_scatter(rows.t(), rows, batch)
    with pytest.raises(TensorError, match=r"counts \(9, 1, 1, 1\) are 12 rows, the global buffer has 4"):
        one.dp_gather_replicate(rows, rows, forward_batch([9, 1, 1, 1], SUM_LEN))
    with pytest.raises(TensorError, match="got 3 of 4 for 4 dp ranks with counts None"):
        one.dp_reduce_scatter_tensor(torch.zeros(3, 16), torch.zeros(4, 16))
    one.set_dp_buffer_len(4, 1, False, [3, 1, 0, 0])
    with pytest.raises(TensorError, match=r"got 1 of 4 for 4 dp ranks with counts \[3, 1, 0, 0\]"):
        one.dp_reduce_scatter_tensor(torch.zeros(1, 16), torch.zeros(4, 16))
    # The sizes of a dp rank repeated for each of its attention-tp ranks: twice too many rows.
    with pytest.raises(TensorError, match="are 2 of 8 rows for dp rank 0, got 1 of 4"):
        one.dp_reduce_scatterv_async(rows[:1], rows, [1] * 8)
    with pytest.raises(TensorError, match="4 dp ranks or 8 ranks, got 3"):
        one.dp_reduce_scatterv_async(rows[:1], rows, [1] * 3)
    with pytest.raises(ValueError, match="must not overlap"):
        one.dp_scatter(rows[:1], rows, batch)
    # What a rank would else meet alone, as the index of a place that is not there.
    for rank in (0, 6):
        other = layer(rank)
        with pytest.raises(TensorError, match=r"counts of 4 dp ranks, the batch has \(2,\)"):
            other.dp_gather_replicate(rows, rows[:2], forward_batch([2], SUM_LEN))
        with pytest.raises(TensorError, match=r"must name 1 cp ranks, got \[\]"):
            other.dp_gather_replicate(rows, rows[:1], forward_batch([1] * 4, SUM_LEN), [])
    nothing = batch_class("ForwardBatch")()
    for ask in (
        lambda: one.dp_gather_partial(rows, rows[:1], nothing),
        lambda: one.dp_scatter(rows[:1].clone(), rows, nothing),
        lambda: one.get_dp_local_slice_cpu(nothing, False, None),
        lambda: one.set_dp_buffer_len_from_batch(nothing),
    ):
        with pytest.raises(TensorError, match="rows of each of 4 dp ranks are needed, the batch has none"):
            ask()


def test_a_sum_that_rocm_cannot_capture_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    on = rocm.Workaround(on=True, reason="the HIP runtime says 7.1.25424")
    one = layer(sum_len_in_graphs=on)
    monkeypatch.setattr(one, "capturing", lambda: True)
    rows = torch.zeros(6, 16, dtype=torch.bfloat16)
    with pytest.raises(TransportRefusedError, match=r"can't be captured here.*the HIP runtime says 7.1.25424"):
        one.dp_gather_replicate(
            rows, torch.zeros(1, 16, dtype=torch.bfloat16), forward_batch([1, 2, 3, 0], SUM_LEN)
        )
