"""What ranks do with the peer kernels: a channel each for gather and combine, over mapped memory of any device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import triton.language as tl
from rocm_dp.kernels import peer_triton

from rocm_dp import Groups, PaddingMode, RankLayout, TokenPlan, reference
from rocm_dp.control import Op
from rocm_dp.memory.peer import PeerBuffer
from rocm_dp.testing import rank_device

CAPACITY = 24
BLOCKS = 3
SPINS = 50_000_000  # looks until a peer is given up; far more than any test waits


@dataclass(frozen=True)
class Form:
    """Rows of ``width`` elements of ``dtype``, moved in ``vec`` units of ``unit`` at once."""

    width: int
    dtype: torch.dtype
    unit: torch.dtype
    vec: int

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


FORMS = (
    Form(12, torch.float32, torch.int32, 4),
    Form(3, torch.bfloat16, torch.int16, 1),
    Form(5, torch.float8_e4m3fn, torch.int8, 1),
)


class Channel:
    """Peer memory and state for one verb."""

    def __init__(self, groups: Groups, device: torch.device, slot_bytes: int) -> None:
        self.layout, self.device, self.slot_bytes = groups.layout, device, slot_bytes
        self.rows = PeerBuffer(2 * slot_bytes, groups=groups, device=device)
        self.pads = PeerBuffer(BLOCKS * groups.layout.world_size * 8, groups=groups, device=device, uncached=True)
        self.state = torch.zeros(4, dtype=torch.int64, device=device)

    def gather(
        self, local: torch.Tensor, counts: torch.Tensor, form: Form, *, spins: int = SPINS, slots: int = 2
    ) -> torch.Tensor:
        """Launch a gather and return the slot that it fills, [CAPACITY, width]."""
        peer_triton.gather_rows[(BLOCKS,)](
            local.view(-1).view(form.unit),
            self.rows.addresses,
            self.pads.addresses,
            counts,
            self.state,
            self.layout.rank,
            form.row_bytes // (form.vec * form.unit.itemsize),
            CAPACITY,
            CAPACITY * (slots - 1),
            spins,
            UNIT=getattr(tl, str(form.unit).removeprefix("torch.")),
            VEC=form.vec,
            BLOCK=16,
            **self._grid_constants(),
        )
        slot = int(self.state[0]) % 2 if slots == 2 else 0
        nbytes = CAPACITY * form.row_bytes
        return self.rows.tensor[slot * nbytes : (slot + 1) * nbytes].view(form.dtype).view(CAPACITY, form.width)

    def combine(self, partial: torch.Tensor, counts: torch.Tensor, *, spins: int = SPINS) -> torch.Tensor:
        """Launch a combine and return ``out`` [CAPACITY, width], poisoned before."""
        out = torch.full_like(partial, float("nan"))
        vec = 4 if partial.shape[1] % 4 == 0 else 1
        peer_triton.combine_rows[(BLOCKS,)](
            out,
            partial,
            self.rows.addresses,
            self.pads.addresses,
            counts,
            self.state,
            self.layout.rank,
            partial.shape[1] // vec,
            CAPACITY,
            CAPACITY * self.layout.world_size,
            CAPACITY,
            spins,
            DTYPE=getattr(tl, str(partial.dtype).removeprefix("torch.")),
            VEC=vec,
            BLOCK=16,
            **self._grid_constants(),
        )
        return out

    def _grid_constants(self) -> dict[str, int]:
        dp = self.layout.dp_size
        return {"WORLD": self.layout.world_size, "DP": dp, "DP_POW2": 1 << (dp - 1).bit_length()}

    def close(self) -> None:
        """Give the memory back."""
        self.pads.close()
        self.rows.close()


def plans(dp: int, steps: int) -> list[TokenPlan]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(steps):
        counts = torch.randint(0, CAPACITY // dp + 1, (dp,), generator=generator)
        counts[torch.rand(dp, generator=generator) < 0.3] = 0
        made.append(TokenPlan(tuple(counts.tolist()), PaddingMode.SUM_LEN))
    return made


def bits(rows: int, form: Form, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, form.row_bytes), dtype=torch.uint8, generator=generator)
    return data.view(form.dtype)


def gathers(rank: int, world: int, dp: int, form: Form, steps: int) -> tuple[int, list[int]]:
    """Random counts, replay after replay of one launch: how many results differ, and the channel's state."""
    layout, wrong = RankLayout(rank, world, dp), 0
    with Groups.create(layout, timeout=timedelta(seconds=60)) as groups:
        channel = Channel(groups, rank_device(), CAPACITY * form.row_bytes)
        for step, plan in enumerate(plans(dp, steps)):
            locals_ = [bits(n, form, seed=step * 64 + d) for d, n in enumerate(plan.counts)]
            mine = locals_[layout.dp_rank].to(channel.device)
            got = channel.gather(mine, torch.tensor(plan.counts, device=channel.device), form).cpu()
            whole = reference.gather([locals_[d] for d in range(dp) for _ in range(layout.replicas)], plan)
            want = torch.cat([whole, torch.zeros(CAPACITY - plan.rows, form.width, dtype=form.dtype)])
            wrong += not reference.same_bits(got, want)
        state = channel.state.tolist()
        channel.close()
    return wrong, state


