"""hoist: loads masks once for each core group. `arrange` calls it for devices with cores. It needs stage "fed", and keeps it.

A tensor of index "const" is the same in every iteration, so its load may come before the loops. The cost is a buffer for the
whole kernel. `candidates` lists these tensors by reads for each byte, highest first.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ...ir.core import Kernel, Op, Program, map_ops, uses


def candidates(p: Program, k: Kernel) -> list[str]:
    """The tensors whose loads can be hoisted, best first."""
    sizes, count = {**p.sizes, **k.sizes}, uses(k.body)
    reads: dict[str, int] = {}
    for o in k.ops:
        if o.kind == "load" and p.tensor(o.attr("tensor")).index == "const":
            reads[o.attr("tensor")] = reads.get(o.attr("tensor"), 0) + count[o.out]
    return sorted(reads, key=lambda n: (-reads[n] / prod(p.tensor(n).tile.shape(sizes)), n))


def hoist(k: Kernel, tensors: set[str]) -> Kernel:
    """`k` with the loads of `tensors` before its loops, one load for each agent and piece of a tile."""
    top: dict[tuple[Any, ...], Op] = {}
    names: dict[str, str] = {}

    def each(o: Op) -> list[Op]:
        """Drop a hoisted load. Other ops read the hoisted value."""
        if o.kind != "load" or o.attr("tensor") not in tensors:
            return [o.renamed(names)]
        names[o.out] = top.setdefault((o.attr("tensor"), o.agent, o.attr("piece")), o).out
        return []

    body = map_ops(k.body, each)
    return replace(k, body=(*top.values(), *body))
