"""stacked_inverse: an inverse whose tiles stay with the cores that multiply. `decompose` calls it for devices with cores.

Blocks of `ROWS` rows on the diagonal lie one below the other in a stack [C, ROWS]. Masks and the first step, which need
elementwise ops, work on this stack. Its products multiply block by block (`stacked`). Then pairs of blocks are merged, two
products a size: T0 and T1 become T0, 0, -T1 A10 T0, T1. A10 is read from the whole A. So only A and stacks of its parts cross
between cores.

All values are N = -T, so that no sign needs an elementwise op: a step T - T A T is N + N A N. The last product is with -I. It
also brings the tile to where it can be stored.

Every entry is rounded where it becomes an operand, as in the inverse of the whole tile. Products with blocks that are zero are
left out.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from ...devices import Device
from ...ir.core import Op
from ...ir.types import BYTES, Tensor
from ...schedule.schedule import Schedule

if TYPE_CHECKING:
    from .decompose import Inverse

ROWS = 16


def stacked(size: int, s: Schedule, dtype: str, device: Device) -> bool:
    """Whether a tile of `size` rows is inverted so. A float32 product could not stay with its core."""
    return device.inverts_blocks and s.inverse_block == ROWS < size and BYTES[dtype] == 2


def stacks(x: Inverse, size: int) -> str:
    """Append the ops that invert I + A for a tile of `size` rows, a power of two above `ROWS`. Returns the inverse's name."""
    def places(step: int, row: int, col: int) -> tuple[tuple[int, int], ...]:
        return tuple((i + row, i + col) for i in range(0, size, step))

    a = _operand(x)
    diagonal = x.op("diagonal_stack", a, size=ROWS)
    t, done = x.op("sub", x.op("pairs", diagonal, size=1), x.op("eye", dims=(x.dims[0], ROWS)), name="rows_2"), 2
    while done < ROWS:
        below = x.product(x.op("pairs", diagonal, size=done), t, name=f"below_{2 * done}", stacked=True)
        t = x.product(t, below, plus=t, name=f"rows_{2 * done}", stacked=True)
        done *= 2
    tile = x.op("full", dims=x.dims, value=0.0, dtype=x.operand, name="zeros")
    tile = x.op("insert", tile, t, at=places(ROWS, 0, 0), name=f"blocks_{done}")
    while done < size:
        together = done == ROWS and size > 2 * ROWS  # blocks of this size can be multiplied as a stack
        pairs = [places(2 * done, 0, 0)] if together else [(at,) for at in places(2 * done, 0, 0)]
        made = []
        for at in pairs:
            def blocks(of: str, row: int, col: int, at: tuple[tuple[int, int], ...] = at) -> str:
                where = tuple((i + row * done, j + col * done) for i, j in at)
                return x.op("blocks", of, at=where, size=done)
            below = x.product(blocks(a, 1, 0), blocks(tile, 0, 0), name=f"below_{2 * done}", stacked=together)
            made.append((x.product(blocks(tile, 1, 1), below, name=f"corner_{2 * done}", stacked=together),
                         tuple((i + done, j) for i, j in at)))
        for corner, where in made:
            tile = x.op("insert", tile, corner, at=where, name=f"blocks_{2 * done}")
        done *= 2
    return x.named(x.op("matmul", tile, _minus_identity(x)))


def _operand(x: Inverse) -> str:
    """A as an operand of products. If it was widened from their dtype, what it was before."""
    made = next((o for o in x.b.stmts if isinstance(o, Op) and o.out == x.a), None)
    if made is not None and made.kind == "cast" and x.b.types[made.args[0]].dtype == x.operand:
        return made.args[0]
    return x.cast(x.a)


def _minus_identity(x: Inverse) -> str:
    """Load -I."""
    name = f"minus_identity_{x.operand}"
    x.made[name] = x.b.tensors[name] = Tensor(name, "workspace", "const", "HV", x.dims, x.operand, fill="eye -1.0 0.0")
    return x.b.op("load", name=x.b.fresh("minus_identity"), tensor=name, line=x.o.line)
