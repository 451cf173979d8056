"""used_up: finds storage for values that may overwrite another one: registers for a product that adds onto an expression or for
what an asynchronous product adds to, and a loaded tile for its running sums. `rings` uses it.

Example: in `s = matmul(a, b, mul(decay, d))`, where nothing reads d later, s takes the registers of d. So does `mul(decay, d)` if
the product is asynchronous.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from ...ir.core import Op
from ...ir.ops import OPS
from ...ir.types import Tile
from ..uses import readers
from .stored_values import is_view


def used_up(o: Op, ops: list[Op], owner: Mapping[str, str], stored: Callable[[Op], bool], type_of: Mapping[str, Tile]
            ) -> str:
    """A tile of the agent and type of `o`, which nothing reads later: that `o` reads, or, of a product, that its accumulator, an
    expression, reads. "" if there is none. ops: of the walk, in order. owner: of values with storage. stored: whether the value
    of an op has storage."""
    order, defs, read = {x: n for n, x in enumerate(ops)}, {x.out: x for x in ops if x.out}, readers(tuple(ops))

    def last(a: str) -> int:
        """The place of the last op with storage or an effect that reads `a`, directly or through expressions."""
        return max((order[r] if not r.out or r.out in owner or stored(r) or r is o else last(r.out)
                    for r, _ in read.get(a, [])), default=0)

    todo = [a for a in (o.args[2:] if o.kind == "matmul" else o.args) if o.kind != "matmul" or a not in owner]
    while todo:
        a = todo.pop(0)
        x = defs.get(a)
        mine = a in owner and type_of[a] == type_of[o.out] and (x is None or x.agent == o.agent)
        if mine and last(a) <= order[o]:
            return a
        todo += x.args if x is not None and a not in owner else ()
    return ""


def begins_sum(o: Op, read: Mapping[str, list[tuple[Op, int]]]) -> bool:
    """Whether an asynchronous product alone reads `o`, and adds to it. So `o` is in the product's registers before that begins.
    read: the readers of each value, and as which operand they read it."""
    readers = read.get(o.out, [])
    return not is_view(o) and len(readers) == 1 and readers[0][1] == 2 and bool(readers[0][0].attr("asynchronous"))


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
