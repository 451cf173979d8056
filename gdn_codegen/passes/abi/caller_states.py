"""caller_states: reads and writes states as the contract says that they lie in memory. All targets run it.

- state "vk": initial and final states are transposed in memory.
- pool: states are in slots. `state_indices` gives the slot of each sequence, and `final_indices` that of a final state in other
  memory. A sequence with a negative slot is skipped.
- in_place: the final state overwrites the initial one.
- checkpoints, positions: each iteration of the walk stores the state to a tensor of index "checkpoint". For positions
  `checkpoint_rows` gives the row for each chunk.
- by token (rows, slots, accepted, parents, frozen): `states_by_token` goes on.

`precision` sets the dtype of that memory later.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Op, Program, map_ops
from ...ir.types import Tensor
from ...schedule.contract import Contract
from ..stage import takes
from .states_by_token import states_by_token

INDICES, FINAL_INDICES, CHECKPOINTS = "state_indices", "final_indices", "state_checkpoints"
ROWS = "checkpoint_rows"


@takes("traced")
def caller_states(p: Program, contract: Contract) -> Program:
    """`p` with states as the contract has them. `p` itself if the contract says nothing of states."""
    vk, pool, in_place = contract.state_layout == "vk", contract.pool, contract.in_place
    kept = contract.checkpoints or contract.positions
    if not (vk or pool or in_place or kept or contract.by_token):
        return p
    (k,) = p.kernels
    loop = p.walk
    ends = {o.args[0]: o.attr("tensor") for o in k.body if isinstance(o, Op) and o.kind == "store"}
    starts = {o.out: o.attr("tensor") for o in k.body if isinstance(o, Op) and o.kind == "load"}
    under = {ends[c.result]: starts[c.init] for c in loop.carried}  # final -> initial

    def lies(t: Tensor) -> Tensor:
        """The tensor of a state with its dims, its slots and the tensor that it overwrites."""
        if t.index != "sequence":
            return t
        final = t.name in under
        at = (INDICES if in_place or not final else FINAL_INDICES) if pool else ""
        return replace(t, dims=t.dims[::-1] if vk else t.dims, at=at, over=under[t.name] if final and in_place else "",
                       optional=t.optional and not in_place and (final or not pool))

    tensors = [lies(t) for t in p.tensors]
    transposed = {t.name for t in tensors if vk and t.index == "sequence" and len(t.dims) == 2}
    if kept:
        at = ROWS if contract.positions else ""
        rows = [(c, CHECKPOINTS if len(loop.carried) == 1 else f"{c.name}_checkpoints") for c in loop.carried]
        tensors += [Tensor(name, "output", "checkpoint", "HV", c.type.dims[::-1] if vk else c.type.dims, at=at)
                    for c, name in rows]
        transposed |= {name for c, name in rows if vk and c.type.rank == 2}
        loop = replace(loop, body=(*loop.body, *(Op("store", "", (c.next,), (("tensor", name),)) for c, name in rows)))
    if pool:
        names = (INDICES,) if in_place or contract.frozen else (INDICES, FINAL_INDICES)
        tensors += [Tensor(n, "input", "number", "HV", (), "int32") for n in names]
    if contract.positions:
        tensors.append(Tensor(ROWS, "input", "numbers", "HV", (), "int32"))

    def moved(o: Op) -> list[Op]:
        return [o.with_attrs(transposed=True) if o.attr("tensor") in transposed else o]

    done = replace(p, tensors=tuple(tensors)).with_walk(loop)
    done = done.map_kernels(lambda k: replace(k, body=map_ops(k.body, moved)))
    return states_by_token(done, contract, INDICES, starts) if contract.by_token else done
