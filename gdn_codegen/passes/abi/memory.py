"""memory: how callers' tensors lie.

Tiles have extents that the device's products and copies take; where memory has less, the program says so (`extents`): a load
gives zeros beyond, a store drops what is there, and workspaces hold the padding. Where callers pass views, tensors of tokens
are addressed by strides that come at run time. Rows of outputs that no sequence covers are cleared by kernels, where the device
has them do it.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores, Device
from ...ir.core import Program
from ...ir.types import Tensor
from ...schedule.contract import Contract
from ...schedule.schedule import ScheduleError
from ..stage import takes
from ..storage.offsets import WIDTH


@takes("traced")
def memory(p: Program, sizes: dict[str, int], device: Device, contract: Contract) -> Program:
    """`p` with the extents of its tiles, and of what callers pass where that is less. sizes: C, K and V as callers know them."""
    tiles = {d: n if d == "C" else tile_extent(n, device) for d, n in sizes.items()}
    if contract.state == "vk" and isinstance(device, Cores):  # each core transposes its columns
        cores = max(device.copies.values())
        tiles["K"] = tile_extent(sizes["K"], device, cores * device.align // WIDTH[contract.state_dtype])
        if sizes["K"] <= (least := tiles["K"] // cores):
            raise ScheduleError(f"head_dim_k: got {sizes['K']}; accepted with states [V, K] of {contract.state_dtype} on "
                                f"{device.name}: more than {least}, as each of {cores} cores needs columns to transpose")

    def lies(t: Tensor) -> Tensor:
        tokens = t.index == "token" and t.role != "workspace"
        return replace(t, strided=contract.strided and tokens, cleared=device.clears and tokens and t.role == "output")
    return replace(p, dims=tuple(tiles.items()), extents=tuple((d, n) for d, n in sizes.items() if n != tiles[d]),
                   tensors=tuple(map(lies, p.tensors)))


def tile_extent(n: int, device: Device, unit: int = 1) -> int:
    """The least extent of a tile that holds `n` and that `device` takes, a multiple of `unit`."""
    return next((x for x in device.extents if x >= n and x % unit == 0), n)
