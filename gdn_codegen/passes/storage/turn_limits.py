"""turn_limits: checks that warps which run iterations in turn can compute an op. For walks on Hopper's warp groups.

Such a warp has the tiles of a chunk in registers, in the order of a sum of mma.m16n8k16 (PTX ISA): 16 rows. In that order a tile
of 16 bits is a first operand and, with its rows as columns, a second operand. So products of such tiles read registers only.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from ...ir.core import Agent, Op
from ...ir.types import BYTES, WARP, Buffer, Tile

#: The rows of a tile that a warp holds, and of which columns and depths of its products are multiples.
ROWS = 16
#: Ops besides elementwise ones that these warps have rules for.
OF_TURNS = ("cumsum", "diagonal", "valid")


def check_op(o: Op, agent: Agent, type_of: Mapping[str, Tile], home: Mapping[str, Buffer], sizes: Mapping[str, int],
             operand: str, error: Callable[[str], Exception]) -> None:
    """Raise the `error` for a text if warps of `agent` cannot compute `o`.

    home: value -> its buffer. operand: the space from which matrix units read.
    """
    t = type_of[o.args[0]] if o.args else None
    if o.kind == "matmul":
        a, b = (type_of[x] for x in o.args[:2])
        there = [x for x in o.args[:2] if home[x].space == operand]
        shapes = [x.shape(dict(sizes)) for x in (a, b)]
        fits = BYTES[a.dtype] == 2 and all(rows == ROWS and depth % ROWS == 0 for rows, depth in shapes)
        if not fits or there or o.attr("ta") or not o.attr("tb"):
            got = " and ".join("x".join(map(str, s)) for s in shapes)
            raise error(f"product {o.out} of {got} in {a.dtype}; a warp of {agent.name} takes the product of a tile of {ROWS} "
                        f"rows in 16 bits with the transpose of another, both in registers: C={ROWS}, and log decays with a "
                        f"bound, so that one product serves all pairs of {ROWS} tokens")
    elif o.kind == "diag_inverse" and (home[o.out].shape != (ROWS, o.attr("size")) or o.attr("strict") or o.args[1:]):
        raise error(f"{o.out} is the inverse of several blocks, scaled or without its diagonal; a warp of {agent.name} takes "
                    f"one block of {ROWS} rows: C={ROWS}")
    elif o.kind == "transpose":
        raise error(f"{o.out} is a transpose, for which warps of {agent.name} have no rule; let an earlier kernel compute it")
    elif o.kind in ("move", "cumsum", "diagonal") and t is not None and t.rank == 2:
        rows, columns = t.shape(dict(sizes))
        if rows != ROWS or columns % (2 * WARP if o.kind == "cumsum" else ROWS):
            raise error(f"{o.out} is a {o.kind} of {rows}x{columns}; a warp of {agent.name} takes {ROWS} rows, and running sums "
                        f"of a multiple of {2 * WARP} columns: C={ROWS}, K of 64 or 128")
