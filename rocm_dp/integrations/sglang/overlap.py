"""The async verbs of two-batch overlap: one stream, one event a key, inputs held until the key comes again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.errors import TensorError
from rocm_dp.integrations.sglang import places
from rocm_dp.integrations.sglang.moves import Moves
from rocm_dp.memory.events import InlineEvent
from rocm_dp.plan import PaddingMode, TokenPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from rocm_dp.memory.events import Event


class OverlapState:
    """What is made once and kept: the stream, an event for each key, a buffer for each key, inputs in flight."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.events: dict[Hashable, Event] = {}
        self.buffers: dict[Hashable, torch.Tensor] = {}
        self.held: dict[Hashable, tuple[torch.Tensor, ...]] = {}


class Overlap(Moves):
    """Gather and combine beside the other batch's compute. The caller's stream waits for the event returned."""

    overlap: OverlapState

    def get_dp_tbo_comm_stream(self) -> torch.cuda.Stream | None:
        """Return the one stream of the async verbs, made once; None on the CPU."""
        if self.overlap.stream is None and self._device.type == "cuda":
            self.overlap.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self.overlap.stream

    def dp_gather_partial_async(
        self,
        global_tokens: torch.Tensor,
        local_tokens: torch.Tensor,
        forward_batch: Any,
        event_key: Hashable = ("gather", 0),
    ) -> Event:
        """``dp_gather_partial`` on the comm stream; both tensors live until ``event_key`` is used again."""
        return self._aside(
            event_key,
            (global_tokens, local_tokens),
            lambda: self.dp_gather_partial(global_tokens, local_tokens, forward_batch),
        )

    def dp_reduce_scatterv_async(
        self,
        output_local: torch.Tensor,
        global_tokens: torch.Tensor,
        sizes: Sequence[int],
        event_key: Hashable = ("combine", 0),
    ) -> Event:
        """Sum ``global_tokens`` over all ranks on the comm stream; this dp rank's rows fill ``output_local``.

        ``sizes``: the rows of each dp rank, or of each rank's share of them.
        """
        out, full = places.as_rows("output_local", output_local), places.as_rows("global_tokens", global_tokens)
        plan = TokenPlan(self._counts_of_sizes(sizes), PaddingMode.SUM_LEN)
        own = plan.counts[self.layout.dp_rank]
        if (plan.rows, own) != (full.shape[0], out.shape[0]):
            raise TensorError(
                f"sizes {list(sizes)} are {own} of {plan.rows} rows for dp rank {self.layout.dp_rank}, got "
                f"{out.shape[0]} of {full.shape[0]}"
            )
        return self._aside(event_key, (output_local, global_tokens), lambda: self._combine(out, full, plan))

    def get_tbo_persistent_buffer(
        self, key: Hashable, rows: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Return [rows, hidden] of the buffer of ``key``, which is made anew only for more rows or another kind.

        It is the caller's to write until the next call with ``key``.
        """
        buffer = self.overlap.buffers.get(key)
        alike = buffer is not None and (buffer.shape[1], buffer.dtype) == (hidden, dtype)
        if buffer is None or not alike or buffer.shape[0] < rows:
            most = max(rows, 0 if buffer is None else buffer.shape[0])
            buffer = self.overlap.buffers[key] = torch.empty(most, hidden, dtype=dtype, device=device)
        return buffer[:rows]

    def tbo_event(self, key: Hashable) -> Event:
        """Return the event of ``key``, made once."""
        if key not in self.overlap.events:
            make = torch.cuda.Event if self._device.type == "cuda" else InlineEvent
            self.overlap.events[key] = make()
        return self.overlap.events[key]

    def _counts_of_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        if len(sizes) == self.layout.dp_size:
            return tuple(sizes)
        if len(sizes) != self.layout.world_size:
            raise TensorError(
                f"sizes must be those of {self.layout.dp_size} dp ranks or {self.layout.world_size} ranks, "
                f"got {len(sizes)}"
            )
        replicas = self.layout.replicas
        return tuple(sum(sizes[first : first + replicas]) for first in range(0, len(sizes), replicas))

    def _aside(self, key: Hashable, tensors: tuple[torch.Tensor, ...], work: Callable[[], None]) -> Event:
        """Run ``work`` on the comm stream, behind all that is queued on the current one; return its end."""
        stream, done = self.get_dp_tbo_comm_stream(), self.tbo_event(key)
        if stream is not None:
            ready = self.tbo_event(("ready", key))
            ready.record(torch.cuda.current_stream(self._device))
            ready.wait(stream)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            work()
            done.record(stream)
        # What the stream reads may be dropped by its owner at once. Those of the last use were waited for.
        self.overlap.held[key] = tensors
        return done
