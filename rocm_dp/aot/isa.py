"""What the machine code of a compiled kernel says of itself."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_BYTES = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4}
_ACCESS = re.compile(
    r"^\s+(?:global|buffer|flat)_(load|store)_(\w+?)(?:x([234]))?(?:_d16(?:_hi)?)?\s", re.MULTILINE
)
# The high half of a product, and an add with carry: what a 64-bit address needs and a 32-bit one has not.
_WIDE_PRODUCT = re.compile(r"^\s+(?:s_mul_hi_[ui]32|v_mul_hi_[ui]32|v_mad_u64_u32|s_mul_u64)", re.MULTILINE)
_WIDE_SUM = re.compile(r"^\s+(?:s_addc_u32|v_addc_co_u32|v_lshl_add_u64|s_add_u64)", re.MULTILINE)
_VGPRS = 512  # a lane's vector registers on CDNA3 and CDNA4, arch and accumulation ones together
_VGPR_GRANULE = 8
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
    wide_addresses: bool

    @property
    def occupancy(self) -> int:
        """Waves that the vector registers leave room for on one SIMD (AMD CDNA3 ISA guide, section 3.6)."""
        taken = -(-max(1, self.vgprs) // _VGPR_GRANULE) * _VGPR_GRANULE
        return min(_MAX_WAVES, _VGPRS // taken)


def parse(amdgcn: str) -> Isa:
    """Read the assembly that Triton's AMD backend writes, metadata included; ValueError when a field is missing."""
    accesses: Counter[tuple[str, int]] = Counter()
    for kind, what, times in _ACCESS.findall(amdgcn):
        base = what.removesuffix("_d16_hi").removesuffix("_d16")
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
        wide_addresses=bool(_WIDE_PRODUCT.search(amdgcn) and _WIDE_SUM.search(amdgcn)),
    )


def _field(amdgcn: str, name: str) -> int:
    found = re.search(rf"^\s*\.{name}:\s+(\d+)\s*$", amdgcn, re.MULTILINE)
    if found is None:
        raise ValueError(f"the assembly has no metadata field {name}")
    return int(found.group(1))


def faults(isa: Isa, *, vec_bytes: int) -> list[str]:
    """Return what is wrong with a kernel whose rows allow accesses of ``vec_bytes``; empty when all is well."""
    found = []
    if isa.wave != 64:
        found.append(f"wave{isa.wave}, not wave64")
    if isa.vgpr_spills or isa.sgpr_spills:
        found.append(f"spills {isa.vgpr_spills} VGPRs and {isa.sgpr_spills} SGPRs")
    if isa.scratch:
        found.append(f"uses {isa.scratch} bytes of scratch")
    if not isa.wide_addresses:
        found.append("has no 64-bit product or sum for its addresses")
    for kind in ("load", "store"):
        # Counts, starts and the status are single accesses outside the loop: what matters is how rows move.
        widths = {width: n for (what, width), n in isa.accesses.items() if what == kind}
        rows = max(widths, key=lambda width: widths[width], default=0)
        if rows != vec_bytes:
            found.append(f"{kind}s rows {rows} bytes at a time where {vec_bytes} are possible")
    return found
