"""padded_tiles: which tiles in shared memory get TILE_PAD unused elements after each row, so that rows begin in different banks.

In a kernel over chunks these are tiles in float32 of which ops read a row and the middle one of some rows, and loaded tiles of 16
bits beside them; none that TileLang's compiler addresses as a whole. `layouts` pads the buffers. What counts bytes before that
asks for `with_pads`.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device
from ...ir.core import Kernel
from ...ir.ops import BESIDE, OPS
from ...ir.types import BYTES
from .stored_values import DECAYED

#: Elements after each row of a tile in shared memory whose rows are a multiple of all banks. Eight rows, of which each thread of
#: a warp reads two entries in the order of a product's sum, then lie in different banks.
TILE_PAD = 8
#: The entries of 32 bits that all banks of shared memory hold.
BANKS = 32


def with_pads(k: Kernel, device: Device) -> Kernel:
    """The placed kernel, whose buffers say how many unused elements their rows will have."""
    wide = padded_tiles(k, device)
    return replace(k, buffers=tuple(replace(b, pad=TILE_PAD) if b.name in wide else b for b in k.buffers))


def padded_tiles(k: Kernel, device: Device) -> set[str]:
    """The names of the buffers that get them. First operands that one call reads lie alike."""
    if k.agents or k.grid != "chunks":
        return set()
    home = {o.out: o.buffer for o in k.ops}
    middles = {home.get(o.args[0], "") for o in k.ops if o.kind in ("to_middle", "from_middle")}
    middles |= {home[a] for o in k.ops if o.kind in DECAYED for a in o.args[2:]}
    others = ("cumsum", "last", "store", "decayed_pairs")
    whole = {home.get(a, "") for o in k.ops for a in (o.args[:1] if o.kind == "decayed_blocks" else o.args)
             if o.kind not in others and not (OPS[o.kind].elementwise or OPS[o.kind].view)}
    beside = {home[o.args[0]] for o in k.ops if o.kind == "decayed_pairs" and o.attr(BESIDE)}
    whole |= beside if beside & whole else set()
    loaded = {o.buffer for o in k.ops if o.kind == "load"} if middles else set()
    return {b.name for b in k.buffers if b.space == device.vector and len(b.shape) == 2 and not
            b.shape[1] * BYTES[b.dtype] % (4 * BANKS) and b.name in (middles if b.dtype == "float32" else loaded) - whole}
