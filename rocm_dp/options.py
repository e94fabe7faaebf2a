"""What a TokenExchange can be told, and what it tells of itself. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_dp.errors import ConfigError

# Ready and done, the hand-over between callers' streams, and those that torch.distributed makes of its own: one for
# each collective, of which a call has three at most.
RECORDS_PER_CALL = 6
PEER_MEMORY = ("ipc", "symmetric")
MIN_IN_FLIGHT = 9 * (RECORDS_PER_CALL + 1)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a TokenExchange; equal on all ranks.

    ``transport``: use this one and no other (None: the best in the table that can). ``table``: where rank 0 finds
    what was measured: a path, or "tuned" for what ``rocm-dp tune`` left for this machine, if it did (None: go by
    built-in rules). ``peer_memory``: how ranks on GPUs share it, "ipc" (handles of HIP or CUDA) or "symmetric"
    (torch's). ``max_events``: cap of the
    event pool. ``max_in_flight``: how many event records the host may run ahead of the device, those of
    torch.distributed counted in. ``timeout``: seconds that the host waits for the device, and a kernel for its
    peers, before a rank is taken for lost. These three are those of the comm stream, so exchanges on the same
    groups must have them alike. ``confirm_calls``: before each gather, gather_many and combine compare verb (with
    or without async), batch and plan over the control plane, so that ranks that diverge get a named error in place
    of a hang or of wrong rows (a round trip on the CPU for each call: for tests and validation). ``poison``: fill
    each returned buffer with 0xFF (NaN in every float dtype) before it is written.

    Raises ConfigError for values out of range.
    """

    transport: str | None = None
    table: str | None = "tuned"
    peer_memory: str = "ipc"
    max_events: int = 256
    max_in_flight: int = 1024
    timeout: float = 300.0
    confirm_calls: bool = False
    poison: bool = False

    def __post_init__(self) -> None:
        if self.peer_memory not in PEER_MEMORY:
            raise ConfigError(f"peer_memory must be one of {PEER_MEMORY}, got {self.peer_memory!r}")
        if not 1 <= self.max_events < 4096:
            raise ConfigError(f"max_events must lie in [1, 4096), got {self.max_events}")
        if not MIN_IN_FLIGHT <= self.max_in_flight < 4096:
            raise ConfigError(f"max_in_flight must lie in [{MIN_IN_FLIGHT}, 4096), got {self.max_in_flight}")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, got {self.timeout}")


@dataclass(frozen=True, slots=True)
class ExchangeStats:
    """Everything a TokenExchange ever made; after warm-up only the last three may change.

    ``slots`` in use, one for each batch of a verb (of each kind of message, for gather_many); ``buffers_made``
    allocations ever; ``buffer_bytes`` held now; ``growths`` buffers outgrown; ``events_made`` / ``events_held``
    and ``streams_made`` of the comm stream; ``records_in_flight`` event records that the device may not have
    reached (an upper bound); ``pendings`` calls not waited for; ``calls`` issued, by transport and verb.
    """

    slots: int
    buffers_made: int
    buffer_bytes: int
    growths: int
    events_made: int
    events_held: int
    streams_made: int
    records_in_flight: int
    pendings: int
    calls: tuple[tuple[str, int], ...]
