"""The row kernels against what torch does in one, two or three launches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from rocm_dp.bench.timing import eager_us, graph_us
from rocm_dp.errors import ConfigError
from rocm_dp.kernels import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPES = (
    (1, 7168, torch.bfloat16),
    (128, 7168, torch.bfloat16),
    (4096, 7168, torch.bfloat16),
    (32768, 7168, torch.bfloat16),
    (4096, 6, torch.int32),
    (4096, 1, torch.int64),
    (4096, 32001, torch.bfloat16),
)
_COLD_BYTES = 2**29  # what the calls of one measurement touch together, unless that takes too many of them
_MIN_CALLS, _MAX_CALLS = 8, 64  # enough that the host is ahead of the device
_COPY_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Measured:
    """One verb at one shape: microseconds of ours and of torch's, and the memory moved at least (bytes)."""

    verb: str
    rows: int
    width: int
    dtype: str
    nbytes: int
    ours_graph: float
    torch_graph: float
    ours_eager: float
    torch_eager: float
    of_copy: float

    def as_dict(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return asdict(self)


def copy_bandwidth(*, repeats: int = 20) -> float:
    """Return what a large copy on the device moves, in bytes read and written per microsecond.

    Raises ConfigError without a GPU, or without triton, since then there is nothing to compare.
    """
    if not torch.cuda.is_available() or rows.rows_triton is None:
        raise ConfigError("bench rows needs a GPU and triton")
    src = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    dst = torch.empty_like(src)
    return 2 * _COPY_BYTES / eager_us([lambda: dst.copy_(src)], repeats=repeats)


def measure(bandwidth: float, *, repeats: int = 30) -> Iterator[Measured]:
    """Yield one measurement after the other; ``bandwidth`` is what ``copy_bandwidth`` returned."""
    for number, width, dtype in SHAPES:
        for verb in ("write_rows", "place_rows", "read_rows"):
            pairs = list(_pairs(verb, number, width, dtype))
            nbytes = pairs[0][2]
            ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            ours_graph = graph_us(ours, repeats=repeats)
            yield Measured(
                verb,
                number,
                width,
                str(dtype).removeprefix("torch."),
                nbytes,
                ours_graph,
                graph_us(theirs, repeats=repeats),
                eager_us(ours, repeats=repeats),
                eager_us(theirs, repeats=repeats),
                nbytes / ours_graph / bandwidth,
            )


def _pairs(
    verb: str, number: int, width: int, dtype: torch.dtype
) -> Iterator[tuple[Callable[[], object], Callable[[], object], int]]:
    """Yield our call and torch's on memory of their own, and the bytes that both must move at least.

    Three quarters of the ``number`` rows of dst are real and the rest padding; write_rows fills all of them.
    """
    count = number if verb == "write_rows" else max(1, number * 3 // 4)
    start = (number - count) // 2
    row_bytes = width * dtype.itemsize
    nbytes = (count + (count if verb == "write_rows" else number)) * row_bytes
    for _ in range(max(_MIN_CALLS, min(_MAX_CALLS, _COLD_BYTES // nbytes))):
        src = torch.empty(number, row_bytes, dtype=torch.uint8, device="cuda").random_().view(dtype)
        dst = torch.empty_like(src)
        at, n = (torch.tensor(value, device="cuda") for value in (start, count))
        yield *_calls(verb, dst, src, (at, n), (start, count)), nbytes


def _calls(
    verb: str,
    dst: torch.Tensor,
    src: torch.Tensor,
    on_device: tuple[torch.Tensor, torch.Tensor],
    on_host: tuple[int, int],
) -> tuple[Callable[[], object], Callable[[], object]]:
    (at, n), (start, count) = on_device, on_host
    call = getattr(rows, verb)

    def by_torch() -> None:
        if verb == "write_rows":
            dst[start : start + count].copy_(src[:count])
        elif verb == "place_rows":
            dst.zero_()
            dst[start : start + count].copy_(src[:count])
        else:
            dst[:count].copy_(src[start : start + count])
            dst[count:].zero_()

    return lambda: call(dst, src, start=at, count=n), by_torch
