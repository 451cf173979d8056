"""orders: how the entries of tiles are assigned to threads of warp groups. `layouts` uses it.

- Where threads move tiles, their registers are in the order of a product's sum, and so are loops over such tiles ("sums"). So are
  all tiles in registers of a warp that runs iterations in turn with others ("warp_sums").
- Threads that have a tile of a chunk in that order store it by rows, 16 bytes each: the store has the order "rows".
"""
from __future__ import annotations

from ...devices import Device
from ...ir.core import Kernel, Op, Program, Stmt, map_ops, types
from ...ir.ops import ORDER
from ...ir.types import GROUP
from .by_rows import ROWS, held, stored_by_rows


def ordered(p: Program, k: Kernel, device: Device) -> tuple[Stmt, ...]:
    """The body with order "sums" on loops over tiles with as many rows as the warp groups of their agent hold, and "rows" on
    stores of such tiles from fragments."""
    sizes, type_of = {**p.sizes, **k.sizes}, types(k.body)
    spaces = {b.name: b.space for b in k.buffers}
    shared = {o.out for o in k.ops if spaces.get(o.buffer) == device.operand}
    moved = {o.args[0] for o in k.ops if o.kind in ("move", "transpose") and o.out in shared}
    rows = {a.name: a.threads // GROUP * ROWS for a in k.agents if a.turns == 1}
    cast = {o.out: o for o in k.ops if o.buffer and o.kind == "cast"}
    by_rows = {o for o in k.ops if stored_by_rows(p, o) and o.args[0] in cast and cast[o.args[0]].agent == o.agent
               and held(type_of[o.args[0]].shape(sizes), rows.get(o.agent, 0), o)}
    as_sums = {a for o in k.ops if o.kind in ("row_sum", "column_sum") or o in by_rows for a in o.args}
    # TileLang chooses the registers of a tile that is made of shared memory alone.
    as_sums |= {o.out for o in k.ops if o.out in moved and shared.issuperset(o.args)}

    turns = {a.name for a in k.agents if a.turns > 1}

    def each(o: Op) -> Op:
        """The op with its order."""
        if o in by_rows:
            return o.with_attrs(**{ORDER: "rows"})
        if o.agent in turns:
            held_by_warp = o.type is not None and o.type.rank == 2 and o.buffer and spaces[o.buffer] != device.operand
            return o.with_attrs(**{ORDER: "warp_sums"}) if held_by_warp else o
        t = type_of[o.args[0]] if o.kind == "store" else o.type if o.buffer else None
        if t is None or o.agent not in rows:
            return o
        tile = t.shape(sizes)
        columns = tile[1:] == (ROWS,) or t.dims[1:] == ("C",) or (o.out in as_sums and not tile[1] % ROWS)
        return o.with_attrs(**{ORDER: "sums"}) if columns and tile[0] == rows[o.agent] else o

    return map_ops(k.body, lambda o: [each(o)])
