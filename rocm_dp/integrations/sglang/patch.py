"""``install`` and ``uninstall``: SGLang's layer stays in place, and the functions that move rows become ours."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp import rocm
from rocm_dp.errors import ConfigError, TransportRefusedError
from rocm_dp.integrations.sglang import engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.integrations.sglang.layer import DpAttention
    from rocm_dp.integrations.sglang.settings import Settings

PLUGIN_SWITCH = "ROCM_DP_SGLANG"
MOVED = (
    *("dp_gather_partial", "dp_gather_replicate", "dp_scatter", "dp_reduce_scatter_tensor"),
    *("dp_gather_partial_async", "dp_reduce_scatterv_async", "get_dp_tbo_comm_stream"),
    *("get_tbo_persistent_buffer", "mask_dp_pad_moe_topk_ids"),
)
TOLD = ("set_dp_buffer_len", "set_local_dp_buffer_len", "set_is_extend_in_batch")
# Whichever is called last knows the groups and the buffers: releases differ in who makes the buffers.
MADE_BY = ("initialize_dp_attention", "init_dp_gathered_buffer")
_NEEDED = (*MOVED[:4], TOLD[0], MADE_BY[0])
_MARK = "_rocm_dp_installation"
_NOTE = "_note_dp_gather_in_prefill_graph"
_DEFAULT_MODE = "get_default_mode_in_cuda_graph"


class Installation:
    """What was put in place of what; ``state`` once SGLang has initialised its layer."""

    def __init__(self, layer: ModuleType, settings: Settings | None) -> None:
        self.layer, self._settings = layer, settings
        self.state: DpAttention | None = None
        self._server_args: Any = None
        self._initialised = False
        self._swaps: list[tuple[object, object]] = []  # SGLang's function and ours
        self._default_mode_before: object = None

    def put(self) -> None:
        """Replace the functions in SGLang's layer, and wherever else they were imported to.

        Raises ConfigError, with nothing replaced, for a layer without those that every release has.
        """
        modes = getattr(self.layer, "DpPaddingMode", None)
        missing = [name for name in _NEEDED if not hasattr(self.layer, name)]
        missing += [] if hasattr(modes, _DEFAULT_MODE) else [f"DpPaddingMode.{_DEFAULT_MODE}"]
        if missing:
            raise ConfigError(f"{self.layer.__name__} of this SGLang has no {', '.join(missing)}")
        kinds: tuple[tuple[tuple[str, ...], Callable[..., Any]], ...]
        kinds = ((MOVED, self._moved), (TOLD, self._told), (MADE_BY, self._made))
        for names, make in kinds:
            for name in names:
                original = getattr(self.layer, name, None)
                if original is not None:
                    self._swaps.append((original, make(name, original)))
                    _swap(*self._swaps[-1])
        self._default_mode_before = vars(modes)[_DEFAULT_MODE]
        setattr(modes, _DEFAULT_MODE, classmethod(self._default_mode(getattr(modes, _DEFAULT_MODE))))
        setattr(self.layer, _MARK, self)

    def undo(self) -> None:
        """Put everything back, in modules too that were imported since, and end the state."""
        for original, ours in self._swaps:
            _swap(ours, original)
        self._swaps.clear()
        setattr(self.layer.DpPaddingMode, _DEFAULT_MODE, self._default_mode_before)
        delattr(self.layer, _MARK)
        state, self.state = self.state, None
        if state is not None:
            try:
                state.shutdown()
            finally:
                state.exchange.groups.close()

    def _moved(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        note = getattr(self.layer, _NOTE, _nothing) if name.startswith("dp_") else _nothing

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            state = self.state
            if state is None or self._left_to_engine(state):
                return original(*args, **kwargs)
            note()
            try:
                return getattr(state, name)(*args, **kwargs)
            except TransportRefusedError:
                # Said by every rank before anything travels: SGLang may have an all-reduce that can be captured.
                if not state.capturing():
                    raise
                return original(*args, **kwargs)

        return torch.compiler.disable(call)  # type: ignore[no-untyped-call, no-any-return]

    def _told(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.state is not None:
                getattr(self.state, name)(*args, **kwargs)
            elif not self._initialised:
                self._initialised = True
                warnings.warn(
                    "SGLang was initialised before install(): rocm_dp moves none of its rows", stacklevel=2
                )
            return original(*args, **kwargs)

        return call

    def _made(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._initialised = True
            if name == MADE_BY[0]:
                self._server_args = kwargs.get("server_args", args[0] if args else None)
            last = MADE_BY[1] if hasattr(self.layer, MADE_BY[1]) else MADE_BY[0]
            if name == last and self.state is None:
                self.state = engine.state_of(self.layer, self._server_args, self._settings)
            return result

        return call

    def _default_mode(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_default_mode_in_cuda_graph(cls: Any, *args: Any, **kwargs: Any) -> Any:
            state = self.state
            if state is not None and state.settings.sum_len_in_graphs.on:
                return cls.SUM_LEN
            return original(*args, **kwargs)

        return get_default_mode_in_cuda_graph

    def _left_to_engine(self, state: DpAttention) -> bool:
        """Return whether SGLang's own function serves: after elastic growth, and captures without peer memory."""
        if getattr(self.layer, "world_dp_gather_enabled", lambda: False)():
            return True
        return state.capturing() and not state.exchange.over_peers


def install(settings: Settings | None = None) -> Installation:
    """Let SGLang move rows with rocm_dp in this process; before a model is loaded. A second call changes nothing.

    ``settings`` None: those of SGLang's variables and ours, see ``settings.from_environment``. Raises ConfigError
    where SGLang is not installed.
    """
    try:
        layer = import_module(engine.LAYER)
    except ModuleNotFoundError as error:
        raise ConfigError(f"install() needs SGLang, and {error.name} is not installed") from error
    installed = getattr(layer, _MARK, None)
    if not isinstance(installed, Installation):
        installed = Installation(layer, settings)
        installed.put()
    return installed


def uninstall() -> None:
    """Give SGLang its own functions back and end the state (collective); without ``install`` it does nothing."""
    layer = sys.modules.get(engine.LAYER)
    installed = getattr(layer, _MARK, None)
    if isinstance(installed, Installation):
        installed.undo()


def plugin() -> None:
    """Do ``install`` as SGLang's plugin, in every process that it starts, if ROCM_DP_SGLANG is 1."""
    if rocm.override_from(os.environ, PLUGIN_SWITCH):
        install()


def _swap(old: object, new: object) -> None:
    """Let every name in SGLang's modules that means ``old`` mean ``new``."""
    for key, module in list(sys.modules.items()):
        if key.split(".")[0] == "sglang" and isinstance(module, ModuleType):
            for name in [name for name, value in vars(module).items() if value is old]:
                setattr(module, name, new)


def _nothing() -> None:
    """Do nothing."""
