"""DpAttention: SGLang's layer as one object, and how it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.control import Op
from rocm_dp.errors import ConfigError
from rocm_dp.integrations.sglang.groups import GroupFunctions
from rocm_dp.integrations.sglang.overlap import Overlap, OverlapState
from rocm_dp.integrations.sglang.ranks import DpPaddingMode
from rocm_dp.integrations.sglang.settings import Settings
from rocm_dp.integrations.sglang.wide import LayerExchange
from rocm_dp.plan import digest64

if TYPE_CHECKING:
    from types import TracebackType

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout

_MASKED = -1  # an expert id that fused MoE kernels drop


class DpAttention(Overlap, GroupFunctions):
    """The functions of SGLang's layer as methods, and all of its state; a context manager.

    Made by ``initialize``, ended by ``shutdown``. Two of them share nothing but what their groups share.
    """

    DpPaddingMode = DpPaddingMode

    def __init__(
        self,
        exchange: LayerExchange,
        *,
        enabled: bool = True,
        moe_dense_tp_size: int | None = None,
        settings: Settings = Settings(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(
            enabled=enabled,
            hidden=exchange.hidden,
            dtype=exchange.dtype,
            device=exchange.device,
            dense_tp_size=moe_dense_tp_size,
        )
        self.exchange, self.layout, self.settings = exchange, exchange.layout, settings
        self.overlap = OverlapState()

    def mask_dp_pad_moe_topk_ids(self, topk_ids: torch.Tensor) -> None:
        """Set the expert ids [G, k] of the padding rows of a MAX_LEN step to -1, in place: nothing is computed.

        By the counts on the device, so it can be captured. Does nothing in other steps, nor when the counts are
        unknown or G is another.
        """
        counts, size = self._device_counts, self._local_len
        if not self._max_padding or counts is None or size < 1 or topk_ids.shape[0] != counts.shape[0] * size:
            return
        at = torch.arange(size, device=topk_ids.device)
        padding = at.unsqueeze(0) >= counts.unsqueeze(1)
        topk_ids.masked_fill_(padding.reshape(-1, 1), _MASKED)

    def shutdown(self) -> None:
        """Give up stream, events, buffers and the exchange; collective, like ``TokenExchange.close``."""
        self.exchange.close()
        self.overlap = OverlapState()

    def __enter__(self) -> DpAttention:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exchange.__exit__(kind, error, trace)
        self.overlap = OverlapState()


def initialize(
    layout: RankLayout,
    groups: Groups,
    *,
    device: torch.device | str,
    hidden: int,
    dtype: torch.dtype,
    enabled: bool = True,
    moe_dense_tp_size: int | None = None,
    settings: Settings = Settings(),  # noqa: B008 - frozen
) -> DpAttention:
    """Make a DpAttention with an exchange of its own; collective. ``groups`` are borrowed.

    ``enabled`` False: no rank owns different rows, ``layout`` must have one dp rank. ``moe_dense_tp_size``: the tp
    size of dense MLPs (None: all ranks). Raises ConfigError, RankMismatchError when the ranks' settings differ, and
    what ``TokenExchange`` raises.
    """
    if not enabled and layout.dp_size != 1:
        raise ConfigError(f"without dp attention there is one dp rank, got {layout.dp_size}")
    # What decides which collective a step takes, so that ranks whose environments differ are told now.
    text = settings.told
    groups.control.call_equal(Op.SIGNATURE, {"settings": digest64(text.encode())}, shown={"settings": text})
    exchange = LayerExchange(
        layout,
        groups,
        device=device,
        hidden=hidden,
        dtype=dtype,
        max_rows=settings.max_rows,
        max_local_rows=settings.max_local_rows,
        options=settings.options,
    )
    if settings.max_rows is not None:
        exchange.reserve()
    return DpAttention(exchange, enabled=enabled, moe_dense_tp_size=moe_dense_tp_size, settings=settings)
