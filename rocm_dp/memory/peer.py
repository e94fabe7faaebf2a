"""Buffers of one size on every rank of a machine, each mapped into all the others."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from rocm_dp.control import Op
from rocm_dp.errors import PeerRefusedError, RankMismatchError
from rocm_dp.memory import runtime, shared
from rocm_dp.platform import host_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rocm_dp.groups import Groups


class Provider(Protocol):
    """Where peer memory comes from. ``words``: eight int64 at most that tell another process how to map it."""

    tensor: torch.Tensor
    words: tuple[int, ...]

    def open(self, words: Sequence[int]) -> int:
        """Map a peer's memory; return its address in this process."""

    def unmap(self) -> None:
        """Unmap all peers' memory."""

    def free(self) -> None:
        """Give up the own memory, which no peer maps any more."""


class SharedProvider:
    """CPU ranks: anonymous shared memory, so that the same kernels run there, interpreted."""

    def __init__(self, nbytes: int) -> None:
        self._own = shared.SharedMemory(nbytes)
        self.tensor = self._own.tensor
        self.words: tuple[int, ...] = self._own.words
        self._mapped: list[torch.Tensor] = []

    def open(self, words: Sequence[int]) -> int:
        """Map a peer's memory; return its address in this process."""
        self._mapped.append(shared.open_shared(words, self.tensor.numel()))
        return self._mapped[-1].data_ptr()

    def unmap(self) -> None:
        """Unmap all peers' memory."""
        self._mapped.clear()

    def free(self) -> None:
        """Give up the own memory, which no peer maps any more."""
        self._own.close()


class IpcProvider:
    """GPU ranks: memory of the HIP or CUDA runtime, shared by its IPC handles."""

    def __init__(self, nbytes: int, device: torch.device, *, uncached: bool) -> None:
        self._device = device
        self._runtime = runtime.loaded_runtime()
        with torch.cuda.device(device):
            self._address = self._runtime.allocate(nbytes, uncached=uncached)
            try:
                self.words = self._runtime.handle(self._address)
                self.tensor = runtime.as_tensor(self._address, nbytes, device)
            except BaseException:
                self._runtime.free(self._address)
                raise
        self._mapped: list[int] = []

    def open(self, words: Sequence[int]) -> int:
        """Map a peer's memory; return its address in this process."""
        with torch.cuda.device(self._device):
            self._mapped.append(self._runtime.open(words))
        return self._mapped[-1]

    def unmap(self) -> None:
        """Unmap all peers' memory."""
        with torch.cuda.device(self._device):
            while self._mapped:
                self._runtime.close(self._mapped.pop())

    def free(self) -> None:
        """Give up the own memory, which no peer maps any more."""
        with torch.cuda.device(self._device):
            self._runtime.free(self._address)


class PeerBuffer:
    """``nbytes`` zero bytes on every rank, mapped into all; made collectively, closed collectively.

    ``tensor`` uint8 [nbytes] is the own memory; ``addresses`` int64 [W] on the device are where every rank's memory
    lies in this process, the own included. ``uncached``: for flags that other GPUs write (HIP only).

    Raises PeerRefusedError on every rank, with every rank's reason, when one of them can't take part: ranks on
    several hosts or in containers that don't share namespaces, no memory, a handle that can't be made or opened.
    """

    def __init__(self, nbytes: int, *, groups: Groups, device: torch.device, uncached: bool = False) -> None:
        self._groups, self._closed = groups, False
        provider, reason = _offer(nbytes, device, uncached=uncached)
        words = (*(provider.words if provider else ()), *[0] * runtime.HANDLE_WORDS)[: runtime.HANDLE_WORDS]
        rows = groups.control.call(
            Op.PEER_OFFER,
            {
                "refused": provider is None,
                "host": host_id(),
                "nbytes": nbytes,
                **{f"word{i}": w for i, w in enumerate(words)},
            },
        )
        if len({(row["host"], row["nbytes"]) for row in rows}) > 1:
            reason = reason or f"host {rows[groups.layout.rank]['host']:x}, {nbytes} bytes"
        refused = any(row["refused"] for row in rows) or len({(row["host"], row["nbytes"]) for row in rows}) > 1
        addresses: list[int] = []
        if provider and not refused:
            addresses, reason = _open_all(provider, rows, groups.layout.rank)
        failed = groups.control.call(Op.PEER_OPEN, {"refused": refused or bool(reason)})
        if provider is None or any(row["refused"] for row in failed):
            self._refuse(provider, reason)
        self._provider: Provider = provider
        self.tensor = provider.tensor
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def close(self, *, collective: bool = True) -> None:
        """Unmap the peers' memory, wait until all have, and free the own. A second call does nothing.

        ``collective`` False: a rank is gone, don't wait for it; nobody may use the memory any more.
        """
        if self._closed:
            return
        self._closed = True
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)
        del self.tensor, self.addresses
        self._provider.unmap()
        if collective:
            # The memory may be mapped elsewhere until everyone is here; a lost rank has nothing mapped any more.
            with suppress(RankMismatchError):
                self._groups.control.call(Op.PEER_CLOSE, {})
        self._provider.free()

    def __enter__(self) -> PeerBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(collective=kind is None)

    def _refuse(self, provider: Provider | None, reason: str) -> NoReturn:
        """Give everything back and raise, on every rank, with what each says."""
        if provider:
            provider.unmap()
        said = dict(enumerate(self._groups.control.texts(reason or "ready")))
        if provider:
            provider.free()
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in said.items())
        raise PeerRefusedError(f"peer memory is refused: {lines}")


def _offer(nbytes: int, device: torch.device, *, uncached: bool) -> tuple[Provider | None, str]:
    try:
        if device.type == "cuda":
            return IpcProvider(nbytes, device, uncached=uncached), ""
        return SharedProvider(nbytes), ""
    except PeerRefusedError as error:
        return None, str(error)


def _open_all(provider: Provider, rows: list[dict[str, int]], own: int) -> tuple[list[int], str]:
    """Map every peer's memory; return the addresses by rank, or the reason why not."""
    addresses = []
    for rank, row in enumerate(rows):
        words = [row[f"word{i}"] for i in range(runtime.HANDLE_WORDS)]
        try:
            addresses.append(provider.tensor.data_ptr() if rank == own else provider.open(words))
        except PeerRefusedError as error:
            return [], f"the memory of rank {rank}: {error}"
    return addresses, ""
