"""walk_limits: checks that warp groups can run a walk, and that its rings fit shared memory. `rings` calls it.

A kernel that walks the chunks and does not fit is refused before any text is emitted. The error names the values, their shapes
or bytes, and what would fit.
"""
from __future__ import annotations

from ...devices import Groups
from ...ir.core import Kernel, Op, Program, loops, types, walk
from ...ir.ops import OPS
from ...ir.types import BYTES, GROUP, WARP
from ...schedule.schedule import ScheduleError
from ..uses import stored_under
from .ring_bytes import bytes_of, loaded, shared_bytes
from .summed import is_sum
from .turn_limits import check_op

#: Strides of tensors that are copied as tiles are multiples of this number of bytes.
ROW = 16
#: Columns of a product, and of tiles that are summed: a multiple of LEAST. Columns of a product: MOST at most.
LEAST, MOST = 64, 128
#: The same for tokens of a chunk in walks forward: 16 is the depth of a wgmma of 16 bits (PTX ISA). Walks back with fewer tokens
#: than 64 never ran on a GPU.
LEAST_TOKENS = 16


def moves(o: Op, device: Groups) -> bool:
    """Whether `o` moves its value from a fragment to shared memory."""
    return o.kind in ("move", "transpose") and o.attr("space") == device.operand


def check_limits(p: Program, k: Kernel, device: Groups) -> None:
    """Raise ScheduleError if agents of `k` cannot compute or copy a value, or if the rings need more shared memory than a block
    has.

    k: a kernel of `p` with buffers.
    """
    _Limits(p, k, device).check()
    _check_space(p, k, device)


def _error(p: Program, k: Kernel, device: Groups, text: str) -> ScheduleError:
    return ScheduleError(f"{p.name}, kernel {k.name} on {device.name}: {text}")


