"""used_up: finds storage for values that may overwrite another one: registers for a product that adds onto an expression, and a
loaded tile for its running sums. `rings` uses it.

Example: in `s = matmul(a, b, mul(decay, d))`, where nothing reads d later, s takes the registers of d.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from ...ir.core import Op
from ...ir.ops import OPS
from ...ir.types import Tile
from ..uses import readers


def used_up(product: Op, ops: list[Op], owner: Mapping[str, str], stored: Callable[[Op], bool], type_of: Mapping[str, Tile]
            ) -> str:
    """A tile of the product's agent and type that its accumulator, an expression, reads and that nothing reads later. "" if
    there is none. ops: of the walk, in order. owner: of values with storage. stored: whether the value of an op has storage."""
    order, defs, read = {o: n for n, o in enumerate(ops)}, {o.out: o for o in ops if o.out}, readers(tuple(ops))

    def last(a: str) -> int:
        """The place of the last op with storage or an effect that reads `a`, directly or through expressions."""
        return max((order[r] if not r.out or r.out in owner or stored(r) or r is product else last(r.out)
                    for r, _ in read.get(a, [])), default=0)

    todo = [product.args[2]] if product.args[2] not in owner else []
    while todo:
        a = todo.pop(0)
        x = defs.get(a)
        mine = a in owner and type_of[a] == type_of[product.out] and (x is None or x.agent == product.agent)
        if mine and last(a) <= order[product]:
            return a
        todo += x.args if x is not None and a not in owner else ()
    return ""


def summed_in_place(o: Op, defs: Mapping[str, Op], count: Mapping[str, int], type_of: Mapping[str, Tile]) -> str:
    """The loaded tile that `o`, running sums of a tile, may overwrite, "" if there is none: one of their type that they alone
    read, perhaps through expressions. count: how often each value is read."""
    a = o.args[0] if o.kind == "cumsum" and type_of[o.out].rank == 2 else ""
    while a and count[a] == 1 and a in defs and type_of[a] == type_of[o.out]:
        if defs[a].kind == "load":
            return a
        if not (OPS[defs[a].kind].elementwise or defs[a].kind == "valid"):
            return ""
        a = next((x for x in defs[a].args if type_of[x] == type_of[o.out]), "")
    return ""
