"""core_values: how one core of an agent holds a value: its space and its shape. `pack` uses it.

A core holds its part of a tile's rows, or of its columns. A vector is whole on each core, except sums along rows, of which each
core has a part. A vector of one number per token that was just loaded, or is to be stored, has one number in each row of
`Cores.align` bytes.
"""
from __future__ import annotations

from ...devices import Cores
from ...ir.core import Kernel, Op, Program, types
from ...ir.ops import OPS
from ...ir.types import BYTES
from ...schedule.schedule import ScheduleError

#: Ops whose value overwrites their first operand.
IN_PLACE = ("valid", "insert", "add_rows")


def is_view(o: Op) -> bool:
    """Whether cores need no storage for the value of `o`: a number, or a part of its operand."""
    return "cores" in OPS[o.kind].view


def pipe(device: Cores, o: Op) -> tuple[str, str]:
    """The agent and the pipe that run `o`."""
    table = device.pipes[o.agent]
    return o.agent, device.issuer if OPS[o.kind].entry else table.get(o.kind, table.get("*", ""))


def by_columns(k: Kernel) -> set[str]:
    """The tiles of which each core of an agent holds its own columns, not rows."""
    out: set[str] = set()
    for o in k.ops:
        if (o.attrs and (o.attr("columns") or (o.kind == "load" and o.attr("heads")))) \
                or ((o.kind in ("valid", "move", "add_rows") or OPS[o.kind].elementwise) and o.args and o.args[0] in out):
            out.add(o.out)
    return out


class CoreValues:
    """The values of a kernel on one core. `hold` is called for each op with a result, in program order.

    spread: vectors with one number in each row of `Cores.align` bytes. divided: vectors of which each core has a part.
    """

    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        """No value is held yet."""
        self.where = f"{p.name}, kernel {k.name} on {device.name}"
        self.device, self.sizes, self.type = device, {**p.sizes, **k.sizes}, types(k.body)
        ops = k.ops
        self.defs = {o.out: o for o in ops if o.out}
        self.spread: set[str] = set()
        self.divided: set[str] = set()
        self._token = {t.name for t in p.tensors if t.index == "token"}
        self.columns = by_columns(k)
        read = {a for o in ops if o.kind != "store" for a in o.args}
        stores = [o for o in ops if o.kind == "store"]
        self._only_stored = {o.args[0] for o in stores} - read

    def error(self, text: str) -> ScheduleError:
        """An error that names the kernel."""
        return ScheduleError(f"{self.where}: {text}")

    def view(self, o: Op) -> bool:
        """Whether `o` has no storage: a number, a column or row of a vector, or a cast of a product that only stores read."""
        if o.kind == "cast":
            return o.agent != self.device.agents[0] and o.out in self._only_stored
        return is_view(o) or self.type[o.out].rank == 0

    def source(self, name: str) -> str:
        """The value under a column, a row or a segment."""
        o = self.defs.get(name)
        return self.source(o.args[0]) if o is not None and o.kind in ("col", "row", "segment") else name

    def hold(self, o: Op) -> None:
        """Note whether the value of `o` is spread or divided. Raises ScheduleError if it needs entries that not
        every core has."""
        divided = [a for a in o.args if self.source(a) in self.divided] if self.divided else []
        if self.type[o.out].rank == 1:
            if o.attr("tensor") in self._token if o.kind == "load" else o.kind == "valid" and o.args[0] in self.spread \
                    or bool(o.attr("spread")):
                self.spread.add(o.out)
            if isinstance(self.type[o.out].dims[0], str) and (o.kind == "row_sum" or divided):
                self.divided.add(o.out)
        if OPS[o.kind].entry and (divided or self.type[o.args[0]].rank != 1):
            raise self.error(f"{o.out} is an entry of {o.args[0]}, of which each core has some rows; accepted: an entry of a "
                             "vector that each core has as a whole, such as one that an earlier kernel computes")
        if o.kind == "expand" and any(self.type[a].dims[0] == 1 for a in divided):
            raise self.error(f"{o.out} needs all entries of {o.args[0]}, and each core has only those of its rows; let an "
                             f"earlier kernel compute {o.args[0]}")

    def space(self, o: Op) -> str:
        """The space that `o` fills."""
        if o.kind == "move":
            return str(o.attr("space"))
        return self.device.product if o.kind == "matmul" else self.device.home[o.agent]

    def shape(self, o: Op) -> tuple[int, ...]:
        """The shape of a value on one core, in elements.

        Raises ScheduleError if rows do not divide among cores, or are not a multiple of `Cores.align` bytes.
        """
        t = self.type[o.out]
        shape, parts = t.shape(self.sizes), self.device.copies[o.agent]
        if o.kind == "move" and o.attr("transposed"):
            shape = shape[::-1]
        if t.rank == 2 and parts > 1 and isinstance(t.dims[0], str):  # a dim that is a number is whole on each core
            if shape[0] % (8 * parts):
                raise self.error(f"{o.out} has {shape[0]} rows; accepted: multiples of {8 * parts}, "
                                 f"for {parts} cores with groups of 8 rows")
            shape = (shape[0] // parts, shape[1]) if o.out not in self.columns else (shape[0], shape[1] // parts)
        if o.kind == "transpose" and o.args[0] in self.columns and isinstance(t.dims[0], int):  # this core's columns are its rows
            shape = (shape[0] // parts, shape[1])
        if t.rank == 1:
            if o.out in self.divided:
                shape = (shape[0] // parts,)
            if o.out in self.spread:
                shape = (*shape, self.device.align // BYTES[t.dtype])
        if shape[-1] * BYTES[t.dtype] % self.device.align:
            raise self.error(f"{o.out} has rows of {shape[-1] * BYTES[t.dtype]} bytes; accepted: multiples of "
                             f"{self.device.align}")
        return shape
