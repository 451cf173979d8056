"""resolve: gives the groups of a schedule values in the place of roles. `cut` uses it."""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Program
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

    A value belongs to the group that names it, otherwise to the first group with a role of it. Empty groups are dropped.
    """
    found, came = roles(p), {n: n for g in s.kernels for n in g if not n.startswith("@")}
    groups: list[tuple[str, ...]] = []
    for g in s.kernels:
        group: list[str] = []
        for word in g:
            new = [n for n in found[word[1:]] if n not in came and (n, word) not in without] if word.startswith("@") else []
            came |= dict.fromkeys(new, word)
            group += new if word.startswith("@") else [word]
        groups.append(tuple(group))
    return replace(s, kernels=tuple(g for g in groups if g)), came
