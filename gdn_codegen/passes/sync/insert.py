"""insert: writes derived waits into a kernel's body, as ops of the kinds signal, wait and barrier."""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, Stmt
from .accesses import Path, pipe_of
from .trace import Trace
from .waits import Pair, Place, Waits


def inserted(trace: Trace, waits: Waits) -> Kernel:
    """The kernel of a trace with its waits. All pairs have ids."""
    k = trace.kernel
    return replace(k, body=_Insert(trace, waits).body(k.body, ()))


class _Insert:
    def __init__(self, trace: Trace, waits: Waits) -> None:
        self.trace, self.waits = trace, waits
        self.channel = {x: n for n, x in enumerate(waits.pairs)}

    def body(self, body: tuple[Stmt, ...], path: Path) -> tuple[Stmt, ...]:
        """The body at a place with its signals, waits and barriers."""
        out: list[Stmt] = []
        for i, s in enumerate(body):
            at = (*path, i)
            out += [self.op("wait", x, 0) for x in self.waits.before.get(at, ())]
            if isinstance(s, Loop):
                initial = [(x, n) for x in self.waits.initial_signals_of_loop.get(at, ()) for n in range(x.distance)]
                out += self.drains(("before", at))
                out += [self.op("signal", x, n, iterations=False) for x, n in initial]
                out.append(replace(s, body=self.body(s.body, at)))
                out += [self.op("wait", x, n) for x, n in initial]
            else:
                if at in self.waits.pipe_barriers:
                    pipe = pipe_of(self.trace.device, s)
                    assert pipe is not None
                    out.append(Op("barrier", "", (), (("scope", pipe[1]),), agent=s.agent))
                out.append(s)
            out += self.drains(("after", at))
            out += [self.op("signal", x, x.distance) for x in self.waits.after.get(at, ())]
        return tuple(out)

    def op(self, kind: str, x: Pair, number: int, iterations: bool = True) -> Op:
        """A signal or a wait. number: the number of iterations ahead; without `iterations`, the number of this signal or wait."""
        src, dst = self.trace.pipes.names[x.src], self.trace.pipes.names[x.dst]
        attrs: dict[str, object] = {"channel": self.channel[x], "src": src[1], "dst": dst[0] if x.crosses else dst[1],
                                    "why": x.why}
        if iterations and len(x.ids) > 1:
            attrs |= {"id": x.ids, "loop": x.loop, **({"ahead": number} if number else {})}
        else:
            attrs["id"] = x.ids[number % len(x.ids)]
        if x.crosses:
            attrs["src"] = f"{src[0]}.{src[1]}"
        return Op(kind, "", (), tuple(sorted(attrs.items())), agent=(src if kind == "signal" else dst)[0])

    def drains(self, place: Place) -> list[Op]:
        """The barriers over agents at a place."""
        return [Op("barrier", "", (), (("scope", "ALL"),), agent=agent) for agent in sorted(self.waits.drains.get(place, ()))]
