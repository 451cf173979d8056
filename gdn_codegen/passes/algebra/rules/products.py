"""Rules about products of tiles: scales are outside of them, products with one operand are joined, states come last."""
from __future__ import annotations

from typing import TYPE_CHECKING

from ....ir.core import Op
from .rule import Rules

if TYPE_CHECKING:
    from ..terms import Terms

PRODUCTS = Rules()


@PRODUCTS.written("a scaling of a product's operand", "matmul")
def _scaling(t: Terms, o: Op) -> str | None:
    """Numbers and scales of the result's rows or columns move out of the product, to the result. A scale of the contracted dim
    moves from the left operand to the right one."""
    if len(o.args) != 2:
        return None
    attrs = dict(o.attrs)
    x, y = (t.factors(a) for a in o.args)
    summed, there = "col" if attrs.get("ta") else "row", "row" if attrs.get("tb") else "col"
    outer = [f for f in x if t.scales(f) and t.kind(f) != summed]
    moved = [f for f in x if t.kind(f) == summed]
    last = [f for f in y if t.scales(f) and t.kind(f) != there]
    if not outer and not moved and not last:
        return None
    left, right = [f for f in x if f not in (*outer, *moved)], [f for f in y if f not in last]
    if not all(any(t.type[f].dims == t.type[a].dims for f in side) for side, a in ((left, o.args[0]), (right, o.args[1]))):
        return None  # an outer product of vectors

    def viewed(f: str, kind: str) -> str:
        return t.make(kind, t.defs[f].args, line=o.line) if t.kind(f) in ("col", "row") else f

    right = [*(viewed(f, there) for f in moved), *right]
    product = t.make("matmul", (t.product(left, o.line), t.product(right, o.line)), o.attrs, line=o.line)
    return t.product([*(viewed(f, "col") for f in outer), *(viewed(f, "row") for f in last), product], o.line)


for _x, _y, _z in ((a, b, c) for a in ("x", "x.T") for b, c in (("y", "z"), ("y.T", "z.T"))):
    for _op, _kind in (("+", "add"), ("-", "sub")):
        _to = f"{_x} @ {'(y ' + _op + ' z)' + ('.T' if _y == 'y.T' else '')}"
        PRODUCTS.rule(f"{_kind} of products {_x} @ {_y}", f"{_x} @ {_y} {_op} {_x} @ {_z}", _to, _kind)
PRODUCTS.rule("a product with a state first", "(x @ y) @ s", "x @ (y @ s)", "matmul",
      lambda t, x: x["s"] in t.states and t.type[x["x"]].dims == ("C", "C"))
