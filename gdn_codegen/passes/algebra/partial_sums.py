"""partial_sums: computes a sum from another sum that is there anyway, if that has some of its terms. All targets run it.

`canonical` orders the terms of a sum by what they are. So two sums with common terms may share no partial sum.

Example, where t has another reader, as a product:
    before:  t = a + b;  s = (a + t @ x) + b
    after:   t = a + b;  s = t + t @ x
"""
from __future__ import annotations

from collections import Counter

from ...ir.core import Op, Program, uses
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def partial_sums(p: Program) -> Program:
    """`p` with such sums. `p` itself if there are none."""
    s = _Sums(p)
    return with_walk_body(p, s.b.finish()) if s.run() else p


class _Sums:
    """Rebuilds the body of a walk."""

    def __init__(self, p: Program) -> None:
        """p: traced."""
        self.ops, self.b = [o for o in p.walk.body if isinstance(o, Op)], walk_body(p)
        self.defs, self.count = {o.out: o for o in self.ops if o.out}, uses(p.walk.body)
        self.kept = {c.next for c in p.walk.carried} | {p.forgets}

    def run(self) -> bool:
        """Rebuild the body. Returns whether a sum changed."""
        changed, done = False, dict[str, Counter[str]]()  # sums so far, and their terms
        for o in self.ops:
            terms = self.terms(o.out) if o.kind == "add" else Counter[str]()
            parts = [(n, x) for n, x in done.items() if x < terms and not self.inner(n, o.out)]
            if terms.total() > 2 and parts:
                n, x = max(parts, key=lambda part: part[1].total())
                rest = [*(terms - x).elements()]
                for a in rest[:-1]:
                    n = self.b.op("add", n, a, line=o.line)
                self.b.op("add", n, rest[-1], name=o.out, line=o.line)
                changed = True
            else:
                self.b.copy(o)
            if o.kind == "add":
                done[o.out] = terms
        return changed

    def terms(self, n: str) -> Counter[str]:
        """The terms of a sum. A partial sum with another reader is a term."""
        o, out = self.defs[n], Counter[str]()
        for a in o.args:
            x = self.defs.get(a)
            alone = x is not None and x.kind == "add" and x.type == o.type and self.count[a] == 1 and a not in self.kept
            out += self.terms(a) if alone else Counter([a])
        return out

    def inner(self, n: str, of: str) -> bool:
        """Whether the sum `n` is a partial sum of `of`, as it stands."""
        return n == of or any(self.inner(n, a) for a in self.defs[of].args if a in self.defs and self.defs[a].kind == "add")