class _Limits:
    """The checks of one kernel."""
    def __init__(self, p: Program, k: Kernel, device: Groups) -> None:
        self.p, self.k, self.device = p, k, device
        self.sizes, self.type = {**p.sizes, **k.sizes}, types(k.body)
        self.buffers = {b.name: b for b in k.buffers}
        self.home = {o.out: self.buffers[o.buffer] for o in k.ops if o.buffer}
        (self.loop,) = loops(k.body)
        self.tokens = LEAST_TOKENS if self.loop.step > 0 else LEAST
        self.agents, self.under = {a.name: a for a in k.agents}, stored_under(k.body)
        self.sums, self.threads = any(map(is_sum, self.loop.ops)), {a.name: a.threads for a in k.agents}
        self.height = {a.name: a.threads // GROUP * device.rows for a in k.agents if a.threads >= GROUP}

    def error(self, text: str) -> ScheduleError:
        return _error(self.p, self.k, self.device, text)

    def check(self) -> None:
        """Check each op of the walk."""
        for o in walk(self.loop.body):
            if o.kind in ("load", "store"):
                self.copied(o)
            elif self.agents[o.agent].turns > 1:
                check_op(o, self.agents[o.agent], self.type, self.home, self.sizes, self.device.operand, self.error)
                if o.kind == "cumsum" and any(self.home[x].space != self.device.operand for x in self.under(o.args[0])):
                    raise self.error(f"{o.out} sums tiles in registers; warps that run iterations in turn sum columns of tiles "
                                     "in shared memory; let an earlier kernel compute it")
            elif OPS[o.kind].entry and not (o.args[0] in self.home and self.home[o.args[0]].space == self.device.operand):
                raise self.error(f"{o.out} is an entry of {o.args[0]}, which is not in shared memory; let an earlier "
                                 f"kernel compute {o.args[0]}")
            elif o.kind in ("move", "transpose") and self.type[o.out].rank == 2:
                self.carried_by_warps(o)
            elif o.kind == "matmul":
                self.product(o)
            elif o.kind == "cumsum" and self.threads[o.agent] != WARP:
                raise self.error(f"{o.agent} would compute running sums ({o.out}); accepted: an agent of one warp")
            elif o.kind in ("row_sum", "column_sum") and self.home[o.args[0]].space != self.device.operand:
                self.summed(o)

    def copied(self, o: Op) -> None:
        """Check a tile that a copy unit transfers between global and shared memory."""
        t = self.p.tensor(o.attr("tensor"))
        if o.kind == "load" and t.optional:
            raise self.error(f"{o.out} is loaded from an optional input, and {o.agent} copies tiles "
                             "unconditionally; let an earlier kernel load it")
        size = self.p.shape(t)[-1] * BYTES[t.dtype]
        if size % ROW and (o.kind == "load" or t.index == "token"):
            raise self.error(f"{t.name} has rows of {size} bytes; copies of tiles need multiples of {ROW}: K and V that are "
                             "multiples of 8")

    def carried_by_warps(self, o: Op) -> None:
        """Check a tile that threads move between shared memory and fragments."""
        d = self.device
        held = self.type[o.args[0] if moves(o, d) else o.out]  # in fragments
        shape = held.shape(self.sizes)
        columns = shape[1] // d.rows * d.rows if self.sums and moves(o, d) and o.kind == "move" else d.rows
        if o.kind == "transpose" and held.dims[1] == "C" and not shape[1] % self.tokens:  # they are rows in shared memory
            columns = min(shape[1], d.rows)
        if BYTES[held.dtype] != 2 or shape != (self.height.get(o.agent), columns):
            can = " or ".join(f"{n} rows with {a}" for a, n in self.height.items())
            own = any(r.kind == "matmul" and r.agent == o.agent and o.out in r.args for r in walk(self.loop.body))
            hint = "; form='split' with state_layout='vk' has fewer such moves" if own else ""
            raise self.error(f"{o.agent} would move {o.args[0]} between shared memory and registers as "
                             f"{' x '.join(map(str, shape))} in {held.dtype}; accepted: tiles of {d.rows} columns in 16 bits, of "
                             f"{can}{hint}")

    def summed(self, o: Op) -> None:
        """Check a tile in registers whose rows or columns are summed."""
        (rows, columns), accepted = self.type[o.args[0]].shape(self.sizes), self.height.get(o.agent)
        if rows != accepted or columns % LEAST:
            raise self.error(f"{o.agent} would sum {o.args[0]}, {rows} x {columns}; accepted: {accepted} x a multiple of 64")

    def product(self, o: Op) -> None:
        """Check the dtype of a product's operands, the space of its second operand, and its size."""
        a, rows = self.type[o.args[0]], self.height[o.agent]
        if BYTES[a.dtype] != 2:
            raise self.error(f"product {o.out} has operands in {a.dtype}; accepted: float16, bfloat16")
        if self.home[o.args[1]].space != self.device.operand:
            raise self.error(f"product {o.out} has a second operand, {o.args[1]}, that is not in shared memory")
        m, n = self.home[o.out].shape
        along = 0 if o.attr("ta") else 1
        depth, dims = a.shape(self.sizes)[along], (self.type[o.out].dims[1], a.dims[along])
        if m != rows:
            raise self.error(f"product {o.out} is {m} x {n} over {depth}; {o.agent} takes {rows} rows: C=64, K and V of 64 or "
                             "128")
        if n > MOST or any(x % (self.tokens if dim == "C" else LEAST) for x, dim in zip((n, depth), dims, strict=True)):
            chunks = "C=64" if self.tokens == LEAST else "C of 16, 32 or 64"
            raise self.error(f"product {o.out} is {m} x {n} over {depth}; {o.agent} takes columns and a depth that are multiples "
                             f"of 64, or of {self.tokens} tokens, and at most {MOST} columns: {chunks}, K and V of 64 or 128")


def _check_space(p: Program, k: Kernel, device: Groups) -> None:
    """Raise ScheduleError if the rings need more than the device's space. The error names the values, their bytes and what
    would fit."""
    limit, need = device.spaces[device.operand], shared_bytes(k, device)
    if need <= limit:
        return
    rings = sorted((b for b in k.buffers if b.space == device.operand), key=bytes_of, reverse=True)
    stages = max(b.slots for b in rings if b.name in loaded(k))
    least = max(a.turns for a in k.agents)
    fits = next((n for n in range(stages - 1, least - 1, -1) if shared_bytes(k, device, n) <= limit), 0)
    hint = f"stages={fits} fits" if fits else (f"stages={least} needs {shared_bytes(k, device, least)}; let an earlier kernel "
                                               "compute some of them")
    raise _error(p, k, device, f"{device.operand} has {limit} bytes, {need} are needed: "
                               f"{', '.join(f'{b.name} {bytes_of(b)}' for b in rings)}; {hint}")
