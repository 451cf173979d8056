"""Writes one kernel whose agents are warp groups of a block. Each agent has a branch with its own loop over the chunks."""
from __future__ import annotations

from itertools import groupby
from typing import TypeGuard

from ...ir.core import NO_LINE, Agent, Buffer
from ...ir.ops import LATE
from ...ir.types import BYTES, GROUP, Dim, Tensor
from ..base import EmitError, KernelText, Loop, Op, Rules, Stmt, Text, Writer, in_buffers
from .kernel import BACKWARDS
from .rules import rule as base
from .tiles import BELOW, Value
from .turns import TurnsWriter, runs

rule = Rules("tilelang", base=base)
turn_rule = Rules("tilelang", base=rule)  # of agents whose warps run iterations in turn
#: Rows of a ragged tail that the threads of a warp access at a time. All 64 rows at once would be code of a thousand instructions
#: that runs once, and waits for the instruction cache.
TAIL = 8
#: Ops at the end of an item, by which agents learn the number of the next one.
HANDED_ON = ("await_kernels", "wait", "signal", "fence", "claim_item", "next_item")


def is_number(o: Op) -> bool:
    """Whether `o` computes a number outside of rings."""
    return o.type is not None and o.type.rank == 0 and o.kind != "claim_item"


def is_late(s: Stmt) -> TypeGuard[Op]:
    """Whether an iteration leaves `s` to the next one."""
    return isinstance(s, Op) and bool(s.attr(LATE))


