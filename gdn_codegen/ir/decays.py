"""Which inputs of a traced program are log decays: numbers that are less than 0 where a token forgets."""
from __future__ import annotations

from .core import Loop, Op, Program

#: Ops whose sign is that of their first operand.
KEEP = ("cumsum", "last", "col", "row", "lower", "strictly_lower", "valid", "div")


def log_decays(p: Program) -> set[str]:
    """Inputs that add to the page's `forgets`, or whose running sums add to what exp takes and are not subtracted there: in
    exp(last(G) - G) they are both, which says nothing."""
    (loop,) = (x for x in p.kernels[0].body if isinstance(x, Loop))
    ops = [o for o in loop.body if isinstance(o, Op)]
    defs = {o.out: o for o in ops if o.out}
    out = {n for n, sign, _ in _reached(defs, p.forgets) if sign > 0}
    for o in ops:
        if o.kind == "exp":
            found = {(n, sign) for n, sign, summed in _reached(defs, o.args[0]) if summed}
            out |= {n for n, sign in found if sign > 0 and (n, -sign) not in found}
    return out


def _reached(defs: dict[str, Op], value: str) -> set[tuple[str, int, bool]]:
    """Inputs that `value` rises or falls with: which, 1 or -1, and whether by a running sum."""
    out: set[tuple[str, int, bool]] = set()
    todo, seen = [(value, 1, False)], set()
    while todo:
        at = n, sign, summed = todo.pop()
        o = defs.get(n)
        if at in seen or o is None:
            continue
        seen.add(at)
        if o.kind == "load":
            out.add((o.attr("tensor"), sign, summed))
        elif o.kind in ("add", "sub", "maximum", "minimum"):
            todo += [(o.args[0], sign, summed), (o.args[1], -sign if o.kind == "sub" else sign, summed)]
        elif o.kind == "neg":
            todo.append((o.args[0], -sign, summed))
        elif o.kind == "mul":
            numbers = [a for a in o.args if a in defs and defs[a].kind in ("const", "scalar")]
            minus = any(defs[a].attr("value", 1) < 0 for a in numbers)
            todo += [(a, -sign if minus else sign, summed) for a in o.args if numbers and a not in numbers]
        elif o.kind in KEEP:
            todo.append((o.args[0], sign, summed or o.kind == "cumsum"))
    return out
