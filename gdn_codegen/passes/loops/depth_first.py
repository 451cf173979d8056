"""depth_first: orders ops so that few values are live. `arrange` calls it for devices with cores, for kernels that have no room
in another order. It needs stage "fed", and keeps it.

Each result, in turn, comes directly after what it needs, and each operand directly before its reader. The pass ignores what pipes
could do meanwhile, so `list_scheduling` comes first.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.core import Kernel, Op, Program
from .dependences import Dependences, by_runs
from .op_costs import OpCosts


def depth_first(p: Program, k: Kernel, device: Cores) -> Kernel:
    """`k` with the ops of each body in depth-first order."""
    costs = OpCosts(p, k, device)
    return replace(k, body=by_runs(k.body, lambda ops, next_of: _ordered(costs, ops, next_of)))


def _ordered(costs: OpCosts, ops: list[Op], next_of: dict[str, str]) -> list[Op]:
    """A run of ops, each after all that it depends on. Of the operands of an op, the one with the most before it comes first."""
    d = Dependences(ops, next_of, costs.rounded, costs.device.feeds)
    size: list[int] = []  # for each op: how many paths lead to it, plus one
    for after in d.after:
        size.append(1 + sum(size[m] for m in after if m < len(size)))
    read = set().union(*d.after) if ops else set()
    done: dict[int, None] = {}
    todo = [n for n in reversed(range(len(ops))) if n not in read]
    while todo:
        n = todo[-1]
        missing = sorted((m for m in d.before[n] if m not in done), key=lambda m: (size[m], -m))
        if missing and n not in done:
            todo += missing
        else:
            done.update(dict.fromkeys((*d.feeding.get(n, ()), n)))
            todo.pop()
    return [ops[n] for n in done]
