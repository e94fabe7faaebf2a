"""pytest plugin: the fixture ``leak_guard`` gates a test's own loop with the soak's samplers.

::

    @pytest.mark.soak(steps=500)
    def test_the_engine_does_not_leak(leak_guard, engine):
        for step in leak_guard.steps():
            engine.step(step)

Loaded by pytest where rocm_dp is installed; imports no torch by itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import torch

    from rocm_dp.soak.guard import LeakGuard

_STEPS = 200


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, so that ``--strict-markers`` takes it."""
    config.addinivalue_line(
        "markers",
        f"soak(steps={_STEPS}): runs a loop for long to see that it doesn't leak; leave such tests out with "
        "-m 'not soak'. steps: how many leak_guard.steps() yields",
    )


@pytest.fixture
def leak_guard(request: pytest.FixtureRequest) -> Iterator[LeakGuard]:
    """A guard whose ``steps()`` yields as many steps as the marker ``soak`` says, sampling in between.

    The test fails when it is over if a counter has leaked, was missing now and then, or if ``steps()`` was never
    used up. ``watch(exchange)`` adds the counters of a TokenExchange, ``limit(name, value)`` a limit.
    """
    from rocm_dp.soak.guard import LeakGuard

    marker = request.node.get_closest_marker("soak")
    steps = marker.kwargs.get("steps", _STEPS) if marker is not None else _STEPS
    with LeakGuard(steps, device=_current_gpu()) as guard:
        yield guard


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Let a test that has passed so far fail when its guard has found something."""
    result = yield
    if "leak_guard" in pyfuncitem.funcargs:
        from rocm_dp.soak.guard import LeakGuard

        guard = pyfuncitem.funcargs["leak_guard"]
        # A project may have a fixture of its own by that name.
        if isinstance(guard, LeakGuard) and (text := guard.finish()):
            pytest.fail(text, pytrace=False)
    return result


def _current_gpu() -> torch.device | None:
    """The GPU that the tests use already; none is started for this."""
    loaded = sys.modules.get("torch")
    if loaded is None or not loaded.cuda.is_available() or not loaded.cuda.is_initialized():
        return None
    return loaded.device("cuda", loaded.cuda.current_device())  # type: ignore[no-any-return]
