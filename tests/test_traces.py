from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError, TraceError
from rocm_dp.workload import Request, Trace, TraceKind, read_trace
from rocm_dp.workload.traces import MAX_LINE_BYTES

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
SAMPLES = {
    TraceKind.AZURE: (
        AZURE,
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,8",
        "2023-11-16 18:17:04.0781490,110,27",
    ),
    TraceKind.MOONCAKE: (
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}',
        '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47]}',
    ),
    TraceKind.BURSTGPT: (
        BURST,
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,230,1317,Conversation log",
        "118,GPT-4,417,276,693,Conversation log",
    ),
}
REQUESTS = {
    TraceKind.AZURE: (Request(0.0, 4808, 10), Request(0.052, 3180, 8), Request(0.098189, 110, 27)),
    TraceKind.MOONCAKE: (Request(0.0, 6955, 52), Request(3.053, 6472, 26)),
    TraceKind.BURSTGPT: (Request(0.0, 472, 18), Request(40.0, 1087, 230), Request(113.0, 417, 276)),
}


def write(folder: Path, *lines: str, end: str = "\n", name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(end.join(lines).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("kind", TraceKind)
def test_every_format_is_recognised_and_read_exactly(tmp_path: Path, kind: TraceKind, end: str) -> None:
    path = write(tmp_path, *SAMPLES[kind], end=end, name="sample.one")
    assert read_trace(path) == Trace("sample", REQUESTS[kind])
    assert read_trace(str(path), kind=kind) == Trace("sample", REQUESTS[kind])


@pytest.mark.parametrize("kind", TraceKind)
def test_a_byte_order_mark_blank_lines_and_mixed_ends_change_nothing(tmp_path: Path, kind: TraceKind) -> None:
    path = tmp_path / "trace"
    text = "\ufeff\n" + "\r\n\n".join(SAMPLES[kind]) + "\n\r\n  \n\n"
    path.write_bytes(text.encode())
    assert read_trace(path).requests == REQUESTS[kind]


def test_ticks_of_100_nanoseconds_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE, "2023-11-16 18:17:03.9999999,1,1", "2023-11-16 18:17:04.0000000,1,1")
    assert read_trace(path).requests[1].arrival == 1e-7


def test_azure_times_of_2024_with_an_offset_or_without_a_fraction_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE,
        "2024-05-10 00:00:00+00:00,2162,5",
        "2024-05-10 00:00:00.009930+00:00,2399,6",
        "2024-05-10T02:00:01.5+02:00,76,15",
        "2024-05-10 00:00:02Z,8,1",
    )
    assert [request.arrival for request in read_trace(path).requests] == [0.0, 0.00993, 1.5, 2.0]


def test_columns_are_found_by_name_among_others_and_quotes_are_taken_off(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        '"3.5","",2.25,"GPT-4, new",12,34,46,"API log"',
    )
    assert read_trace(path).requests == (Request(0.0, 12, 34),)


