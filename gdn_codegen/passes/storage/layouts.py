"""layouts: fixes layouts of buffers where TileLang's compiler may not choose them, or finds none. For TileLang.

- The code that inverts a whole tile, and the code that moves tiles between registers and shared memory, address shared tiles
  directly: rows of 128 bytes, swizzled. Such a buffer has the layout "swizzled".
- So is a tile of running sums that warps compute in turn, whose rows would begin in one bank.
- Ops of warp groups have orders of entries (`orders`).
- A cast of a tile to another buffer is a copy (order "copy"), unless its order is "sums".
- A fragment of which a warp holds whole columns has the layout "columns" (`summed_columns`).
- Another fragment has the layout "rows" if its rows or columns are summed and the length of rows is no power of two: TileLang
  infers none for it, unless it lies as a product does (`of_products`).
- Some tiles of a kernel over chunks have unused elements after each row (`padded_tiles`). In rings, vectors have `slot_pad`.
- In a block that runs several heads, all values are in shared memory, one row per head. PAD unused elements after rows keep the
  heads of a token in different banks, and align rows to four elements, which are moved at once.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device
from ...ir.core import Buffer, Kernel, Op, Program, Stmt, loops, map_ops, walk
from ...ir.ops import OF_ROWS, OPS, ORDER
from ...ir.types import BYTES, Dim
from ...schedule.schedule import ScheduleError
from ..stage import takes
from .by_rows import ROWS
from .orders import ordered
from .padded_tiles import TILE_PAD, padded_tiles
from .ring_bytes import slot_pad
from .stored_values import DECAYED, over
from .summed_columns import by_columns, of_products

#: Elements after each row of a buffer with a row per head.
PAD = 4


@takes("placed")
def layouts(p: Program, device: Device) -> Program:
    """`p` with layouts on buffers, and orders on the ops that fill or store tiles."""
    return p.map_kernels(lambda k: _heads(k, device) if k.batch.way == "threads" else _kernel(p, k, device))


def _heads(k: Kernel, device: Device) -> Kernel:
    """A kernel that runs several heads a block: all buffers are in shared memory, with padding."""
    return replace(k, buffers=tuple(replace(b, space=device.vector, pad=PAD if b.shape else 0) for b in k.buffers))


def _kernel(p: Program, k: Kernel, device: Device) -> Kernel:
    """The kernel with layouts of buffers that emitted code addresses, that agents exchange, or whose rows are summed."""
    if any(o.attr("one_token") for o in k.ops):
        return _of_tokens(k, device)
    home = {o.out: o.buffer for o in k.ops}
    fixed = {b for o in k.ops if over(o, device) for b in (o.buffer, home[o.args[0]])}
    shape, padded = {b.name: b.shape for b in k.buffers}, padded_tiles(k, device)
    fixed |= {home[a] for o in k.ops if o.kind in DECAYED for a in o.args[:2] if home[a] not in padded
              and not shape[home[a]][1] % ROWS}
    crossing = _crossing(k, home, device) if k.agents else set()
    of_turns = _of_turns(k, device)
    summed = {home.get(o.args[0], "") for o in k.ops if o.kind in (*OF_ROWS, "column_sum")} - of_products(k, device)
    columns = by_columns(k, device)

    def layout(name: str, space: str) -> str:
        if name in fixed | crossing | of_turns:
            return "swizzled"
        if name in columns:
            return "columns"
        return "rows" if name in summed and space == device.tile and shape[name][1] & (shape[name][1] - 1) else ""

    pad = {b.name: slot_pad(b) for b in k.buffers if k.agents} | dict.fromkeys(padded, TILE_PAD)
    buffers = tuple(replace(b, layout=layout(b.name, b.space), pad=pad.get(b.name, 0)) for b in k.buffers)
    return replace(k, buffers=buffers, body=_copied(ordered(p, k, device) if crossing else k.body))


def _of_turns(k: Kernel, device: Device) -> set[str]:
    """The tiles of running sums in shared memory that warps compute in turn. Their rows would begin in one bank."""
    turns = {a.name for a in k.agents if a.turns > 1}
    shared = {b.name for b in k.buffers if b.space == device.operand and len(b.shape) == 2}
    return {o.buffer for o in k.ops if o.kind == "cumsum" and o.agent in turns} & shared


def _of_tokens(k: Kernel, device: Device) -> Kernel:
    """A kernel over single tokens: threads share rows of the state, and hold the entries of vectors that meet these rows.

    ScheduleError for tiles of several shapes, for which TileLang's compiler finds no layout.
    """
    tokens = {o.attr("tokens") for o in k.ops if o.attr("tokens")}
    groups = {b.name for b in k.buffers if b.dims and b.dims[0] in tokens}
    shapes = list(dict.fromkeys(b.dims for b in k.buffers if len(b.dims) == 2 and b.name not in groups))
    entries = [o.out for o in k.ops if OPS[o.kind].entry]
    if len(shapes) > 1 or any(len(set(dims)) < 2 or 1 in dims for dims in shapes) or entries or (groups and not shapes):
        what = f"an entry of a vector ({entries[0]})" if entries else f"tiles of {' and '.join(map(str, shapes)) or 'no state'}"
        raise ScheduleError(f"kernel {k.name}: a chunk of one token with {what}; accepted for TileLang: tiles of one shape, "
                            "whose dims differ. Triton takes others, and chunks of 16 tokens do")
    lies: tuple[Dim, ...] = shapes[0] if shapes else ()
    along: dict[tuple[Dim, ...], str] = {lies[:1]: "along_rows", lies[1:]: "along_columns"}

    def layout(b: Buffer) -> str:
        if b.name in groups:
            shared = "token_rows" if len(b.dims) == 2 and BYTES[b.dtype] == 4 and b.dims[1] == lies[1] else ""
            return shared if b.space == device.vector else ("state_rows", "along_rows")[len(b.dims) == 1]
        if len(b.dims) == 2:
            return "state_rows" if b.dims == lies else ""
        return along.get(b.dims, "")

    return replace(k, buffers=tuple(replace(b, layout=layout(b)) for b in k.buffers), body=_copied(k.body))


def _crossing(k: Kernel, home: dict[str, str], device: Device) -> set[str]:
    """The tiles in shared memory that threads copy to or from fragments."""
    tiles = {b.name for b in k.buffers if b.space == device.operand and len(b.shape) == 2 and not b.shape[1] % ROWS}
    return {b for o in k.ops if o.kind in ("move", "transpose") for b in (o.buffer, home.get(o.args[0])) if b in tiles}


def _copied(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The body with order "copy" on casts of tiles from buffer to buffer. Carried values have buffers, too."""
    stored = {o.out for o in walk(body) if o.buffer} | {x for lp in loops(body) for c in lp.carried for x in (c.name, c.result)}

    def copies(o: Op) -> bool:
        return o.kind == "cast" and bool(o.buffer) and o.args[0] in stored and o.type is not None and o.type.rank == 2

    return map_ops(body, lambda o: [o.with_attrs(**{ORDER: o.attr(ORDER, "copy")}) if copies(o) else o])
