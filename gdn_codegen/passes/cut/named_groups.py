"""named_groups: replaces roles in a schedule's groups by the values that have them. `cut` calls it."""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Program
from ...schedule.schedule import Schedule
from .roles import roles


def with_names(p: Program, s: Schedule) -> tuple[Schedule, set[str], set[str]]:
    """`s` with values instead of roles, the values that roles gave, and those that only the role operand gave. p: traced, in the
    form of `s`.

    A value belongs to the group that names it, otherwise to the first group with a role of it. Empty groups are dropped. A role
    with a * stands for one group for each of its values if they are several, and else is left to other groups.
    """
    found, taken = roles(p), {n for g in s.kernels for n in g if not n.startswith("@")}
    came: set[str] = set()
    groups: list[tuple[str, ...]] = []
    for g in s.kernels:
        group: list[str] = []
        for word in g:
            new = [n for n in found[word.strip("@*")] if n not in taken | came] if word.startswith("@") else []
            if word.endswith("*"):
                new = new if len(new) > 1 else []
                groups += [(n,) for n in new]
            else:
                group += new if word.startswith("@") else [word]
            came |= set(new)
        groups.append(tuple(group))
    other = {n for g in s.kernels for word in g if word.startswith("@") and word != "@operand" for n in found[word.strip("@*")]}
    return replace(s, kernels=tuple(g for g in groups if g)), came, came - other
