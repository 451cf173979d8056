"""middle_rows: loads the middle rows of running sums that another kernel stored. For Triton.

`to_middle` compares each row with the middle row of its block. Triton's compiler finds that row among the threads by a masked sum
over all rows. A row that lies in memory is loaded again instead: its address follows from the row's number, and it is in the
cache.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program
from ..common import Rule, rebuild_kernels
from ..stage import takes

#: Ops that read middle rows: which operand has the sums, and by what `size` is divided to give half of a block.
BLOCKS_OF = {"to_middle": (0, 1), "from_middle": (0, 1), "decayed_blocks": (2, 2)}


@takes("decomposed")
def middle_rows(p: Program) -> Program:
    """`p` with loads of the middle rows of workspaces, in kernels over chunks."""
    def rule(k: Kernel, o: Op, b: Body, loaded: dict[tuple[str, int], str]) -> str | None:
        """The op with its middle rows as an operand. loaded: those loads of the kernel that are there, by sums and size."""
        if o.kind not in BLOCKS_OF or k.grid != "chunks":
            return None
        at, times = BLOCKS_OF[o.kind]
        load = next(x for x in k.ops if x.out == o.args[at])
        if load.kind != "load" or load.attr("transposed") or p.tensor(load.attr("tensor")).index != "slot":
            return None
        size = o.attr("size") // times
        if (load.out, size) not in loaded:
            loaded[load.out, size] = b.op("load", name=b.fresh(f"{load.out}_middle_{size}"), line=o.line,
                                          tensor=load.attr("tensor"), middle=size)
        return b.op(o.kind, *o.args, loaded[load.out, size], name=o.out, line=o.line, **dict(o.attrs), given=True)

    def of(k: Kernel) -> Rule:
        """The rule of a kernel."""
        loaded: dict[tuple[str, int], str] = {}
        return lambda o, b: rule(k, o, b, loaded)

    return rebuild_kernels(p, of)
