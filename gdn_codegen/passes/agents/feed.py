"""feed: adds the ops that bring operands to where an agent can read them. Only devices with cores (PTO) run it.

- The kernel's body becomes a loop over items, because a core group takes one instance after another.
- Operands of a product move from their agent's home space to the space of that side.
- Loads from a caller's tensor of tokens go through `valid`, which sets rows past the end of the sequence to zero. For an
  optional tensor that is not given, it sets all entries to zero.
- A tensor that is transposed in memory is loaded and stored by columns. Each core of an agent has its own columns, and
  transposes them on the chip.
- A vector of one number per token is loaded as a strided column: one number in each row of `align` bytes. A move then makes it
  dense. Before a store, a move spreads it.

Example:
    before:  k = load k; A = k @ k.T
    after:   k_raw = load k; k = valid(k_raw); A_left = move k; A_right = move k, transposed; A = A_left @ A_right
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...devices import Cores
from ...ir.body import Body
from ...ir.core import Loop, Op, Program
from ...ir.types import Tensor
from ..common import rebuild_kernels
from ..stage import takes


@takes("transferred", gives="fed")
def feed(p: Program, device: Cores) -> Program:
    """`p` with explicit moves, and with the loop over items."""
    return rebuild_kernels(p, lambda k: _Feed(p, device)).map_kernels(lambda k: replace(k, body=(Loop("item", (), k.body),)))


class _Feed:
    """The rule for one op: the moves, clears and transposes around it.

    It returns the name of the op's value, "" if there is none, and None if the op stays.
    """
    def __init__(self, p: Program, device: Cores) -> None:
        self.p, self.device = p, device
        self.token = {t.name for t in p.tensors if t.index == "token"}

    def partial(self, t: Tensor) -> bool:
        """Whether a load of `t` may leave part of its tile unwritten."""
        return t.optional or any(self.p.padded(t))

    def __call__(self, o: Op, b: Body) -> str | None:
        """Puts `o` into `b`, with the ops that its loads, stores and operands need on this device (the module's list)."""
        def op(kind: str, *args: str, name: str = "", **attrs: Any) -> str:
            return b.op(kind, *args, name=name, line=o.line, agent=o.agent, **attrs)

        if o.kind == "load" and o.attr("tensor") in self.token:
            raw = op("load", name=b.fresh(f"{o.out}_raw"), **dict(o.attrs))
            if b.types[raw].rank == 2:
                return op("valid", raw, name=o.out)
            wide = op("valid", raw, name=b.fresh(f"{o.out}_wide"))
            return op("move", wide, name=o.out, space=self.device.home[o.agent])
        given = o.attr("tensor") if o.kind == "load" and self.partial(b.tensors[o.attr("tensor")]) else ""
        if o.kind == "load" and (given or o.attr("transposed")):
            transposed = o.attr("transposed")
            raw = op("load", name=b.fresh(f"{o.out}_raw"), tensor=o.attr("tensor"), columns=transposed, piece=o.attr("piece"))
            if given:
                raw = op("valid", raw, name=b.fresh(f"{o.out}_given") if transposed else o.out, given=given)
            return op("transpose", raw, name=o.out) if transposed else raw
        if o.kind == "store" and o.attr("transposed"):
            op("store", op("transpose", *o.args, name=b.fresh(f"{o.args[0]}_transposed"), columns=True),
               **{**dict(o.attrs), "transposed": None, "columns": True})
            return ""
        if o.kind == "store" and o.attr("tensor") in self.token and b.types[o.args[0]].rank == 1:
            wide = op("move", *o.args, name=b.fresh(f"{o.args[0]}_wide"), space=self.device.home[o.agent], spread=True)
            op("store", wide, **dict(o.attrs))
            return ""
        if o.kind == "valid":  # `valid` works in place, so it gets a copy
            return op("valid", op("move", o.args[0], name=b.fresh(f"{o.out}_raw"), space=self.device.home[o.agent]), name=o.out)
        if o.kind == "matmul":
            sides: list[str] = []
            for a, space, transposed in zip(o.args, self.device.feeds, (o.attr("ta"), o.attr("tb")), strict=False):
                sides.append(op("move", a, name=b.fresh(f"{o.out}_{'left' if not sides else 'right'}"), space=space,
                                transposed=transposed))
            return op("matmul", *sides, *o.args[2:], name=o.out, **dict(o.attrs))
        return None
