"""The soak's samplers: right numbers of real things, recorded trees for what is not here, a reason when absent."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchange_cases import Grid, an_exchange
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

from rocm_dp.soak.device import ExchangeSampler, TorchSampler
from rocm_dp.soak.heap import FEW_RECORDS, ONE_ARENA, BlockSampler, HeapSampler
from rocm_dp.soak.host import HostSampler, ShmSampler, fd_kind, host_limits
from rocm_dp.soak.kfd import KfdSampler
from rocm_dp.soak.objects import ObjectSampler
from rocm_dp.soak.sample import AbsentError, Probe
from rocm_dp.soak.vendor import AmdsmiSampler, NvmlSampler
from rocm_dp.testing import RankPool

Ranks = Callable[[int], RankPool]

# As Linux writes it, cut to a few lines.
STATUS = "Name:\tpython\nNSpid:\t{pids}\nVmLck:\t      16 kB\nVmPin:\t       8 kB\nVmRSS:\t  2048 kB\nThreads:\t7\n"
ROLLUP = "00400000-7ffe ---p 00000000 00:00 0 [rollup]\nRss:  2048 kB\nPss:  1024 kB\n"
MAPS = "00400000-00401000 r--p 00000000 08:01 12 /usr/bin/python\n7f00-7f01 rw-p 00000000 00:00 0 \n"


def a_process(folder: Path, fds: dict[str, str], pids: str = "42") -> Path:
    (folder / "fd").mkdir(parents=True)
    (folder / "status").write_text(STATUS.format(pids=pids))
    (folder / "maps").write_text(MAPS)
    (folder / "smaps_rollup").write_text(ROLLUP)
    for name, target in fds.items():
        (folder / "fd" / name).symlink_to(target)
    return folder


def test_a_recorded_process_is_read_field_by_field(tmp_path: Path) -> None:
    targets = ("socket:[1]", "socket:[2]", "pipe:[3]", "anon_inode:[eventpoll]", "/dev/kfd", "/etc/hosts")
    a_process(tmp_path / "self", {str(fd): target for fd, target in enumerate(targets)})
    found = HostSampler(tmp_path).read()
    kinds = {name: value for name, value in found.items() if name.startswith("fds.") and value}
    assert kinds == {"fds.socket": 2, "fds.pipe": 1, "fds.eventpoll": 1, "fds.gpu": 1, "fds.file": 1, "fds.all": 6}
    others = {name: value for name, value in found.items() if not name.startswith("fds.")}
    assert others == {"threads": 7, "maps": 2, "rss": 2048 * 1024, "pss": 1024 * 1024, "memlock": 24 * 1024}


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("anon_inode:[eventfd]", "eventfd"),
        ("anon_inode:inotify", "other"),
        ("/memfd:buffer (deleted)", "memfd"),
        ("/dev/shm/psm_1", "shm"),
        ("/dev/dri/renderD128", "gpu"),
        ("/dev/nvidia0", "gpu"),
        ("/tmp/a socket:", "file"),
    ],
)
def test_an_fd_is_named_by_what_its_link_points_to(target: str, kind: str) -> None:
    assert fd_kind(target) == kind


@pytest.mark.parametrize("nbytes", [1000, 40 * 2**20])
def test_what_native_code_allocates_and_frees_is_counted_in_arenas_and_mappings(nbytes: int) -> None:
    library, sampler, count = ctypes.CDLL(None), HeapSampler(), max(1, 2**20 // nbytes)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    addresses = (ctypes.c_void_p * count)()
    before = sampler.read()["heap.used"]
    for index in range(count):
        addresses[index] = library.malloc(nbytes)
    held = sampler.read()["heap.used"] - before
    for address in addresses:
        library.free(address)
    left = sampler.read()["heap.used"] - before
    assert nbytes * count <= held < nbytes * count * 1.1 + 64 * 1024
    assert abs(left) < 64 * 1024  # of this test's own objects


def test_a_c_library_without_the_numbers_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with pytest.raises(AbsentError, match="no mallinfo2"):
        HeapSampler()


def test_numbers_that_python_does_not_track_are_counted_as_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = BlockSampler()
    before = sampler.read()["heap.blocks"]
    kept = [float(number) for number in range(1000)]
    assert 1000 <= sampler.read()["heap.blocks"] - before < 1100
    kept.clear()
    assert sampler.read()["heap.blocks"] - before < 200  # Python keeps some for the next
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: 0)
    with pytest.raises(AbsentError, match="PYTHONMALLOC"):
        BlockSampler()


def test_ranks_of_a_soak_have_one_arena() -> None:
    with RankPool(1) as pool:
        assert pool.run(arenas)[0] > 1
    with RankPool(1, env=ONE_ARENA) as pool:
        assert pool.run(arenas) == [1]


def test_torch_keeps_few_collectives_of_a_soak_on_record() -> None:
    """Its own 2000 take 2.4 MB, which a soak of some hundred steps would call a leak."""
    with RankPool(2, env=FEW_RECORDS) as pool:
        assert max(pool.run(records)) <= 64


def records(_: int) -> int:
    """How many collectives are on record after 200."""
    tensor = torch.ones(1)
    for _ in range(200):
        dist.all_reduce(tensor)
    return len(json.loads(_dump_fr_trace_json())["entries"])


def arenas(_: int) -> int:
    """How many arenas there are after eight threads have allocated at once."""
    together = threading.Barrier(8)

    def allocate() -> None:
        library = ctypes.CDLL(None)
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
        together.wait()
        addresses = [library.malloc(100) for _ in range(1000)]
        together.wait()
        for address in addresses:
            library.free(address)

    threads = [threading.Thread(target=allocate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library = ctypes.CDLL(None)
    with tempfile.TemporaryFile("w+b") as file:
        library.fdopen.restype = ctypes.c_void_p
        stream = ctypes.c_void_p(library.fdopen(os.dup(file.fileno()), b"w"))
        library.malloc_info(0, stream)
        library.fclose(stream)
        file.seek(0)
        return file.read().count(b"<heap nr=")


def test_this_process_is_counted_to_the_unit() -> None:
    sampler = HostSampler()
    before = sampler.read()
    over = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(Path(os.devnull).open())
        for _ in range(2):
            stack.enter_context(socket.socket())
        thread = threading.Thread(target=over.wait)
        thread.start()
        stack.callback(over.set)
        after = sampler.read()
    thread.join()
    changed = {name: after[name] - before[name] for name in after if name.startswith(("fds", "threads"))}
    changed = {name: change for name, change in changed.items() if change}
    assert changed == {"fds.file": 1, "fds.socket": 2, "fds.all": 3, "threads": 1}
    assert sampler.read()["fds.all"] == before["fds.all"]


def test_a_system_without_proc_is_absent_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(AbsentError, match="status does not exist"):
        HostSampler(tmp_path)


def test_the_limits_are_those_of_this_process() -> None:
    limits = host_limits()
    assert limits["maps"] == float(Path("/proc/sys/vm/max_map_count").read_text())
    assert 0 < limits["fds.all"] < 2**63
    assert limits["rss"] > 2**20


def test_a_container_is_limited_by_what_it_is_allowed(tmp_path: Path) -> None:
    allowed = tmp_path / "memory.max"
    allowed.write_text("1048576\n")
    assert host_limits(cgroup=allowed)["rss"] == 2**20
    allowed.write_text("max\n")
    assert host_limits(cgroup=allowed)["rss"] > 2**20


def test_files_left_in_shared_memory_are_counted_those_of_others_are_not(tmp_path: Path) -> None:
    shm, proc = tmp_path / "shm", tmp_path / "proc"
    shm.mkdir()
    (shm / "old").write_bytes(b"x")
    for pid, held in (("7", "held_open"), ("8", "held_mapped")):
        (proc / pid / "fd").mkdir(parents=True)
        (proc / pid / "maps").write_text(f"7f00-7f01 rw-s 0 00:19 3 {shm / held}\n" if "map" in held else "")
        if "open" in held:
            (proc / pid / "fd" / "3").symlink_to(shm / held)
    sampler = ShmSampler(shm, proc)
    assert sampler.read() == {"shm.files": 0, "shm.bytes": 0}
    for name in ("left", "held_open", "held_mapped"):
        (shm / name).write_bytes(b"12345678")
    assert sampler.read() == {"shm.files": 1, "shm.bytes": 8}
    assert ShmSampler(shm, proc).read()["shm.files"] == 0, "what was there before is not counted"
    (shm / "left").unlink()
    assert sampler.read()["shm.files"] == 0


def test_a_real_segment_that_is_left_behind_is_found() -> None:
    sampler = ShmSampler()
    segment = SharedMemory(create=True, size=4096)
    try:
        assert sampler.read() == {"shm.files": 1, "shm.bytes": 4096}
    finally:
        segment.close()
        segment.unlink()
    assert sampler.read()["shm.files"] == 0


def test_objects_are_counted_by_type_and_garbage_is_not() -> None:
    sampler = ObjectSampler()
    kept = [torch.zeros(1) for _ in range(3)]
    before = sampler.read()
    more = [torch.zeros(1) for _ in range(5)]
    ring: list[object] = []
    ring.append(ring)
    del ring
    after = sampler.read()
    assert after["objects.Tensor"] - before["objects.Tensor"] == 5
    assert ("torch.Tensor", 5) in sampler.grown()
    del more
    assert sampler.read()["objects.Tensor"] == before["objects.Tensor"]
    assert len(kept) == 3


def a_kfd_tree(root: Path, pid: str, *, vram: int = 5 * 2**20, queues: int = 2) -> Path:
    """Laid out as the amdgpu driver does: files named by the GPU's id, a folder for each queue."""
    folder = root / "proc" / pid
    for gpu in ("31415", "27182"):
        (folder / f"stats_{gpu}").mkdir(parents=True)
        (folder / f"stats_{gpu}" / "evicted_ms").write_text("3\n")
        (folder / f"vram_{gpu}").write_text(f"{vram}\n")
        (folder / f"sdma_{gpu}").write_text("1000\n")
    for queue in range(queues):
        (folder / "queues" / str(queue)).mkdir(parents=True)
        (folder / "queues" / str(queue) / "type").write_text("compute\n")
    return root