BAD_LINES = [
    (AZURE, "2023-11-16 18:17:03.9799600,4808", "expected 3 fields, got 2"),
    (AZURE, "2023-11-16 18:17:03.9799600,4808,10,1", "expected 3 fields, got 4"),
    (AZURE, "2023-11-16 18:17:03,many,10", "ContextTokens is not a number: 'many'"),
    (AZURE, "2023-11-16 18:17:03,1_000,10", "ContextTokens is not a number"),
    (AZURE, "2023-11-16 18:17:03,,10", "ContextTokens is not a number: ''"),
    (AZURE, "2023-11-16 18:17:03,nan,10", r"ContextTokens must .* got nan"),
    (AZURE, "2023-11-16 18:17:03,10,inf", r"GeneratedTokens must .* got inf"),
    (AZURE, "2023-11-16 18:17:03,0,10", r"ContextTokens must .* \[1, 2147483647\], got 0"),
    (AZURE, "2023-11-16 18:17:03,-5,10", r"ContextTokens must .* got -5"),
    (AZURE, "2023-11-16 18:17:03,5,-1", r"GeneratedTokens must .* got -1"),
    (AZURE, "2023-11-16 18:17:03,1.5,10", r"ContextTokens must be whole .* got 1.5"),
    (AZURE, "2023-11-16 18:17:03,2147483648,10", r"ContextTokens must .* got 2147483648"),
    (AZURE, "2023-11-31 18:17:03,5,10", "not a time: '2023-11-31 18:17:03' .*day"),
    (AZURE, "18:17:03,5,10", "not a time: '18:17:03'"),
    (AZURE, '2023-11-16 18:17:03,5,"10', "not a CSV line"),
    (BURST, "5,ChatGPT,472,0,472,Conversation log", "a failed request"),
    (BURST, "nan,ChatGPT,472,1,473,Conversation log", r"Timestamp must lie .* got nan"),
    (BURST, "-5,ChatGPT,472,1,473,Conversation log", r"Timestamp must lie .* got -5"),
    (BURST, "1e300,ChatGPT,472,1,473,Conversation log", r"Timestamp must lie .* got 1e300"),
    (SAMPLES[TraceKind.MOONCAKE][0], '{"timestamp": 1, "input_length": 5', "not JSON"),
    (SAMPLES[TraceKind.MOONCAKE][0], "[" * 200_000, "not JSON"),
    (SAMPLES[TraceKind.MOONCAKE][0], "[1, 2]", "not a JSON object"),
    (SAMPLES[TraceKind.MOONCAKE][0], '{"timestamp": 1}', "output_length is not a number: 'NoneType'"),
    (
        SAMPLES[TraceKind.MOONCAKE][0],
        '{"timestamp": true, "input_length": 5, "output_length": 5}',
        "timestamp is not a number: 'bool'",
    ),
    (
        SAMPLES[TraceKind.MOONCAKE][0],
        '{"timestamp": 1, "input_length": NaN, "output_length": 5}',
        r"input_length must .* got nan",
    ),
    (
        SAMPLES[TraceKind.MOONCAKE][0],
        f'{{"timestamp": {"9" * 5000}, "input_length": 5, "output_length": 5}}',
        r"timestamp must lie .* got inf",
    ),
    (AZURE, "x" * (MAX_LINE_BYTES + 1), f"longer than {MAX_LINE_BYTES} bytes"),
]


@pytest.mark.parametrize(("first", "line", "reason"), BAD_LINES, ids=[reason for _, _, reason in BAD_LINES])
def test_a_malformed_line_is_named_or_counted(tmp_path: Path, first: str, line: str, reason: str) -> None:
    good = {AZURE: SAMPLES[TraceKind.AZURE][1], BURST: SAMPLES[TraceKind.BURSTGPT][1]}.get(first, first)
    path = write(tmp_path, first, good, line, good)
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert (caught.value.file, caught.value.line) == (str(path), 3)
    trace = read_trace(path, skip_bad=True)
    assert trace.skipped == 1
    assert len(trace.requests) == (3 if first == good else 2)


def test_bytes_that_are_not_utf_8_are_a_malformed_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes("\n".join(SAMPLES[TraceKind.AZURE]).encode() + b"\n2023-11-16 18:17:03,\xff,10\n")
    with pytest.raises(TraceError, match="line 5: not UTF-8 text"):
        read_trace(path)
    assert read_trace(path, skip_bad=True) == Trace("trace", REQUESTS[TraceKind.AZURE], 1)


def test_zero_generated_tokens_are_one_where_the_format_does_not_mark_failures(tmp_path: Path) -> None:
    azure = write(tmp_path, AZURE, "2023-11-16 18:17:03,7,0")
    assert read_trace(azure).requests == (Request(0.0, 7, 1),)
    mooncake = write(tmp_path, '{"timestamp": 0, "input_length": 7, "output_length": 0}')
    assert read_trace(mooncake).requests == (Request(0.0, 7, 1),)


def test_requests_are_sorted_by_arrival_and_equal_arrivals_keep_their_order(tmp_path: Path) -> None:
    lines = [f"{time},m,{tokens},1,0,x" for time, tokens in ((9, 3), (4, 4), (9, 1), (4, 2), (2, 5))]
    requests = read_trace(write(tmp_path, BURST, *lines)).requests
    assert [(request.arrival, request.context) for request in requests] == [
        (0.0, 5),
        (2.0, 4),
        (2.0, 2),
        (7.0, 3),
        (7.0, 1),
    ]


def test_nothing_is_read_after_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, *SAMPLES[TraceKind.AZURE][:3], "malformed")
    assert read_trace(path, limit=2).requests == REQUESTS[TraceKind.AZURE][:2]
    with pytest.raises(TraceError, match="line 4"):
        read_trace(path, limit=3)


