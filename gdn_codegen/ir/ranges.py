"""ranges: the least and the largest value that entries can have, as far as the ops of a page say.

An input has any value. sigmoid(x) is between 0 and 1, and maximum(x, -5) is at least -5. So a gate's input form can bound the
gate, and by how much a running sum of gates changes from a token to the next (`steps`). A tensor of running sums says this
itself (`Tensor.least_step`).
"""
from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import exp, inf

from .core import Op, Program

Range = tuple[float, float]
ANY: Range = (-inf, inf)
#: Ops whose entries are entries of the operand, or the same and zeros.
SAME, OR_ZERO = ("col", "row", "expand", "cast", "last", "segment", "boundary"), ("valid", "pairs", "diagonal_blocks")
#: By op: the range of its values for any operand.
ALWAYS: dict[str, Range] = {"sigmoid": (0.0, 1.0), "softplus": (0.0, inf), "eye": (0.0, 1.0)}


def ranges(ops: Iterable[Op]) -> dict[str, Range]:
    """The range of each value. Ends may be infinite."""
    out: dict[str, Range] = {}
    for o in ops:
        if o.out:
            out[o.out] = _range(o, [out.get(a, ANY) for a in o.args])
    return out


def steps(p: Program) -> dict[str, Range]:
    """Of values in the walk of `p` that are made of running sums: the range of the difference between a row and the row before
    it."""
    ops = [o for o in p.walk.body if isinstance(o, Op)]
    known, out = ranges(ops), dict[str, Range]()
    for o in ops:
        if o.kind == "load" and (least := p.tensor(o.attr("tensor")).least_step) > -inf:
            out[o.out] = least, inf
        elif o.kind == "cumsum":
            low, high = known.get(o.args[0], ANY)
            out[o.out] = max(low, o.attr("least", -inf)), max(high, o.attr("least", -inf))
        elif o.kind in ("neg", "add", "sub") and all(a in out for a in o.args):
            out[o.out] = _range(o, [out[a] for a in o.args])
    return out


def _range(o: Op, x: list[Range]) -> Range:
    """The range of the values of `o`. x: the ranges of its operands."""
    if o.kind in ALWAYS or o.kind in ("const", "full"):
        return ALWAYS.get(o.kind) or (o.attr("value"), o.attr("value"))
    if o.kind in SAME:
        return x[0]
    if o.kind in OR_ZERO and not o.attr("fill"):
        return min(x[0][0], 0.0), max(x[0][1], 0.0)
    if o.kind == "neg":
        return -x[0][1], -x[0][0]
    if o.kind in ("add", "sub"):
        (low, high), (a, b) = x[0], x[1] if o.kind == "add" else (-x[1][1], -x[1][0])
        return low + a, high + b
    if o.kind == "mul":
        corners = [a * b if a and b else 0.0 for a, b in product(*x)]  # 0 of infinite is a limit of zeros
        return min(corners), max(corners)
    if o.kind in ("maximum", "minimum"):
        choose = max if o.kind == "maximum" else min
        return choose(x[0][0], x[1][0]), choose(x[0][1], x[1][1])
    if o.kind == "exp":
        return tuple(exp(min(a, 700.0)) if a < inf else inf for a in x[0])  # type: ignore[return-value]
    return ANY
