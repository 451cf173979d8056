"""live_values: the storage that the values of a run of ops need while `list_scheduling` puts the ops in order. An estimate:
`pack` makes the final decision.
"""
from __future__ import annotations

from collections.abc import Collection

from ...ir.core import Op
from .dependences import Dependences

#: A space, and a number of its bytes.
Room = tuple[str, int]


class LiveValues:
    """The values that are live after the ops so far.

    needs: for each op, the space and the bytes of the new buffer that it needs, ("", 0) if it needs none. earlier: the values
    that are live before the run. kept: the values that are live after it. spaces: the bytes that each space has.
    """

    def __init__(self, ops: list[Op], d: Dependences, needs: list[Room], earlier: dict[str, Room], kept: Collection[str],
                 spaces: dict[str, int]) -> None:
        self.ops, self.needs, self.kept = ops, needs, kept
        self.live = dict(earlier)
        self.room = {"": 0, **spaces}
        for space, size in earlier.values():
            self.room[space] -= size
        self.left = {a: len(ns) for a, ns in d.readers.items()}  # readers that have not run yet
        self.reads = [{d.storage(a) for a in o.args} for o in ops]

    def fits(self, n: int) -> bool:
        """Whether op n has room. It may take the place of one value of its size whose last reader it is."""
        space, size = need = self.needs[n]
        room = self.room[space]
        return size <= room or (room >= 0 and any(
            self.left[a] == 1 and a not in self.kept and self.live.get(a) == need for a in self.reads[n]))

    def run(self, n: int) -> None:
        """Free the operands of op n without further readers, and add its result."""
        for a in self.reads[n]:
            self.left[a] -= 1
            if not self.left[a] and a not in self.kept and a in self.live:
                space, size = self.live.pop(a)
                self.room[space] += size
        space, size = self.needs[n]
        if size:
            self.live[self.ops[n].out] = space, size
            self.room[space] -= size
