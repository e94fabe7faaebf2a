"""Python objects by type: what is still referenced when nothing is going on."""

from __future__ import annotations

import gc
from collections import Counter

_WATCHED = ("rocm_dp.", "torch")


class ObjectSampler:
    """``objects.all``, and ``objects.<Type>`` for the types of rocm_dp and torch that were seen.

    Reads after a full collection. What was frozen (``gc.freeze``) before is not counted, nor are objects that the
    collector does not track, such as strings and bytes; tensors and Python-level events are.
    """

    name = "objects"

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.last: Counter[str] = Counter()
        self.first: Counter[str] = Counter()

    def read(self) -> dict[str, float]:
        """Collect, then count."""
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        watched: Counter[str] = Counter()
        for kind, count in kinds.items():
            if _home(kind).startswith(_WATCHED):
                watched[kind.__name__] += count
        self.last = Counter({f"{_home(kind)}.{kind.__qualname__}": n for kind, n in kinds.items()})
        self.first = self.first or self.last
        self._seen |= set(watched)
        values = {f"objects.{name}": float(watched[name]) for name in self._seen}
        return {**values, "objects.all": float(sum(kinds.values()))}

    def restart(self) -> None:
        """Let ``grown`` compare with the next read."""
        self.first = Counter()

    def grown(self, most: int = 5) -> list[tuple[str, int]]:
        """Return the types, watched or not, of which there are most more than at the first read."""
        return [(name, more) for name, more in (self.last - self.first).most_common(most) if more > 0]


def _home(kind: type) -> str:
    """Return the module of a type; some types of libraries have none, or a descriptor in its place."""
    module = kind.__module__
    return module if isinstance(module, str) else ""
