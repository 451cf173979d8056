"""recompute: lets each reader of a computed operand compute it again (rematerialisation). `place` calls it for kernels over
chunks whose tiles do not fit in shared memory otherwise.

A product reads its operands from shared memory. An operand with a second reader lies there until that reader comes. Gradients of
decayed products have many such operands: each product of a level (`decayed_products`) is read again by the gradient's products.

Example:
    before:  x = k * e; a = x @ b; ...; c = x @ d
    after:   x = k * e; a = x @ b; ...; x_again = k * e; c = x_again @ d
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Op
from ...ir.ops import OPS


def recompute(k: Kernel) -> Kernel:
    """`k`, whose body has no loop, where readers of a moved or elementwise operand, after the first, read a copy of their own."""
    defs, operands = {o.out: o for o in k.ops if o.out}, {a for o in k.ops if o.kind == "matmul" for a in o.args[:2]}
    out: list[Op] = []
    read = set[str]()

    def computed(a: str) -> bool:
        """Whether `a` is a move, an elementwise result or a view."""
        return defs[a].kind == "move" or OPS[defs[a].kind].elementwise or bool(OPS[defs[a].kind].view)

    def copied(a: str, reader: int) -> str:
        """Append ops that compute `a` again, down to loads, products and the like. Returns the name of the copy."""
        if not computed(a):
            return a
        new = f"{a}_for_{reader}"
        out.append(replace(defs[a], out=new, args=tuple(copied(x, reader) for x in defs[a].args)))
        return new

    for n, o in enumerate(k.ops):
        again = {a for a in o.args if a in operands & read and computed(a)}
        read |= set(o.args)
        out.append(replace(o, args=tuple(copied(a, n) if a in again else a for a in o.args)))
    return replace(k, body=tuple(out))
