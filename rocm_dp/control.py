"""The control plane: one fixed-size packet from every rank, read by all of them, or a named error.

Every decision that ranks must share (groups, plans, options) goes through here, so a rank that calls something
else is seen at once: its packet carries another operation.
"""

from __future__ import annotations

import re
import threading
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rocm_dp.errors import ClosedError, ConfigError, RankMismatchError
from rocm_dp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WORDS = 16  # int64 words of a packet: version, operation, then up to 14 fields
_TEXT = 512  # bytes of what a person reads in place of a hash, when ranks disagree
_PART = 1000  # a version's parts as digits of one word: 0.1.0 is 1000
_GRACE_S = 2.0  # after a failure: how long to wait for what the other ranks say of it
_STORE_S = 1.0  # how much longer the store may take to answer


def version_word(version: str) -> int:
    """Return the first three numbers of a version in one word."""
    major, minor, patch = map(int, [*re.findall(r"\d+", version), 0, 0][:3])
    return (major * _PART + minor) * _PART + patch


_VERSION = version_word(__version__)


class Op(IntEnum):
    """What a rank is doing when it sends a packet."""

    GROUPS = 1
    EXCHANGE = 2
    AGREE = 3
    CONFIRM = 4
    SIGNATURE = 5
    GATHER = 6
    GATHER_MANY = 7
    COMBINE = 8
    PEER_OFFER = 9
    PEER_OPEN = 10
    PEER_CLOSE = 11
    LANES = 12
    QUALIFY = 13
    POISON = 14
    LINKS = 15
    GRAPH_PLAN = 16
    TABLE = 17


