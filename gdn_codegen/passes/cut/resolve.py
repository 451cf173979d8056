"""resolve: gives the groups of a schedule values in the place of roles. `cut` uses it."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...ir.core import Op, Program
from ...schedule.schedule import Schedule
from .groups import KernelGroups
from .roles import roles


def resolved(p: Program, s: Schedule) -> Schedule:
    """`s` with values instead of roles. Values of roles that no later group reads are left out, and so are operands that no walk
    reads: a later group with another role of theirs has them, or a kernel over chunks computes them again. p: traced, in the form
    of `s`."""
    without: set[tuple[str, str]] = set()
    while True:
        found, came = _with_names(p, s, without)
        g = KernelGroups(p, found)
        idle = {n for n in g.unwalked() if came.get(n) == "@operand"} or {n for n in g.unread() if came.get(n, n) != n}
        if not idle:
            return found
        without |= {(n, came[n]) for n in idle}


def _with_names(p: Program, s: Schedule, without: set[tuple[str, str]]) -> tuple[Schedule, dict[str, str]]:
    """`s` with values instead of roles, and the word of `s`, such as "@operand", by which each value came. p: traced, in the form
    of `s`. without: values and words by which they do not come.

    A value belongs to the group that names it, otherwise to the first group with a role of it. Empty groups are dropped. A role
    with a * stands for one group for each of its values if they are several, and else is left to other groups. A role with a +
    stands for one group for each set of its values that read something in common.
    """
    found, came = roles(p), {n: n for g in s.kernels for n in g if not n.startswith("@")}
    groups: list[tuple[str, ...]] = []
    for g in s.kernels:
        group: list[str] = []
        for word in g:
            of_role = found[word.strip("@*+")] if word.startswith("@") else ()
            new = [n for n in of_role if n not in came and (n, word) not in without]
            if word.endswith("*"):
                new = new if len(new) > 1 else []
                groups += [(n,) for n in new]
            elif word.endswith("+"):
                groups += _apart(p, new, {n for g in groups for n in g})
            else:
                group += new if word.startswith("@") else [word]
            came |= dict.fromkeys(new, word)
        groups.append(tuple(group))
    return replace(s, kernels=tuple(g for g in groups if g)), came


def _apart(p: Program, names: list[str], before: Collection[str]) -> list[tuple[str, ...]]:
    """The values in sets that read something in common: an input, or a value of an earlier group. Numbers do not count. Values
    that read no tile join the first set. before: values of earlier groups."""
    defs = {o.out: o for o in p.walk.body if isinstance(o, Op) and o.out}
    rank = {n: len(o.type.dims) for n, o in defs.items() if o.type is not None}

    def reads(n: str) -> set[str]:
        """What a kernel for this value reads and computes."""
        out, todo = set[str](), [n]
        while todo:
            a = todo.pop()
            if a not in out and rank.get(a, 2):
                out.add(a)
                todo += defs[a].args if a in defs and (a == n or a not in before) else ()
        return out
    sets: list[tuple[set[str], set[str]]] = []  # what is read, and the values
    for n in names:
        mine = reads(n)
        joined = [x for x in sets if x[0] & mine]
        sets = [x for x in sets if x not in joined]
        sets.append((mine.union(*(x[0] for x in joined)), {n}.union(*(x[1] for x in joined))))
    tiles = [values for read, values in sets if any(rank.get(a, 2) > 1 for a in read)]
    rest = {n for n in names if not any(n in values for values in tiles)}
    found = [tiles[0] | rest, *tiles[1:]] if tiles else [rest]
    return [tuple(n for n in names if n in values) for values in found if values]
