"""persistent: lets a block take one walk after another. For Hopper's warp groups under TileLang (sm_90a).

Before it an instance of a kernel has a block of its own. If sequences are short, a block spends most of its time on its first
loads and on its final state. The pass puts the body of each kernel with several agents into a loop over items, which are the
instances. The GPU then starts only as many blocks as run at a time. The agent that loads claims the next item from a counter in
global memory, after its last load of the current item. So a block that is done early takes more items. The number goes to all
agents through a ring in shared memory, and each agent goes on with it by itself: one already loads for the next item while
another still stores the state of the current one. `mbarriers` derives the ring's barriers.

The ring has one slot more than rings of loads. So it does not limit how far the loads run ahead, even if items have one chunk
each. The first kernel of the program clears the counter.

Example:
    before:  S0 = load initial_state; loop over chunks; store S1
    after:   loop over items:
                 S0 = load initial_state; loop over chunks; store S1
                 claimed = claim_item       by the agent that loads
                 next_item claimed          by each agent
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...ir.body import Body
from ...ir.core import Buffer, Kernel, Loop, Op, Program, types
from ...ir.types import Tensor, Tile
from ...schedule.schedule import Schedule, ScheduleError
from ..common import with_tensors
from ..stage import takes


@takes("placed")
def persistent(p: Program, s: Schedule, device: Groups) -> Program:
    """`p` with a loop over items in the kernels with several agents, if the schedule asks for it. ScheduleError if the first
    kernel is such a kernel, because nothing could clear its counter, and for agents that run iterations in turn: no fence comes
    between the zeros of a ragged tail and the next item's copy there, as no matrix unit reads that tile."""
    walks = [k for k in p.kernels if k.agents and s.persistent]
    if not walks:
        return p
    if p.kernels[0] in walks:
        raise ScheduleError(f"{p.name}, kernel {walks[0].name} on {device.name}: persistent=True; accepted only after another "
                            "kernel, which clears the counter of its items; let an earlier kernel compute some of its values")
    if turns := [a.name for k in walks for a in k.agents if a.turns > 1]:
        raise ScheduleError(f"{p.name} on {device.name}: persistent=True with warps that run iterations in turn ({turns[0]}); "
                            "accepted: False")
    names = Body()
    names.taken = {t.name for t in p.tensors}
    counters = {k.name: Tensor(names.fresh(f"{k.name}_items"), "workspace", "counter", "HV", (), "int32") for k in walks}
    clears = tuple(Op("clear_counter", "", (), (("tensor", x.name),), agent=p.kernels[0].ops[0].agent) for x in counters.values())
    first, *rest = (_over_items(k, counters[k.name].name, device) if k in walks else k for k in p.kernels)
    return replace(with_tensors(p, *counters.values()), kernels=(replace(first, body=(*clears, *first.body)), *rest))


def _over_items(k: Kernel, counter: str, device: Groups) -> Kernel:
    """The kernel with its body in a loop over items, whose numbers come from `counter`."""
    rings = {b.name: b for b in k.buffers if b.space == device.operand}
    loads = [o for o in k.ops if o.kind == "load" and o.buffer in rings]
    names = Body(types=types(k.body))
    names.taken |= {b.name for b in k.buffers}
    claimed, agent = names.fresh("claimed"), loads[-1].agent
    ring = Buffer(claimed, device.operand, (1,), "int32", slots=1 + max(rings[o.buffer].slots for o in loads))
    claim = Op("claim_item", claimed, (), (("tensor", counter),), Tile(()), agent=agent, buffer=claimed)
    follow = (Op("next_item", "", (claimed,), agent=a.name) for a in k.agents)
    return replace(k, body=(Loop("item", (), (*k.body, claim, *follow)),), buffers=(*k.buffers, ring))
