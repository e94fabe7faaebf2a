"""Request traces of LLM serving, and a strict reader of the public formats."""

from __future__ import annotations

import csv
import json
import math
import re
import stat
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rocm_dp.errors import ConfigError, TraceError
from rocm_dp.plan import MAX_ROWS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

MAX_LINE_BYTES = 2**20
MAX_SECONDS = 2**31 - 1

_NANO = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_AZURE_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?"
)


class TraceKind(Enum):
    """The formats that ``read_trace`` knows. Columns are found by name, in any order; others are ignored."""

    AZURE = 1
    """Azure LLM inference traces (CSV). Times are in UTC unless they say otherwise."""
    MOONCAKE = 2
    """Mooncake traces (one JSON object a line). Times are in milliseconds."""
    BURSTGPT = 3
    """BurstGPT traces (CSV). Times are in seconds."""


_COLUMNS = {
    TraceKind.AZURE: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    TraceKind.MOONCAKE: ("timestamp", "input_length", "output_length"),
    TraceKind.BURSTGPT: ("Timestamp", "Request tokens", "Response tokens"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request: ``arrival`` in seconds after the trace's start, prompt tokens, and tokens to generate.

    Raises ConfigError for an ``arrival`` that is negative or not finite, or tokens that aren't ints above 0.
    """

    arrival: float
    context: int
    generated: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise ConfigError(f"arrival must be finite and at least 0 seconds, got {self.arrival!r}")
        for name, tokens in (("context", self.context), ("generated", self.generated)):
            if type(tokens) is not int or not 1 <= tokens <= MAX_ROWS:
                raise ConfigError(f"{name} must be an int in [1, {MAX_ROWS}], got {tokens!r}")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; ``skipped`` counts the malformed lines that the reader passed over.

    Raises ConfigError when a request arrives before the one it follows.
    """

    name: str
    requests: tuple[Request, ...]
    skipped: int = 0

    def __post_init__(self) -> None:
        for index, (before, after) in enumerate(pairwise(self.requests), start=1):
            if after.arrival < before.arrival:
                raise ConfigError(
                    f"requests[{index}] must not arrive before requests[{index - 1}] "
                    f"({before.arrival} s), got {after.arrival} s"
                )

    def at_speed(self, factor: float) -> Trace:
        """Return the trace with requests arriving ``factor`` times as fast; ConfigError unless it is > 0."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"the speed of a trace must be finite and above 0, got {factor!r}")
        faster = tuple(replace(request, arrival=request.arrival / factor) for request in self.requests)
        return replace(self, requests=faster)


def read_trace(
    path: str | os.PathLike[str],
    *,
    kind: TraceKind | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
) -> Trace:
    """Read a trace file. The trace is named after the file, and its first request arrives at 0 seconds.

    ``kind`` None: told from the first line. ``limit``: read no further once that many requests were read.
    Requests out of order are sorted by arrival; equal arrivals keep the file's order. A byte order mark, CRLF
    or LF ends, blank lines and a missing final newline are fine. Memory grows only with the requests kept:
    no more than ``MAX_LINE_BYTES`` of a line are ever held.

    0 generated tokens are read as 1 in an Azure or Mooncake trace: the prompt was processed, and a prefill
    always yields a token. In BurstGPT they mark a failed request, which counts as a malformed line.

    Raises TraceError for the first malformed line (with ``skip_bad`` it is counted in ``skipped`` instead),
    for a first line of no known format, and for a file without a usable request. Raises ConfigError for a
    ``path`` that is no regular file or a ``limit`` below 1, and OSError when the file can't be read.
    """
    if kind is not None and not isinstance(kind, TraceKind):
        raise ConfigError(f"kind must be a TraceKind or None, got {kind!r}")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"limit must be an int of at least 1 or None, got {limit!r}")
    path = Path(path)
    # Asked before opening: opening a FIFO waits for its writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"path must be a regular file, got {path}")
    with path.open("rb") as stream:
        rows, skipped = _read_rows(path, stream, kind, skip_bad=skip_bad, limit=limit)
    if not rows:
        raise TraceError(path, 1, f"no usable request in the file ({skipped} malformed lines)")
    rows.sort(key=itemgetter(0))
    start = rows[0][0]
    requests = tuple(Request((time - start) / _NANO, context, generated) for time, context, generated in rows)
    return Trace(path.stem, requests, skipped)


_Row = tuple[int, int, int]
"""Time in nanoseconds (an int, so that 100 ns ticks stay exact), context, generated."""


class _BadLineError(Exception):
    """Why a line is malformed."""


def _read_rows(
    path: Path, stream: BinaryIO, kind: TraceKind | None, *, skip_bad: bool, limit: int | None
) -> tuple[list[_Row], int]:
    rows: list[_Row] = []
    skipped = 0
    parse, lines = _recognised(path, _lines(stream), kind)
    for number, line in lines:
        try:
            if text := _decoded(line):
                rows.append(parse(text))
        except _BadLineError as error:
            if not skip_bad:
                raise TraceError(path, number, str(error)) from None
            skipped += 1
        if len(rows) == limit:
            break
    return rows, skipped


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number; of one that is too long, only the first MAX_LINE_BYTES + 1 bytes."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        yield number, line
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)


def _decoded(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise _BadLineError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        return line.decode().strip("\ufeff \t\r\n")
    except UnicodeDecodeError:
        raise _BadLineError("not UTF-8 text") from None


def _recognised(
    path: Path, lines: Iterator[tuple[int, bytes]], kind: TraceKind | None
) -> tuple[Callable[[str], _Row], Iterator[tuple[int, bytes]]]:
    """Return the parser of a line, and the lines left to parse: all of them, or those below the header."""
    for number, line in lines:
        if kind is TraceKind.MOONCAKE:
            return _mooncake, chain([(number, line)], lines)
        try:
            text = _decoded(line)
            if kind is None and text.startswith("{"):
                return _mooncake, chain([(number, line)], lines)
            if text:
                return _csv_parser(_fields(text), kind), lines
        except _BadLineError as error:
            # skip_bad is no help here: without its header a CSV can't be read.
            raise TraceError(path, number, str(error)) from None
    raise TraceError(path, 1, "the file is empty")


def _csv_parser(header: list[str], kind: TraceKind | None) -> Callable[[str], _Row]:
    for known in (TraceKind.AZURE, TraceKind.BURSTGPT):
        if kind in (None, known) and set(_COLUMNS[known]) <= set(header):
            pick = itemgetter(*map(header.index, _COLUMNS[known]))
            return lambda text: _row(known, *pick(_fields(text, len(header))))
    wanted = "an Azure, Mooncake or BurstGPT trace" if kind is None else f"the header of {kind}"
    raise _BadLineError(f"not {wanted}: {', '.join(header)[:100]!r}")


def _fields(text: str, count: int | None = None) -> list[str]:
    try:
        fields = [field.strip() for field in next(csv.reader([text], strict=True), [])]
    except csv.Error as error:
        raise _BadLineError(f"not a CSV line: {error}") from None
    if count is not None and len(fields) != count:
        raise _BadLineError(f"expected {count} fields, got {len(fields)}")
    return fields


def _mooncake(text: str) -> _Row:
    try:
        # As floats: Python takes quadratic time over the digits of a huge int.
        entry = json.loads(text, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise _BadLineError("not a JSON object")
    return _row(TraceKind.MOONCAKE, *map(entry.get, _COLUMNS[TraceKind.MOONCAKE]))


def _row(kind: TraceKind, time: object, context: object, generated: object) -> _Row:
    names = _COLUMNS[kind]
    if kind is TraceKind.AZURE:
        nanoseconds = _azure_time(str(time))
    else:
        scale = 1000 if kind is TraceKind.MOONCAKE else 1
        nanoseconds = round(_number(names[0], time, 0, MAX_SECONDS * scale) * (_NANO // scale))
    tokens = int(_number(names[2], generated, 0, MAX_ROWS, whole=True))
    if kind is TraceKind.BURSTGPT and not tokens:
        raise _BadLineError("a failed request (0 response tokens)")
    return nanoseconds, int(_number(names[1], context, 1, MAX_ROWS, whole=True)), max(1, tokens)


def _azure_time(text: str) -> int:
    match = _AZURE_TIME.fullmatch(text)
    if match is None:
        raise _BadLineError(f"not a time: {text[:100]!r}")
    date, clock, fraction, offset = match.groups(default="")
    try:
        moment = datetime.fromisoformat(f"{date} {clock}{'+00:00' if offset in ('', 'Z') else offset}")
    except ValueError as error:
        raise _BadLineError(f"not a time: {text!r} ({error})") from None
    # The fraction is added apart: datetime stops at microseconds, the traces have 100 ns ticks.
    whole = moment - _EPOCH
    return (whole.days * 86_400 + whole.seconds) * _NANO + int(fraction.ljust(9, "0"))


def _number(name: str, value: object, least: int, most: int, *, whole: bool = False) -> float:
    text = str(value) if isinstance(value, (float, str)) else type(value).__name__
    try:
        # Python reads '1_000' as a number; a trace that holds it is damaged.
        number = float(text.replace("_", "?"))
    except ValueError:
        raise _BadLineError(f"{name} is not a number: {text[:100]!r}") from None
    if not least <= number <= most or (whole and not number.is_integer()):
        wanted = "be whole and lie" if whole else "lie"
        raise _BadLineError(f"{name} must {wanted} in [{least}, {most}], got {text[:100]}")
    return number
