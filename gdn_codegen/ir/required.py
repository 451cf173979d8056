"""What a program must have at its stage. `verify` enforces it. ir/stages.py has what a program may have."""
from __future__ import annotations

from collections.abc import Callable, Iterator

from .core import Kernel, Loop, Op, Program, loops
from .ops import OPS
from .stages import STAGES, between

#: An error text, with the kernel and the op that lack something.
Missing = tuple[str, Kernel | None, Op | None]


def _walks(p: Program) -> Iterator[Missing]:
    """There is one kernel, and it walks the chunks."""
    if len(p.kernels) != 1 or [lp.index for lp in loops(p.kernels[0].body)] != ["chunk"]:
        yield "has another form than one kernel with one loop, over chunks", None, None


def _agents(p: Program) -> Iterator[Missing]:
    """Each op has an agent, which is one of the kernel's if the kernel lists them."""
    for k in p.kernels:
        names = {a.name for a in k.agents}
        for o in k.ops:
            if not o.agent or (names and o.agent not in names):
                yield f"has the agent {o.agent!r}, which the kernel does not have", k, o


def _own_values(p: Program) -> Iterator[Missing]:
    """Each op reads values of its own agent. Numbers of the call belong to all agents."""
    for k in p.kernels:
        home = {o.out: o.agent for o in k.ops if o.out and not OPS[o.kind].number}
        for lp in loops(k.body):
            home.update({x: home[c.next] for c in lp.carried if c.next in home for x in (c.name, c.result)})
        for o in k.ops:
            for a in o.args:
                if home.get(a, o.agent) != o.agent:
                    yield f"of {o.agent} reads {a} of {home[a]}, not through a workspace", k, o


def _launches(p: Program) -> Iterator[Missing]:
    """Either no kernel has launches for one part each, or all have, and go through its chunks from the first to the last."""
    for k in p.kernels if any(k.by_part for k in p.kernels) else ():
        if not k.by_part or k.grid == "sequences" or k.step < 0:
            yield "has no launches for one part each, over its chunks from the first to the last, as another kernel has", k, None


def _moved_operands(p: Program) -> Iterator[Missing]:
    """Instances are iterations of a loop. Products read what a move computed, or what a loop carries."""
    for k in p.kernels:
        if [s.index for s in k.body if isinstance(s, Loop)] != ["item"]:
            yield "has no loop over items around its other loops", k, None
        kind = {o.out: o.kind for o in k.ops if o.out}
        for o in k.ops:
            for a in o.args[:2] if o.kind == "matmul" else ():
                if kind.get(a, "move") != "move":
                    yield f"reads {a}, which no move has computed", k, o


def _buffers(p: Program) -> Iterator[Missing]:
    """A tile or vector that is no expression in its reader has a buffer. Elementwise ops and views may be such expressions, and
    where a block has several agents, rows that are zero past a sequence's end."""
    for k in p.kernels:
        for o in k.ops:
            d = OPS[o.kind]
            inside = d.elementwise or d.view or (o.kind == "valid" and k.agents)
            if o.out and not o.buffer and not inside and o.type is not None and o.type.rank:
                yield "has no buffer", k, o


def _waits(p: Program) -> Iterator[Missing]:
    """An agent that reads what another agent wrote waits, and the other signals. Each channel has both a wait and a signal. An
    asynchronous load signals, too."""
    for k in p.kernels:
        ops = k.ops
        waits = {o.attr("channel"): o for o in ops if o.kind == "wait"}
        signals = {o.attr("channel"): o for o in ops if o.kind in ("signal", "load") and o.attr("channel") is not None}
        for channel in waits.keys() ^ signals.keys():
            one, other = ("waits for", "signals") if channel in waits else ("signals", "waits for")
            yield f"{one} channel {channel}, which no op {other}", k, waits.get(channel) or signals[channel]
        waiting, signalling = ({o.agent for o in ops if o.kind in kinds} for kinds in (("wait",), ("signal", "load")))
        wrote = {o.out: o.agent for o in ops if o.buffer and o.type is not None and o.type.rank}
        wrote |= {o.attr("tensor"): o.agent for o in ops if o.kind == "store"}
        for o in ops:
            for x in (*o.args, *([o.attr("tensor")] if o.kind == "load" else [])):
                by = wrote.get(x, o.agent)
                if by != o.agent and not (o.agent in waiting and by in signalling):
                    yield f"reads {x}, and {o.agent} never waits for {by}", k, o


#: The stages at which a program must have something -> the function that finds where it is missing.
REQUIRED: dict[str, Callable[[Program], Iterator[Missing]]] = {
    "traced": _walks,
    "cut..checked": _launches,
    "assigned..checked": _agents,
    "transferred..fed": _own_values,
    "fed": _moved_operands,
    "placed..checked": _buffers,
    "synchronised..checked": _waits,
}


_AT = {stage: [find for stages, find in REQUIRED.items() if stage in between(stages)] for stage in STAGES}


def missing(p: Program) -> Iterator[Missing]:
    """An error text for each thing that `p` must have at its stage and lacks, with the kernel and op. The stage is known."""
    for find in _AT[p.stage]:
        yield from find(p)
