"""Gather, scatter and reduce-scatter, into buffers of the caller's. G global rows, L local rows.

A plan goes over the exchange. What has none (counts that only the device knows, cp ranks with rows of their own,
more rows than ``max_rows``) is placed in the caller's zero-filled buffer and summed there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.checks import SUMMED_DTYPES, check_summed
from rocm_dp.errors import TensorError, TransportRefusedError
from rocm_dp.integrations.sglang import fp8, places
from rocm_dp.integrations.sglang.state import StepState
from rocm_dp.kernels import rows as row_kernels
from rocm_dp.plan import PaddingMode, TokenPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLANS_KEPT = 64
# SGLang sums rows of other kinds too: on ROCm, floats that one rank alone holds, seen as integers.
_ADDED = (*SUMMED_DTYPES, torch.float64, torch.int32, torch.int64)


class Moves(StepState):
    """The functions that move rows around the MoE layers and the logits."""

    def get_dp_local_info(self, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first row and the number of rows of this dp rank on the device, 0-d; kept on the batch."""
        if forward_batch.dp_local_start_pos is None:
            counts = forward_batch.global_num_tokens_gpu
            slot = self.dp_slot_in(counts)
            forward_batch.dp_local_start_pos = counts[:slot].sum()
            forward_batch.dp_local_num_tokens = counts[slot]
        return forward_batch.dp_local_start_pos, forward_batch.dp_local_num_tokens

    def get_dp_local_slice_cpu(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None
    ) -> tuple[int, int]:
        """Return the same on the host; in a graph every dp rank has ``cuda_graph_batch`` rows of the buffer."""
        counts = forward_batch.global_num_tokens_cpu
        slot = self.dp_slot_in(counts)
        if not can_run_graph:
            return sum(counts[:slot]), counts[slot]
        if cuda_graph_batch is None:
            raise TensorError("cuda_graph_batch must be the rows of a captured batch, got None")
        return slot * cuda_graph_batch, counts[slot]

    def dp_gather_partial(
        self,
        global_tokens: torch.Tensor,
        local_tokens: torch.Tensor,
        forward_batch: Any,
        cp_shard_counts: Sequence[int] | None = None,
    ) -> None:
        """Fill ``global_tokens`` [G, ...] with the rows of all dp ranks, summed over attention tp.

        ``cp_shard_counts``: each cp rank of the dp rank holds a shard of that many rows, not a copy of all.
        """
        self._gather(global_tokens, local_tokens, forward_batch, cp_shard_counts, partial=True)

    def dp_gather_replicate(
        self,
        global_tokens: torch.Tensor,
        local_tokens: torch.Tensor,
        forward_batch: Any,
        cp_shard_counts: Sequence[int] | None = None,
    ) -> None:
        """Fill ``global_tokens`` [G, ...] with the rows of all dp ranks, of which attention tp holds copies."""
        self._gather(global_tokens, local_tokens, forward_batch, cp_shard_counts, partial=False)

    def dp_scatter(
        self,
        local_tokens: torch.Tensor,
        global_tokens: torch.Tensor,
        forward_batch: Any,
        cp_shard_counts: Sequence[int] | None = None,
    ) -> None:
        """Fill ``local_tokens`` [L, ...] with this dp rank's rows of ``global_tokens``, zeros behind them."""
        local, full = places.as_rows("local_tokens", local_tokens), places.as_rows("global_tokens", global_tokens)
        counts = places.counts_of(forward_batch)
        if cp_shard_counts is not None:
            place = places.shard_place(counts, cp_shard_counts, self.layout)
        elif counts is None or self.capturing():
            place = places.Place(*self.get_dp_local_info(forward_batch))
        else:
            slot = self.dp_slot_in(counts)
            place = places.Place(sum(counts[:slot]), counts[slot])
        row_kernels.read_rows(local, full, start=place.start, count=place.count)

    def can_use_dp_reduce_scatter(self) -> bool:
        """Return True: every layout is served."""
        return True

    def dp_reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
        """Sum ``input`` [G, ...] over all ranks; this dp rank's rows fill ``output`` [L, ...].

        The rows are those of the step when all of them are G, else equal blocks: what every rank sees alike.
        """
        out, full = places.as_rows("output", output), places.as_rows("input", input)
        dp_size, counts = self.layout.dp_size, self._counts
        if counts is None or len(counts) != dp_size or sum(counts) != full.shape[0]:
            counts = [full.shape[0] // dp_size] * dp_size
        if (sum(counts), counts[self.layout.dp_rank]) != (full.shape[0], out.shape[0]):
            raise TensorError(
                f"output must have the rows of its dp rank, got {out.shape[0]} of {full.shape[0]} for {dp_size} dp "
                f"ranks with counts {self._counts}"
            )
        self._combine(out, full, self._plan(tuple(counts), PaddingMode.SUM_LEN))

    def _gather(
        self,
        global_tokens: torch.Tensor,
        local_tokens: torch.Tensor,
        batch: Any,
        shards: Sequence[int] | None,
        *,
        partial: bool,
    ) -> None:
        full, local = places.as_rows("global_tokens", global_tokens), places.as_rows("local_tokens", local_tokens)
        if (full.shape[1], full.dtype, full.device) != (local.shape[1], local.dtype, local.device):
            raise TensorError(
                f"global_tokens and local_tokens must be alike: {full.dtype} [*, {full.shape[1]}] on {full.device} "
                f"and {local.dtype} [*, {local.shape[1]}] on {local.device}"
            )
        plan, place = self._route(batch, shards, full.shape[0], local.shape[0])
        if plan is not None and self._carries(full, plan, partial=partial):
            self._gather_by_plan(full, local, plan, partial=partial)
        else:
            self._place_and_sum(full, local, place, partial=partial)

    def _route(
        self, batch: Any, shards: Sequence[int] | None, rows: int, local_rows: int
    ) -> tuple[TokenPlan | None, places.Place]:
        """Return the plan of a gather, if it has one, and where this rank's rows go."""
        at, counts = self.layout, places.counts_of(batch)
        if shards is not None:
            return None, places.shard_place(counts, shards, at)
        if places.is_max_len(batch):
            if places.blocks_of(at, rows, local_rows) > at.dp_size:
                own = at.dp_rank * at.cp_size + at.cp_rank
                return None, places.Place(own * local_rows, local_rows, every_cp=True)
            plan = self._plan((local_rows,) * at.dp_size, PaddingMode.MAX_LEN)
        else:
            packed = places.packed_counts(counts, rows, at, capturing=self.capturing())
            if packed is None:
                return None, places.Place(*self.get_dp_local_info(batch))
            plan = self._plan(packed, PaddingMode.SUM_LEN)
        return plan, places.Place(plan.starts[at.dp_rank], plan.counts[at.dp_rank])

    def _plan(self, counts: tuple[int, ...], padding: PaddingMode) -> TokenPlan:
        """Return the plan of a step, which serves every layer."""
        key = (counts, padding)
        if key not in self._plans:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = TokenPlan(counts, padding)
        return self._plans[key]

    def _carries(self, rows: torch.Tensor, plan: TokenPlan, *, partial: bool) -> bool:
        """Return whether the exchange takes this gather: it fits, and sums are of the exchange's own rows."""
        summed = partial and self.layout.tp_size > 1
        # A message of a new kind is confirmed with all ranks, which nothing can do in a capture.
        return self.settings.fits(plan) and (self._is_own(rows) or not (summed or self.capturing()))

    def _is_own(self, rows: torch.Tensor) -> bool:
        return (rows.shape[1], rows.dtype) == (self.exchange.hidden, self.exchange.dtype)

    def _gather_by_plan(self, full: torch.Tensor, local: torch.Tensor, plan: TokenPlan, *, partial: bool) -> None:
        count = plan.counts[self.layout.dp_rank]
        if local.shape[0] < count:
            local = torch.cat([local, local.new_zeros(count - local.shape[0], local.shape[1])])
        local, filled = local[:count], full[: plan.rows]
        summed = partial and self.layout.tp_size > 1
        if self.settings.fp8_gather and not summed and plan.padding is PaddingMode.SUM_LEN and fp8.packable(local):
            values, scales = self.exchange.gather_many(fp8.packed(local), plan)
            fp8.unpack_into(filled, values, scales)
        elif self._is_own(full):
            filled.copy_(self.exchange.gather(local, plan, partial=partial))
        else:
            filled.copy_(self.exchange.gather_many([local], plan)[0])
        full[plan.rows :].zero_()

    def _place_and_sum(
        self, full: torch.Tensor, local: torch.Tensor, place: places.Place, *, partial: bool
    ) -> None:
        """Place the rows once, or once for each attention-tp addend, and add all buffers in place.

        Rows that need no sum are added as integers: -0.0 + 0.0 would lose its sign, and fp8 has no sum.
        """
        at, summed = self.layout, partial and self.layout.tp_size > 1
        if summed:
            check_summed("dp_gather_partial", full.dtype, _ADDED)
        if (place.every_cp or at.cp_rank == 0) and (summed or at.tp_rank == 0):
            row_kernels.place_rows(full, local, start=place.start, count=place.count)
        else:
            full.zero_()
        self._sum_over_all(full if summed else _as_ints(full))

    def _combine(self, out: torch.Tensor, full: torch.Tensor, plan: TokenPlan) -> None:
        if self.settings.fits(plan) and self._is_own(full):
            out.copy_(self.exchange.combine(full, plan))
            return
        check_summed("dp_reduce_scatter_tensor", full.dtype, _ADDED)
        summed = full.clone()
        self._sum_over_all(summed)
        start = plan.starts[self.layout.dp_rank]
        out.copy_(summed[start : start + out.shape[0]])

    def _sum_over_all(self, buffer: torch.Tensor) -> None:
        if self.settings.sum_len_in_graphs.on and self.capturing():
            raise TransportRefusedError(
                "a sum over a process group can't be captured here, and these rows have no plan that peer memory "
                f"carries; {self.settings.sum_len_in_graphs.reason}"
            )
        self.exchange.sum_over_all(buffer)

    def capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _as_ints(rows: torch.Tensor) -> torch.Tensor:
    # The place in the storage too: without rows the address is 0, and torch views no odd place in wider units.
    begins = rows.data_ptr() | int(rows.storage_offset()) * rows.itemsize
    odd = (rows.shape[1] * rows.itemsize | begins) % 4
    return rows.view(torch.uint8 if odd else torch.int32)
