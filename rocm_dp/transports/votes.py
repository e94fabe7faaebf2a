"""Steps that all ranks take together or none: what one of them can't do, none of them does."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rocm_dp.control import Op
from rocm_dp.errors import RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.groups import Groups

T = TypeVar("T")
_FINE = "fine"


class FailedError(Exception):
    """The self-test failed, on every rank with the same text."""


def together(groups: Groups, step: Callable[[], T]) -> T:
    """Do one step; raise FailedError on every rank when it fails on one."""
    result, wrong = None, ""
    try:
        result = step()
    except Exception as error:  # whatever it is, it must not be met in service
        wrong = f"{type(error).__name__}: {error}"
    if told := vote(groups, wrong):
        raise FailedError(f"its self-test failed with {told}")
    return result  # type: ignore[return-value]


def vote(groups: Groups, reason: str) -> str:
    """Return every rank's reason against; empty when no rank has one.

    A rank whose step failed comes here while others are still in a collective of that step: then all of them see a
    mismatch, and those come here next.
    """
    try:
        votes = groups.control.call(Op.QUALIFY, {"refused": bool(reason)})
    except RankMismatchError:
        votes = groups.control.call(Op.QUALIFY, {"refused": bool(reason)})
    if not any(vote["refused"] for vote in votes):
        return ""
    said = {rank: text for rank, text in enumerate(groups.control.texts(reason or _FINE)) if text != _FINE}
    if len(set(said.values())) == 1 and len(said) == groups.layout.world_size:
        return reason
    return "; ".join(f"rank {rank}: {text}" for rank, text in said.items())
