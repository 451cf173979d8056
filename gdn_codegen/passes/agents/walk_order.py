"""walk_order: the order of ops in a walk that agents share.

An agent's loop is its ops in this order. So the order says what an agent does first, and no value may stand before what it is
made of. Where several orders do, what leads to the next carried value comes first, since the next iteration waits for it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...ir.core import Op
from ...schedule.agents import WALK_ROLES
from .order import needs_in_place, topological
from .roles import INVERSE, Roles, leads


def by_role(r: Roles) -> list[Op]:
    """The ops that have a role, in the order of WALK_ROLES. Of those with the role "state", what leads to no next carried value
    comes with the outputs. Cycle where no such order has values before their readers."""
    order = list(WALK_ROLES)

    def rank(o: Op) -> int:
        role = r.of[o]
        return order.index("output" if role == "state" and o.out not in r.first else role)
    return topological(sorted((o for o in r.inside if o in r.of), key=rank), needs_in_place(r.loop))


def begun_early(ops: list[Op], role: Callable[[Op], str]) -> list[Op]:
    """`ops` in which the agent that computes what an inverse takes begins its other products once it has handed that over, and
    reads them last (`asynchronous`). It moves tiles and computes vectors meanwhile. `ops` themselves where one agent does
    both."""
    early = leads(ops, INVERSE)
    solver = {a: o.agent for o in ops if o.kind == INVERSE for a in o.args}
    given = next((o for o in ops if o.kind != "load" and o.out in solver and o.agent != solver[o.out]), None)
    if given is None:
        return ops
    late = {o.out for o in ops if o.agent == given.agent and o.kind == "matmul" and o.out not in early and role(o) == "rest"}
    if not late:
        return ops
    after: list[Op] = []  # what reads them
    rest: list[Op] = []
    reads = set(late)
    for o in ops:
        if o.out in late:
            continue
        if o.agent == given.agent and reads & set(o.args):
            reads.add(o.out)
            after.append(o)
        else:
            rest.append(o)
    last = max(n for n, o in enumerate(rest) if o.agent == given.agent) + 1
    rest[last:last] = after
    at = rest.index(given) + 1
    rest[at:at] = [o.with_attrs(asynchronous=True) for o in ops if o.out in late]
    return rest


def loads_by_need(ops: list[Op], hub: str) -> list[Op]:
    """`ops` with the loads first, in the order in which agents read them, those with the same readers together: what inverses
    wait for, then what `hub` reads, the agent that computes the next carried value."""
    place: dict[str, int] = {}
    first: dict[str, dict[str, int]] = {}
    for o in ops:
        at = place[o.agent] = place.get(o.agent, -1) + 1
        for a in o.args:
            first.setdefault(a, {}).setdefault(o.agent, at)
    loads = [o for o in ops if o.kind == "load"]
    readers = {o: tuple(sorted(first[o.out])) for o in loads}
    early = leads(ops, INVERSE)

    def need(o: Op) -> tuple[bool, bool, int, tuple[str, ...], int]:
        agent = hub if hub in readers[o] else readers[o][0]
        group = min(first[x.out][agent] for x in loads if readers[x] == readers[o])
        return o.out not in early, agent != hub, group, readers[o], first[o.out][agent]
    return [*sorted(loads, key=need), *(o for o in ops if o.kind != "load")]


def merged(ops: list[Op], agents: Iterable[str]) -> list[Op]:
    """`ops` in an order in which each value stands before its readers, while the ops of one agent stay in theirs. Cycle where
    there is none."""
    made = {o.out: o for o in ops if o.out}
    before: dict[Op, Op] = {}
    for agent in agents:
        mine = [o for o in ops if o.agent == agent]
        before |= dict(zip(mine[1:], mine, strict=False))
    return topological(ops, lambda o: {made[a] for a in o.args if a in made} | ({before[o]} if o in before else set()))


def in_order(ops: list[Op], roles: Mapping[str, str], hub: str, agents: Iterable[str]) -> list[Op]:
    """The ops of a walk, each with its agent, in the order in which the agents run them. roles: of values. Cycle where there is
    none."""
    early = begun_early(ops, lambda o: roles.get(o.out, ""))
    return merged(loads_by_need(early, hub), agents)
