"""The report of a soak as one HTML file that asks nothing of any other place."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

from rocm_dp.soak.gates import Status
from rocm_dp.soak.plots import draw
from rocm_dp.soak.tables import COLUMNS, cells, worst_of_each

if TYPE_CHECKING:
    from rocm_dp.soak.gates import Verdict
    from rocm_dp.soak.log import SoakLog
    from rocm_dp.soak.outcome import Outcome

_MOST_PROBLEMS = 100
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff }
.pass { background: #e3f4e3 } .fail { background: #fbe3e3 }
p.verdict { font-size: 18px; font-weight: bold; padding: .5em .8em; border-radius: 4px }
table { border-collapse: collapse }
td, th { padding: .15em .6em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left }
figure { margin: 1em 0 } figcaption { font-weight: bold } pre { background: #f6f6f6; padding: .6em }
"""


def page(log: SoakLog, outcome: Outcome) -> str:
    """Return the page: verdict, table of verdicts, what was wrong, plots. ConfigError without matplotlib."""
    body = [
        f'<p class="verdict {_class(outcome.passed)}">{escape(outcome.headline)}</p>',
        _table(worst_of_each(outcome.verdicts)),
        _problems(outcome),
        *_plots(log, outcome),
        _about(log),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>rocm-dp soak</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>rocm-dp soak</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _class(passed: bool) -> str:
    return "pass" if passed else "fail"


def _problems(outcome: Outcome) -> str:
    lines = list(outcome.problems[:_MOST_PROBLEMS])
    if outcome.diagnosis is not None:
        lines.append(outcome.diagnosis.text)
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


def _table(verdicts: list[Verdict]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = []
    for verdict in verdicts:
        if verdict.status is not Status.SHOWN:
            row = "".join(f"<td>{escape(cell)}</td>" for cell in cells(verdict))
            rows.append(f'<tr class="{_class(verdict.passed)}">{row}</tr>')
    note = (
        "The worst rank of each counter. “Would catch”: the smallest steady leak this gate would have caught here."
    )
    return f'<table id="verdicts"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table><p>{note}</p>'


def _plots(log: SoakLog, outcome: Outcome) -> list[str]:
    """Return a figure for each counter that moved or failed, those that failed first."""
    by_name: dict[str, dict[int, Verdict]] = {}
    for verdict in outcome.verdicts:
        by_name.setdefault(verdict.name, {})[verdict.rank] = verdict
    series = log.series()
    figures = []
    for name, verdicts in by_name.items():
        own = [one for one in series if one.name == name]
        if all(len(set(one.values)) == 1 for one in own) and all(v.passed for v in verdicts.values()):
            continue
        image = base64.b64encode(draw(own, [verdicts[one.rank] for one in own])).decode()
        unit = next(iter(verdicts.values())).counter.unit
        caption = f"{name} ({unit}) over steps" if unit else f"{name} over steps"
        figures.append(
            f"<figure><figcaption>{escape(caption)}</figcaption>"
            f'<img alt="{escape(caption)}" src="data:image/png;base64,{image}"></figure>'
        )
    return ["<h2>Series: fitted slope dashed, end of warm-up dotted, limit orange</h2>", *figures]


def _about(log: SoakLog) -> str:
    lines = [f"{name} = {value}" for name, value in log.about.items()]
    for rank, said in sorted(log.ranks.items()):
        if said.started is not None:
            absent = [f"{name} ({why})" for name, why in said.started.absent.items()]
            lines.append(f"rank {rank}: {said.started.device}; not sampled: {'; '.join(absent) or 'nothing'}")
        if said.ended is not None and said.ended.grown:
            grown = ", ".join(f"{name} +{more}" for name, more in said.ended.grown)
            lines.append(f"rank {rank}: objects that grew most since the start: {grown}")
    return f"<h2>The run</h2><pre>{escape(chr(10).join(lines))}</pre>"
