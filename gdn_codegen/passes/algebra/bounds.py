"""bounds: marks the maxima and minima of a value and a constant with the number of the constant (`bound`). For GPUs.

Such a constant is a bound. The result must be NaN where the value is NaN. A GPU's instruction gives the bound there, so emitters
print more for these ops. For two computed values they print the plain instruction.

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
    constants = {o.out for o in k.ops if o.kind == "const"}

    def each(o: Op) -> list[Op]:
        """The op with its mark, if it can have one."""
        bound = next((n for n, a in enumerate(o.args) if a in constants), None) if BOUND in OPS[o.kind].attrs else None
        return [o if bound is None else o.with_attrs(**{BOUND: bound})]
    return replace(k, body=map_ops(k.body, each))
