"""bounds: marks the maxima and minima of a value and a number with the index of the number (`bound`). For GPUs.

Such a number is a bound: a constant, a number of the caller, or computed from these alone, as -limit. The result must be NaN
where the value is NaN. A GPU's instruction gives the bound there, so emitters print more for these ops. For two computed values
they print the plain instruction.

In a walk whose warps run iterations in turn, a negative bound from below of what only running sums read becomes their attribute
`least`: they bound terms in registers. A maximum beside the load would be a condition around it. Between the two may be `valid`.

Example:
    before:  y = maximum(x, c), with c = const          in turn: s = cumsum(valid(maximum(x, c)))
    after:   y = maximum(x, c, bound=1)                          s = cumsum(valid(x), least=c)
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.core import Kernel, Op, Program, map_ops, uses, walk
from ...ir.ops import BOUND, OPS
from ..stage import takes
from ..uses import readers


@takes("decomposed")
def bounds(p: Program, in_turns: bool = False) -> Program:
    """`p` with such marks and attributes. in_turns: whether warps of walks run iterations in turn."""
    return p.map_kernels(lambda k: _marked(_summed(k) if in_turns and k.grid != "chunks" else k))


def _summed(k: Kernel) -> Kernel:
    """`k` with constant bounds of terms in their running sums."""
    defs, read, count = {o.out: o for o in walk(k.body) if o.out}, readers(k.body), uses(k.body)
    least, instead = dict[str, float](), dict[str, str]()
    for o in defs.values():
        bound = next((defs[a].attr("value") for a in o.args if a in defs and defs[a].kind == "const"), 0.0)
        if o.kind == "maximum" and bound < 0:
            sums = _sums(o.out, read, count)
            least |= dict.fromkeys(sums, bound)
            instead |= {o.out: next(a for a in o.args if a not in defs or defs[a].kind != "const")} if sums else {}

    def each(o: Op) -> list[Op]:
        """The op with the bound of its terms, or with operands that have none."""
        o = replace(o, args=tuple(instead.get(a, a) for a in o.args))
        if o.out in least:
            o = o.with_attrs(least=max(least[o.out], o.attr("least", least[o.out])))
        return [] if o.out in instead else [o]
    return replace(k, body=map_ops(k.body, each)) if instead else k


def _sums(value: str, read: Mapping[str, list[tuple[Op, int]]], count: Mapping[str, int]) -> list[str]:
    """The running sums that read `value`, directly or through `valid`. No sums if anything else reads it."""
    mine = [o for o, _ in read.get(value, ())]
    found = [[o.out] if o.kind == "cumsum" else _sums(o.out, read, count) if o.kind == "valid" else [] for o in mine]
    return [x for of in found for x in of] if all(found) and len(mine) == count.get(value, 0) else []


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
