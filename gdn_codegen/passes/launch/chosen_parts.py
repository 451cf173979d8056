"""chosen_parts: lets the device choose how many chunks a part has. For Hopper's warp groups under TileLang (sm_90a).

Lengths of packed sequences are on the device, so the host launches kernels over parts as if one sequence had all tokens, with
the shortest parts that pay then. If no sequence is that long, longer parts are better, or whole sequences. The first kernel has
one block more, which knows all lengths from `cu_seqlens`. It finds the best number of chunks by the host's model of cost, and
stores which chunks each part has (op `choose_parts`), those of the longest sequence first. Kernels over parts read that
(`Kernel.places`). There are never more parts than the host launches instances for; of kernels for summaries and bounds, never
more parts of split sequences, which come first (host/parts.py `_split_parts`). Instances past the last part end at once. So do
all instances of a kernel that has nothing to do if each sequence is one part (op `return_unless_split`): those of summaries,
and those that bound what is forgotten before a part. A part of any length gives a right result, so the cost decides about time
alone.

The host's parts stay where the first kernel is not over chunks, since another kernel would have to choose, and with
partition="short", whose parts cost something else. They stay in walks back, too: the device's choice was not run with them on a
GPU.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...devices.part_cost import of_chunks
from ...ir.body import Body
from ...ir.core import Kernel, Loop, Op, Program
from ...ir.types import Tensor
from ..common import with_tensors
from ..stage import takes


@takes("placed")
def chosen_parts(p: Program, device: Groups) -> Program:
    """`p` whose first kernel chooses the chunks of a part, for kernels over parts that may start with a warm-up. Costs are in
    64ths of the time of a chunk."""
    first, *others = p.kernels
    forward = all(k.step > 0 for k in p.kernels)
    lengths = [o for k in p.kernels for o in k.ops if o.kind == "warm_up_length" and o.attr("tensor")]
    short = any(o.attr("longest") for o in lengths)
    if device.part_cost is None or not (forward and lengths) or short or first.grid != "chunks":
        return p
    c = of_chunks(device.part_cost, p.sizes["C"])
    costs = c.warm_up_chunks, c.longest_warm_up_chunks, c.split_us / c.chunk_us, c.crowded, c.start_chunks
    places = Tensor(Body({t.name: t for t in p.tensors}).fresh("part_places"), "workspace", "places", "HV", (), "int32")
    choose = Op("choose_parts", "", (), (("costs", tuple(round(64 * x) for x in costs)), ("tensor", places.name)),
                agent=first.ops[0].agent)
    kernels = (replace(first, body=(choose, *first.body)), *(_placed(k, places.name) for k in others))
    return replace(with_tensors(p, places), kernels=kernels)


def _placed(k: Kernel, places: str) -> Kernel:
    """`k` with the parts that the tensor `places` names, if it is over parts. A kernel for summaries, or with a loop over what
    comes before a part, has nothing to do if each sequence is one part."""
    if k.grid != "parts":
        return k
    idle = any(s.index == "before" if isinstance(s, Loop) else s.kind == "return_unless_negative" for s in k.body)
    end = Op("return_unless_split", "", (), agent=k.ops[0].agent)
    return replace(k, places=places, body=(*([end] if idle else []), *k.body))
