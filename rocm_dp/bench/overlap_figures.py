"""What the times of two-batch overlap mean. Microseconds of a layer, both halves; plain numbers, no torch.

``compute`` and ``comm``: each alone; ``serial``: one half after the other; ``overlap``: in turns.
"""

from __future__ import annotations

_NEGLIGIBLE = 1e-3  # of the serial time: what is less can't be told from nothing


def hidden(compute: float, comm: float, serial: float, overlap: float) -> float | None:
    """Return the share of the communication that costs no time: 1 - (overlap - compute) / comm.

    1: the layer takes as long as its compute alone; 0: as long as both in turn; below 0: overlap slows it down.
    None where there is next to no communication.

    >>> hidden(800.0, 400.0, 1200.0, 900.0)
    0.75
    """
    return _over(compute + comm - overlap, comm, serial)


def of_ideal(compute: float, comm: float, serial: float, overlap: float) -> float | None:
    """Return the gain over serial as a share of the largest possible: (serial - overlap) / (serial - bound).

    The bound is max(compute, comm). None where next to nothing is to be gained.

    >>> of_ideal(800.0, 400.0, 1200.0, 900.0)
    0.75
    """
    return _over(serial - overlap, serial - max(compute, comm), serial)


def times_bound(compute: float, comm: float, overlap: float) -> float | None:
    """Return overlap / max(compute, comm), at best 1; None where there is neither.

    >>> times_bound(800.0, 400.0, 900.0)
    1.125
    """
    bound = max(compute, comm)
    return overlap / bound if bound > 0 else None


def _over(numerator: float, denominator: float, serial: float) -> float | None:
    return numerator / denominator if denominator > _NEGLIGIBLE * serial else None
