"""fewer_exponentials: computes exponentials of running sums as products of other exponentials. For warps in turn.

Where gates have a lower bound, one decayed product may serve all pairs of a chunk (`decayed_products`). It reads a * exp(G - m)
and b * exp(m - G), with the sums m of the middle row. The other exponentials of running sums then follow from these:

    exp(G) = exp(G - m) * exp(m), exp(last(G) - G) = exp(m - G) * exp(last(G) - m)

exp(m) and exp(last(G) - m) are rows, so half as many tiles of exponentials are left. Where a tile is multiplied by both
exponentials of an equation, the product with the left one is the product with the other times the row. The sums differ by at most
80 within such a chunk, so that no factor overflows, and a product loses no more than another rounding.
"""
from __future__ import annotations

from collections.abc import Iterator

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program
from ...schedule.schedule import Schedule
from ..common import rebuild_kernels, walks
from ..match import matched
from ..stage import takes
from ..uses import needed_before

LATER, EARLIER = "exp(x)", "exp(last(x)[None, :] - x)"


@takes("cut")
def fewer_exponentials(p: Program, s: Schedule) -> Program:
    """`p`, whose walks compute exponentials of running sums from those of the sums from the middle row on."""
    return rebuild_kernels(p, lambda k: _Factors(k, p.sizes["C"] // 2 if s.in_turns and walks(k) else 0))


class _Factors:
    """The rule for one kernel. It moves ops before the exponential that is computed from them, if that comes first."""

    def __init__(self, k: Kernel, middle: int) -> None:
        """middle: how many rows are before the middle of a chunk, 0 if the kernel stays as it is."""
        self.defs = {o.out: o for o in k.ops if o.out}
        self.middle = middle
        #: By pattern, and by the running sums G: the tile exp(G - m) or exp(m - G), and the sums of which m is a row.
        self.factors: dict[str, dict[str, tuple[Op, str]]] = {LATER: {}, EARLIER: {}}
        #: Factors -> their product.
        self.products = {frozenset(o.args): o for o in reversed(self.defs.values()) if o.kind == "mul"}
        for o in self.defs.values():
            for text, exponential in ((LATER, "exp(x)"), (EARLIER, "exp(-x)")):
                m = self.defs.get((matched(exponential, o, self.defs) or {}).get("x", ""))
                if m is not None and m.kind == "from_middle" and m.attr("size") == middle and len(m.args) <= 1 + (text == LATER):
                    self.factors[text].setdefault(m.args[-1], (o, m.args[0]))

    def __call__(self, o: Op, b: Body) -> str | None:
        """The name of an exponential's value or product, or of an op that is there already. None if the op stays."""
        if o.out in b.types:  # an op that the rule has moved
            return o.out
        if o.kind == "mul":  # its operands by the names that they had before
            for x, y in (self.defs[o.out].args, self.defs[o.out].args[::-1]):
                for text, sums, factor in self.found(self.defs.get(y)):
                    product = self.products.get(frozenset((x, factor.out)))
                    if product is not None and text == EARLIER:
                        return self.scaled(o, b, product, text, sums)
        for text, sums, factor in self.found(o):
            return self.scaled(o, b, factor, text, sums)
        return None

    def found(self, o: Op | None) -> Iterator[tuple[str, str, Op]]:
        """If `o` is an exponential of running sums: its pattern, the sums of which m is a row, and the tile exp(G - m) or
        exp(m - G)."""
        for text, factors in self.factors.items():
            found = matched(text, o, self.defs)
            if found and found["x"] in factors:
                factor, sums = factors[found["x"]]
                yield text, sums, factor

    def scaled(self, o: Op, b: Body, factor: Op, text: str, sums: str) -> str:
        """`factor` times exp(m) or exp(last(G) - m), as the pattern `text` needs, in place of `o`. sums: m is their row."""
        for x in (*needed_before(factor, self.defs, b.types), factor):
            if x.out not in b.types:
                b.copy(x)
        middle = b.op("last", sums, before=self.middle, line=o.line)
        if text == EARLIER:
            middle = b.op("sub", b.op("last", sums, line=o.line), middle, line=o.line)
        return b.op("mul", b.op("row", b.op("exp", middle, line=o.line), line=o.line), factor.out, name=o.out, line=o.line)
