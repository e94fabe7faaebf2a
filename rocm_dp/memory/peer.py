"""Buffers of one size on every rank of a machine, each mapped into all the others."""

from __future__ import annotations

import weakref
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from rocm_dp.control import Op
from rocm_dp.errors import ClosedError, PeerRefusedError, RankMismatchError
from rocm_dp.memory import runtime, shared
from rocm_dp.memory.raw import as_tensor
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
        """Give up the own memory, which no peer maps any more; it is gone with the last view of it."""

    def abandon(self) -> None:
        """Give up the own memory though a peer may yet write to it."""


class SharedProvider:
    """CPU ranks: anonymous shared memory, so that the same kernels run there, interpreted."""

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(mode=False):
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

    def abandon(self) -> None:
        """Give up the own memory: what a peer maps stays its own."""
        self._own.close()


class IpcProvider:
    """GPU ranks: memory of the HIP or CUDA runtime, shared by its IPC handles."""

    def __init__(self, nbytes: int, device: torch.device, *, uncached: bool) -> None:
        self._device = device
        self._runtime = runtime.loaded_runtime()
        with torch.inference_mode(mode=False), torch.cuda.device(device):
            address = self._runtime.allocate(nbytes, uncached=uncached)
            try:
                self.words = self._runtime.handle(address)
                self.tensor, owner = as_tensor(address, nbytes, device)
            except BaseException:
                self._runtime.free(address)
                raise
        # Results are views of it: it must not go before the last of them.
        self._freed = weakref.finalize(owner, _free, self._runtime, device, address)
        self._freed.atexit = False
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
        """Give up the own memory, which no peer maps any more; it is gone with the last view of it."""
        del self.tensor

    def abandon(self) -> None:
        """Leave the own memory to the end of the process: a peer may yet write to it."""
        self._freed.detach()


def _free(loaded: runtime.Runtime, device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        loaded.free(address)


class SymmetricProvider:
    """GPU ranks: torch's symmetric memory, where IPC handles are not to be had. Its rendezvous is collective."""

    def __init__(self, nbytes: int, device: torch.device, groups: Groups) -> None:
        self._group = groups.world.group_name
        self._handle: Any = None
        self.words: tuple[int, ...] = (groups.layout.rank,)
        try:
            with torch.inference_mode(mode=False):
                self.tensor: torch.Tensor = _symmetric().empty(nbytes, dtype=torch.uint8, device=device).zero_()
        except RuntimeError as error:
            raise PeerRefusedError(f"torch has no symmetric memory here ({error})") from error

    def open(self, words: Sequence[int]) -> int:
        """Map all peers' memory the first time; return the address of one in this process."""
        try:
            if self._handle is None:
                self._handle = _symmetric().rendezvous(self.tensor, self._group)
        except RuntimeError as error:
            raise PeerRefusedError(f"no rendezvous over symmetric memory ({error})") from error
        return int(self._handle.buffer_ptrs[words[0]])

    def unmap(self) -> None:
        """Unmap all peers' memory."""
        self._handle = None

    def free(self) -> None:
        """Give up the own memory, which no peer maps any more."""
        del self.tensor

    def abandon(self) -> None:
        """Give up the own memory: what a peer maps stays its own."""
        del self.tensor


def _symmetric() -> Any:
    # Imported late: it is private to torch, and few need it.
    return import_module("torch.distributed._symmetric_memory")


class PeerBuffer:
    """``nbytes`` zero bytes on every rank, mapped into all; made collectively, closed collectively.

    ``tensor`` uint8 [nbytes] is the own memory; ``addresses`` int64 [W] on the device are where every rank's memory
    lies in this process, the own included. ``uncached``: for flags that other GPUs write (HIP only).

    Raises PeerRefusedError on every rank, with every rank's reason, when one of them can't take part: ranks on
    several hosts or in containers that don't share namespaces, no memory, a handle that can't be made or opened.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        groups: Groups,
        device: torch.device,
        uncached: bool = False,
        kind: str = "ipc",
    ) -> None:
        self._groups, self._closed = groups, False
        provider, reason = _offer(nbytes, device, groups, uncached=uncached, kind=kind)
        try:
            addresses, reason, refused = self._meet(provider, reason, nbytes)
        except BaseException:
            # A rank was lost, or is elsewhere: some may map this memory already.
            if provider:
                provider.unmap()
                provider.abandon()
            raise
        if provider is None or refused:
            self._refuse(provider, reason)
        self._provider: Provider = provider
        self.tensor = provider.tensor
        self.of_ranks = tuple(addresses)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def _meet(self, provider: Provider | None, reason: str, nbytes: int) -> tuple[list[int], str, bool]:
        """Exchange handles and open all; return the addresses, the own reason against, and whether any has one."""
        layout, control = self._groups.layout, self._groups.control
        words = (*(provider.words if provider else ()), *[0] * runtime.HANDLE_WORDS)[: runtime.HANDLE_WORDS]
        fields = {"refused": provider is None, "host": host_id(), "nbytes": nbytes}
        rows = control.call(Op.PEER_OFFER, {**fields, **{f"word{i}": word for i, word in enumerate(words)}})
        differ = len({(row["host"], row["nbytes"]) for row in rows}) > 1
        if differ:
            reason = reason or f"host {rows[layout.rank]['host']:x}, {nbytes} bytes"
        refused = differ or any(row["refused"] for row in rows)
        addresses: list[int] = []
        if provider and not refused:
            addresses, reason = _open_all(provider, rows, layout.rank)
        opened = control.call(Op.PEER_OPEN, {"refused": refused or bool(reason)})
        return addresses, reason, any(row["refused"] for row in opened)

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
        # The memory may be mapped elsewhere until everyone is here.
        try:
            if collective:
                self._groups.control.call(Op.PEER_CLOSE, {})
        except (RankMismatchError, ClosedError):
            collective = False
        if collective:
            self._provider.free()
        else:
            self._provider.abandon()

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


def _offer(
    nbytes: int, device: torch.device, groups: Groups, *, uncached: bool, kind: str
) -> tuple[Provider | None, str]:
    try:
        if device.type != "cuda":
            return SharedProvider(nbytes), ""
        if kind == "symmetric":
            return SymmetricProvider(nbytes, device, groups), ""
        return IpcProvider(nbytes, device, uncached=uncached), ""
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
