"""early_terms: adds up first what does not depend on a carried value, in sums of tiles of tokens. All targets run it, for
schedules with the role early.

The partial sum then has that role: a kernel over chunks before a walk computes it, and hands on one tile instead of each of its
terms. A factor that depends on no carried value multiplies both parts of a sum.

Example, where x and y depend on a state, and a, b and c do not:
    before:  s = ((a + x) - b) + c * (d - y)
    after:   s = ((a - b) + c * d) + x - c * y
"""
from __future__ import annotations

from ...ir.core import Op, Program, uses
from ...schedule.schedule import Schedule
from ..common import walk_body, with_walk_body
from ..stage import takes

#: Terms of a sum: for each its sign and its value.
Terms = list[tuple[int, str]]


@takes("traced")
def early_terms(p: Program, s: Schedule) -> Program:
    """`p` with such sums. `p` itself if no group of `s` has the role early, or there are none."""
    if not any("@early" in group for group in s.kernels):
        return p
    e = _Early(p)
    return with_walk_body(p, e.b.finish()) if e.run() else p


class _Early:
    """Rebuilds the body of a walk."""

    def __init__(self, p: Program) -> None:
        """p: traced."""
        self.ops, self.b = [o for o in p.walk.body if isinstance(o, Op)], walk_body(p)
        self.defs, self.count = {o.out: o for o in self.ops if o.out}, uses(p.walk.body)
        self.waits = {c.name for c in p.walk.carried}  # values that depend on a carried value
        for o in self.ops:
            if self.waits & set(o.args):
                self.waits.add(o.out)
        self.inner = {a for o in self.ops if self.sums(o) for a in o.args if self.count[a] == 1}

    def run(self) -> bool:
        """Rebuild the body. Returns whether a sum changed."""
        changed = False
        for o in self.ops:
            early, late = self.terms(o.out, True) if self.sums(o) and o.out not in self.inner else ([], [])
            if len(early) > 1 and late:
                self.total(o, [(1, self.total(o, early)), *late], o.out)
                changed = True
            else:
                self.b.copy(o)
        return changed

    def sums(self, o: Op) -> bool:
        """Whether `o` is a sum or difference of two tiles of tokens that depends on a carried value."""
        if o.kind not in ("add", "sub") or o.out not in self.waits or o.type is None or o.type.rank != 2:
            return False
        of_tokens = o.type.dims[0] == "C" and o.type.dims[1] != "C"
        return of_tokens and all(a in self.defs and self.defs[a].type == o.type for a in o.args)

    def terms(self, n: str, root: bool = False) -> tuple[Terms, Terms]:
        """The terms of the value `n` that depend on no carried value, and the others. root: whether other ops may read `n`."""
        o = self.defs.get(n)
        if n not in self.waits:
            return [(1, n)], []
        if o is None or (self.count[n] > 1 and not root):
            return [], [(1, n)]
        if self.sums(o):
            (e, x), (f, y) = map(self.terms, o.args)
            sign = -1 if o.kind == "sub" else 1
            return e + [(sign * s, a) for s, a in f], x + [(sign * s, a) for s, a in y]
        waiting = [a for a in o.args if a in self.waits]
        if o.kind == "mul" and len(waiting) == 1 and waiting[0] in self.defs and self.defs[waiting[0]].type == o.type:
            factor, = (a for a in o.args if a != waiting[0])
            e, x = self.terms(waiting[0])
            if e and x:
                e, x = ([(s, self.b.op("mul", factor, a, line=o.line)) for s, a in y] for y in (e, x))
                return e, x
        return [], [(1, n)]

    def total(self, o: Op, terms: Terms, name: str = "") -> str:
        """Append what adds terms up, those without a sign first. name: of the sum."""
        terms = sorted(terms, key=lambda t: -t[0])
        sign, total = terms[0]
        if sign < 0:
            total = self.b.op("neg", total, line=o.line)
        for n, (sign, a) in enumerate(terms[1:], 2):
            total = self.b.op("sub" if sign < 0 else "add", total, a, name=name if n == len(terms) else "", line=o.line)
        return total
