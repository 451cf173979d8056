"""bounds: marks the maxima and minima of a value and a number with the index of the number (`bound`). For GPUs.

Such a number is a bound: a constant, a number of the caller, or computed from these alone, as -limit. The result must be NaN
where the value is NaN. A GPU's instruction gives the bound there, so emitters print more for these ops. For two computed values
they print the plain instruction.

Example:
    before:  y = maximum(x, c), with c = const
    after:   y = maximum(x, c, bound=1)
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Op, Program, map_ops
from ...ir.ops import BOUND, OPS
from ..stage import takes


@takes("decomposed")
def bounds(p: Program) -> Program:
    """`p` with such marks."""
    return p.map_kernels(_marked)


def _marked(k: Kernel) -> Kernel:
    """`k` with such marks. Of two numbers, the one that is made of constants is the bound."""
    fixed, numbers = set[str](), set[str]()  # what is made of constants alone, and of constants and the caller's numbers
    for o in k.ops:
        fixed |= {o.out} if o.kind == "const" or o.args and fixed.issuperset(o.args) else set()
        numbers |= {o.out} if OPS[o.kind].number or o.args and numbers.issuperset(o.args) else set()

    def each(o: Op) -> list[Op]:
        """The op with its mark, if it can have one."""
        if BOUND not in OPS[o.kind].attrs:
            return [o]
        bound = next((n for known in (fixed, numbers) for n, a in enumerate(o.args) if a in known), None)
        return [o if bound is None else o.with_attrs(**{BOUND: bound})]
    return replace(k, body=map_ops(k.body, each))
