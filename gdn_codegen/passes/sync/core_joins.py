"""core_joins: waits of an agent's cores for each other, before stores to memory that another core may still be loading. A part of
`synchronise`.

Each core of an agent loads a vector as a whole, and stores its part of one. If both lie in the same memory, as a state [K] that
overwrites itself, a core could store before another one has loaded. The flags between agents order this only where a loop with
such flags lies between, and a sequence may be empty. So the pass puts a join before a store to memory that an earlier op of the
agent has loaded as a whole: each core signals from its pipe that loads, and the issuers of all cores wait for all these signals.
In a loop, the ops of the iteration before are earlier, too. A join has a flag of its own, the last.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.core import Kernel, Loop, Op, Program, Stmt, walk
from .accesses import pipe_of


def core_joins(p: Program, k: Kernel, device: Cores) -> Kernel:
    """`k` with these joins: barriers of the scope "cores"."""
    return replace(k, body=_Joins(p, device).body(k.body, {}))


class _Joins:
    def __init__(self, p: Program, device: Cores) -> None:
        self.device, self.vectors = device, {t.name: t.over or t.name for t in p.tensors if len(t.dims) == 1}

    def memory(self, o: Op) -> str:
        """The memory of the vector that `o`, an op of an agent with several cores, loads or stores. "" for other ops."""
        moves = o.kind in ("load", "store") and self.device.copies[o.agent] > 1
        return self.vectors.get(o.attr("tensor"), "") if moves else ""

    def body(self, body: tuple[Stmt, ...], earlier: dict[str, Op]) -> tuple[Stmt, ...]:
        """A body with joins. earlier: memory that ops before the body have loaded since the last join, with the last such op;
        this changes it."""
        out: list[Stmt] = []
        for s in body:
            if isinstance(s, Loop):
                earlier |= {m: o for o in walk(s.body) if o.kind == "load" and (m := self.memory(o))}
                s = replace(s, body=self.body(s.body, earlier))
            elif memory := self.memory(s):
                if s.kind == "load":
                    earlier[memory] = s
                elif memory in earlier:
                    out.append(self.join(earlier[memory], s))
                    earlier.clear()  # all of them are loads, which the same pipe has run
            out.append(s)
        return tuple(out)

    def join(self, load: Op, store: Op) -> Op:
        """The join between these ops."""
        pipe = pipe_of(self.device, load)
        assert pipe is not None
        why = f"{load.attr('tensor')} -> store of {store.args[0]}"
        attrs = {"ids": (self.device.flags - 1,), "scope": "cores", "src": pipe[1], "why": why}
        return Op("barrier", "", (), tuple(attrs.items()), agent=store.agent)
