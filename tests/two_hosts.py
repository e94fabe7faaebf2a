"""Two hosts on one machine: network, UTS, ipc and pid namespaces of their own, and a cable between them.

A host lives as long as its first process, which ends with this one, however that ends; all its processes, its
namespaces and the cable go with it. Nothing gets a name that is seen outside.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RANKS = 2  # of each host
PORT = 29500
CABLE = "cable0"
_SCRIPT = Path(__file__).with_name("two_hosts_rank.py")
_NAMES = ("north", "south")
_TOOLS = ("ip", "unshare", "nsenter")
_APART = ("unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
# The first process of a host waits for the end of its input, which comes when whoever holds the other end is gone.
_INIT = 'echo "$1" >/proc/sys/kernel/hostname && ip link set lo up && echo up && exec cat'


@dataclass(frozen=True)
class Host:
    """One host: its ``name``, its ``address`` on the cable, its first process as seen from here, and the others."""

    name: str
    address: str
    init: int
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def enter(self, *command: str) -> list[str]:
        """The command line that runs ``command`` on this host."""
        return [
            "nsenter",
            f"--target={self.init}",
            *("--net", "--uts", "--ipc", "--pid", "--mount"),
            "--wd",
            *command,
        ]

    def ip(self, *arguments: str) -> None:
        """Change this host's network. Processes in ``arguments`` are numbered as here."""
        command = ["nsenter", f"--target={self.init}", "--net", "ip", *arguments]
        subprocess.run(command, check=True, timeout=20)

    def cut_off(self) -> None:
        """Pull the cable: nothing comes or goes any more, and nobody is told."""
        self.ip("link", "set", CABLE, "down")

    def processes(self) -> list[str]:
        """The command lines of its processes, but for the first."""
        own = Path(f"/proc/{self.init}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != self.init and Path(f"/proc/{process.pid}/ns/pid").readlink() == own:
                    found.append(" ".join(process.cmdline()))
            except (OSError, psutil.Error):
                continue  # ended meanwhile
        return found

    def python(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start this Python on this host, with ``variables`` in its environment."""
        one = subprocess.Popen(
            self.enter(sys.executable, *arguments),
            env={**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(one)
        return one

    def start(self, ranks: Sequence[int], world: int, *what: str, master: str) -> list[subprocess.Popen[str]]:
        """Start ``ranks`` of ``world`` on this host, as torchrun would; ``what`` they run, and its arguments."""
        common = {
            "MASTER_ADDR": master,
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": str(world),
            "PYTHONPATH": str(_SCRIPT.parent),
            "TRITON_INTERPRET": "1",
        }
        return [
            self.python(str(_SCRIPT), *what, **common, RANK=str(rank), LOCAL_RANK=str(local))
            for local, rank in enumerate(ranks)
        ]


def missing() -> str:
    """Why two hosts can't be made here; empty when they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {' and no '.join(absent)}"
    command = [*_APART, "ip", "link", "add", "one", "type", "veth", "peer", "name", "other"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts and the cable between them. At the end nothing is left of either, whatever still ran there."""
    with ExitStack() as stack:
        # Addresses that are set aside for documentation.
        one, other = (
            stack.enter_context(_host(name, f"192.0.2.{number}")) for number, name in enumerate(_NAMES, start=1)
        )
        one.ip("link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(other.init))
        for host in (one, other):
            host.ip("address", "add", f"{host.address}/24", "dev", CABLE)
            host.ip("link", "set", CABLE, "up")
        yield one, other


@contextmanager
def _host(name: str, address: str) -> Iterator[Host]:
    command = [*_APART, "sh", "-c", _INIT, "sh", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdin is not None
        assert outside.stdout is not None
        assert outside.stdout.readline() == "up\n", f"the host {name} did not start"
        [init] = psutil.Process(outside.pid).children()
        host = Host(name, address, init.pid)
        try:
            yield host
        finally:
            outside.stdin.close()
            for one in host.started:
                with one:  # closes its output, and waits
                    pass


def answers(started: Sequence[subprocess.Popen[str]], *, within: float) -> list[dict[str, Any]]:
    """What each rank said last, once all have ended well, ``within`` seconds from now."""
    deadline = time.monotonic() + within
    said = []
    for one in started:
        text, _ = one.communicate(timeout=max(0.1, deadline - time.monotonic()))
        assert one.returncode == 0, text
        said.append(json.loads(text.splitlines()[-1]))
    return said
