"""Which resource ran out is told from the last sample, with the evidence; what is not known is not guessed."""

from __future__ import annotations

import pytest

from rocm_dp.soak.diagnosis import diagnose, ran_out

GIB = float(2**30)
HSA = "RuntimeError: HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources"
LIMITS = {
    "hsa.live": 4096.0,
    "kfd.queues": 1024.0,
    "torch.driver_used": 192 * GIB,
    "memlock": 8.0 * 2**20,
    "fds.all": 1024.0,
    "maps": 65530.0,
    "threads": 30000.0,
    "rss": 512 * GIB,
}
CALM = {
    "hsa.live": 180.0,
    "kfd.queues": 4.0,
    "torch.driver_used": 100 * GIB,
    "memlock": 2.0**20,
    "fds.all": 90.0,
    "maps": 900.0,
    "threads": 60.0,
    "rss": 9 * GIB,
}


@pytest.mark.parametrize(
    ("full", "cause", "shown"),
    [
        ({"hsa.live": 4090.0}, "HSA signals", "4,090 of 4,096 (99.9%)"),
        ({"kfd.queues": 1000.0}, "hardware queues", "1,000 of 1,024"),
        # 30 MB are free: the same error, and signals have nothing to do with it.
        ({"torch.driver_used": 192 * GIB - 30e6}, "VRAM", "scratch memory of kernels could not grow"),
        ({"memlock": 8.0 * 2**20}, "locked memory", "ulimit -l"),
        ({"fds.all": 1023.0}, "file descriptors", "ulimit -n"),
    ],
)
def test_the_same_error_is_told_apart_by_what_was_full(full: dict[str, float], cause: str, shown: str) -> None:
    found = diagnose(HSA, {**CALM, **full}, LIMITS)
    assert found is not None
    assert found.cause == cause
    assert found.text.startswith(f"it was {cause}\n")
    assert shown in found.text.splitlines()[1]
    assert len(found.evidence) == len(CALM), "what was not full is evidence too"


def test_of_two_the_fuller_is_named_first() -> None:
    found = diagnose(HSA, {**CALM, "hsa.live": 3900.0, "fds.all": 1024.0}, LIMITS)
    assert found is not None
    assert [one.resource.name for one in found.evidence[:2]] == ["file descriptors", "HSA signals"]


def test_nothing_near_its_limit_names_nothing() -> None:
    found = diagnose(HSA, CALM, LIMITS)
    assert found is not None
    assert found.cause == ""
    assert "none of the resources that were sampled was near its limit" in found.text


def test_what_was_not_sampled_is_said() -> None:
    found = diagnose(HSA, {"fds.all": 10.0}, LIMITS)
    assert found is not None
    assert "HSA signals" in found.unknown
    assert "not sampled: HSA signals" in found.text


@pytest.mark.parametrize(
    "error",
    [
        HSA,
        "OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB",
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA error: too many resources requested for launch (cudaErrorLaunchOutOfResources)",
        "OSError: [Errno 24] Too many open files",
        "RuntimeError: can't start new thread",
        "RankFailedError: rank 1 died without an answer (exit code -6)",
    ],
)
def test_the_errors_of_both_vendors_and_of_linux_are_known(error: str) -> None:
    assert ran_out(error)
    assert diagnose(error, CALM, LIMITS) is not None


def test_an_error_of_another_kind_is_not_diagnosed() -> None:
    assert diagnose("RankMismatchError: ranks disagree on counts", CALM, LIMITS) is None
