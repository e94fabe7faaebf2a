"""A measurement on ranks, with its progress shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rocm_dp.bench.config import BenchConfig
from rocm_dp.errors import RocmDpError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

T = TypeVar("T")
C = TypeVar("C", bound=BenchConfig)


def on_ranks(
    fn: Callable[[int, C], T], config: C, console: Console, *, env: Mapping[str, str] | None = None
) -> list[T]:
    """Run ``fn`` on every rank with a progress bar; RocmDpError when it takes longer than ``config.timeout``.

    ``fn`` sends (done, of how many) as notes; ``env``: what the ranks' environment has beside ours.
    """
    from rocm_dp.testing import RankPool

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)
        try:
            with RankPool(config.ranks, env=env) as pool:
                progress.update(task, description="checking and measuring" if config.check else "measuring")
                return pool.run(
                    fn,
                    config,
                    timeout=config.timeout,
                    on_note=lambda _, done: progress.update(task, completed=done[0], total=done[1]),
                )
        except TimeoutError as error:
            raise RocmDpError(f"the run was ended: {error}") from error
