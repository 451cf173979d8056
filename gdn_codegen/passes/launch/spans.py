"""spans: lets the device choose how many chunks a part has. For Hopper's warp groups under TileLang (sm_90a).

Lengths of packed sequences are on the device, so the host launches kernels over parts as if one sequence had all tokens, with the
shortest parts that pay then. If no sequence is that long, longer parts are better, or whole sequences. Each instance knows all
lengths from `cu_seqlens`, and finds the same number of chunks by the same model of cost. There are never more parts than the
host launches instances for, and instances without a part return at once. A part of any length gives a right result, so the cost
decides about time alone. Walks back keep the host's parts: the device's choice was not run with them on a GPU.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...devices.part_cost import of_chunks, of_short
from ...ir.core import Program
from ..stage import takes


@takes("placed")
def spans(p: Program, device: Groups) -> Program:
    """`p` with the costs of parts in its kernels over parts that may start with a warm-up, in 64ths of the time of a chunk."""
    forward = all(k.step > 0 for k in p.kernels)
    warms_up = any(o.kind == "warm_up_length" and o.attr("tensor") for k in p.kernels for o in k.ops)
    if device.part_cost is None or not (forward and warms_up):
        return p
    short = any(o.attr("longest") for k in p.kernels for o in k.ops)
    c = (of_short if short else of_chunks)(device.part_cost, p.sizes["C"])
    costs = c.warm_up_chunks, c.longest_warm_up_chunks, c.split_us / c.chunk_us, c.crowded, c.start_chunks
    spans = tuple(round(64 * x) for x in costs)
    return p.map_kernels(lambda k: replace(k, spans=spans) if k.grid == "parts" else k)
