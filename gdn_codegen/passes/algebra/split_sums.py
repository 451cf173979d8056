"""split_sums: a sum of rows or columns of a sum becomes a sum of two vectors. All targets run it, for schedules with
the role early.

It applies where one tile of the inner sum depends on a carried value, and the other one does not. The sum of the other tile then
has the role early. A kernel over chunks before a walk computes it, and hands on a vector instead of a tile.

Example, where x depends on a state and y does not:
    before:  s = row_sum(strictly_lower(-(x + y)) * D)
    after:   s = row_sum(strictly_lower(-x) * D) + row_sum(strictly_lower(-y) * D)
"""
from __future__ import annotations

from ...ir.core import Op, Program
from ...schedule.schedule import Schedule
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def split_sums(p: Program, s: Schedule) -> Program:
    """`p` with split sums. `p` itself if no group of `s` has the role early, or no sum depends on a carried value in part."""
    if not any("@early" in group for group in s.kernels):
        return p
    split = _Split(p)
    return with_walk_body(p, split.b.finish()) if split.run() else p


class _Split:
    """Rebuilds the body of a walk."""

    def __init__(self, p: Program) -> None:
        """p: traced."""
        self.ops, self.b = [o for o in p.walk.body if isinstance(o, Op)], walk_body(p)
        self.defs = {o.out: o for o in self.ops if o.out}
        self.waits = {c.name for c in p.walk.carried}  # values that depend on a carried value
        for o in self.ops:
            if self.waits & set(o.args):
                self.waits.add(o.out)

    def run(self) -> bool:
        """Rebuild the body. Returns whether a sum changed."""
        changed = False
        for o in self.ops:
            path = self.path(o) if o.kind in ("row_sum", "column_sum") and o.type is not None and o.type.rank == 1 else []
            if path:
                x, y = (self.applied(path[:-1], path[-1].out, a) for a in path[-1].args)
                self.b.op(path[-1].kind, x, y, name=o.out, line=o.line)
                changed = True
            else:
                self.b.copy(o)
        return changed

    def path(self, o: Op) -> list[Op]:
        """The ops from `o`, which is linear in one operand that depends on a carried value, down to an inner sum of a tile that
        depends on one and a tile that does not. Empty if there is none, or if an op on the way is not linear."""
        if o.kind in ("add", "sub") and len(self.waits & set(o.args)) == 1:
            return [o]
        if o.kind not in ("row_sum", "column_sum", "neg", "mul", "strictly_lower", "lower") or o.attr("fill"):
            return []
        below = [self.path(self.defs[a]) for a in o.args if a in self.waits and a in self.defs]
        return [o, *below[0]] if len(below) == 1 and below[0] else []

    def applied(self, path: list[Op], inner: str, a: str) -> str:
        """Append the ops of `path` with the value `a` in the place of `inner`. Returns the last value."""
        for o in reversed(path):
            a, inner = self.b.op(o.kind, *(a if n == inner else n for n in o.args), line=o.line, **dict(o.attrs)), o.out
        return a
