"""Writes one kernel whose agents are warp groups of a block: a branch an agent, each with its own walk over the chunks."""
from __future__ import annotations

import math
from itertools import groupby

from ...ir.core import Agent, Buffer
from ...ir.ops import OWN_PART
from ...ir.types import Dim, Tensor
from ..base import KernelText, Loop, Op, Rules, Stmt, Text, Writer, walk
from .kernel import STATEMENTS, KernelWriter, Value
from .rules import fill, strict
from .rules import rule as base

rule = Rules("tilelang", {}, base)
#: Threads of a warp group, for which registers are set; registers of a block.
GROUP, REGISTERS = 128, 64 * 1024
#: Of a tile, rows that a warp group holds, and columns of one that it carries between shared memory and registers.
ROWS = 64


class GroupsWriter(KernelWriter):
    """Writes one kernel. A buffer in shared memory is a ring that iterations with the walk."""

    rules = rule
    statements = (*STATEMENTS, "move", "transpose", "wait", "signal", "fence", "drain", "claim_part")

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        #: Barriers that count the iterations of the walk's own part; others may have loads of that part among theirs.
        self.own = {o.attr("channel") for o in walk(self.k.body) if o.kind == "signal" and o.attr(OWN_PART)}
        home = {o.out: o.buffer for o in walk(self.k.body)}
        tiles = {x.name for x in self.k.buffers if x.space == "shared" and len(x.shape) == 2}
        self.crossing = {x for o in walk(self.k.body) if o.kind in ("move", "transpose")
                         for x in (o.buffer, home[o.args[0]]) if x in tiles}
        self.begun: list[str] = []  # fragments of products that run
        self.whole_chunks = False  # in iterations before those of the walk's own part
        self.taken |= {"tx"} | {x.name for x in self.k.buffers if x.space == "barrier"}

    def order(self, dims: tuple[Dim, ...]) -> str:
        """Tiles of 64 columns whose rows warp groups share, 64 each, lie as sums of products do: warps carry them so."""
        if not hasattr(self, "agent"):  # of all threads
            return "parallel"
        extents = [d if isinstance(d, int) else self.sizes[d] for d in dims]
        return "as_sums" if self.crossing and extents == [self.agent.threads // GROUP * ROWS, ROWS] else "parallel"

    @property
    def thread(self) -> str:
        """A thread's number among those of its agent."""
        return f"tx - {self.agent.first}" if self.agent.first else "tx"

    @property
    def iteration(self) -> str:
        """How many iterations the walk has made."""
        return "iteration" if self.k.grid == "parts" else "chunk"

    def slot(self, x: Buffer, own: bool = False) -> str:
        """The slot of this iteration; `own`: of the iterations of the walk's own part."""
        return f"{self.counted(own)} % {x.slots}" if x.slots > 1 else "0"

    def counted(self, own: bool) -> str:
        return "(chunk - first)" if own else self.iteration

    def stored(self, o_dims: tuple[Dim, ...], buffer: str) -> Value:
        x = self.buffers[buffer]
        if x.space != "shared":
            return super().stored(o_dims, buffer)
        name = self.name(buffer)
        ring = [self.slot(x)] if x.slots > 1 else []
        return Value(o_dims, x.dtype, lambda *index: Text(f"{name}[{', '.join([*ring, *(index or ('0',))])}]"), buffer)

    def whole(self, buffer: str) -> str:
        """The storage of a buffer as an operand: its slot of this iteration."""
        x = self.buffers[buffer]
        name = self.name(buffer)
        return name if x.space != "shared" or x.slots == 1 else f"{name}[{', '.join([self.slot(x), *[':'] * len(x.shape)])}]"

    def tile(self, t: Tensor) -> str:
        """This instance's tile of `t`, as a slice."""
        slices = [f"block * B{d}:block * B{d} + B{d}" if d == self.k.split else f"0:{self.dim(d)}" for d in t.dims]
        if t.index == "token":
            slices[0] = f"{self.use('row')}:row + {t.dims[0]}"
        return self.at(t, slices)

    # --- statements ---
    def inner(self, *lines: str) -> None:
        """Lines of a block."""
        self.w.indent += 1
        for x in lines:
            self.line(x)
        self.w.indent -= 1

    def body(self, body: tuple[Stmt, ...]) -> None:
        super().body(tuple(s for s in body if isinstance(s, Loop) or (s.agent == self.agent.name and not self.known(s))))

    def known(self, o: Op) -> bool:
        """Whether `o` stands before agents part: a number that all of them know, or what ends them all."""
        return o in self.k.body and (o.kind == "claim_part" or (o.type is not None and o.type.rank == 0))

    def walk(self, lp: Loop) -> None:
        for c in lp.carried:
            self.env[c.name] = self.env[c.result] = self.stored(c.type.dims, c.name)
        self.use("length")
        if self.k.grid != "parts":
            self.iterations("for chunk in T.serial(T.ceildiv(length, C)):", lp.body)
            return
        begin = self.use("begin")
        always = tuple(s for s in lp.body if isinstance(s, Op) and not s.attr(OWN_PART))
        if len(always) < len(lp.body):
            if any(s.agent == self.agent.name for s in always):
                self.whole_chunks = True
                self.iterations(f"for iteration in T.serial(first - {begin}):", always)
                self.whole_chunks = False
            self.iterations(f"for iteration in T.serial(first - {begin}, stop - {begin}):", lp.body)
        else:
            self.iterations(f"for iteration in T.serial(stop - {begin}):", lp.body)

    def iterations(self, head: str, body: tuple[Stmt, ...]) -> None:
        """A loop over chunks."""
        self.w.line = 0
        first = len(self.w.lines)
        self.w.indent += 1
        self.body(body)
        self.w.indent -= 1
        after, self.w.lines = self.w.lines[first:], self.w.lines[:first]
        self.w(head)
        self.w.indent += 1
        for text in (*(["chunk = begin + iteration"] if self.k.grid == "parts" else []), *self.chunk()):
            self.line(text)
        self.w.indent -= 1
        self.w.lines += after

    def branch(self, a: Agent) -> None:
        self.agent, self.w.line = a, 0
        kept, self.uses = self.uses, {}
        self.env = {o.out: self.stored(o.type.dims, o.buffer) for o in walk(self.k.body) if o.buffer and o.type}
        self.body(self.k.body)
        self.uses = {**kept, **{x: None for x in self.uses if x not in ("row", "rows", "slot", "checkpoint")}}

    def branches(self) -> None:
        """The agents, those of a warp group together, since registers are set for it."""
        total = sum(a.threads for a in self.k.agents)
        groups = [list(g) for _, g in groupby(self.k.agents, lambda a: a.first // GROUP if a.threads < GROUP else a.name)]
        for n, group in enumerate(groups):
            last = n == len(groups) - 1
            self.w("else:" if last else f"{'el' if n else ''}if tx < {group[-1].first + group[-1].threads}:")
            self.w.indent += 1
            budget = group[0].registers
            self.w(f"T.set_max_nreg({budget}, {int(budget > REGISTERS // (-(-total // GROUP) * GROUP))})")
            for m, a in enumerate(group):
                if len(group) > 1 or last:
                    self.w(f"{'el' if m else ''}if tx < {a.first + a.threads}:")
                    self.w.indent += 1
                self.branch(a)
                self.w.indent -= len(group) > 1 or last
            self.w.indent -= 1

    # --- the whole ---
    def text(self) -> KernelText:
        conditions = ["first < T.max(stop, 1)"] if self.k.grid == "parts" else []  # a sequence's first part, or one with chunks
        self.w.indent = 3 + bool(conditions or self.p.skips)
        super().body(tuple(o for o in self.k.body if isinstance(o, Op) and self.known(o)))
        self.w("tx = T.get_thread_binding()")
        self.branches()
        body = self.w.lines
        clear = self.clear()
        self.w = Writer(self.p, "#", 2)
        self.head()
        for x in self.k.buffers:
            self.w(self.allocation(x))
        for x in self.k.buffers:  # here, as there is a fence for each place where one stands
            if x.name in self.inverted | self.crossing:
                self.w(f"t.expect_swizzled({self.name(x.name)})")
        self.w.lines += clear
        self.open_block(*conditions)
        if conditions and not self.warm_up:
            self.w("begin = first")
        return self.finished(body)

    def allocation(self, x: Buffer) -> str:
        if x.space == "barrier":
            return f"{x.name} = T.alloc_barrier(arrive_count=[{x.shape[0]}] * {x.slots})"
        if x.space != "shared":
            return super().allocation(x)
        dims = [*([str(x.slots)] if x.slots > 1 else []), *(self.dim(d) for d in self.buffer_dims(x.name) or (1,))]
        alloc = "t.staged" if x.name in self.inverted | self.crossing else "T.alloc_shared"
        return f"{self.name(x.name)} = {alloc}(({', '.join(dims)}{',' if len(dims) == 1 else ''}), {self.dtype(x.dtype)})"

    def threads(self) -> int:
        return -(-sum(a.threads for a in self.k.agents) // GROUP) * GROUP


# --- rules -----------------------------------------------------------------------------------------------------------
@rule("wait")
def wait(w: GroupsWriter, o: Op) -> None:
    x = w.buffers[o.attr("channel")]
    own = o.attr(OWN_PART, False)
    iterations = f"{w.counted(own)} // {x.slots}" if x.slots > 1 else w.counted(own)
    w.line(f"T.barrier_wait({x.name}[{w.slot(x, own)}], {f'({iterations} + 1)' if o.attr('back') else iterations} % 2)")


@rule("signal")
def signal(w: GroupsWriter, o: Op) -> None:
    x = w.buffers[o.attr("channel")]
    w.line(f"T.barrier_arrive({x.name}[{w.slot(x, o.attr(OWN_PART, False))}])")


@rule("drain")
def drain(w: GroupsWriter, o: Op) -> None:
    w.line("T.wait_wgmma(0)")
    for x in w.begun:  # lest nvcc reads it before the wait
        w.line(f"T.warpgroup_fence_operand({w.name(x)}, num_regs={math.prod(w.buffers[x].shape) // w.agent.threads})")
    w.begun.clear()


@rule("diag_inverse")
def diag_inverse(w: GroupsWriter, o: Op, x: Value, scale: Value | None = None) -> None:
    tiles = [w.whole(x.buffer), w.whole(o.buffer), str(o.attr("size")), *[f"scale={w.whole(y.buffer)}" for y in [scale] if y]]
    w.line(f"t.diag_inverse({', '.join([*tiles, *strict(o)])}, thread={w.thread}, warp={w.iteration} % {w.agent.threads // 32})")


@rule("claim_part")
def claim_part(w: GroupsWriter, o: Op, warm_up: Value) -> None:
    w.line(f"if ({warm_up.at()} * 2 > span) == (half == 0):")
    w.w.indent += 1  # to the kernel's end


@rule("fence")
def fence(w: GroupsWriter, o: Op) -> None:
    w.line("T.fence_proxy_async()")


@rule("matmul")
def matmul(w: GroupsWriter, o: Op, a: Value, b: Value, acc: Value | None = None) -> None:
    assert o.type is not None
    if acc is not None and acc.buffer != o.buffer:
        w.fill(w.stored(o.type.dims, o.buffer), acc)
    options = [f"{name}=True" for name, key in (("transpose_A", "ta"), ("transpose_B", "tb")) if o.attr(key)]
    options += (["clear_accum=True"] if acc is None else []) + ["policy=T.GemmWarpPolicy.FullRow"]
    if o.attr("asynchronous"):
        w.begun.append(o.buffer)
    run = "T.wgmma_gemm" if o.attr("asynchronous") else "T.gemm"
    w.line(f"{run}({', '.join([*(w.whole(x) for x in (a.buffer, b.buffer, o.buffer)), *options])})")


@rule("load")
def load(w: GroupsWriter, o: Op, *operands: Value) -> None:
    t, channel, tail = w.p.tensor(o.attr("tensor")), o.attr("channel"), o.attr("tail")
    if channel is None or (t.index == "token" and not tail):
        fill(w, o, *operands)
        return
    x = w.buffers[channel]
    arrives = f"{x.name}[{w.slot(x, channel in w.own)}]"
    copy = f"T.tma_copy({w.tile(t)}, {w.whole(o.buffer)}, barrier="
    if not tail or w.whole_chunks:
        w.line(f"{copy}{arrives})")
        return
    w.line(f"if {w.use('rows')} >= C:")
    w.inner(f"{copy}{arrives})")
    # Once a sequence: what was copied of other sequences' rows becomes zero.
    w.line("else:")
    w.inner(f"{copy}{tail}[0])", f"T.barrier_arrive({tail}[0])", f"T.barrier_wait({tail}[0], 0)",
            "for i in T.serial(C - rows):", f"    for j in T.Parallel({w.dim(t.dims[1])}):",
            f"        {w.stored(t.dims, o.buffer).at('rows + i', 'j')} = 0")


@rule("store")
def store(w: GroupsWriter, o: Op, x: Value) -> None:
    t = w.p.tensor(o.attr("tensor"))
    if t.index != "token" or len(t.dims) < 2:
        base.of(o)(w, o, x)
        return
    when = w.when(t, o)
    for condition in when:
        w.line(f"if {condition}:")
        w.w.indent += 1
    w.line(f"if {w.use('rows')} >= C:")
    w.inner(f"T.copy({w.whole(x.buffer)}, {w.tile(t)})")
    w.line("else:")
    # Where one instance stores all columns, the loop ends where memory does: Python nests 20 blocks at most, and TileLang
    # makes two blocks of an `if`.
    split = t.dims[1] == w.k.split
    inside = [f"if {y}:" for y in w.inside(t, ("i", "j"))[1:]] if split else []
    w.inner("for i in T.serial(rows):", f"    for j in T.Parallel({w.dim(t.dims[1]) if split else w.extents(t)[1]}):",
            *(f"        {y}" for y in inside), f"        {'    ' * len(inside)}{w.address(t, ('i', 'j'))} = {x.at('i', 'j')}")
    w.w.indent -= len(when)


@rule("move")
def move(w: GroupsWriter, o: Op, x: Value) -> None:
    assert o.type is not None
    if o.buffer in w.crossing:
        _store_tile(w, o, x)
    elif x.buffer and x.dims:
        w.line(f"T.copy({w.whole(x.buffer)}, {w.whole(o.buffer)})")
    elif x.dims:
        w.fill(w.stored(o.type.dims, o.buffer), x)
    else:
        w.line("for i in t.parallel(1):")
        w.w.indent += 1
        w.line(f"{w.stored((1,), o.buffer).at('i')} = {x.at()}")
        w.w.indent -= 1


@rule("transpose")
def transpose(w: GroupsWriter, o: Op, x: Value) -> None:
    if o.buffer in w.crossing:
        _store_tile(w, o, x)
    else:
        w.line(f"t.load_transposed({w.whole(x.buffer)}, {w.whole(o.buffer)}, {w.thread})")


def _store_tile(w: GroupsWriter, o: Op, x: Value) -> None:
    transposed = ", transposed=True" if o.kind == "transpose" else ""
    w.line(f"t.store_tile({w.whole(x.buffer)}, {w.whole(o.buffer)}, {w.thread}{transposed})")
