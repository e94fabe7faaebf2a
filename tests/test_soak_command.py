"""``rocm-dp soak`` as a person runs it: exit codes, reports, metrics, Ctrl-C; the page asks nothing of anyone."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from io import StringIO
from typing import TYPE_CHECKING

import psutil
import pytest
from rich.console import Console
from soak_cases import SMALL, soaked

from rocm_dp.cli import main
from rocm_dp.errors import ConfigError
from rocm_dp.soak.log import SoakLog, about
from rocm_dp.soak.outcome import Outcome, conclude
from rocm_dp.soak.prometheus import endpoint
from rocm_dp.soak.report import page
from rocm_dp.soak.selftest import Trial
from rocm_dp.soak.tables import live, render, render_trials
from rocm_dp.testing import RankPool

if TYPE_CHECKING:
    from pathlib import Path

Ranks = Callable[[int], RankPool]
COMMAND = [sys.executable, "-m", "rocm_dp", "soak", "--ranks", "2"]


@pytest.fixture(scope="module")
def leaked(ranks: Ranks) -> tuple[SoakLog, Outcome]:
    return soaked(ranks(2), replace(SMALL, inject="fd"))


@pytest.fixture(scope="module")
def leaked_page(leaked: tuple[SoakLog, Outcome]) -> str:
    return page(*leaked)


def shown(what: object) -> str:
    out = StringIO()
    Console(file=out, width=160).print(what)
    return out.getvalue()


class Page(HTMLParser):
    """The order of what a reader sees, and everything that could ask something of another place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.order: list[str] = []
        self.asks: list[str] = []
        self.images: list[bytes] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "p" and "verdict" in (given.get("class") or ""):
            self.order.append("verdict")
        if tag == "table":
            self.order.append(given.get("id") or "table")
        if tag == "img":
            self.order.append("plot")
            head, _, data = (given["src"] or "").partition(",")
            assert head == "data:image/png;base64"
            self.images.append(base64.b64decode(data))
        if tag in ("script", "link", "iframe", "object", "embed", "base"):
            self.asks.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action") and not (value or "").startswith("data:"):
                self.asks.append(f"{name}={value}")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} is closed out of order"


def test_the_page_shows_the_verdict_first_and_asks_nothing_of_any_other_place(leaked_page: str) -> None:
    text, read = leaked_page, Page(leaked_page)
    assert read.order[:2] == ["verdict", "verdicts"]
    assert read.order[2:] == ["plot"] * len(read.images)
    assert not read.open
    assert not read.asks
    assert not re.search(r"https?://|url\(|@import", text)
    assert all(image.startswith(b"\x89PNG\r\n\x1a\n") for image in read.images)
    assert text.index("FAILED") < text.index("<table") < text.index("<img")
    # The counter that leaked has the first plot.
    assert text.index("<figcaption>fds.") < text.index("<figcaption>program.")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
_NO_ORIGIN = "not an origin"  # of what the browser itself asks for, the time and the like
_LOOK = """<script>addEventListener("load", () => {
    const verdict = document.querySelector("p.verdict").getBoundingClientRect(), images = [...document.images];
    const drawn = images.filter(image => image.complete && image.naturalWidth).length;
    document.title = JSON.stringify({verdict: verdict.bottom, seen: innerHeight, drawn, images: images.length});
})</script></body>"""


def opened(text: str, folder: Path) -> tuple[dict[str, float], list[str]]:
    """What a browser window of 1280 x 800 shows of a page, and what the page asks other places for."""
    assert BROWSER is not None
    (folder / "page.html").write_text(text.replace("</body>", _LOOK), encoding="utf-8")
    # Its sandbox needs what containers don't give; the page is our own.
    window = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,800", "--dump-dom")
    places = (f"--user-data-dir={folder}", f"--log-net-log={folder / 'net.json'}", f"file://{folder / 'page.html'}")
    command = [BROWSER, *window, *_QUIET, *places]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    title = re.search("<title>(.*?)</title>", dom)
    assert title is not None, dom[:500]
    events = [event.get("params", {}) for event in json.loads((folder / "net.json").read_text())["events"]]
    asked = [one["url"] for one in events if "url" in one and one.get("initiator", _NO_ORIGIN) != _NO_ORIGIN]
    return json.loads(unescape(title[1])), asked


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the PATH")
def test_a_browser_shows_the_verdict_without_scrolling_and_every_plot_and_asks_for_nothing(
    leaked_page: str, tmp_path: Path
) -> None:
    for folder in ("ours", "asking"):
        (tmp_path / folder).mkdir()
    shown, asked = opened(leaked_page, tmp_path / "ours")
    assert 0 < shown["verdict"] < shown["seen"]
    assert shown["drawn"] == shown["images"] > 5
    assert asked == []
    elsewhere = "http://127.0.0.1:9/plot.png"
    shown, asked = opened(leaked_page.replace("<table", f'<img src="{elsewhere}"><table', 1), tmp_path / "asking")
    assert (shown["images"] - shown["drawn"], asked) == (1, [elsewhere])


def test_what_a_rank_says_can_not_change_the_page(leaked: tuple[SoakLog, Outcome]) -> None:
    hostile = replace(leaked[1], problems=("<script src=http://elsewhere/x.js></script>",), verdicts=())
    assert not Page(page(leaked[0], hostile)).asks


