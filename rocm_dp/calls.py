"""Calls that are worked out once for each plan: what is left of them is to check tensors and to launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from rocm_dp.checks import checked_rows
from rocm_dp.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_dp.memory.slots import Slot
    from rocm_dp.transports.launch import Launch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_POISON = 0xFF  # NaN in every float dtype


class Call(Protocol[T_co]):
    """A verb of one plan on one batch.

    ``raw``: it launches on a raw stream, and makes ``records`` event records of its own. ``fixed``: its memory can
    never move.
    """

    name: str
    slot: Slot
    raw: bool
    records: int
    fixed: bool

    @property
    def stale(self) -> bool:
        """Whether memory that it was made for was outgrown since."""

    def checked(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the tensors as the call takes them; raise TensorError with both sides when one doesn't fit."""

    def result(self) -> T_co:
        """Return what the next ``run`` fills."""

    def poison(self) -> None:
        """Fill with 0xFF what the next ``run`` writes."""

    def run(self, tensors: Sequence[torch.Tensor], stream: int) -> None:
        """Do it on the current stream, of which ``stream`` is the raw handle."""


class Wanted(NamedTuple):
    """What an input must be: a contiguous [rows, width] of ``dtype`` on ``device``."""

    name: str
    rows: int
    width: int
    dtype: torch.dtype
    device: torch.device

    def check(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, detached; raise TensorError with both sides."""
        return checked_rows(self.name, tensor, self.rows, width=self.width, dtype=self.dtype, device=self.device)


class GroupCall(Generic[T]):
    """A call that torch runs on the current stream, into the buffer of its slot; ``launch``: a part that it has."""

    raw = False

    def __init__(
        self,
        name: str,
        slot: Slot,
        wanted: Sequence[Wanted],
        work: Callable[[Sequence[torch.Tensor], int], None],
        result: T,
        *,
        fixed: bool,
        launch: Launch | None = None,
    ) -> None:
        self.name, self.slot, self.fixed = name, slot, fixed
        self._wanted, self._work, self._result, self._buffer = tuple(wanted), work, result, slot.buffer
        self._launch = launch
        self.records = launch.records if launch is not None else 0

    @property
    def stale(self) -> bool:
        """Whether memory that it was made for was outgrown since."""
        return self.slot.buffer is not self._buffer or (self._launch is not None and self._launch.stale)

    def checked(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the tensors as the call takes them."""
        checked = [wanted.check(tensor) for wanted, tensor in zip(self._wanted, tensors, strict=True)]
        if any(self.slot.holds(tensor) for tensor in checked):
            raise _alias(self.slot)
        return checked

    def result(self) -> T:
        """Return what every ``run`` fills."""
        return _as_callers_own(self._result)

    def poison(self) -> None:
        """Fill the slot's buffer."""
        self._buffer.fill_(_POISON)

    def run(self, tensors: Sequence[torch.Tensor], stream: int) -> None:
        """Do it on the current stream."""
        self._work(tensors, stream)


class PeerCall(Generic[T]):
    """A call over peer memory; ``results`` are what it fills, for each slot of its channel."""

    raw = True

    def __init__(
        self,
        name: str,
        slot: Slot,
        wanted: Sequence[Wanted],
        launch: Launch,
        results: tuple[T, T],
        *,
        fixed: bool,
    ) -> None:
        self.name, self.slot, self.fixed = name, slot, fixed
        self.wanted, self.launch, self.results, self._buffer = tuple(wanted), launch, results, slot.buffer
        self.records = launch.records

    @property
    def stale(self) -> bool:
        """Whether the channel's memory or the slot's buffer was outgrown since."""
        return self.launch.stale or self.slot.buffer is not self._buffer

    def checked(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the tensors as the call takes them."""
        checked = [wanted.check(tensor) for wanted, tensor in zip(self.wanted, tensors, strict=True)]
        for tensor in checked:
            address = tensor.data_ptr()
            written = (*self.launch.ranges, self.slot.range)
            if tensor.numel() and any(low <= address < high for low, high in written):
                raise _alias(self.slot)
        return checked

    def result(self) -> T:
        """Return what the next ``run`` fills."""
        return _as_callers_own(self.results[self.launch.next_slot])

    def poison(self) -> None:
        """Fill what the next ``run`` writes; no peer may have begun to write there."""
        for view in _tensors(self.result()):
            view.view(-1).view(torch.uint8).fill_(_POISON)

    def run(self, tensors: Sequence[torch.Tensor], stream: int) -> None:
        """Launch on the raw ``stream``."""
        self.launch([tensor.data_ptr() for tensor in tensors], stream)


def _as_callers_own(result: T) -> T:
    """Return a list of its own for each caller."""
    return list(result) if isinstance(result, list) else result  # type: ignore[return-value]


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _alias(slot: Slot) -> TensorError:
    verb, batch = slot.key
    return TensorError(
        f"an input of {verb} is a view of the buffer that the call writes (batch {batch}): clone it first"
    )
