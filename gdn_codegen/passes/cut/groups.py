"""groups: what each group of a schedule computes and what it reads of earlier groups. `cut` makes one kernel of each.

A group computes all ops on which its values depend, down to inputs and to values that an earlier group wrote.
"""
from __future__ import annotations

from itertools import takewhile

from ...ir.core import Op, Program
from ...ir.ops import OPS
from ...schedule.schedule import Schedule, ScheduleError


def keeps_state(p: Program, o: Op) -> bool:
    """Whether a store of a traced program writes a state before or after a chunk. Another value of a chunk is none, though it has
    a slot for each chunk, too: it is an output."""
    t = p.tensor(o.attr("tensor"))
    return t.index == "checkpoint" or (t.index == "slot" and o.args[0] in {c.name for c in p.walk.carried})


class Slice:
    """What one group computes and reads."""
    def __init__(self) -> None:
        self.ops: set[str] = set()  # values computed here
        self.reads: set[str] = set()  # values an earlier group wrote
        self.walks = False


class KernelGroups:
    """The groups of a schedule, and the values of a walk that they need.

    Raises ScheduleError if a group names an unknown value, or if no group writes an output or a state.
    """
    def __init__(self, p: Program, s: Schedule) -> None:
        """Finds the outputs and states of the walk. ScheduleError for an unknown name, and for a result that no group has."""
        (self.whole,), self.loop = p.kernels, p.walk
        self.p, self.s, loop = p, s, self.loop
        self.defs = {o.out: o for o in loop.body if isinstance(o, Op) and o.out}
        self.states = {c.name: c for c in loop.carried}
        #: Stores of states after or before chunks. They are part of the kernel that computes the state.
        self.kept = [o for o in loop.body if isinstance(o, Op) and o.kind == "store" and keeps_state(p, o)]
        self.outputs = {o.args[0]: o for o in loop.body if isinstance(o, Op) and o.kind == "store" and o not in self.kept}
        names = [n for group in s.kernels for n in group]
        known = [n for n, o in self.defs.items() if not OPS[o.kind].number]
        unknown = [n for n in names if n not in known and n not in self.states]
        if unknown:
            have = [n for n in known if self.defs[n].kind != "load"]
            raise ScheduleError(f"schedule {s.name}: kernels names {', '.join(unknown)}, and {p.name} has no such value; "
                                f"accepted: {', '.join([*have, *self.states])}")
        lost = [n for n in [*self.outputs, *self.states] if n not in names]
        if lost:
            raise ScheduleError(f"schedule {s.name}: no group of kernels writes {', '.join(lost)}; accepted: groups that have "
                                f"all outputs and states, as --set kernels={','.join([*self.outputs, *self.states])} or "
                                "--set kernels=@output,@state")

    def unread(self) -> set[str]:
        """The values of groups that no later group reads and that are not a result of the call."""
        parts, out = [self.slice(i) for i in range(len(self.s.kernels))], set()
        for i, group in enumerate(self.s.kernels):
            read = {n for later in parts[i + 1:] for n in later.reads}
            out |= set(group) - {*read, *self.outputs, *self.states, *self.p.scales, self.p.forgets}
        return out

    def unwalked(self) -> set[str]:
        """The values of groups that no later walk reads, and that are not a result of the call."""
        parts, out = [self.slice(i) for i in range(len(self.s.kernels))], set()
        for i, group in enumerate(self.s.kernels):
            read = {n for later in parts[i + 1:] if later.walks for n in later.reads}
            out |= set(group) - {*read, *self.outputs, *self.states}
        return out

    def check(self, apart: bool) -> None:
        """Raise ScheduleError for groups that write nothing, and for workspaces of numbers if cores share no memory (`apart`)."""
        unread = self.unread()
        for i, group in enumerate(self.s.kernels):
            if unread.issuperset(group):
                raise ScheduleError(f"schedule {self.s.name}: kernels has the group {','.join(group)}, which writes no output "
                                    "and no value that a later group reads; accepted: groups whose values are read")
            after = {n for later in self.s.kernels[i + 1:] for n in later}
            nexts = [f"{c.next} (the next value of the state {c.name})" for c in self.states.values()
                     if c.next in group and c.name in after]
            if nexts:
                raise ScheduleError(f"schedule {self.s.name}: a group has {', '.join(nexts)}, and a later group has the "
                                    "state; accepted: the name of the state instead, in the earlier group")
            numbers = [n for n in group if n in self.defs and (x := self.defs[n].type) is not None and not x.dims]
            if numbers and apart:
                raise ScheduleError(f"schedule {self.s.name}: kernels names {', '.join(numbers)}, one number for each chunk; "
                                    "accepted where cores share no memory: tiles and vectors")

    def slice(self, i: int) -> Slice:
        """What group i computes: all ops that its values depend on. It stops at values of earlier groups, which it reads."""
        out, earlier = Slice(), {n for group in self.s.kernels[:i] for n in group}
        todo = [self.states[n].next if n in self.states else n for n in self.s.kernels[i]]
        out.walks = any(n in self.states for n in self.s.kernels[i])
        while todo:
            n = todo.pop()
            if n in out.ops or n in out.reads:
                continue
            if n in earlier:
                out.reads.add(n)
            elif n in self.states:
                out.walks = True
                todo.append(self.states[n].next)
            elif n in self.defs:  # others are initial values, which a kernel that walks has
                out.ops.add(n)
                todo += self.defs[n].args
        return out

    def with_forgets(self) -> tuple[tuple[str, ...], ...]:
        """The groups, with `forgets` added to the one over chunks before all walks that computes most of what it depends on, the
        first of several; in a group of its own before the others if there is none."""
        groups, needed = self.s.kernels, {self.p.forgets}
        for n in reversed(self.defs):
            needed |= set(self.defs[n].args) if n in needed else set()
        before = list(takewhile(lambda part: not part.walks, (self.slice(i) for i in range(len(groups)))))
        if not before:
            return (self.p.forgets,), *groups
        at = max(range(len(before)), key=lambda i: (len(before[i].ops & needed), -i))
        return *groups[:at], (*groups[at], self.p.forgets), *groups[at + 1:]

    def with_scales(self) -> tuple[tuple[str, ...], ...]:
        """The groups, with each vector of `scales` that is stored added to the group that writes it.

        That is the first group over chunks that computes it. If only walks compute it, that is the last group over chunks
        before them. With short warm-ups the bound of what is forgotten has a group of its own, which does not see all chunks.
        """
        parts, out = [self.slice(i) for i in range(len(self.s.kernels))], list(self.s.kernels)
        before_parts = (self.p.forgets,) if self.s.partition == "short" else ()
        for n in self.p.scales:
            users = [i for i, part in enumerate(parts) if n in part.ops]
            every = [i for i, part in enumerate(parts) if not part.walks and self.s.kernels[i] != before_parts]
            chunks = [i for i in every if i in users or i < users[0]]
            computing = [i for i in chunks if i in users]
            if chunks and (len(users) > 1 or not computing):
                at = computing[0] if computing else chunks[-1]
                out[at] = (*out[at], n)
        return tuple(out)
