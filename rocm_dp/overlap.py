"""Two-batch overlap: generators that take turns, so that one computes while the other's rows are under way."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

T = TypeVar("T")


def interleave(*batches: Generator[None, None, T]) -> list[T]:
    """Run the batches in turns, from ``yield`` to ``yield``: A0 B0 A1 B1 ...; return what each returned.

    The turns depend on nothing but the generators' lengths, so the collectives of all batches are issued in
    one order on every rank. If one batch raises, the others are closed and its error goes on; call ``drain``
    on the exchange before it is used again. Raises ConfigError for the same generator twice.
    """
    if len({id(batch) for batch in batches}) < len(batches):
        raise ConfigError("every batch must be a generator of its own, got one twice")
    results: dict[int, T] = {}
    with ExitStack() as stack:
        for batch in batches:
            stack.callback(batch.close)
        live = dict(enumerate(batches))
        while live:
            for index, batch in list(live.items()):
                try:
                    next(batch)
                except StopIteration as stop:
                    results[index] = stop.value
                    del live[index]
    return [results[index] for index in range(len(batches))]