class Control:
    """The control plane over one gloo group. Calls are collective; after a rank was lost it can't be used again.

    ``failure`` says what was lost then.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # A group with a backend for each kind of device says "cpu:gloo,cuda:nccl", or only "undefined".
        backend = dist.get_backend(group)
        if "gloo" not in backend and backend != "undefined":
            raise ConfigError(f"the cpu group must be gloo, got {backend}")
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._mine = torch.zeros(WORDS, dtype=torch.int64)
        self._all = torch.zeros(self._size, WORDS, dtype=torch.int64)
        self.failure: str | None = None

    def call(self, op: Op, fields: Mapping[str, int]) -> list[dict[str, int]]:
        """Send this rank's ``fields`` (int64 each, at most 14) and return those of every rank, by rank.

        Raises RankMismatchError on every rank when one sent another operation, runs another version of
        rocm_dp, or did not come within the group's timeout; ClosedError after such a failure.
        """
        self.check_usable()
        words = [_VERSION, op, *fields.values()]
        self._mine[: len(words)] = torch.tensor(words, dtype=torch.int64)
        doing = f"{op.name.lower()}({', '.join(f'{name}={value}' for name, value in fields.items())})"
        self._gather(list(self._all.unbind()), self._mine, doing)
        rows: list[list[int]] = self._all.tolist()
        check_same("the version of rocm_dp", {rank: _version(row[0]) for rank, row in enumerate(rows)})
        check_same("the call", {rank: _op_name(row[1]) for rank, row in enumerate(rows)})
        return [dict(zip(fields, row[2:], strict=False)) for row in rows]

    def call_equal(self, op: Op, fields: Mapping[str, int], *, shown: Mapping[str, object] | None = None) -> None:
        """Like ``call``, and raise RankMismatchError unless every field is equal on all ranks.

        ``shown`` says what a person reads in place of a field that is a hash.
        """
        rows = self.call(op, fields)
        for name in fields:
            values: dict[int, object] = {rank: row[name] for rank, row in enumerate(rows)}
            if len(set(values.values())) > 1 and shown and name in shown:
                # Every rank sees the mismatch, so all of them come here. A text may be cut where it differs.
                texts = self.texts(str(shown[name]))
                if len(set(texts)) > 1:
                    values = dict(enumerate(texts))
            check_same(f"{name} in {op.name.lower()}", values)

    def lost(self, doing: str) -> RankMismatchError:
        """Return the error for a collective that failed or timed out, with what every rank was doing.

        Each rank that failed leaves a line in the group's store and reads those of the others for a short
        while; a rank that left none is still elsewhere, or gone, or cut off from the store.
        """
        said: dict[int, object] = dict.fromkeys(range(self._size), "no answer: still elsewhere, or gone")
        said[self._rank] = doing
        found: dict[int, str] = {}
        wrong = _bounded(lambda: _share_lines(self._group, self._rank, self._size, doing, found))
        said.update(found.copy())
        if wrong:
            doing += f" (the store is gone too: {wrong})"
        lines = "; ".join(f"rank {rank}: {line}" for rank, line in said.items())
        self.failure = f"a collective failed or timed out in {doing}"
        return RankMismatchError(f"{self.failure}; {lines}", said)

    def from_rank_0(self, data: bytes, wrong: str) -> bytes:
        """Return rank 0's ``data`` on every rank; ConfigError on every rank if it tells what is ``wrong``."""
        first = self.call(Op.TABLE, {"size": len(data), "wrong": bool(wrong)})[0]
        if first["wrong"]:
            raise ConfigError(self.texts(wrong or "fine")[0])
        whole = torch.zeros(first["size"], dtype=torch.uint8)
        if not first["size"]:
            return b""
        if self._rank == 0:
            whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        try:
            dist.broadcast(whole, group=self._group, group_src=0)
        except RuntimeError as error:
            raise self.lost("reading a table from rank 0") from error
        return bytes(whole.tolist())

    def gave_up(self, why: str) -> None:
        """Tell the others that this rank comes to no call any more, and refuse every further one here."""
        if self.failure:
            return
        self.failure = why
        _bounded(lambda: _say(self._group, self._rank, why))

    def check_usable(self) -> None:
        """Raise ClosedError after a rank was lost: whoever noticed, nobody on these groups should wait again."""
        if self.failure:
            raise ClosedError(f"these groups can't be used after: {self.failure}")

    def _gather(self, every: list[torch.Tensor], mine: torch.Tensor, doing: str) -> None:
        try:
            dist.all_gather(every, mine, group=self._group)
        except RuntimeError as error:
            raise self.lost(doing) from error

    def texts(self, mine: str) -> list[str]:
        """Return a text of every rank, by rank, cut to a fixed length; for ranks that just agreed to say why."""
        packed = torch.zeros(_TEXT, dtype=torch.uint8)
        data = mine.encode()[:_TEXT]
        packed[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [torch.empty_like(packed) for _ in range(self._size)]
        self._gather(every, packed, "telling why")
        return [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in every]


def check_same(what: str, values: Mapping[int, object]) -> None:
    """Raise RankMismatchError, with each rank's value, unless all are equal."""
    if len(set(values.values())) > 1:
        lines = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
        raise RankMismatchError(f"ranks disagree on {what}: {lines}", values)


def _op_name(word: int) -> str:
    return Op(word).name.lower() if word in Op._value2member_map_ else f"unknown operation {word}"


def _version(word: int) -> str:
    return f"{word // _PART**2}.{word // _PART % _PART}.{word % _PART}"


def _bounded(talk: Callable[[], object]) -> str:
    """Talk to a store for a bounded time; return what went wrong, or "".

    The store may be on a host that is cut off: torch then waits for its answer without a bound, in a thread that is
    left behind.
    """
    wrong = ["no answer"]

    def run() -> None:
        try:
            talk()
            wrong[0] = ""
        except (RuntimeError, AttributeError, KeyError) as error:
            wrong[0] = type(error).__name__

    thread = threading.Thread(target=run, name="rocm_dp-last-words", daemon=True)
    thread.start()
    thread.join(_GRACE_S + _STORE_S)
    return wrong[0]


def _say(group: dist.ProcessGroup, rank: int, line: str) -> Any:
    """Leave a rank's ``line`` in the store of ``group``, and return that."""
    store = dist.distributed_c10d._get_process_group_store(group)
    store.set(f"rocm_dp/lost/{rank}", line)
    return store


def _share_lines(group: dist.ProcessGroup, rank: int, size: int, line: str, found: dict[int, str]) -> None:
    """Leave a ``line`` for the others, and put those of all ranks into ``found`` as they come."""
    # The group itself is broken by now; its store is what is left to talk over.
    store = _say(group, rank, line)
    missing = set(range(size))
    deadline = time.monotonic() + _GRACE_S
    while missing and time.monotonic() < deadline:
        for other in sorted(missing):
            if store.check([f"rocm_dp/lost/{other}"]):
                found[other] = store.get(f"rocm_dp/lost/{other}").decode()
                missing.discard(other)
        time.sleep(0.02)
