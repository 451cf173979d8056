"""async_copies: marks asynchronous copies, and adds waits for them. For TileLang, in kernels with one agent.

Loads of tiles to shared memory are asynchronous copies. So are loads of vectors of float32, of tokens or of a slot; four bytes
are the smallest asynchronous copy. A tile that a product adds to lies in registers, which no such copy reaches. Copies are marked
by the attribute `channel`. A wait comes before the first op that reads such a buffer or fills it again. A wait counts copies in
the order in which they were started (PTX ISA, cp.async.wait_group): a wait for one is a wait for all before it. A kernel over
chunks starts most of them at once, so there a wait leaves later ones under way, `pending` of them. Other kernels wait for all. A
wait is a barrier. So ops of one kind in a row share one, before the first of them. A warp that ends one early then begins the
next. Kernels that batch heads by threads have no asynchronous copies.

Example:
    before:  k = load k; v = load v; A = k @ k.T
    after:   k = load k (copies); v = load v (copies); wait (copies, pending=1); A = k @ k.T
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device
from ...ir.core import Attrs, Kernel, Loop, Op, Program, Stmt
from ..stage import takes
from ..uses import stored_under

CHANNEL = "copies"


@takes("placed")
def async_copies(p: Program, device: Device) -> Program:
    """`p` with marks and waits. `p` itself if the device has no asynchronous copies."""
    if not device.async_loads:
        return p
    def marked(k: Kernel) -> Kernel:
        return replace(k, body=_Arrive(p, k, device).body(k.body))

    return p.map_kernels(lambda k: k if k.agents or k.batch.way == "threads" else marked(k))


class _Arrive:
    """Adds marks and waits to one kernel."""
    def __init__(self, p: Program, k: Kernel, device: Device) -> None:
        self.p, self.tensors = p, {t.name: t for t in p.tensors}
        self.home = {o.out: o.buffer for o in k.ops if o.buffer}
        self.reached = {b.name for b in k.buffers if b.space == device.loaded}
        self.under = stored_under(k.body)
        self.agent = device.agents[0]
        self.all = k.grid != "chunks"  # whether each wait is for all copies
        self.coming: list[str] = []  # buffers that copies are still filling, the first that was started first

    def body(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The body with marked loads, and with a wait before the first op that accesses one of their buffers."""
        out: list[Stmt] = []

        def wait(pending: int) -> None:
            if len(self.coming) > pending:
                left: Attrs = (("pending", pending),) if pending else ()
                out.append(Op("wait", "", attrs=(("channel", CHANNEL), *left), agent=self.agent))
                self.coming = self.coming[len(self.coming) - pending:]

        for at, s in enumerate(body):
            if isinstance(s, Loop):
                wait(0)
                s = replace(s, body=self.body(s.body))
            elif used := {x for o in _row(body[at:]) for x in self.touched(o)}.intersection(self.coming):
                wait(0 if self.all else next(n for n, x in enumerate(reversed(self.coming)) if x in used))
            if isinstance(s, Op) and s.kind == "load" and self.copied(s):
                s = s.with_attrs(channel=CHANNEL)
                self.coming.append(s.buffer)
            out.append(s)
        wait(0)
        return tuple(out)

    def copied(self, o: Op) -> bool:
        """Whether the load is an asynchronous copy to shared memory: of a tile that is given, not padded and not transposed, or
        of a float32 vector of tokens, or of a slot if it is given and not padded."""
        if o.attr("one_token") or o.buffer not in self.reached:
            return False
        t = self.tensors[o.attr("tensor")]
        whole = not t.optional and not any(self.p.padded(t))
        if len(t.dims) == 1:
            return (t.index == "token" or (t.index == "slot" and whole)) and t.dtype == "float32"
        return len(t.dims) == 2 and t.index in ("token", "slot") and whole and not o.attr("transposed")

    def touched(self, o: Op) -> set[str]:
        """The buffers that `o` fills or reads, directly or through expressions inside it."""
        if o.out and not o.buffer:
            return set()
        return {o.buffer} | {self.home[x] for a in o.args for x in self.under(a) if x in self.home}


def _row(body: tuple[Stmt, ...]) -> list[Op]:
    """The ops at the start of `body` that are of one kind. Empty for a loop."""
    ops: list[Op] = []
    for x in body:
        if not isinstance(x, Op) or (ops and x.kind != ops[0].kind):
            break
        ops.append(x)
    return ops
