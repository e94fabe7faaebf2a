"""A soak on a pool of ranks: notes collected as they come, so that a soak that is stopped still reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rocm_dp.soak.log import Journal, SoakLog, about
from rocm_dp.soak.outcome import Outcome, conclude
from rocm_dp.soak.rank import run_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.soak.config import SoakConfig
    from rocm_dp.soak.log import Said
    from rocm_dp.testing import RankPool

_CASE_TIMEOUT = 30 * 24 * 3600.0  # seconds: a long soak is no hang; a lost rank is noticed by its peers


def soak(
    pool: RankPool,
    config: SoakConfig,
    *,
    journal: TextIO | None = None,
    watch: Callable[[SoakLog], object] = lambda _: None,
) -> tuple[SoakLog, Outcome]:
    """Run one soak on ``pool`` and judge it; ``watch`` sees the log after each note.

    An error of a rank ends the soak and is a problem of its outcome; Ctrl-C ends it, and what there is is judged.
    """
    log = SoakLog(about(config))
    lines = Journal(journal, log.about)

    def on_note(rank: int, said: Said) -> None:
        log.add(rank, said)
        lines.note(rank, said)
        watch(log)

    try:
        pool.run(run_rank, config, timeout=_CASE_TIMEOUT, on_note=on_note)
    except KeyboardInterrupt:
        log.stopped = True
    except Exception as error:
        log.error = f"{type(error).__name__}: {error}"
    outcome = conclude(log, ranks=config.ranks, required=config.required)
    lines.write("outcome", {"error": log.error, "stopped": log.stopped, "passed": outcome.passed})
    return log, outcome
