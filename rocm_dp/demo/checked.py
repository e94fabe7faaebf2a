"""An exchange whose every result is compared with the oracle, and timed."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.exchange import TokenExchange
    from rocm_dp.plan import TokenPlan


class CheckedPending:
    """A Pending that checks its result when it is waited for."""

    def __init__(self, wait: Callable[[], torch.Tensor]) -> None:
        self._wait = wait

    def wait(self) -> torch.Tensor:
        """Return the checked result."""
        return self._wait()


class CheckedExchange:
    """Wraps a TokenExchange; the inputs of all ranks come over the cpu group, a way of their own.

    Counts the checks and what failed; adds up the seconds spent in each part of a layer, checking left out. The
    device is synchronised around each part, so nothing overlaps here in time, only in order.
    """

    def __init__(self, exchange: TokenExchange) -> None:
        self._exchange = exchange
        self.layout, self.device = exchange.layout, exchange.device
        self.hidden, self.dtype = exchange.hidden, exchange.dtype
        self.checks = 0
        self.failures: list[str] = []
        self.worst_sum_error = 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self._lap_started = time.perf_counter()

    def gather_async(
        self, local: torch.Tensor, plan: TokenPlan, *, partial: bool = False, batch: int = 0
    ) -> CheckedPending:
        """Gather, checked bit for bit (within the rounding bound where rows are added)."""
        self._lap("attention")
        locals_ = self._from_all(local, [plan.counts[r // self.layout.replicas] for r in self._ranks()])
        self._lap(None)
        pending = self._exchange.gather_async(local, plan, partial=partial, batch=batch)
        self._lap("gather")

        def wait() -> torch.Tensor:
            self._lap(None)
            got = pending.wait()
            self._lap("gather")
            self._check_gather(got.cpu(), locals_, plan, partial=partial)
            self._lap(None)
            return got

        return CheckedPending(wait)

    def combine_async(self, partial: torch.Tensor, plan: TokenPlan, *, batch: int = 0) -> CheckedPending:
        """Combine, checked within the rounding bound of the sum."""
        self._lap("experts")
        partials = self._from_all(partial, [plan.rows] * self.layout.world_size)
        self._lap(None)
        pending = self._exchange.combine_async(partial, plan, batch=batch)
        self._lap("combine")

        def wait() -> torch.Tensor:
            self._lap(None)
            got = pending.wait()
            self._lap("combine")
            own = reference.scatter_range(plan, self.layout.dp_rank)
            self._check_sum("combine", got.cpu(), [rows[own] for rows in partials], plan)
            self._lap(None)
            return got

        return CheckedPending(wait)

    def start_lap(self) -> None:
        """Start timing here: what comes before the first verb of a step counts as attention."""
        self._lap(None)

    def scatter(self, full: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
        """Scatter, checked bit for bit."""
        got = self._exchange.scatter(full, plan)
        self._note(
            reference.same_bits(got, reference.scatter(full, plan)[self.layout.dp_rank]), "scatter differs", plan
        )
        return got

    def _check_gather(
        self, got: torch.Tensor, locals_: list[torch.Tensor], plan: TokenPlan, *, partial: bool
    ) -> None:
        if not partial:
            self._note(reference.same_bits(got, reference.gather(locals_, plan)), "gather differs", plan)
            return
        zeros = got.clone()
        for dp in range(self.layout.dp_size):
            rows = reference.scatter_range(plan, dp)
            first = dp * self.layout.replicas
            self._check_sum("gather", got[rows], locals_[first : first + self.layout.tp_size], plan)
            zeros[rows] = 0
        self._note(not zeros.view(torch.uint8).any(), "gather left padding rows unwritten", plan)

    def _check_sum(self, verb: str, got: torch.Tensor, addends: list[torch.Tensor], plan: TokenPlan) -> None:
        error = reference.sum_error(got, addends)
        self.worst_sum_error = max(self.worst_sum_error, error)
        self._note(error <= 1, f"{verb} is off by {error:.3g} x the rounding bound", plan)

    def _note(self, right: bool, what: str, plan: TokenPlan) -> None:
        self.checks += 1
        if not right:
            self.failures.append(f"rank {self.layout.rank}: {what}: {plan}")

    def _ranks(self) -> range:
        return range(self.layout.world_size)

    def _from_all(self, mine: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
        """Return every rank's tensor, on the CPU; ``rows`` of each rank are known from the plan."""
        packed = torch.zeros(max(rows), mine.shape[1], dtype=mine.dtype)
        packed[: mine.shape[0]] = mine.cpu()
        slots = [torch.empty_like(packed) for _ in rows]
        if packed.numel():
            dist.all_gather([slot.view(torch.uint8) for slot in slots], packed.view(torch.uint8), group=self._cpu)
        return [slot[:n] for slot, n in zip(slots, rows, strict=True)]

    @property
    def _cpu(self) -> dist.ProcessGroup:
        return self._exchange.groups.cpu

    def _lap(self, what: str | None) -> None:
        """Add the time since the last lap to ``what`` (None: to nothing, it was checking)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if what is not None:
            self.seconds[what] += now - self._lap_started
        self._lap_started = now
