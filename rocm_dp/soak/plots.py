"""Plots of a soak: for each counter a small one of each rank, drawn as PNG bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError
from rocm_dp.soak.gates import Status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from rocm_dp.soak.gates import Series, Verdict

_INCHES = (3.0, 2.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.6, 0.25, 0.3, 0.25  # inches around a panel, for its labels
_DPI = 90
_MOST_COLUMNS = 4
_NEAR_LIMIT = 4  # a limit further away than so many times the highest value would flatten the series


def draw(series: Sequence[Series], verdicts: Sequence[Verdict]) -> bytes:
    """Return one counter's series, fitted slope, end of warm-up and limit as PNG; a panel for each rank.

    ``series`` and ``verdicts`` are of the same counter, in the same order. Raises ConfigError without matplotlib.
    """
    figure_type, canvas = _matplotlib()
    columns = min(_MOST_COLUMNS, len(series))
    lines = -(-len(series) // columns)
    width, height = _INCHES[0] * columns, _INCHES[1] * lines
    figure = figure_type(figsize=(width, height), dpi=_DPI)
    canvas(figure)
    # By hand: a layout engine draws everything twice.
    figure.subplots_adjust(
        left=_LEFT / width,
        right=1 - _RIGHT / width,
        top=1 - _TOP / height,
        bottom=_BOTTOM / height,
        wspace=(_LEFT + _RIGHT) / (_INCHES[0] - _LEFT - _RIGHT),
        hspace=(_TOP + _BOTTOM) / (_INCHES[1] - _TOP - _BOTTOM),
    )
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel, one, verdict in zip(panels, series, verdicts, strict=False):
        _draw_rank(panel, one, verdict)
    for panel in list(panels):
        panel.remove()
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _draw_rank(panel: Any, series: Series, verdict: Verdict) -> None:
    color = "tab:blue" if verdict.passed else "tab:red"
    panel.plot(series.steps, series.values, color=color, linewidth=1)
    if verdict.status in (Status.FLAT, Status.LEAK):
        panel.axvline(verdict.warm_up, color="gray", linestyle=":", linewidth=1)
        after = [step for step in series.steps if step >= verdict.warm_up]
        middle = (after[0] + after[-1]) / 2
        height = (verdict.baseline + verdict.final) / 2
        fitted = [height + verdict.slope * (step - middle) for step in (after[0], after[-1])]
        panel.plot((after[0], after[-1]), fitted, color="black", linestyle="--", linewidth=1)
    if verdict.limit is not None and verdict.limit <= _NEAR_LIMIT * max(series.values, default=0.0):
        panel.axhline(verdict.limit, color="tab:orange", linewidth=1)
    panel.set_title(f"rank {series.rank}: {verdict.status.value}", fontsize=8)
    panel.tick_params(labelsize=6)
    panel.ticklabel_format(axis="x", style="plain")  # a factor beside the axis has no room there
    panel.yaxis.offsetText.set_fontsize(6)


def _matplotlib() -> tuple[Any, Any]:
    try:
        # Not pyplot: it keeps figures alive and picks a backend by the environment.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("--html needs matplotlib: pip install 'rocm-dp[report]'") from error
    return Figure, FigureCanvasAgg
