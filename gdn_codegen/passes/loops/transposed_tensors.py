"""Tensors that are transposed in memory: how kernels load and store them."""
from __future__ import annotations

from dataclasses import replace

from ...ir.builder import Body
from ...ir.core import Kernel, Op, loops
from ...ir.types import Tensor
from ..common import rebuild


def only_for_products(k: Kernel) -> set[str]:
    """The loads that only products read."""
    carried = {x for lp in loops(k.body) for c in lp.carried for x in (c.init, c.next)}
    others = {a for o in k.ops for n, a in enumerate(o.args) if not (o.kind == "matmul" and n < 2)}
    return {o.out for o in k.ops if o.kind == "load"} - others - carried


def lying(k: Kernel, over: set[str], tensors: dict[str, Tensor]) -> Kernel:
    """`k` with loads, stores and products adapted to the tensors `over`, which are transposed in memory."""
    flat = only_for_products(k)
    flat = {o.out for o in k.ops if o.out in flat and o.attr("tensor") in over and not o.attr("transposed")}

    def rule(o: Op, b: Body) -> str | None:
        attrs = dict(o.attrs)
        if o.kind in ("load", "store") and o.attr("tensor") in over and o.out not in flat:
            attrs["transposed"] = not o.attr("transposed")
        elif o.kind == "matmul" and flat & set(o.args[:2]):
            attrs |= {side: bool(o.attr(side)) != (x in flat) for side, x in zip(("ta", "tb"), o.args, strict=False)}
        else:
            return None
        return b.op(o.kind, *o.args, name=o.out, line=o.line, **attrs)

    return replace(k, body=rebuild(k.body, Body(tensors), rule))
