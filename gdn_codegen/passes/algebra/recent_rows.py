"""recent_rows: loads the rows of earlier tokens from memory, so that they need no state. For devices that load a tile some tokens
before the chunk (`Device.moved_loads`).

A state whose next value is `latest(x)` is, before a chunk, the row of x of the token before it. If x is an input, that row lies
in memory. So `delay(x, r, s)` with such states is a load that begins two tokens before the chunk. Only before a sequence's first
token memory has none of its rows: there are the initial states. Then chunks need nothing of each other, and `cut` makes them
parallel.

Example, with S and R that become latest(x) and latest(delay(x, S)):
    before:  y = delay(x, R, S)
    after:   x_2_before = load x (delay=2); y = delay(x_2_before, R_0, S_0, given), where given means: in the first chunk only
"""
from __future__ import annotations

from ...devices import Device
from ...ir.body import Body
from ...ir.core import Op, Program
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def recent_rows(p: Program, device: Device) -> Program:
    """`p` with such loads in place of delays of inputs. `p` itself for other devices, and for chunks of one token."""
    if not device.moved_loads or p.sizes["C"] == 1 or not any(o.kind == "delay" for o in p.walk.ops):
        return p
    known, b = _Known(p), walk_body(p)
    for o in p.walk.body:
        assert isinstance(o, Op)
        if o.kind == "delay" and known.continues(o.args[0], o.args[1:]):
            known.load(o, b)
        else:
            b.copy(o)
    return with_walk_body(p, b.finish())


class _Known:
    """What the walk says of its states: the op that makes the next value of each, and the tensor with its initial value."""

    def __init__(self, p: Program) -> None:
        self.p, self.defs = p, {o.out: o for k in p.kernels for o in k.ops if o.out}
        self.next = {c.name: c.next for c in p.walk.carried}
        self.start: dict[str, str] = {}  # the initial states that the body has loaded
        self.initial = {c.name: self.defs[c.init].attr("tensor") for c in p.walk.carried}

    def continues(self, x: str, rows: tuple[str, ...]) -> bool:
        """Whether states are the rows of an input before the chunk: `rows`, the oldest first, those of x."""
        load = self.defs[x]
        if load.kind != "load" or self.p.tensor(load.attr("tensor")).index != "token" or load.attr("transposed"):
            return False
        before: tuple[str, ...] = ()
        for row in reversed(rows):
            after = self.defs.get(self.next.get(row, ""))
            if after is None or after.kind != "latest" or not self.delays(after.args[0], x, before):
                return False
            before = (row, *before)
        return True

    def delays(self, y: str, x: str, rows: tuple[str, ...]) -> bool:
        """Whether y is x, or its delay after these rows."""
        o = self.defs.get(y)
        return y == x if not rows else o is not None and (o.kind, o.args) == ("delay", (x, *rows))

    def load(self, o: Op, b: Body) -> None:
        """Append the load for the delay `o`, and what puts the initial rows before it."""
        x, *rows = o.args
        moved = b.op("load", name=b.fresh(f"{x}_{len(rows)}_before"), line=o.line, tensor=self.defs[x].attr("tensor"),
                     delay=len(rows))
        for r in rows:
            self.start[r] = self.start.get(r) or b.op("load", name=b.fresh(f"{r}_start"), line=o.line, tensor=self.initial[r])
        first = [self.start[r] for r in rows]
        b.op("delay", moved, *first, name=o.out, line=o.line, given=True)
