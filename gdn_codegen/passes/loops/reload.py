"""reload: loads and computes tiles again for each reader. `arrange` calls it for devices with cores, for kernels that have no
room otherwise. It needs stage "fed", and keeps it.

A tile that is in memory need not stay on the chip between two readers that are far apart. So each reader gets its own load, and
its own copy of the few elementwise ops in between. `depth_first` then puts these directly before the reader.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.core import Kernel, Loop, Op, Stmt, types
from ...ir.ops import OPS

MOST = 4  # ops that are done again for a reader


def reload(k: Kernel, device: Cores) -> Kernel:
    """`k` in which each reader of tiles of the first agent that come from memory has loads of its own."""
    return replace(k, body=_body(k, k.body, device.agents[0]))


def _body(k: Kernel, body: tuple[Stmt, ...], agent: str) -> tuple[Stmt, ...]:
    """A body with loads for each reader, in its loops too."""
    type, again = types(k.body), dict[str, tuple[Op, ...]]()  # value -> the ops that make it again
    kept = {x for s in body if isinstance(s, Loop) for c in s.carried for x in (c.init, c.next)}
    out: list[Stmt] = []
    count = 0
    for s in body:
        if isinstance(s, Loop):
            out.append(replace(s, body=_body(k, s.body, agent)))
            continue
        ops = tuple(dict.fromkeys(o for a in s.args for o in again.get(a, ())))
        tiles = [a for a in s.args if type[a].rank == 2]
        if s.agent == agent and s.out and s.out not in kept and type[s.out].rank == 2 and len(ops) < MOST and (
                s.kind == "load" or ((OPS[s.kind].elementwise or s.kind == "valid") and all(a in again for a in tiles))):
            again[s.out] = (*ops, s)
            continue
        count += 1
        names = {o.out: f"{o.out}_{count}" for o in ops}
        out += [o.renamed(names).changed(out=names[o.out]) for o in ops]
        out.append(s.renamed(names))
    return tuple(out)
