"""Launches of the peer kernels, worked out once: what is left to do in a call is to fill in addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from rocm_dp.kernels import peer as kernels
from rocm_dp.kernels.driver import Arguments
from rocm_dp.transports.launch import TwoSlots, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rocm_dp.kernels.launch import Prepared
    from rocm_dp.transports.launch import Field, Job

_HEAD = 17  # numbers that all kernels begin with
_UNALIGNED = 15
Widths = TypeVar("Widths", int, "tuple[int, ...]")


class Settled(NamedTuple):
    """A kernel compiled for some widths of access, and its arguments for each slot."""

    form: Prepared
    arguments: tuple[Arguments, Arguments]


class PushLaunch(TwoSlots, ABC, Generic[Widths]):
    """A kernel that pushes; ``form`` compiles it for widths of access, ``usual`` are those of aligned inputs.

    ``results``: what a call fills, by slot.
    """

    __slots__ = ("_form", "_settled", "_usual")

    def __init__(
        self,
        job: Job,
        results: tuple[list[torch.Tensor], list[torch.Tensor]],
        form: Callable[[Widths], Prepared],
        usual: Widths,
    ) -> None:
        super().__init__(job, results)
        self._form: Callable[[Widths], Prepared] = form
        self._settled: dict[Widths, Settled] = {}
        self._usual = self._for(usual)

    @property
    def records(self) -> int:
        """None: it is one kernel."""
        return 0

    def one(self, address: int, stream: int) -> None:
        """Launch on the raw ``stream`` for the only input, at an aligned ``address``."""
        channel, (form, both) = self._job.channel, self._usual
        slot = channel.slot ^ 1
        arguments = both[slot]
        arguments.values[_HEAD] = address
        form(self._job.blocks, stream, arguments)
        channel.slot = slot  # only of a call that was made

    def _launch(self, settled: Settled, addresses: Sequence[int], stream: int, *, apart: int) -> None:
        """Launch for inputs at ``addresses``, of which one stands ``apart`` numbers behind the other."""
        channel = self._job.channel
        slot = channel.slot ^ 1
        arguments = settled.arguments[slot]
        for index, address in enumerate(addresses):
            arguments.values[_HEAD + apart * index] = address
        settled.form(self._job.blocks, stream, arguments)
        channel.slot = slot

    def _for(self, widths: Widths) -> Settled:
        if widths not in self._settled:
            both = (Arguments(self._numbers(0, widths)), Arguments(self._numbers(1, widths)))
            self._settled[widths] = Settled(self._form(widths), both)
        return self._settled[widths]

    def _head(self, slot: int) -> list[int]:
        return self._job.numbers(tag_of(slot, self._job.blocks))

    @abstractmethod
    def _numbers(self, slot: int, widths: Widths) -> list[int]:
        """Return the numbers of a launch into ``slot``, the addresses of its inputs left open."""


class GatherLaunch(PushLaunch["tuple[int, ...]"]):
    """A gather of up to four fields of a job."""

    __slots__ = ("_fields", "_widths")

    def __init__(self, job: Job, fields: Sequence[Field], form: Callable[[tuple[int, ...]], Prepared]) -> None:
        self._fields = tuple(fields)
        self._widths = tuple(kernels.vector_bytes(field.row_bytes) for field in fields)

        def views(slot: int) -> list[torch.Tensor]:
            return [job.channel.view(slot, one.offset, job.rows.rows, one.width, one.dtype) for one in self._fields]

        super().__init__(job, (views(0), views(1)), form, self._widths)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the raw ``stream`` for the local rows at ``addresses``."""
        settled = self._usual
        if any(address & _UNALIGNED for address in addresses):
            pairs = zip(self._widths, addresses, strict=True)
            settled = self._for(tuple(kernels.vector_bytes(*pair) for pair in pairs))
        self._launch(settled, addresses, stream, apart=3)

    def _numbers(self, slot: int, widths: tuple[int, ...]) -> list[int]:
        begin = slot * self._job.channel.slot_bytes
        fields = [
            (0, begin + field.offset, field.row_bytes // width)
            for field, width in zip(self._fields, widths, strict=True)
        ]
        unused = [(0, 0, 0)] * (kernels.MAX_FIELDS - len(fields))
        return [*self._head(slot), *(number for field in (*fields, *unused) for number in field)]


class CombineLaunch(PushLaunch[int]):
    """A combine of a job into ``out`` [*, width].

    ``stage_rows``: room for the rows of one sender; ``schedule``: steps, and turns in each, see the kernel;
    ``out_rows``: the rows of ``out`` up to which those behind the own ones are zeroed (0: none).
    """

    __slots__ = ("_out", "_row_bytes", "_tail")

    def __init__(
        self,
        job: Job,
        out: torch.Tensor,
        form: Callable[[int], Prepared],
        *,
        stage_rows: int,
        schedule: tuple[int, int],
        out_rows: int,
    ) -> None:
        self._out, self._row_bytes = out, out.shape[1] * out.itemsize
        self._tail = (stage_rows, out_rows, *schedule)
        super().__init__(job, ([out], [out]), form, self._width(0))

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the raw ``stream`` for the addends at ``addresses[0]``."""
        (address,) = addresses
        settled = self._for(self._width(address)) if address & _UNALIGNED else self._usual
        self._launch(settled, addresses, stream, apart=0)

    def _width(self, address: int) -> int:
        return kernels.vector_bytes(self._row_bytes, address, self._out.data_ptr())

    def _numbers(self, slot: int, width: int) -> list[int]:
        begin, vecs = slot * self._job.channel.slot_bytes, self._row_bytes // width
        return [*self._head(slot), 0, self._out.data_ptr(), begin, vecs, *self._tail]


class PullLaunch:
    """A combine of what lies in the job's channel, into ``out`` [*, width]; ``out_rows`` as in CombineLaunch."""

    __slots__ = ("_arguments", "_form", "_job", "_memory", "results")

    def __init__(self, job: Job, out: torch.Tensor, form: Callable[[int], Prepared], *, out_rows: int) -> None:
        self._job, self._memory = job, job.channel.buffer
        row_bytes = out.shape[1] * out.itemsize
        width = kernels.vector_bytes(row_bytes, out.data_ptr())
        self._form = form(width)
        # The slot is always the one used last: the channel's note of it begins with 1.
        head = job.numbers(tag_of(1, job.blocks))
        self._arguments = Arguments([*head, out.data_ptr(), row_bytes // width, out_rows])
        self.results = [out], [out]

    @property
    def stale(self) -> bool:
        """Whether the channel's memory was outgrown since."""
        return self._job.channel.buffer is not self._memory

    @property
    def next_slot(self) -> int:
        """Any: the result is always ``out``."""
        return 0

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """None: a call writes no peer memory."""
        return ()

    @property
    def records(self) -> int:
        """None: it is one kernel."""
        return 0

    def one(self, address: int, stream: int) -> None:  # noqa: ARG002 - the addends lie where they lie
        """Launch on the raw ``stream``."""
        self._form(self._job.blocks, stream, self._arguments)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:  # noqa: ARG002
        """Launch on the raw ``stream``."""
        self._form(self._job.blocks, stream, self._arguments)
