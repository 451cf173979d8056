"""Finds the log decays among the inputs of a traced program, and the running sums in arguments of exp.

A log decay is less than 0 if the token makes the state smaller.
"""
from __future__ import annotations

from collections.abc import Iterator

from .core import Op, Program
from .dataflow import ops_of
from .ops import OPS

#: Ops whose result has the sign of the first operand.
KEEP = ("cumsum", "row_max", "col", "row", "lower", "strictly_lower", "valid", "div", "expand", "boundary")


def log_decays(p: Program) -> set[str]:
    """The inputs that are log decays, among those of tokens and of heads.

    Of a product of an input of tokens and a number for each head, the number is taken for the log decay, and the input for a
    rate.

    An input is one if it has a positive sign in the page's `forgets`. It is also one if an argument of exp contains its running
    sum with a positive sign only. In exp(last(G) - G) both signs occur; such an exp is no evidence.
    """
    defs = ops_of(p)

    def loads(value: str) -> set[tuple[str, int, bool]]:
        return {(o.attr("tensor"), sign, summed) for o, sign, summed in _reached(defs, value) if o.attr("tensor")}

    out = {n for n, sign, _ in loads(p.forgets) if sign > 0}
    for o in defs.values():
        if o.kind == "decayed_product":
            out |= {n for n, sign, summed in loads(o.args[2]) if summed and sign > 0}
        if o.kind == "exp":
            found = {(n, sign) for n, sign, summed in loads(o.args[0]) if summed}
            out |= {n for n, sign in found if sign > 0 and (n, -sign) not in found}
    return out


def by_channel(p: Program) -> bool:
    """Whether an input of tokens is a log decay for each channel."""
    decays = log_decays(p)
    return any(t.name in decays and t.index == "token" and len(t.dims) > 1 for t in p.role("input"))


def channels_apart(p: Program) -> bool:
    """Whether a row of the next state depends on the same row of the state only."""
    waits = {c.name for c in p.walk.carried}
    needed = {c.next for c in p.walk.carried}
    ops = list(ops_of(p).values())
    for o in reversed(ops):
        needed |= set(o.args) if o.out in needed else set()
    for o in ops:
        if waits & set(o.args) and o.out in needed:
            if not OPS[o.kind].elementwise:
                return False
            waits.add(o.out)
    return True


def exponents(p: Program) -> dict[str, int]:
    """The running sums in arguments of exp: value -> -1 if sums of its terms only occur with a minus sign, else 1."""
    defs, signs = ops_of(p), dict[str, set[int]]()
    for e in defs.values():
        if e.kind in ("exp", "decayed_product"):
            for a in e.args[2:] or e.args:
                found = {(o.args[0], sign) for o, sign, _ in _reached(defs, a) if o.kind == "cumsum"}
                for n, sign in found:
                    signs.setdefault(n, set()).update({sign} if (n, -sign) not in found else ())
    sums = (o for o in defs.values() if o.kind == "cumsum" and o.args[0] in signs)
    return {o.out: -1 if signs[o.args[0]] == {-1} else 1 for o in sums}


def _reached(defs: dict[str, Op], value: str) -> Iterator[tuple[Op, int, bool]]:
    """The ops that `value` is a monotonic function of: (op, 1 if increasing or -1, whether through a running sum)."""
    todo, seen = [(value, 1, False)], set()
    while todo:
        at = n, sign, summed = todo.pop()
        o = defs.get(n)
        if at in seen or o is None:
            continue
        seen.add(at)
        yield o, sign, summed
        if o.kind in ("add", "sub", "maximum", "minimum"):
            todo += [(o.args[0], sign, summed), (o.args[1], -sign if o.kind == "sub" else sign, summed)]
        elif o.kind == "neg":
            todo.append((o.args[0], -sign, summed))
        elif o.kind == "mul":
            numbers = [a for a in o.args if a in defs and defs[a].kind in ("const", "scalar")]
            of_heads = [a for a in numbers if defs[a].attr("tensor")]
            if of_heads:
                todo += [(a, sign, summed) for a in of_heads]
                continue
            minus = any(defs[a].attr("value", 1) < 0 for a in numbers)
            todo += [(a, -sign if minus else sign, summed) for a in o.args if numbers and a not in numbers]
        elif o.kind in KEEP or OPS[o.kind].entry:
            todo.append((o.args[0], sign, summed or o.kind == "cumsum"))
