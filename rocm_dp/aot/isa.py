"""What the machine code of a compiled kernel says of itself."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_BYTES = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4}
_ACCESS = re.compile(
    r"^\s+(?:global|buffer|flat)_(load|store)_(\w+?)(?:x([234]))?(?:_d16(?:_hi)?)?\s", re.MULTILINE
)
_ANY_ACCESS = re.compile(r"^\s+(?:global|buffer|flat|scratch)_(?:load|store)_", re.MULTILINE)
# A product of two scalars, and a step of a pointer by anything but a place within a block, in 32 bits.
_NARROW_PRODUCT = re.compile(r"arith\.muli [^\n]*: i32\b")
_NARROW_STEP = re.compile(r"tt\.addptr %[\w#]+, (%[\w#]+) : !tt\.ptr<[^>]*>, i32\b")
_CONSTANT = re.compile(r"(%[\w#]+) = arith\.constant\b")
_VGPRS = 512  # a lane's vector registers on CDNA3 and CDNA4, arch and accumulation ones together
_VGPR_GRANULE = 8
_BESIDE_ROWS = {"load": (4, 8), "store": (8,)}  # bytes: counts, and addresses, epochs and flags
_HANDOVERS = 2
_MAX_WAVES = 8  # on one SIMD


@dataclass(frozen=True, slots=True)
class Isa:
    """Registers, spills and scratch (bytes) of a kernel; its accesses by (load or store, bytes of a lane)."""

    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    wave: int
    accesses: Counter[tuple[str, int]]
    unknown_accesses: int
    narrow_addresses: int
    system_releases: int
    system_acquires: int

    @property
    def occupancy(self) -> int:
        """Waves that the vector registers leave room for on one SIMD (AMD CDNA3 ISA guide, section 3.6)."""
        taken = -(-max(1, self.vgprs) // _VGPR_GRANULE) * _VGPR_GRANULE
        return min(_MAX_WAVES, _VGPRS // taken)


def parse(amdgcn: str, ttir: str) -> Isa:
    """Read the assembly that Triton's AMD backend writes, and in ``ttir`` how addresses are made.

    Raises ValueError when a metadata field is missing. ``narrow_addresses`` counts scalar products and pointer
    steps of 32 bits in Triton's own code: in the assembly they can't be told from products of other things.
    """
    accesses: Counter[tuple[str, int]] = Counter()
    for kind, what, times in _ACCESS.findall(amdgcn):
        base = what.removesuffix("_d16_hi").removesuffix("_d16")
        if base in _BYTES:
            accesses[kind, _BYTES[base] * int(times or 1)] += 1
    return Isa(
        vgprs=_field(amdgcn, "vgpr_count"),
        sgprs=_field(amdgcn, "sgpr_count"),
        vgpr_spills=_field(amdgcn, "vgpr_spill_count"),
        sgpr_spills=_field(amdgcn, "sgpr_spill_count"),
        scratch=_field(amdgcn, "private_segment_fixed_size"),
        lds=_field(amdgcn, "group_segment_fixed_size"),
        wave=_field(amdgcn, "wavefront_size"),
        accesses=accesses,
        unknown_accesses=len(_ANY_ACCESS.findall(amdgcn)) - sum(accesses.values()),
        narrow_addresses=_narrow_addresses(ttir),
        system_releases=len(re.findall(r"^\s+buffer_wbl2 sc0 sc1\b", amdgcn, re.MULTILINE)),
        system_acquires=len(re.findall(r"^\s+buffer_inv sc0 sc1\b", amdgcn, re.MULTILINE)),
    )


def _narrow_addresses(ttir: str) -> int:
    constants = set(_CONSTANT.findall(ttir))
    steps = sum(step not in constants for step in _NARROW_STEP.findall(ttir))
    return len(_NARROW_PRODUCT.findall(ttir)) + steps


def _field(amdgcn: str, name: str) -> int:
    found = re.search(rf"^\s*\.{name}:\s+(\d+)\s*$", amdgcn, re.MULTILINE)
    if found is None:
        raise ValueError(f"the assembly has no metadata field {name}")
    return int(found.group(1))


def faults(isa: Isa, *, vec_bytes: int, only_rows: bool = False, peers: int = 0, lanes: int = 0) -> list[str]:
    """Return what is wrong with a kernel whose rows allow accesses of ``vec_bytes``; empty when all is well.

    ``only_rows``: the kernel touches memory for nothing but rows, so that every access must be so wide; otherwise
    the most frequent width of its loads and of its stores. ``peers``: it hands rows to so many ranks, so it needs
    releases and acquires of system scope, at its entry and in the call; beside rows it only touches counts of 4
    bytes, and addresses, epochs and flags of 8. With ``vec_bytes`` 0 it moves no rows, and meets its peers once.
    ``lanes``: SGPRs that may be kept in lanes of a VGPR.
    """
    found = []
    if isa.wave != 64:
        found.append(f"wave{isa.wave}, not wave64")
    if isa.vgpr_spills or isa.sgpr_spills > lanes:
        found.append(f"spills {isa.vgpr_spills} VGPRs and {isa.sgpr_spills} SGPRs")
    if isa.scratch:
        found.append(f"uses {isa.scratch} bytes of scratch")
    if isa.narrow_addresses:
        found.append(f"makes {isa.narrow_addresses} addresses in 32 bits")
    if isa.unknown_accesses:
        found.append(f"has {isa.unknown_accesses} memory accesses of a kind that is not known here")
    for kind in ("load", "store") if vec_bytes else ():
        widths = {width: n for (what, width), n in isa.accesses.items() if what == kind}
        common = max(widths, key=lambda width: widths[width], default=0)
        worst = min(widths, default=0) if only_rows else common
        if peers:
            narrow = [width for width in widths if width not in (*_BESIDE_ROWS[kind], vec_bytes)]
            worst = min(narrow, default=max(widths, default=0))
        if worst != vec_bytes:
            found.append(f"{kind}s rows {worst} bytes at a time where {vec_bytes} are possible")
    if peers and min(isa.system_releases, isa.system_acquires) < (_HANDOVERS if vec_bytes else 1):
        have = f"{isa.system_releases} releases and {isa.system_acquires} acquires of system scope"
        found.append(f"has {have} for {peers} peers")
    return found
