"""column_sums: finds the values of a kernel over chunks that are sums over pieces of the columns of K. For `column_loop`.

These are products over K, sums of rows, and what is linear in them: sums of two, masks, and products with the identity. The
loop over pieces adds to those of them that other ops read. So it carries one sum where a page adds many masked products.
"""
from __future__ import annotations

from ...ir.core import Kernel, Op, types
from ..uses import readers

#: Masks: the sum of masked pieces is the masked sum.
MASKS = ("pairs", "diagonal_blocks", "lower", "strictly_lower")


class ColumnSums:
    """The values of a kernel that are sums over the pieces. ops: their ops, by the name of the value. given: those that other ops
    read, which the loop carries."""

    def __init__(self, k: Kernel) -> None:
        """Finds the sums. A value that other ops read is a sum for these alone."""
        self.k, self.types, self.readers = k, types(k.body), readers(k.body)
        self.defs = {o.out: o for o in k.ops if o.out}
        self.ops: dict[str, Op] = {}
        for o in k.ops:
            if self.over_k(o) or self.linear(o):
                self.ops[o.out] = o
        while late := {r.out for n in self.given for r, _ in self.readers[n] if r.out in self.ops} | self.masked():
            self.ops = {n: o for n, o in self.ops.items() if n not in late and not late & set(o.args)}

    @property
    def given(self) -> list[str]:
        """The sums that an op reads that is none."""
        return [n for n in self.ops if any(r.out not in self.ops for r, _ in self.readers.get(n, []))]

    def masked(self) -> set[str]:
        """The carried sums that are better masked after the loop: those whose operand has no other readers."""
        given = set(self.given)
        return {n for n in given if not self.over_k(o := self.ops[n]) and o.kind != "add" and
                all(r.out in given or r.out not in self.ops for a in o.args if a in self.ops for r, _ in self.readers[a])}

    def over_k(self, o: Op) -> bool:
        """Whether `o` sums over K, onto nothing or onto a sum."""
        return self.contracts(o) and all(a in self.ops for a in o.args[2:])

    def contracts(self, o: Op) -> bool:
        """Whether `o` has operands with the dim K, and a value without it."""
        return bool(o.out) and self.has_k(o) and "K" not in self.types[o.out].dims

    def linear(self, o: Op) -> bool:
        """Whether `o` is linear in sums: the sum of two, a mask that fills with 0, or a product with the identity."""
        sums = [a in self.ops for a in o.args]
        if o.kind == "mul":
            return any(sums) and any(a in self.defs and self.defs[a].kind == "eye" for a in o.args)
        return (o.kind == "add" or (o.kind in MASKS and not o.attr("fill"))) and all(sums)

    def has_k(self, o: Op) -> bool:
        """Whether an operand or the value of `o` has the dim K."""
        return any("K" in self.types[x].dims for x in (*o.args, *([o.out] if o.out else [])))

    def separate(self) -> bool:
        """Whether all that contracts K is a sum, and nothing with the dim K depends on a carried one."""
        after = set(self.given)
        for o in self.k.ops:
            if o.out in self.ops:
                continue
            if self.contracts(o) or (after & set(o.args) and self.has_k(o)):
                return False
            if after & set(o.args):
                after.add(o.out)
        return True

    def flat(self, n: str) -> bool:
        """Whether the value `n` is an addition that the additions to carried sums replace."""
        o = self.ops[n]
        return (o.kind == "add" or len(o.args) == 3) and (n in self.given or self.only_added(n))

    def only_added(self, n: str) -> bool:
        """Whether all readers of `n` add it to carried sums."""
        return all(self.adds(r, i) for r, i in self.readers[n])

    def adds(self, r: Op, i: int) -> bool:
        """Whether `r` adds its operand `i` as a term of carried sums."""
        return r.out in self.ops and (r.kind == "add" or i == 2) and self.flat(r.out)

    def totals(self, n: str) -> list[str]:
        """The carried sums of which the value `n` is a term."""
        return ([n] if n in self.given else []) + [x for r, i in self.readers[n] if self.adds(r, i) for x in self.totals(r.out)]
