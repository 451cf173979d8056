"""Tensors that are transposed in memory: how kernels load and store them."""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program, loops, map_ops, types
from ...ir.differentiate import TRANSPOSED
from ...ir.ops import OPS
from ...ir.types import Tensor
from ..common import rebuild

#: The sum of a tile -> the same sum of its transpose.
SUMS = {"row_sum": "column_sum", "column_sum": "row_sum"}


def only_for_products(k: Kernel) -> set[str]:
    """The loads that only products read."""
    carried = {x for lp in loops(k.body) for c in lp.carried for x in (c.init, c.next)}
    others = {a for o in k.ops for n, a in enumerate(o.args) if not (o.kind == "matmul" and n < 2)}
    return {o.out for o in k.ops if o.kind == "load"} - others - carried


def lying(k: Kernel, over: set[str], tensors: dict[str, Tensor]) -> Kernel:
    """`k` with loads, stores, products and sums adapted to the tensors `over`, which are transposed in memory."""
    flat, in_any_order = _as_they_lie(k, over), totalled(k)

    def rule(o: Op, b: Body) -> str | None:
        """The op for the orientation in memory, None for one that stays."""
        attrs = dict(o.attrs)
        if o.kind in ("load", "store") and o.attr("tensor") in over and o.out not in flat:
            attrs["transposed"] = not o.attr("transposed")
        elif o.kind == "matmul" and flat & set(o.args[:2]):
            attrs |= {side: bool(o.attr(side)) != (x in flat) for side, x in zip(("ta", "tb"), o.args, strict=False)}
        elif o.kind in SUMS and o.args[0] in flat:
            kind = o.kind if o.out in in_any_order else SUMS[o.kind]
            return b.op(kind, *o.args, name=o.out, line=o.line, **attrs)
        else:
            return None
        return b.op(o.kind, *o.args, name=o.out, line=o.line, **attrs)

    return replace(k, body=rebuild(k.body, Body(tensors), rule))


def totalled(k: Kernel) -> set[str]:
    """Vectors of which only the sum is read. It does not depend on the axis along which a tile was summed first."""
    others = {a for o in k.ops if o.kind != "row_sum" for a in o.args}
    return {o.out for o in k.ops if o.kind == "row_sum" and o.type is not None and o.type.rank == 1} - others


def loaded_transposed(k: Kernel, over: set[str]) -> set[str]:
    """Those of the tensors `over` that `k` would transpose when it loads them."""
    flat = _as_they_lie(k, over)
    return {o.attr("tensor") for o in k.ops if o.kind == "load" and o.attr("tensor") in over and o.out not in flat}


def _as_they_lie(k: Kernel, over: set[str]) -> set[str]:
    """The tiles that need no transposition on the way to the chip: loads of `over` that only products and sums read, and
    elementwise ops of such tiles."""
    type_of, carried = types(k.body), {x for lp in loops(k.body) for c in lp.carried for x in (c.init, c.next)}
    flat: set[str] = set()
    for o in k.ops:
        tiles = [a for a in o.args if type_of[a].rank]
        if o.kind == "load" and o.attr("tensor") in over and not o.attr("transposed"):
            flat.add(o.out)
        elif o.out and OPS[o.kind].elementwise and tiles and set(tiles) <= flat and o.kind not in _OF_PLACES:
            flat.add(o.out)
    flat -= carried
    while wrong := {a for o in k.ops for n, a in enumerate(o.args) if a in flat and o.out not in flat
                    and not (o.kind == "matmul" and n < 2) and o.kind not in SUMS}:
        flat -= wrong
        flat -= {o.out for o in k.ops if o.kind != "load" and wrong & set(o.args)}
    return flat


#: Elementwise ops whose entries depend on their place in a tile.
_OF_PLACES = ("col", "row", "expand", "lower", "strictly_lower", "pairs", "halves", "diagonal_blocks")


def renamed(p: Program, over: set[str]) -> Program:
    """`p`, in which callers' tensors among `over` have names that end in _vk. A module that stores states of chunks in one
    orientation then does not fit one that reads the other."""
    names = {t.name: f"{t.name}{TRANSPOSED}" for t in p.tensors if t.name in over and t.role != "workspace"}

    def each(o: Op) -> list[Op]:
        return [o.with_attrs(tensor=names[o.attr("tensor")]) if o.attr("tensor") in names else o]
    tensors = tuple(replace(t, name=names.get(t.name, t.name)) for t in p.tensors)
    return replace(p, tensors=tensors).map_kernels(lambda k: replace(k, body=map_ops(k.body, each))) if names else p
