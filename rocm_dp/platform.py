"""What machine this is, as far as the kernel tells."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rocm_dp.plan import digest64

# Processes must share these to reach each other's memory: handles are resolved through them.
_NAMESPACES = ("ipc", "pid")


def host_id(proc: Path = Path("/proc")) -> int:
    """Return a number that is equal for processes of one running machine and one set of namespaces.

    A hash of the boot id and of the ipc and pid namespaces; ``proc`` is where the proc file system lies. Two hosts
    never share a boot id, two containers on one host share the namespaces only if they were told to.
    """
    facts = []
    with suppress(OSError):
        facts.append((proc / "sys/kernel/random/boot_id").read_text().strip())
    for name in _NAMESPACES:
        with suppress(OSError):
            facts.append(str((proc / "self/ns" / name).readlink()))
    return digest64("\n".join(facts).encode())
