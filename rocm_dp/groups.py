"""Process groups of one layout: world, attention tp, attention cp, MoE dp, and a gloo group for control."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rocm_dp.control import Control, Op
from rocm_dp.errors import ClosedError, ConfigError
from rocm_dp.plan import digest64

if TYPE_CHECKING:
    from types import TracebackType

    from rocm_dp.layout import RankLayout

DEFAULT_TIMEOUT = timedelta(seconds=300)


class Groups:
    """The process groups of this rank, as a context manager.

    ``world`` all ranks; ``tp`` those that share this rank's dp and cp rank; ``cp`` those that share its dp and tp
    rank; ``moe_dp`` those that exchange tokens before the MoE; ``cpu`` a gloo group over the world, and
    ``control`` the control plane on it; ``closed`` once ``close`` was called. Make one with ``create`` (owned,
    destroyed by ``close``) or ``borrow`` (never destroyed here). Groups of the same ranks are one and the same.
    """

    world: dist.ProcessGroup
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    moe_dp: dist.ProcessGroup
    cpu: dist.ProcessGroup
    control: Control

    def __init__(
        self,
        layout: RankLayout,
        groups: dict[str, dist.ProcessGroup],
        *,
        control: Control,
        owned: bool,
    ) -> None:
        self.layout = layout
        self.control = control
        # The side streams of exchanges on these groups, by device, and what a lost rank may yet write.
        self.attached: dict[object, Any] = {}
        # Why peer memory of a device and kind can't be trusted here ("": it can), as its self-test found once.
        self.channels: list[Any] = []
        """Peer memory of every exchange on these groups, for a rank that gives up."""
        self.qualified: dict[tuple[object, str], dict[str, str]] = {}
        world = dist.get_process_group_ranks(groups["world"])
        if len(world) != layout.world_size:
            raise ConfigError(f"the world group must hold {layout.world_size} ranks, got {len(world)}")
        for name, ranks in group_ranks(layout).items():
            wanted, got = [world[rank] for rank in ranks], dist.get_process_group_ranks(groups[name])
            if wanted != got:
                raise ConfigError(f"the {name} group must hold ranks {wanted} in this order, got {got}")
            setattr(self, name, groups[name])
        self._owned = list({id(group): group for group in groups.values()}.values()) if owned else []
        self.closed = False

    @classmethod
    def create(
        cls, layout: RankLayout, *, backend: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> Groups:
        """Make every group of ``layout``; collective over the default group of torch.distributed.

        ``backend`` of the device groups (None: that of the default group). ``timeout`` bounds every collective
        on them. Raises ConfigError when the default group is missing or differs from the layout, and
        RankMismatchError on every rank when the ranks' layouts or backends differ.
        """
        if not dist.is_initialized():
            raise ConfigError("torch.distributed must be initialised before Groups.create")
        world, rank = dist.get_world_size(), dist.get_rank()
        cpu = dist.new_group(backend="gloo", timeout=timeout)
        control = Control(cpu)
        made = {"cpu": cpu}
        try:
            control.call_equal(
                Op.GROUPS,
                {
                    "world_size": layout.world_size,
                    "rank - its own in torch.distributed": layout.rank - rank,
                    "dp_size": layout.dp_size,
                    "cp_size": layout.cp_size,
                    "moe_dp_size": layout.moe_dp_size,
                    "backend": digest64(str(backend).encode()),
                },
                shown={"backend": backend},
            )
            if (world, rank) != (layout.world_size, layout.rank):
                raise ConfigError(
                    f"layout is rank {layout.rank} of {layout.world_size}, "
                    f"torch.distributed is rank {rank} of {world}"
                )
            shared: dict[str, dist.ProcessGroup] = {}
            for name, partition in _partitions(layout).items():
                # Not use_local_synchronization: it names a group after its ranks, so that one made again after
                # a close() would meet the stale addresses of the first in the store.
                if str(partition) not in shared:
                    shared[str(partition)], _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                        partition, timeout=timeout, backend=backend
                    )
                made[name] = shared[str(partition)]
            return cls(layout, made, control=control, owned=True)
        except BaseException:
            _destroy(list({id(group): group for group in made.values()}.values()))
            raise

    @classmethod
    def borrow(cls, layout: RankLayout, **groups: dist.ProcessGroup) -> Groups:
        """Use the caller's groups ``world``, ``tp``, ``cp``, ``moe_dp`` and ``cpu`` (gloo); never destroy them.

        Raises ConfigError when one is missing, unknown, or doesn't hold the layout's ranks in order.
        """
        if groups.keys() != group_ranks(layout).keys():
            raise ConfigError(f"groups must be {sorted(group_ranks(layout))}, got {sorted(groups)}")
        return cls(layout, groups, control=Control(groups["cpu"]), owned=False)

    def close(self) -> None:
        """Destroy the groups made by ``create``; a second call does nothing."""
        self.closed = True
        owned, self._owned = self._owned, []
        _destroy(owned)

    def check_open(self) -> None:
        """Raise ClosedError after ``close``, and after a rank was lost."""
        if self.closed:
            raise ClosedError("these Groups are closed")
        self.control.check_usable()

    def __enter__(self) -> Groups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def group_ranks(layout: RankLayout) -> dict[str, tuple[int, ...]]:
    """Return, for each group's name, the world ranks that it holds, in order."""
    world = tuple(range(layout.world_size))
    return {
        "cpu": world,
        "world": world,
        "tp": layout.tp_ranks(layout.dp_rank, layout.cp_rank),
        "cp": layout.cp_ranks(layout.dp_rank, layout.tp_rank),
        "moe_dp": layout.moe_dp_ranks(),
    }


def _partitions(layout: RankLayout) -> dict[str, list[list[int]]]:
    """Return, for each device group's name, the ranks of every group of that name, the same on every rank."""
    by_name: dict[str, set[tuple[int, ...]]] = {}
    for rank in range(layout.world_size):
        for name, ranks in group_ranks(replace(layout, rank=rank)).items():
            by_name.setdefault(name, set()).add(ranks)
    del by_name["cpu"]
    return {name: [list(ranks) for ranks in sorted(groups)] for name, groups in by_name.items()}


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    for group in reversed(groups):
        # After a failed collective, or once torch.distributed itself was shut down, it is already gone.
        with suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(group)
