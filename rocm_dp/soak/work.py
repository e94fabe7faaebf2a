"""What one rank does in a step, checked against the oracle now and then. L local rows, G global rows, H width."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rocm_dp import reference
from rocm_dp.exchange import TokenExchange
from rocm_dp.overlap import interleave
from rocm_dp.plan import Phase, TokenPlan
from rocm_dp.soak.program import StepKind

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rocm_dp.soak.capture import Replay
    from rocm_dp.soak.config import SoakConfig
    from rocm_dp.soak.program import SoakStep

ID_WIDTH = 2


class Rows:
    """The rows that every rank sends: slices of tensors that the seed makes, so that each rank can check all.

    Nothing is allocated in a step: a rank's input is a view, [L, H] of ``local`` or [G, H] of ``whole``.
    """

    def __init__(self, config: SoakConfig, device: torch.device, rank: int) -> None:
        dtype = getattr(torch, config.dtype)
        most = 2 * config.tokens
        self._replicas = config.align
        self._cpu = []
        for other in range(config.ranks):
            generator = torch.Generator().manual_seed(config.seed * config.ranks + other)
            shape = (most + config.local_rows * config.dp, config.hidden)
            self._cpu.append(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype))
        self._ids = torch.arange(most * ID_WIDTH, dtype=torch.int32).view(most, ID_WIDTH)
        self._own, self._owner = self._cpu[rank].to(device), self._cpu[self._leader(rank)].to(device)
        self._own_ids = (self._ids + self._leader(rank)).to(device)

    def _leader(self, rank: int) -> int:
        return rank // self._replicas * self._replicas

    def local(self, offset: int, rows: int, *, partial: bool = False) -> torch.Tensor:
        """Return this rank's input of a gather: the same on all ranks of a dp rank, unless ``partial``."""
        return (self._own if partial else self._owner)[offset : offset + rows]

    def ids(self, offset: int, rows: int) -> torch.Tensor:
        """Return this rank's second tensor of a gather_many."""
        return self._own_ids[offset : offset + rows]

    def whole(self, offset: int, rows: int) -> torch.Tensor:
        """Return this rank's input of a combine."""
        return self._own[offset : offset + rows]

    def locals_of_all(self, offset: int, plan: TokenPlan, *, partial: bool = False) -> list[torch.Tensor]:
        """Return every rank's input of that gather, on the CPU."""
        ranks = range(len(self._cpu))
        source = [self._cpu[rank if partial else self._leader(rank)] for rank in ranks]
        return [source[rank][offset : offset + plan.counts[rank // self._replicas]] for rank in ranks]

    def ids_of_all(self, offset: int, plan: TokenPlan) -> list[torch.Tensor]:
        """Return every rank's ids, on the CPU."""
        ranks = range(len(self._cpu))
        counts = [plan.counts[rank // self._replicas] for rank in ranks]
        return [self._ids[offset : offset + counts[rank]] + self._leader(rank) for rank in ranks]

    def wholes_of_all(self, offset: int, rows: int) -> list[torch.Tensor]:
        """Return every rank's input of that combine, on the CPU."""
        return [source[offset : offset + rows] for source in self._cpu]


class Worker:
    """Does steps on one exchange. ``checks`` made of results, ``waits`` for a Pending."""

    def __init__(self, exchange: TokenExchange, rows: Rows, replay: Replay | None = None) -> None:
        self._exchange, self._rows, self._replay = exchange, rows, replay
        self._dp_rank = exchange.layout.dp_rank
        self._kinds: dict[StepKind, Callable[..., None]] = {
            StepKind.SERIAL: self._serial,
            StepKind.OVERLAP: self._overlap,
            StepKind.MANY: self._many,
            StepKind.GRAPH: self._graph,
            StepKind.LIFETIME: self._lifetime,
        }
        self.checks = self.waits = 0
        self._mismatches: list[str] = []

    def do(self, step: SoakStep, *, check: bool) -> None:
        """Do one step; with ``check`` compare every result with the oracle."""
        self._kinds[step.kind](step, check=check)

    def take_mismatches(self) -> list[str]:
        """Return what differed from the oracle since the last time, each with its step."""
        found, self._mismatches = self._mismatches, []
        return found

    def _serial(self, step: SoakStep, *, check: bool) -> None:
        self._gather_and_combine(self._exchange, step, step.plan, check=check)

    def _gather_and_combine(self, exchange: TokenExchange, step: SoakStep, plan: TokenPlan, *, check: bool) -> None:
        local = self._rows.local(step.offset, plan.counts[self._dp_rank], partial=step.partial)
        gathered = exchange.gather(local, plan, partial=step.partial, batch=step.batch)
        if check:
            self._check_gather(gathered, step, plan, partial=step.partial)
        combined = exchange.combine(self._rows.whole(step.offset, plan.rows), plan, batch=step.batch)
        if check:
            self._check_combine(combined, step, plan)

    def _overlap(self, step: SoakStep, *, check: bool) -> None:
        def layer(plan: TokenPlan, batch: int) -> Generator[None, None, None]:
            pending = self._exchange.gather_async(
                self._rows.local(step.offset, plan.counts[self._dp_rank]), plan, batch=batch
            )
            yield
            gathered = pending.wait()
            if check:
                self._check_gather(gathered, step, plan, partial=False)
            pending = self._exchange.combine_async(self._rows.whole(step.offset, plan.rows), plan, batch=batch)
            yield
            combined = pending.wait()
            self.waits += 2
            if check:
                self._check_combine(combined, step, plan)

        first, second = step.plan.halves()
        interleave(layer(first, 0), layer(second, 1))

    def _many(self, step: SoakStep, *, check: bool) -> None:
        plan, rows = step.plan, step.plan.counts[self._dp_rank]
        local, ids = self._rows.local(step.offset, rows), self._rows.ids(step.offset, rows)
        got = self._exchange.gather_many([local, ids], plan, batch=step.batch)
        if check:
            want = (self._rows.locals_of_all(step.offset, plan), self._rows.ids_of_all(step.offset, plan))
            for tensor, locals_ in zip(got, want, strict=True):
                right = reference.same_bits(tensor.cpu(), reference.gather(locals_, plan))
                self._note(right, "gather_many differs", step)

    def _graph(self, step: SoakStep, *, check: bool) -> None:
        if self._replay is None:
            self._serial(step, check=check)
            return
        plan = self._replay.plan_of(step.plan)
        gathered, combined = self._replay.run(
            plan,
            self._rows.local(step.offset, plan.counts[self._dp_rank]),
            self._rows.whole(step.offset, plan.rows),
        )
        if check:
            self._check_gather(gathered, step, plan, partial=False)
            self._check_combine(combined, step, plan)

    def _lifetime(self, step: SoakStep, *, check: bool) -> None:
        own = self._exchange
        options = replace(own.options, transport=step.transport)
        with TokenExchange(
            own.layout, own.groups, device=own.device, hidden=own.hidden, dtype=own.dtype, options=options
        ) as exchange:
            for share in (4, 2, 1):
                counts = tuple(count // share for count in step.plan.counts)
                plan = replace(step.plan, counts=counts, phase=Phase.PREFILL)
                self._gather_and_combine(exchange, step, plan, check=check)

    def _check_gather(self, got: torch.Tensor, step: SoakStep, plan: TokenPlan, *, partial: bool) -> None:
        locals_ = self._rows.locals_of_all(step.offset, plan, partial=partial)
        if not partial:
            self._note(reference.same_bits(got.cpu(), reference.gather(locals_, plan)), "gather differs", step)
            return
        rows, replicas = got.cpu(), self._exchange.layout.replicas
        padding = torch.ones(plan.rows, dtype=torch.bool)
        for dp in range(len(plan.counts)):
            own = reference.scatter_range(plan, dp)
            self._check_sum("gather", rows[own], locals_[dp * replicas : (dp + 1) * replicas], step)
            padding[own] = False
        self._note(not rows[padding].count_nonzero(), "gather left padding rows unwritten", step)

    def _check_combine(self, got: torch.Tensor, step: SoakStep, plan: TokenPlan) -> None:
        own = reference.scatter_range(plan, self._dp_rank)
        addends = [whole[own] for whole in self._rows.wholes_of_all(step.offset, plan.rows)]
        self._check_sum("combine", got.cpu(), addends, step)

    def _check_sum(self, verb: str, got: torch.Tensor, addends: Sequence[torch.Tensor], step: SoakStep) -> None:
        error = reference.sum_error(got, addends)
        self._note(error <= 1, f"{verb} is off by {error:.3g} x the rounding bound", step)

    def _note(self, right: bool, what: str, step: SoakStep) -> None:
        self.checks += 1
        if not right:
            self._mismatches.append(f"rank {self._exchange.layout.rank}, step {step.index}: {what}: {step}")
