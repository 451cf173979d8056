"""operand_scales: moves a number before a product into an operand that an earlier kernel computes. All targets run it, for
schedules with the role operand.

It applies to products that are added to the next value of a state, as x + s (a @ b), where a is an elementwise result that
depends on no state and has no other reader. A walk that loads a then accumulates the product onto x (`accumulate`). If one
operand was stored by another call, and the other is rows of the caller, it scales a copy of these rows.

Example, where a depends on no state:
    before:  a = exp(G) * q;        S_next = c * S + s * (a.T @ b)
    after:   a = s * (exp(G) * q);  S_next = c * S + a.T @ b
"""
from __future__ import annotations

from ...ir.core import Op, Program, uses
from ...ir.ops import OPS
from ...schedule.schedule import Schedule
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def operand_scales(p: Program, s: Schedule) -> Program:
    """`p` with such products. `p` itself if no group of `s` has the role operand, or there are none."""
    if not any("@operand" in group for group in s.kernels):
        return p
    scaled = _Scaled(p)
    found = scaled.products()
    if not found:
        return p
    b = walk_body(p)
    for o in scaled.ops:
        if o.out not in found:
            b.copy(o)
            continue
        product, number = found[o.out]
        at = next(n for n in range(2) if scaled.may_scale(product, n))
        args = [b.op("mul", number, a, line=o.line) if n == at else a for n, a in enumerate(product.args)]
        b.op("matmul", *args, name=o.out, line=o.line, **dict(product.attrs))
    return with_walk_body(p, b.finish())


class _Scaled:
    """The ops of a walk, and what depends on a carried value."""

    def __init__(self, p: Program) -> None:
        """p: traced."""
        self.p = p
        self.ops, self.count = [o for o in p.walk.body if isinstance(o, Op)], uses(p.walk.body)
        self.defs = {o.out: o for o in self.ops if o.out}
        self.nexts, self.waits = [c.next for c in p.walk.carried], {c.name for c in p.walk.carried}
        for o in self.ops:
            if self.waits & set(o.args):
                self.waits.add(o.out)

    def may_scale(self, product: Op, n: int) -> bool:
        """Whether operand `n` may be scaled where it is computed, or as a copy."""
        a, other = product.args[n], product.args[1 - n]
        if a not in self.defs or a in self.waits:
            return False
        computed = self.count[a] == 1 and OPS[self.defs[a].kind].elementwise
        return computed or (self.loads(a) == "token" and self.loads(other) == "slot")

    def loads(self, a: str) -> str:
        """The index of the tensor that a value is loaded from, "" for what is computed or carried."""
        return self.p.tensor(self.defs[a].attr("tensor")).index if a in self.defs and self.defs[a].kind == "load" else ""

    def products(self) -> dict[str, tuple[Op, str]]:
        """What becomes a product alone: for each such value the product, and the number before it."""
        found, todo = dict[str, tuple[Op, str]](), list(self.nexts)
        while todo:
            o = self.defs.get(todo.pop())
            if o is not None and o.kind in ("add", "sub"):
                todo += [a for a in o.args if self.count[a] == 1]
            elif o is not None and o.kind == "mul" and all(a in self.defs for a in o.args):
                number, product = sorted((self.defs[a] for a in o.args), key=lambda x: x.type.rank if x.type else 0)
                plain = number.type is not None and not number.type.dims and product.kind == "matmul"
                if plain and self.count[product.out] == 1 and any(self.may_scale(product, n) for n in range(2)):
                    found[o.out] = product, number.out
        return found
