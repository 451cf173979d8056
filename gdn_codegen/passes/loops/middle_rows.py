"""middle_rows: loads the middle rows of running sums that another kernel stored. For Triton.

`to_middle` compares each row with the middle row of its block. Triton's compiler finds that row among the threads by a masked sum
over all rows. A row that lies in memory is loaded again instead: its address follows from the row's number, and it is in the
cache.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program
from ..common import rebuild_kernels
from ..stage import takes


@takes("decomposed")
def middle_rows(p: Program) -> Program:
    """`p` with loads of the middle rows of workspaces, in kernels over chunks."""
    def rule(k: Kernel, o: Op, b: Body) -> str | None:
        if o.kind not in ("to_middle", "from_middle") or k.grid != "chunks":
            return None
        load = next(x for x in k.ops if x.out == o.args[0])
        if load.kind != "load" or load.attr("transposed") or p.tensor(load.attr("tensor")).index != "slot":
            return None
        size = o.attr("size")
        middle = b.op("load", name=b.fresh(f"{load.out}_middle_{size}"), line=o.line, tensor=load.attr("tensor"), middle=size)
        return b.op(o.kind, *o.args, middle, name=o.out, line=o.line, **dict(o.attrs), given=True)

    return rebuild_kernels(p, lambda k: lambda o, b: rule(k, o, b))
