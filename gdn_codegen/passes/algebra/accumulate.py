"""accumulate: replaces x + a @ b by one product that accumulates onto x.

All targets run it, after `decompose`. It applies if the product has no other reader and x has the product's type, so no work is
done twice. A sign or a number before the product moves into the operand, if that is a tile that the kernel scales by a vector:
x - s a @ (c[:, None] * y) becomes x + a @ ((-s c)[:, None] * y). The product then needs no registers of its own.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program, uses
from ...ir.ops import OPS
from ..common import rebuild_kernels
from ..stage import takes


@takes("decomposed")
def accumulate(p: Program) -> Program:
    """`p` with such sums replaced by `matmul(a, b, x)`."""
    return rebuild_kernels(p, lambda k: _Sums(k).rule)


class _Sums:
    """The rule for the ops of one kernel. once: ops whose value one op reads. views: columns and rows of vectors."""

    def __init__(self, k: Kernel) -> None:
        """Finds both."""
        count = uses(k.body)
        self.once = {o.out: o for o in k.ops if count.get(o.out) == 1}
        self.views = {o.out: o for o in k.ops if o.kind in ("col", "row")}

    def rule(self, o: Op, b: Body) -> str | None:
        """The product that takes the place of a sum, None if there is none."""
        ways = {"add": (o.args, o.args[::-1]), "sub": (o.args,)}.get(o.kind, ())
        for x, y in ways:
            product, numbers = self.product(y, b)
            if product is None or b.types[x] != b.types[product.out]:
                continue
            args = product.args
            if numbers or o.kind == "sub":
                scaled = [(n, self.scaled(a, numbers, o.kind == "sub", b)) for n, a in enumerate(args)]
                at, other = next(((n, a) for n, a in reversed(scaled) if a), (0, ""))
                if not other:
                    continue
                args = tuple(other if n == at else a for n, a in enumerate(args))
            return b.op("matmul", *args, x, name=o.out, line=o.line, **dict(product.attrs))
        return None

    def product(self, name: str, b: Body) -> tuple[Op | None, list[str]]:
        """The product that `name` is, and the numbers that multiply it."""
        o, numbers = self.once.get(name), list[str]()
        while o is not None and o.kind == "mul" and b.types[o.args[0]].rank == 0:
            numbers.append(o.args[0])
            o = self.once.get(o.args[1])
        return (o if o is not None and o.kind == "matmul" and len(o.args) == 2 else None), numbers

    def scaled(self, name: str, numbers: list[str], minus: bool, b: Body) -> str:
        """The operand times these numbers, and -1 if `minus`. "" for an operand that is no tile times a column or row."""
        cast = self.once.get(name)
        o = self.once.get(cast.args[0]) if cast is not None and cast.kind == "cast" else None
        view = next((self.views[a] for a in o.args if a in self.views), None) if o is not None and o.kind == "mul" else None
        if cast is None or o is None or (view is None and (minus or not OPS[o.kind].elementwise)):
            return ""
        if view is None:
            tile = o.out
            for x in numbers:
                tile = b.op("mul", x, tile, line=o.line)
            return b.op("cast", tile, line=cast.line, **dict(cast.attrs))
        (vector,) = view.args
        for x in numbers:
            vector = b.op("mul", x, vector, line=o.line)
        vector = b.op("neg", vector, line=o.line) if minus else vector
        scaled = b.op(view.kind, vector, line=o.line)
        tile = b.op("mul", *(scaled if a == view.out else a for a in o.args), line=o.line)
        return b.op("cast", tile, line=cast.line, **dict(cast.attrs))