def test_a_kfd_tree_is_added_up_over_the_gpus(tmp_path: Path) -> None:
    root = a_kfd_tree(tmp_path / "kfd", "42")
    a_kfd_tree(root, "43", vram=1)
    status = tmp_path / "status"
    status.write_text(STATUS.format(pids="42\t1"))
    sampler = KfdSampler(root, status)
    assert sampler.read() == {"kfd.vram": 10 * 2**20, "kfd.sdma": 2000, "kfd.queues": 2, "kfd.evicted_ms": 6}


def test_in_a_container_the_only_process_is_ours_and_one_of_many_is_not_guessed(tmp_path: Path) -> None:
    root = a_kfd_tree(tmp_path / "kfd", "4711")
    status = tmp_path / "status"
    status.write_text(STATUS.format(pids="1"))
    assert KfdSampler(root, status).read()["kfd.queues"] == 2
    a_kfd_tree(root, "4712")
    with pytest.raises(AbsentError, match="is 1: run with the host's pid namespace"):
        KfdSampler(root, status)


@pytest.mark.parametrize(("made", "said"), [((), "no AMD GPU"), (("kfd",), "tells nothing of processes")])
def test_a_machine_without_kfd_says_so(tmp_path: Path, made: tuple[str, ...], said: str) -> None:
    for name in made:
        (tmp_path / name).mkdir()
    with pytest.raises(AbsentError, match=said):
        KfdSampler(tmp_path / "kfd")