def test_a_huge_line_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE, SAMPLES[TraceKind.AZURE][1] + "\n")
    with path.open("r+b") as stream:
        stream.truncate(256 * MAX_LINE_BYTES)
        stream.seek(0, os.SEEK_END)
        stream.write(("\n" + SAMPLES[TraceKind.AZURE][2]).encode())
    tracemalloc.start()
    try:
        trace = read_trace(path, skip_bad=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace == Trace("trace", REQUESTS[TraceKind.AZURE][:2], 1)
    assert peak < 8 * MAX_LINE_BYTES


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("\n\r\n \n", "the file is empty"),
        (AZURE + "\n", "no usable request"),
        ("a,b,c\n1,2,3\n", "not an Azure, Mooncake or BurstGPT trace: 'a, b, c'"),
        ("\0\0\0", "not an Azure, Mooncake or BurstGPT trace"),
        ("x" * (MAX_LINE_BYTES + 1), "longer than"),
    ],
    ids=["empty", "blank", "header only", "unknown header", "binary", "one long line"],
)
def test_a_file_without_a_trace_is_refused(tmp_path: Path, text: str, reason: str, skip_bad: bool) -> None:
    with pytest.raises(TraceError, match=reason):
        read_trace(write(tmp_path, text), skip_bad=skip_bad)


def test_a_trace_of_another_kind_than_told_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, *SAMPLES[TraceKind.AZURE])
    with pytest.raises(TraceError, match=r"line 1: not the header of TraceKind\.BURSTGPT"):
        read_trace(path, kind=TraceKind.BURSTGPT)
    with pytest.raises(TraceError, match="line 1: not JSON"):
        read_trace(path, kind=TraceKind.MOONCAKE)
    with pytest.raises(TraceError, match=r"no usable request in the file \(4 malformed lines\)"):
        read_trace(path, kind=TraceKind.MOONCAKE, skip_bad=True)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path(os.devnull)):
        with pytest.raises(ConfigError, match="path must be a regular file"):
            read_trace(path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "missing")


@pytest.mark.parametrize("limit", [0, -1, 1.0, True])
def test_a_limit_that_is_no_positive_int_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match="limit must be an int of at least 1"):
        read_trace(write(tmp_path, *SAMPLES[TraceKind.AZURE]), limit=limit)


@pytest.mark.parametrize("arrival", [-1.0, float("nan"), float("inf")])
def test_a_request_arrives_at_a_finite_time_from_zero_on(arrival: float) -> None:
    with pytest.raises(ConfigError, match="arrival must be finite and at least 0 seconds"):
        Request(arrival, 1, 1)


@pytest.mark.parametrize("tokens", [0, -1, 2**31, 1.0, True])
def test_a_request_has_whole_tokens_from_one_on(tokens: int) -> None:
    with pytest.raises(ConfigError, match="context must be an int in"):
        Request(0.0, tokens, 1)
    with pytest.raises(ConfigError, match="generated must be an int in"):
        Request(0.0, 1, tokens)


def test_a_trace_is_in_order_of_arrival() -> None:
    with pytest.raises(ConfigError, match=r"requests\[2\] must not arrive before requests\[1\]"):
        Trace("t", (Request(0.0, 1, 1), Request(2.0, 1, 1), Request(1.0, 1, 1)))


FIELDS = st.sampled_from(
    ["", "5", "-1", "nan", "1e9", "2023-11-16 18:17:03.5", "9999-12-31 23:59:59-23:59", '"', "\r", "\0", "é"]
)
ROWS = st.lists(FIELDS | st.text(max_size=5), max_size=7).map(",".join)
OBJECTS = st.dictionaries(
    st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids"]),
    st.sampled_from(["1", "-1", "1e400", "NaN", "null", "[]", '"7"', "{}", "9" * 400]),
).map(lambda entry: "{" + ",".join(f'"{key}": {value}' for key, value in entry.items()) + "}")
TEXTS = st.tuples(
    st.sampled_from([AZURE, BURST, SAMPLES[TraceKind.MOONCAKE][0]]), st.lists(ROWS | OBJECTS, max_size=5)
).map(lambda parts: "\n".join((parts[0], *parts[1])).encode("utf-8", "surrogatepass"))


@settings(max_examples=400, deadline=None)
@given(
    data=st.binary(max_size=200) | TEXTS,
    kind=st.none() | st.sampled_from(TraceKind),
    skip_bad=st.booleans(),
)
def test_any_bytes_give_a_trace_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, kind: TraceKind | None, skip_bad: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(data)
    try:
        trace = read_trace(path, kind=kind, skip_bad=skip_bad)
    except TraceError as error:
        lines = error.line
    else:
        assert trace.requests[0].arrival == 0
        lines = len(trace.requests) + trace.skipped
    assert 1 <= lines <= data.count(b"\n") + 1
