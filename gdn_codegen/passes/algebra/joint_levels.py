"""joint_levels: two decayed products, or two of their derivatives, by one product for each level. A part of `decayed_products`.

Of a product of a level, `decayed_products` reads the lower left block of each diagonal block of 2h rows: rows of second halves
meet rows of first halves. The upper right block is free for what a second value needs. With x = exp(to_middle(G, h)), and
`halves` the rows of first halves of one tile and those of second halves of another:

    P1[i, j] = sum of a1[i] b1[j] decay, P2[i, j] = sum of a2[i] b2[j] decay:
        (halves(b2, a1) * x) @ (halves(b1, a2) * x).T has level h of P1 below the diagonal, and that of P2, transposed, above it
    row i of D1 = sum over j < i of p[i, j] b[j] decay, row j of D2 = sum over i > j of p[i, j] a[i] decay:
        (pairs of p + p.T) @ (halves(b, a) * x) * x has level h of D1 in second halves, and that of D2 in first halves

A tile is transposed once, by a product with the identity. It is rounded as operands are. So P2 is a value that only products
read, and p is an operand anyway.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from ...ir.body import Body
from ...ir.core import Op

#: The fewest levels for which one product fewer for each of them is worth a transposition.
LEAST = 3


def partners(group: list[Op], ops: Iterable[Op], stored: Collection[str]) -> list[tuple[Op, Op]]:
    """Pairs of `group`, ops of one kind with the same sums. ops: of the page. stored: tensors of which products read tiles."""
    operands: set[str] = set()
    others: set[str] = set()
    for o in ops:
        for n, a in enumerate(o.args):
            (operands if (o.kind == "matmul" and n < 2) or o.attr("tensor") in stored else others).add(a)

    def second(o: Op) -> bool:
        """Whether `o` may be transposed."""
        return bool(o.attr("transposed")) if o.kind == "decayed_matmul" else o.out in operands - others

    out: list[tuple[Op, Op]] = []
    for o in group:
        free = [x for x in group if x is not o and second(x) and not any(x in pair or o in pair for pair in out)
                and x.args[2:] == o.args[2:]]
        if o.kind == "decayed_matmul":
            free = [x for x in free if x.args[0] == o.args[0] and not second(o)]
        out += [(o, free[0])] if free else []
    return out


class JointLevels:
    """Appends the ops that compute pairs of ops. b: the body that gets them."""

    def __init__(self, b: Body, pairs: list[tuple[Op, Op]], halves: list[int]) -> None:
        """halves: the levels, the largest first."""
        self.b, self.pairs, self.halves = b, pairs, halves

    def op(self, o: Op, kind: str, *args: str, name: str = "", **attrs: Any) -> str:
        """An op on the line of `o`."""
        return self.b.op(kind, *args, name=name, line=o.line, **attrs)

    def decays(self, o: Op, size: int) -> str:
        """What scales the rows of a level."""
        return self.op(o, "exp", self.op(o, "to_middle", *o.args[2:], size=size))

    def half(self, o: Op, first: str, second: str, size: int) -> str:
        """The rows of first halves of one tile, and of second halves of the other."""
        return first if first == second else self.op(o, "halves", first, second, size=size)

    def transposed(self, o: Op, x: str) -> str:
        """A tile of tokens x tokens, transposed."""
        return self.op(o, "matmul", x, self.op(o, "eye", dims=("C", "C")), ta=True)

    def products(self, whole: Callable[[Op], bool]) -> dict[str, str]:
        """The sums of the levels of decayed products, by the name of the product. whole: whether that is all of it."""
        total: dict[str, str] = {}
        for size in self.halves:
            for o, t in self.pairs:
                x = self.decays(o, size)
                left, right = (self.op(o, "mul", self.half(o, first, second, size), x)
                               for first, second in ((t.args[1], o.args[0]), (o.args[1], t.args[0])))
                term = self.op(o, "pairs", self.op(o, "matmul", left, right, tb=True), size=size, both=True)
                total[o.out] = self.op(o, "add", total[o.out], term) if o.out in total else term
        both = {o.out: (o, total[o.out]) for o, _ in self.pairs}
        both |= {t.out: (t, self.transposed(t, total[o.out])) for o, t in self.pairs}
        return {n: self.op(y, "strictly_lower", x, name=n if whole(y) else "") for n, (y, x) in both.items()}

    def derivatives(self, whole: bool) -> dict[str, str]:
        """The sums of the levels of derivatives, by the name of the derivative. whole: whether that is all of it."""
        total: dict[str, str] = {}
        for size in self.halves:
            for o, t in self.pairs:
                x, entries = self.decays(o, size), self.op(o, "add", o.args[0], self.transposed(o, o.args[0]))
                tile = self.op(o, "mul", self.half(o, o.args[1], t.args[1], size), x)
                product = self.op(o, "matmul", self.op(o, "pairs", entries, size=size, both=True), tile)
                zero = self.op(o, "full", dims=self.b.types[x].dims, value=0.0)
                for y, rows in ((o, (zero, product)), (t, (product, zero))):
                    name = y.out if whole and size == self.halves[-1] else ""
                    term = self.op(y, "mul", self.op(y, "halves", *rows, size=size), x)
                    total[y.out] = self.op(y, "add", total[y.out], term, name=name) if y.out in total else term
        return total