class GroupsWriter(TurnsWriter):
    """Writes one kernel. A buffer in shared memory is a ring. Each iteration of the walk uses its next slot."""

    rules = rule

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.loop_begin, self.loop_body = "0", tuple[Stmt, ...]()  # the first chunk of the current loop, and its statements
        self.begun: dict[str, str] = {}  # asynchronous products before their drain, in order, and their fragments
        items = next((s for s in self.k.body if isinstance(s, Loop) and s.index == "item"), None)
        self.items = items is not None
        ops = [s for s in (items.body if items else ()) if isinstance(s, Op)]
        self.numbers = {o for o in ops if is_number(o)}  # that all agents compute for each item
        self.of_items = {x for o in ops if o.kind in HANDED_ON for x in (o.buffer, o.attr("channel"))}
        self.taken |= {"tx"} | {x.name for x in self.k.buffers if x.space == "barrier"}

    @property
    def iteration(self) -> str:
        """The number of iterations before this one, for slots of rings. It counts those of earlier items, too."""
        return "iteration" if self.k.grid == "parts" or self.items else self.passed

    @property
    def tails(self) -> str:
        """The parity of the phase for the ragged tail of this walk. An instance has one tail at most."""
        return "tails_before % 2" if self.items else "0"

    def slot(self, x: Buffer) -> str:
        """The slot of ring `x` in this iteration."""
        return f"{self.counted(x)} % {x.slots}" if x.slots > 1 else "0"

    def counted(self, x: Buffer) -> str:
        """The number of the iteration, for slots of ring `x`. A barrier may count only the chunks of the walk's own part. Rings
        of the loop over items count items."""
        return f"({self.passed} - first)" if x.own else "items_before" if x.name in self.of_items else self.iteration

    def row_of_several(self, t: Tensor) -> tuple[str, int]:
        """A row of a ragged tail of `t`, and how many rows the threads of the agent access at a time: TAIL, or in a loop over
        items so many that each thread has 16 bytes, because addresses then take registers in all items."""
        n = max(1, 16 * self.agent.threads // (BYTES[t.dtype] * self.sizes[str(t.dims[1])])) if self.items else TAIL
        return f"i * {n} + ii", n

    def stored(self, o_dims: tuple[Dim, ...], buffer: str) -> Value:
        """A value in a buffer. In a ring it is in the slot of this iteration."""
        x = self.buffers[buffer]
        if x.space != "shared":
            return super().stored(o_dims, buffer)
        name = self.name(buffer)
        ring = [self.slot(x)] if x.slots > 1 else []

        def at(*index: str) -> Text:
            return Text(f"{name}[{', '.join([*ring, *(self.in_piece(x, index) or ('0',))])}]")
        return Value(o_dims, x.dtype, at, buffer)

    def whole(self, buffer: str) -> str:
        """The storage of a buffer, as an operand. For a ring it is the slot of this iteration."""
        x = self.buffers[buffer]
        name = self.name(buffer)
        if x.space != "shared" or x.slots == 1:
            return super().whole(buffer)
        return f"{name}[{', '.join([self.slot(x), *(f'0:{self.dim(d)}' if x.pad else ':' for d in x.dims or (1,))])}]"

    def tile(self, t: Tensor, piece: tuple[int, ...] = ()) -> str:
        """This instance's tile of `t`, as a slice. EmitError for a piece of its columns, which no kernel with agents has."""
        if piece:
            raise EmitError(f"tilelang: a kernel with agents loads columns {piece[0]} to {sum(piece)} of {t.name}; pass place "
                            "should have left its tiles whole")
        slices = [f"block * B{d}:block * B{d} + B{d}" if d == self.k.blocked_dim else f"0:{self.dim(d)}" for d in t.dims]
        if t.index == "token":
            slices[0] = f"{self.use('row')}:row + {t.dims[0]}"
        return self.at(t, slices)

    def compared(self, i: str, sign: str, j: str) -> str:
        """A comparison of the row of an element with its column. In a tile that lies as sums they differ by a constant more than
        those of the thread's first entry, which a loop over chunks has in a register."""
        if not self.in_loop or self.order != "as_sums" or (i, j) != ("i", "j"):
            return super().compared(i, sign, j)
        return f"{self.use(BELOW)} + i // 8 % 2 * 8 {sign} j // 8 * 8 + j % 2"

    def chunk(self) -> list[str]:
        """The lines that compute the variables of a chunk that the current agent's ops use."""
        return [*super().chunk(), *([f"{BELOW} = t.below_diagonal({self.thread})"] if BELOW in self.uses else [])]

    # --- statements ---
    def inner(self, *lines: str) -> None:
        """Print lines with one more level of indentation."""
        self.w.indent += 1
        for x in lines:
            self.line(x)
        self.w.indent -= 1

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Print the statements that the current agent runs."""
        own = [s for s in body if isinstance(s, Loop) or s in self.numbers or (s.agent == self.agent.name and not self.known(s))]
        for late, some in groupby(own, is_late):
            if late:
                self.w(f"if {self.passed} > {self.loop_begin}:")
            self.w.indent += late
            for columns, run in runs(some):
                self.in_pieces(columns, run)
            self.w.indent -= late

    def known(self, o: Op) -> bool:
        """Whether all agents run `o` before their branches: a number that all of them need, a wait by it, an op that may end the
        instance, or one before such an op."""
        ends = [n for n, s in enumerate(self.k.body) if isinstance(s, Op) and s.kind in ("claim_part", "return_unless_negative")]
        early = self.k.body[:ends[-1] + 1] if ends else ()
        return o in early or (o in self.k.body and (is_number(o) or (o.kind == "await_kernels" and bool(o.args))))

    def walk(self, lp: Loop) -> None:
        """Print a loop over items, or a loop over chunks if the current agent has ops in it."""
        if lp.index == "item":
            self.over_items(lp)
            return
        for c in lp.carried:
            self.env[c.name] = self.env[c.result] = self.stored(c.type.dims, c.name)
        self.use("length")
        once = self.agent.name in self.k.one_loop
        if not any(s.agent == self.agent.name for s in lp.ops) or (once and lp.index == "before"):
            return
        if self.k.grid != "parts":
            self.iterations(self.passed, "0", "T.ceildiv(length, C)", lp.body, "0", "length")
            return
        begin = self.use("begin")
        first, stop = f"first - {begin}", f"stop - {begin}"
        begins = lp.warm_up or once or not self.warm_up  # in a kernel without warm-ups `begin` is the part's first chunk
        over = ("0", first) if lp.index == "before" else ("0", stop) if begins else (first, stop)
        self.iterations("iteration", *over, lp.body, begin if begins or lp.index == "before" else "first",
                        "first" if lp.index == "before" else "stop")

    def iterations(self, name: str, start: str, stop: str, body: tuple[Stmt, ...], begin: str, end: str) -> None:
        """Print a loop over chunks, and after it the late ops of its last iteration. name: its variable, from `start` to `stop`.
        begin: its first chunk. end: a number that is greater if it has iterations."""
        self.loop_begin, self.loop_body = begin, body
        self.w.line = NO_LINE
        first = len(self.w.lines)
        self.w.indent += 1
        self.in_loop = True
        self.body(body)
        self.in_loop = False
        self.w.indent -= 1
        after, self.w.lines = self.w.lines[first:], self.w.lines[:first]
        self.head_of_loop(name, start, stop, "iterations_before" if self.items else start)
        self.w.indent += 1
        count = [f"iteration = iterations_before + {self.passed}", "T.assume(iteration >= 0)"] if self.items else []
        of_part = [f"{self.passed} = begin + iteration"] if self.k.grid == "parts" else []
        for text in (*count, *of_part, *([BACKWARDS] if self.k.step < 0 else []), *self.chunk()):
            self.line(text)
        self.w.indent -= 1
        self.w.lines += after
        if late := tuple(s for s in body if is_late(s) and s.agent == self.agent.name):
            self.w(f"if {end} > {begin}:")
            self.w.indent += 1
            super().body(late)
            self.w.indent -= 1

    def zeros(self, t: Tensor, head: int) -> None:
        """Print loops that write zeros to the first `rows` rows of the current tile. In a loop over items one agent does so."""
        if not self.items:
            super().zeros(t, head)
            return
        row, n = self.row_of_several(t)
        inside = self.inside(t, (row, "j"))
        self.w(f"for i in T.serial(T.ceildiv(T.min(rows, C), {n})):", f"    for ii, j in T.Parallel({n}, {self.dim(t.dims[1])}):",
               f"        if {' and '.join(inside)}:", f"            {self.address(t, (row, 'j'))} = 0")

    def over_items(self, lp: Loop) -> None:
        """Print a loop over items for the current agent. Each iteration computes the place of the instance, runs its statements
        if its sequence is not skipped, and then goes on with the next item."""
        own = [s for s in lp.body if isinstance(s, Loop) or s.agent == self.agent.name or s in self.numbers]
        last = max(n for n, s in enumerate(own) if isinstance(s, Loop) or s.kind not in HANDED_ON)
        first = len(self.w.lines)
        self.w.indent += 1
        for t in self.p.clears(self.k):
            if any(isinstance(o, Op) and o.kind == "store" and o.attr("tensor") == t.name for x in own if isinstance(x, Loop)
                   for o in x.ops if o.agent == self.agent.name):
                self.clear_rows(t)
        self.open_block()
        self.body(tuple(own[:last + 1]))
        self.w("iterations_before = iterations_before + T.ceildiv(length, C)")
        if any(o.attr("tail") for o in self.k.ops if o.agent == self.agent.name):
            self.w("if length % C != 0:", "    tails_before = tails_before + 1")
        self.w.indent -= bool(self.p.skips)
        self.w("T.assume(items_before >= 0)")
        self.body(tuple(own[last + 1:]))
        self.w("items_before = items_before + 1")
        after, self.w.lines = self.w.lines[first:], self.w.lines[:first]
        self.w.indent -= 1
        self.w("instance = first_instance", f"while instance < {self.instances}:")
        self.w.indent += 1
        self.w(*(f"{name} = {text}" for name, text, _ in self.place()))
        self.w.indent -= 1
        self.w.lines += after

    def branch(self, a: Agent) -> None:
        """Print the branch of one agent's threads."""
        self.agent, self.w.line = a, NO_LINE
        self.rules = turn_rule if a.turns > 1 else rule
        kept, self.uses = self.uses, {}
        self.env = {o.out: self.stored(o.type.dims, o.buffer) for o in in_buffers(self.k) if o.type}
        self.body(self.k.body)
        self.uses = {**kept, **{x: None for x in self.uses if x not in ("row", "rows", "slot", "checkpoint", BELOW)}}

    def branches(self) -> None:
        """Print the branches of all agents. Agents in one warp group share a branch, since registers are set for the warp
        group."""
        groups = [list(g) for _, g in groupby(self.k.agents, lambda a: a.first // GROUP if a.threads < GROUP else a.name)]
        for n, group in enumerate(groups):
            last = n == len(groups) - 1
            self.w("else:" if last else f"{'el' if n else ''}if tx < {group[-1].first + group[-1].threads}:")
            self.w.indent += 1
            budget = group[0].registers
            self.w(f"T.set_max_nreg({budget}, {int(budget > self.k.registers)})")
            for m, a in enumerate(group):
                if len(group) > 1 or last:
                    self.w(f"{'el' if m else ''}if tx < {a.first + a.threads}:")
                    self.w.indent += 1
                if any(o.kind == "matmul" and o.agent == a.name for o in self.k.ops):
                    self.w("T.fence_proxy_async()")  # or TileLang puts one into each iteration
                self.turn(a)
                self.branch(a)
                self.w.indent -= len(group) > 1 or last
            self.w.indent -= 1

    # --- the whole ---
    def text(self) -> KernelText:
        """The kernel's text: head, buffers, barriers, and a branch for each agent."""
        conditions = ["first < T.max(stop, 1)"] if self.k.grid == "parts" else []  # has chunks, or is the first
        self.w.indent = 3 + bool(conditions or (self.p.skips and not self.items))
        super().body(tuple(o for o in self.k.body if isinstance(o, Op) and self.known(o)))
        self.w("tx = T.get_thread_binding()")
        self.branches()
        body = self.w.lines
        clear = self.clear()
        self.w = Writer(self.p, "#", 2)
        self.head()
        if self.items:
            self.w("instance = T.alloc_var(T.int32)", *(f"{n} = T.alloc_var(T.int32)" for n, _, kept in self.place() if kept),
                   *(f"{n}_before = T.alloc_var(T.int32, init=0)" for n in ("iterations", "items", "tails")))
        for x in self.k.buffers:
            self.w(self.allocation(x))
        for x in self.k.buffers:  # only here, since each of these lines adds a fence
            if x.layout == "swizzled" and BYTES[x.dtype] == 2:
                self.w(f"t.expect_swizzled({self.name(x.name)})")
        self.overlap()
        self.w.lines += clear
        if not self.items:
            self.open_block(*conditions)
        if conditions and not self.warm_up:
            self.w("begin = first")
        return self.finished(body)

    def allocation(self, x: Buffer) -> str:
        """The line that allocates a buffer: a ring of tiles or barriers, or a fragment."""
        if x.space == "barrier":
            return f"{x.name} = T.alloc_barrier(arrive_count=[{x.shape[0]}] * {x.slots})"
        if x.space != "shared":
            return super().allocation(x)
        dims = [*([str(x.slots)] if x.slots > 1 else []), *(self.dim(d) for d in x.dims or (1,))]
        dims[-1] += f" + {x.pad}" if x.pad else ""
        alloc = "t.staged" if x.layout == "swizzled" else "T.alloc_shared"
        return f"{self.name(x.name)} = {alloc}(({', '.join(dims)}{',' if len(dims) == 1 else ''}), {self.dtype(x.dtype)})"
