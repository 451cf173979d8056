"""walk_order: orders the ops of a walk that agents share. For Hopper's warp groups.

Each agent runs its ops in this order. No value may come before its operands. Where several orders are possible, ops that lead
to the next carried value come first, because the next iteration waits for them.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from ...ir.core import Op
from ...schedule.agents import PART_OF, WALK_TASKS
from ..storage.summed import is_sum
from .order import needs_in_place, topological
from .tasks import INVERSE, Tasks, leads


def by_task(tasks: Tasks) -> list[Op]:
    """The ops that have a task, in the order of WALK_TASKS.

    An op with the task "state" whose value is not in `Tasks.first`, such as a store, comes with the outputs. Raises Cycle if a
    value would come after a reader.
    """
    order = list(WALK_TASKS)

    def rank(o: Op) -> int:
        task = PART_OF.get(tasks.of[o], tasks.of[o])
        return order.index("output" if task == "state" and o.out not in tasks.first else task)
    return topological(sorted((o for o in tasks.inside if o in tasks.of), key=rank), needs_in_place(tasks.loop))


def asynchronous_products(ops: list[Op], task: Callable[[Op], str]) -> list[Op]:
    """`ops` with asynchronous products in the agent that computes the operand of an inverse.

    After it has passed that operand to the agent of the inverse, it starts its other state-free products, and goes on. It reads
    their results last. Meanwhile it moves tiles and computes vectors. Returns `ops` itself if one agent does both.
    """
    to_inverse = leads(ops, INVERSE)
    solver = {a: o.agent for o in ops if o.kind == INVERSE for a in o.args}
    given = next((o for o in ops if o.kind != "load" and o.out in solver and o.agent != solver[o.out]), None)
    if given is None:
        return ops
    started = {o.out for o in ops if o.agent == given.agent and o.kind == "matmul" and task(o) == "rest"} - to_inverse
    if not started:
        return ops
    after: list[Op] = []  # ops that read the asynchronous products
    rest: list[Op] = []
    reads = set(started)
    for o in ops:
        if o.out in started:
            continue
        if o.agent == given.agent and reads & set(o.args):
            reads.add(o.out)
            after.append(o)
        else:
            rest.append(o)
    last = max(n for n, o in enumerate(rest) if o.agent == given.agent) + 1
    rest[last:last] = after
    at = rest.index(given) + 1
    rest[at:at] = [o.with_attrs(asynchronous=True) for o in ops if o.out in started]
    return rest


def loads_by_need(ops: list[Op], state_agent: str, in_turn: Collection[str] = ()) -> list[Op]:
    """`ops` with all loads first, in the order in which agents read them. Loads with the same readers are neighbours.

    Loads on which an inverse depends come first. Then come the loads that `state_agent` reads, the agent that computes the next
    carried value. But what it frees comes last where agents compute iterations in turn (`in_turn`): these run ahead of it.
    """
    place: dict[str, int] = {}
    first: dict[str, dict[str, int]] = {}
    for o in ops:
        at = place[o.agent] = place.get(o.agent, -1) + 1
        for a in o.args:
            first.setdefault(a, {}).setdefault(o.agent, at)
    loads = [o for o in ops if o.kind == "load"]
    readers = {o: tuple(sorted(first[o.out])) for o in loads}
    to_inverse = leads(ops, INVERSE)

    if any(map(is_sum, ops)):  # agents of different pace read them: what is free first is loaded first
        last = {a: n for n, o in enumerate(ops) for a in o.args}
        return [*sorted(loads, key=lambda o: (o.type is not None and o.type.rank == 2, last.get(o.out, 0))),
                *(o for o in ops if o.kind != "load")]

    def need(o: Op) -> tuple[bool, bool, bool, int, tuple[str, ...], int]:
        """The sort key of a load."""
        agent = state_agent if state_agent in readers[o] else readers[o][0]
        group = min(first[x.out][agent] for x in loads if readers[x] == readers[o])
        freed_late = bool(in_turn) and agent == state_agent
        return freed_late, o.out not in to_inverse, agent != state_agent, group, readers[o], first[o.out][agent]
    return [*sorted(loads, key=need), *(o for o in ops if o.kind != "load")]


def merged(ops: list[Op], agents: Iterable[str]) -> list[Op]:
    """`ops` in an order in which each value comes before its readers, and the ops of each agent keep their order.

    Raises Cycle if there is none.
    """
    made = {o.out: o for o in ops if o.out}
    before: dict[Op, Op] = {}
    for agent in agents:
        mine = [o for o in ops if o.agent == agent]
        before |= dict(zip(mine[1:], mine, strict=False))
    return topological(ops, lambda o: {made[a] for a in o.args if a in made} | ({before[o]} if o in before else set()))


def in_order(ops: list[Op], tasks: Mapping[str, str], state_agent: str, agents: Iterable[str], in_turn: Collection[str] = ()
             ) -> list[Op]:
    """The ops of a walk, each with its agent, in the order in which the agents run them. tasks: of values. in_turn: agents
    whose warps run iterations in turn. Raises Cycle if there is none."""
    ops = asynchronous_products(ops, lambda o: tasks.get(o.out, ""))
    return merged(loads_by_need(ops, state_agent, in_turn), agents)
