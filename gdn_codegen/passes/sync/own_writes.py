"""own_writes: barriers of a block before ops that read what it has written to global memory. A part of `synchronise`.

Threads share a tile. They may divide it between them in one way to store it, and in another to load it. So a thread may read what
another thread of its block has written. A barrier makes that visible. The pass looks for each op that reads memory to which an
earlier op of the kernel stores. In a loop, the ops of the iteration before are earlier, too.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Loop, Op, Program, Stmt, walk
from ...ir.ops import OPS


def own_writes(p: Program) -> Program:
    """`p` with these barriers."""
    memory = {t.name: t.over or t.name for t in p.tensors}
    return p.map_kernels(lambda k: k if k.agents else replace(k, body=_ordered(k.body, set(), memory)))


def _ordered(body: tuple[Stmt, ...], earlier: set[str], memory: dict[str, str]) -> tuple[Stmt, ...]:
    """A body with barriers. earlier: memory that ops before the body have written since the last barrier, which this changes."""
    out: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop):
            earlier |= {memory[o.attr("tensor")] for o in walk(s.body) if o.kind == "store"}
            s = replace(s, body=_ordered(s.body, earlier, memory))
        elif OPS[s.kind].effect == "read" and memory.get(s.attr("tensor", "")) in earlier:
            out.append(Op("barrier", "", (), (("scope", "block"),), agent=s.agent))
            earlier.clear()
        elif s.kind == "store":
            earlier.add(memory[s.attr("tensor")])
        out.append(s)
    return tuple(out)