def combines(rank: int, world: int, dp: int, width: int, dtype: torch.dtype, steps: int) -> tuple[int, list[int]]:
    """The sum in float32 in rank order, bit for bit; rows of nobody stay as they were."""
    layout, wrong = RankLayout(rank, world, dp), 0
    with Groups.create(layout, timeout=timedelta(seconds=60)) as groups:
        channel = Channel(groups, rank_device(), world * CAPACITY * width * dtype.itemsize)
        for step, plan in enumerate(plans(dp, steps)):
            partials = [
                torch.randn(CAPACITY, width, generator=torch.Generator().manual_seed(step * 64 + r)).to(dtype)
                for r in range(world)
            ]
            mine = partials[rank].to(channel.device)
            got = channel.combine(mine, torch.tensor(plan.counts, device=channel.device)).cpu()
            total = torch.zeros(CAPACITY, width)
            for partial in partials:
                total += partial.float()
            rows, part = plan.counts[layout.dp_rank], layout.replica_rank
            low, high = part * rows // layout.replicas, (part + 1) * rows // layout.replicas
            first = plan.starts[layout.dp_rank]
            mine_of_all = [partial[first + low : first + high] for partial in partials]
            # Interpreted, a float32 is cut to bfloat16, not rounded: only there the order's own bits aren't met.
            exact = dtype is not torch.bfloat16 or channel.device.type == "cuda"
            right = reference.sum_error(got[: high - low], mine_of_all) <= 1
            if exact:
                right = reference.same_bits(got[: high - low], total[first + low : first + high].to(dtype))
            wrong += not (right and bool(got[high - low :].isnan().all()))
        state = channel.state.tolist()
        channel.close()
    return wrong, state


def with_a_slow_rank(rank: int, world: int, spins: int, slots: int, steps: int) -> int:
    """Rank 0 comes late to every call and reads late: how many results differ on this rank."""
    layout, form, wrong = RankLayout(rank, world, world), FORMS[0], 0
    with Groups.create(layout, timeout=timedelta(seconds=60)) as groups:
        channel = Channel(groups, rank_device(), CAPACITY * form.row_bytes)
        for step in range(steps):
            plan = TokenPlan((2,) * world, PaddingMode.SUM_LEN)
            locals_ = [bits(2, form, seed=step * 64 + d) for d in range(world)]
            if rank == 0 and step % 2:
                time.sleep(0.1)
            counts = torch.tensor(plan.counts, device=channel.device)
            got = channel.gather(locals_[rank].to(channel.device), counts, form, spins=spins, slots=slots)
            if rank == 0 and not step % 2:
                time.sleep(0.1)
            wrong += not reference.same_bits(got[: plan.rows].cpu(), reference.gather(locals_, plan))
        channel.close()
    return wrong


def one_rank_never_calls(rank: int, world: int) -> list[int]:
    """Rank 1 stays away from the second call: what the others' state says, after a bounded number of looks."""
    layout, form = RankLayout(rank, world, world), FORMS[0]
    with Groups.create(layout, timeout=timedelta(seconds=60)) as groups:
        channel = Channel(groups, rank_device(), CAPACITY * form.row_bytes)
        local = bits(2, form, seed=1).to(channel.device)
        counts = torch.full((world,), 2, device=channel.device)
        channel.gather(local, counts, form)
        # Those that do call start together, so that only the absent one is missed.
        groups.control.call(Op.CONFIRM, {})
        if rank != 1:
            channel.gather(local, counts, form, spins=10_000_000 if channel.device.type == "cuda" else 10_000)
        state = channel.state.tolist()
        channel.close()
    return state