@contextmanager
def a_module(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    sys.modules.pop(name, None)


def test_an_amdsmi_that_prints_and_raises_keyerror_is_absent_and_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "print('Unable to find libamd_smi.so')\nraise KeyError('libamd_smi.so')\n"
    probe = Probe()
    with a_module(tmp_path, "amdsmi", source, monkeypatch):
        probe.add("amdsmi", AmdsmiSampler)
    assert capfd.readouterr() == ("", "")
    assert not probe.samplers
    assert "KeyError: 'libamd_smi.so'" in probe.absent["amdsmi"]
    assert "it said: Unable to find libamd_smi.so" in probe.absent["amdsmi"]


AMDSMI = """
class AmdSmiException(Exception): pass
class AmdSmiMemoryType: VRAM = 0
def amdsmi_init(): print('noise')
def amdsmi_get_processor_handles(): return ['a', 'b']
def amdsmi_get_gpu_memory_usage(gpu, kind): return {'a': 100, 'b': 20}[gpu]
def amdsmi_get_gpu_process_list(gpu): return [1, 2] if gpu == 'a' else []
def amdsmi_get_gpu_total_ecc_count(gpu): return {'correctable_count': 3, 'uncorrectable_count': 1}
def amdsmi_gpu_xgmi_error_status(gpu): raise AmdSmiException('not supported')
"""


def test_amdsmi_is_added_up_over_the_gpus_and_what_is_unsupported_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with a_module(tmp_path, "amdsmi", AMDSMI, monkeypatch):
        found = AmdsmiSampler().read()
    assert found == {"amdsmi.vram": 120, "amdsmi.processes": 2, "amdsmi.ecc": 8}
    assert capfd.readouterr().out == ""


NVML = """
class Memory: used = 77
def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(gpu): return Memory
def nvmlDeviceGetComputeRunningProcesses(gpu): return [gpu]
"""


def test_nvml_is_read_where_it_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_module(tmp_path, "pynvml", NVML, monkeypatch):
        assert NvmlSampler(0).read() == {"nvml.used": 77, "nvml.processes": 1}


def test_the_allocator_of_a_cpu_is_absent() -> None:
    with pytest.raises(AbsentError, match="no caching allocator"):
        TorchSampler(torch.device("cpu"))


def test_an_exchanges_own_counters_are_sampled(ranks: Ranks) -> None:
    for found in ranks(2).run(own_counters):
        assert found["own.slots"] == 1
        assert found["own.calls"] == 3
        assert found["own.events_held"] >= 2
        assert "own.pendings" in found


def own_counters(rank: int) -> dict[str, float]:
    from rocm_dp import PaddingMode, TokenPlan

    plan = TokenPlan((2, 1), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2)) as exchange:
        for _ in range(3):
            exchange.gather(torch.ones(plan.counts[rank], exchange.hidden, dtype=torch.bfloat16), plan)
        return ExchangeSampler(exchange.stats).read()


class _Fails:
    name = "fails"

    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> dict[str, float]:
        self.reads += 1
        if self.reads == 3:
            raise OSError("gone")
        return {"fails.value": 1.0}


def test_a_sampler_that_fails_later_leaves_a_hole_and_is_not_forgotten() -> None:
    probe = Probe()
    probe.add("fails", _Fails)
    values = [probe.read(step).values for step in (1, 2, 3)]
    assert values == [{"fails.value": 1.0}, {}, {"fails.value": 1.0}]
    assert probe.failures == ["step 2: fails: OSError: gone"]
    assert not probe.absent
