"""zero_products: marks products with a state that is zero, for kernels whose blocks take one walk after another.

A walk without an initial state begins with zeros. In its first iteration the products that read this state as their first
operand are zero, whatever the other operand is. With walks of one chunk these are most of the products with the state. The mark
names the tensor of the initial state (`absent`), and the emitter then leaves the product out. Such a product is not asynchronous:
nvcc serialises products that a branch begins, and persistent walks took 10 to 35 % longer with them (docs/performance.md).

Example:
    before:  S0 = load initial_state; loop over chunks, S from S0: k_S = S @ k.T
    after:   S0 = load initial_state; loop over chunks, S from S0: k_S = S @ k.T (absent: initial_state)
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Loop, Program, Stmt, loops
from ..stage import takes

#: Ops that give zeros for zeros.
KEPT = ("cast", "move", "transpose")


@takes("placed")
def zero_products(p: Program) -> Program:
    """`p` with marks in the kernels with a loop over items."""
    return p.map_kernels(lambda k: _marked(p, k) if any(lp.index == "item" for lp in loops(k.body)) else k)


def _marked(p: Program, k: Kernel) -> Kernel:
    """The kernel with marks on the products whose first operand is a state that a walk carries, in another dtype or place."""
    optional = {t.name for t in p.tensors if t.optional}
    given = {o.out: o.attr("tensor") for o in k.ops if o.kind == "load" and o.attr("tensor") in optional}

    def body(stmts: tuple[Stmt, ...], states: dict[str, str]) -> tuple[Stmt, ...]:
        """The statements with marks. states: values that are zero with the state, and the tensor of its initial value."""
        out: list[Stmt] = []
        for s in stmts:
            if isinstance(s, Loop):
                carried = {c.name: given[c.init] for c in s.carried if c.init in given and s.index == "chunk"}
                s = replace(s, body=body(s.body, carried))
            elif s.kind in KEPT and s.args[0] in states:
                states[s.out] = states[s.args[0]]
            elif s.kind == "matmul" and len(s.args) == 2 and s.args[0] in states:
                s = s.with_attrs(absent=states[s.args[0]], asynchronous=None)
            out.append(s)
        return tuple(out)

    return replace(k, body=body(k.body, {}))

