"""memory: records the extents and strides of callers' tensors. It runs before all other passes.

A tile has the next extent that the device's products and copies accept. Where memory has less, the program says so in
`extents`. A load gives zeros beyond that extent, and a store drops those entries. Workspaces hold the padding. If callers pass
views, tensors of tokens have strides that come at run time. If the device clears outputs, kernels write zeros to rows that no
sequence covers.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores, Device
from ...ir.core import Program
from ...ir.types import BYTES, Tensor
from ...schedule.contract import Contract
from ...schedule.schedule import ScheduleError
from ..stage import takes


@takes("traced")
def memory(p: Program, sizes: dict[str, int], device: Device, contract: Contract) -> Program:
    """`p` with the extents of its tiles, and with those of callers' tensors where they are less.

    sizes: C, K and V as callers know them. Raises ScheduleError if K is too small for the cores that transpose states [V, K].
    """
    tiles = {d: n if d == "C" else tile_extent(n, device) for d, n in sizes.items()}
    if contract.state_layout == "vk" and isinstance(device, Cores):  # each core transposes a share of the columns
        cores = max(device.copies.values())
        tiles["K"] = tile_extent(sizes["K"], device, cores * device.align // BYTES[contract.state_dtype])
        if sizes["K"] <= (least := tiles["K"] // cores):
            raise ScheduleError(f"head_dim_k: got {sizes['K']}; accepted with states [V, K] of {contract.state_dtype} on "
                                f"{device.name}: more than {least}, as each of {cores} cores needs columns to transpose")

    def lies(t: Tensor) -> Tensor:
        """The tensor, with whether it is strided and whether kernels clear it."""
        tokens = t.index == "token" and t.role != "workspace"
        return replace(t, strided=contract.strided and tokens, cleared=device.clears and tokens and t.role == "output")
    return replace(p, dims=tuple(tiles.items()), extents=tuple((d, n) for d, n in sizes.items() if n != tiles[d]),
                   tensors=tuple(map(lies, p.tensors)))


def tile_extent(n: int, device: Device, unit: int = 1) -> int:
    """The smallest extent that `device` accepts, is at least `n` and is a multiple of `unit`. `n` itself if there is none."""
    return next((x for x in device.extents if x >= n and x % unit == 0), n)
