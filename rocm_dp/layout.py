"""Where a rank stands: rank -> (dp, cp, tp). Ints only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_dp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank's place in the grid ``rank = (dp_rank * cp_size + cp_rank) * tp_size + tp_rank``.

    ``dp_size`` attention data-parallel ranks each own different rows; within one of them ``cp_size *
    tp_size`` ranks share the rows (context parallel and attention tensor parallel). ``moe_dp_size``
    splits the world into that many data-parallel copies of the experts.

    >>> layout = RankLayout(rank=5, world_size=8, dp_size=2, cp_size=2)
    >>> layout.tp_size, layout.dp_rank, layout.cp_rank, layout.tp_rank
    (2, 1, 0, 1)

    Raises ConfigError when the sizes don't divide the world or the rank lies outside it.
    """

    rank: int
    world_size: int
    dp_size: int = 1
    cp_size: int = 1
    moe_dp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "dp_size", "cp_size", "moe_dp_size"):
            value = getattr(self, name)
            if type(value) is not int:
                raise ConfigError(f"{name} must be an int, got {value!r}")
            if name != "rank" and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must lie in [0, world_size {self.world_size}), got {self.rank}")
        if self.world_size % (self.dp_size * self.cp_size):
            raise ConfigError(
                f"dp_size {self.dp_size} * cp_size {self.cp_size} must divide world_size {self.world_size}"
            )
        if self.world_size % self.moe_dp_size:
            raise ConfigError(f"moe_dp_size {self.moe_dp_size} must divide world_size {self.world_size}")

    @property
    def tp_size(self) -> int:
        """Attention tensor-parallel size: what dp and cp leave of the world."""
        return self.world_size // (self.dp_size * self.cp_size)

    @property
    def replicas(self) -> int:
        """How many ranks hold the rows of one dp rank: cp_size * tp_size."""
        return self.world_size // self.dp_size

    @property
    def dp_rank(self) -> int:
        """Which dp rank's rows this rank holds."""
        return self.rank // self.replicas

    @property
    def replica_rank(self) -> int:
        """This rank's place among the ranks of its dp rank: cp_rank * tp_size + tp_rank."""
        return self.rank % self.replicas

    @property
    def cp_rank(self) -> int:
        """This rank's place in its context-parallel group."""
        return self.replica_rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        """This rank's place in its attention tensor-parallel group."""
        return self.rank % self.tp_size

    def tp_ranks(self, dp: int, cp: int) -> tuple[int, ...]:
        """Return the ranks of the attention-tp group at (dp, cp), in tp order."""
        first = (dp * self.cp_size + cp) * self.tp_size
        return tuple(range(first, first + self.tp_size))

    def cp_ranks(self, dp: int, tp: int) -> tuple[int, ...]:
        """Return the ranks of the context-parallel group at (dp, tp), in cp order."""
        first = dp * self.replicas + tp
        return tuple(range(first, first + self.replicas, self.tp_size))

    def moe_dp_ranks(self) -> tuple[int, ...]:
        """Return the ranks that exchange tokens before the MoE, this one among them.

        With fewer MoE copies than cp ranks the cp partners must share their tokens first, so it is the cp
        group; otherwise it is the ranks at the same place in every MoE copy.
        """
        if self.cp_size > self.moe_dp_size:
            return self.cp_ranks(self.dp_rank, self.tp_rank)
        stride = self.world_size // self.moe_dp_size
        return tuple(range(self.rank % stride, self.world_size, stride))