def test_a_person_sees_the_leak_its_pace_and_what_each_gate_would_have_caught(
    leaked: tuple[SoakLog, Outcome],
) -> None:
    log, outcome = leaked
    text = shown(render(outcome))
    [line] = [line for line in text.splitlines() if line.startswith("│ fds.file")]
    assert "LEAK" in line
    assert "│ 1 " in line
    assert "never back to" in text
    assert text.strip().endswith("looks like a leak of kind fd")
    assert "fds.all" in shown(live(log, "240"))


def test_the_confusion_table_counts_false_alarms_and_misses(leaked: tuple[SoakLog, Outcome]) -> None:
    outcome = leaked[1]
    right = Trial("fd", 0, outcome)
    assert right.right
    assert "1 of 1 leaks missed" in shown(render_trials([Trial("thread", 0, outcome)], {}))
    text = shown(render_trials([right, Trial(None, 3, outcome)], {"stream": "there are no streams on the CPU"}))
    assert "1 false alarms in 1 clean runs, 0 of 1 leaks missed" in text
    assert "left out: stream: there are no streams" in text


def test_the_metrics_are_served_on_loopback_with_a_label_for_each_rank(leaked: tuple[SoakLog, Outcome]) -> None:
    log, _ = leaked
    with endpoint(0) as (port, feed):
        url = f"http://127.0.0.1:{port}/metrics"
        assert "rocm_dp_calls" not in ask(url), "before the first sample there is nothing"
        feed(log)
        text = ask(url)
        [listening] = [
            c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port
        ]
        assert listening.laddr.ip == "127.0.0.1"
    last = log.ranks[1].samples[-1].values
    for name in (
        "pool_events_held",
        "slots",
        "padding_wasted_ratio",
        "skew_ratio",
        "slot_waits_total",
        "calls_total",
    ):
        assert re.search(rf'^rocm_dp_{name}{{rank="0"}} [0-9.e+-]+$', text, re.M), name
    [value] = re.findall(r'^rocm_dp_calls_total{rank="1"} (.*)$', text, re.M)
    assert float(value) == last["own.calls"]
    with pytest.raises(OSError, match="refused"):
        ask(url)


def ask(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_a_port_that_is_taken_is_an_error() -> None:
    with endpoint(0) as (port, _), pytest.raises(OSError, match="in use"), endpoint(port):
        pass


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--steps", "10"], "--steps must be at least"),
        (["--ranks", "3", "--dp", "2"], "must divide"),
        (["--html", "no/such/folder.html"], "--html needs an existing folder"),
        (["--from", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["soak", *args]) == 2
    assert said in capsys.readouterr().err.replace("\n", "")


def test_an_unknown_leak_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["soak", "--inject", "patience"])
    assert left.value.code == 2
    assert "patience" in capsys.readouterr().err


def test_a_leak_exits_with_1_writes_both_reports_and_can_be_judged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, html = tmp_path / "soak.jsonl", tmp_path / "soak.html"
    args = ["--steps", "240", "--inject", "fd", "--json", str(lines), "--html", str(html), "--seed", "3"]
    done = subprocess.run([*COMMAND, *args], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "looks like a leak of kind fd" in done.stdout
    assert "not sampled: kfd" in done.stdout
    assert "FAILED" in html.read_text()
    assert json.loads(lines.read_text().splitlines()[0])["seed"] == 3
    assert main(["soak", "--from", str(lines)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == done.stdout.splitlines()[-1]


def test_ctrl_c_ends_the_soak_with_a_report_on_what_there_is_and_leaves_no_process(tmp_path: Path) -> None:
    lines = tmp_path / "soak.jsonl"
    args = ["--minutes", "100", "--json", str(lines), "--sample-every", "20"]
    with subprocess.Popen([*COMMAND, *args], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        parent = psutil.Process(running.pid)
        deadline = time.monotonic() + 90
        while not (lines.exists() and lines.read_text().count('"sample"') > 30) and time.monotonic() < deadline:
            time.sleep(0.2)
        ranks = parent.children(recursive=True)
        os.kill(running.pid, signal.SIGINT)
        out, _ = running.communicate(timeout=60)
    assert running.returncode in (0, 1), out
    assert "stopped early" in out
    assert "own.slots" in out
    assert json.loads(lines.read_text().splitlines()[-1])["stopped"] is True
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


def test_a_needed_sampler_that_is_absent_fails_whoever_asked_for_it(leaked: tuple[SoakLog, Outcome]) -> None:
    outcome = conclude(leaked[0], ranks=2, required=(*SMALL.required, "hsa"))
    assert any("hsa is needed: the counter is not preloaded" in problem for problem in outcome.problems)


def test_without_scipy_the_error_names_the_extra_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rocm_dp.soak import trend

    monkeypatch.setattr(trend, "find_spec", lambda name: None)
    assert main(["soak"]) == 2
    assert "pip install 'rocm-dp[soak]'" in capsys.readouterr().err.replace("\n", " ")


def test_a_log_of_nothing_fails() -> None:
    outcome = conclude(SoakLog(about(SMALL)), ranks=1, required=())
    assert set(outcome.problems) == {"rank 0 sent no sample", "no result was checked"}
    assert "FAILED" in outcome.headline


def test_without_matplotlib_the_error_names_the_extra(
    leaked: tuple[SoakLog, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'rocm-dp\[report\]'"):
        page(*leaked)
