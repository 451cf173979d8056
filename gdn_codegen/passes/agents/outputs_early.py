"""outputs_early: lets an agent finish its outputs while the products of the next carried value run. For Hopper's warp groups.

The products of outputs begin first, and those of the next carried value right after them. So the agent scales, casts and stores
outputs while the latter run, and waits for these at the end of its iteration. What these add to, and vectors, it computes while
the last product before them runs.

That is for walks whose loads have a slot ahead of their readers (`loads_ahead`). With one slot, a load of what outputs read
begins when they are done, and it would now be needed sooner.

Example, with p and y asynchronous, and u computed from x:
    before:  x = a @ r      u = ...      s' = (d * s) + b @ u          o = ... (c @ u)
    after:   x = a @ r      d * s        u = ...      y = c @ u        s' = (d * s) + b @ u      o = ... y
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod

from ...devices import Groups
from ...ir.core import Carry, Op
from ...ir.dataflow import after
from ...ir.types import BYTES
from ..storage.ring_bytes import ALIGN, ALIGN_VECTOR
from .order import topological
from .products_end import Ends
from .walk_order import merged


def carried_first(ops: list[Op], agent: str, carried: Sequence[Carry], agents: Iterable[str]) -> list[Op]:
    """`ops` in which the first product of `agent`, if carried values are in its operands, comes before all that it does not
    depend on. So these run beside it. agents: all of them."""
    mine = [o for o in ops if o.agent == agent]
    depends = after(mine, {c.name for c in carried})
    first = next((o for o in mine if o.kind == "matmul" and not depends.isdisjoint(o.args[:2])), None)
    if first is None or any(o.kind == "matmul" for o in mine[:mine.index(first)]):
        return ops
    needed = _leading_to({first.out}, mine)
    return _with_order(ops, agent, [*(o for o in mine if o in needed), *(o for o in mine if o not in needed)], agents)


def outputs_early(ops: list[Op], agent: str, carried: Sequence[Carry], agents: Iterable[str]) -> list[Op]:
    """`ops`, in the order in which agents run them, with that of `agent` changed as above. `ops` itself where the agent has no
    products of outputs that can begin before those of the next carried value, or several carried values, or stores the current
    one. agents: all of them."""
    mine = [o for o in ops if o.agent == agent]
    sums = _sums(mine, carried)
    state = _leading_to({c.next for c in carried}, mine)
    last = next((o for o in reversed(mine) if o.kind == "matmul" and o in state and o not in sums), None)
    at = 0 if last is None else mine.index(last) + 1
    outputs = [o for o in mine[at:] if o not in state] if sums else []
    begun, current = _products(outputs), _of_current({c.name for c in carried}, outputs)
    products = {o for o in begun if o.kind == "matmul"}
    if not products or _readers(_outs(sums), outputs) or {*current} & {*products, *_readers(_outs(products), outputs)}:
        return ops
    if any(o.kind == "store" for o in current):  # which takes longer than what it would run beside
        return ops
    begun = [o for o in begun if o not in current]
    between = [o for o in mine[at:] if o not in sums and o not in outputs]
    adds_to = {a for o in sums for a in o.args[2:]}
    if last is None:
        beside = [o for o in between if o in _leading_to(adds_to, between)]
    else:
        beside = [o for o in between if o.out not in after(between, {last.out})]
    solved = [o for o in between if o not in beside]
    rest = [o for o in outputs if o not in begun and o not in current]
    started = {*sums, *products, *([last] if last and adds_to & _outs(beside) else [])}
    order = [*mine[:at], *current, *beside, *solved, *begun, *sums, *rest]
    order = [o.with_attrs(asynchronous=True) if o in started else o for o in order]
    return _loads_as_freed(_with_order(ops, agent, order, agents))


def loads_ahead(ops: list[Op], stages: int, sizes: dict[str, int], device: Groups) -> bool:
    """Whether each load of a walk has `stages` slots, at least two. Otherwise `ring_slots` finds fewer slots for some."""
    need = 0
    for o in (o for o in ops if o.kind == "load" or o.attr("space") == device.operand):
        assert o.type is not None
        one = prod(o.type.shape(sizes)) * BYTES[o.type.dtype] * (stages if o.kind == "load" else 1)
        align = ALIGN if o.type.rank > 1 else ALIGN_VECTOR
        need += -(-one // align) * align
    return stages > 1 and need <= device.spaces[device.operand]


def _loads_as_freed(ops: list[Op]) -> list[Op]:
    """`ops` with loads, which come first, in the order in which their readers free them, so that none waits for a slot that is
    free later than its own. Those which are free at the same time are in the order in which they are read."""
    ends, first = Ends(ops, lambda o: o.args), {a: n for n, o in reversed([*enumerate(ops)]) for a in o.args}
    later = {a: ends.later_products(o) for o in ops for a in o.args}  # of the last reader
    loads = [o for o in ops if o.kind == "load"]
    return [*sorted(loads, key=lambda o: (-later.get(o.out, 0), first.get(o.out, 0))), *(o for o in ops if o.kind != "load")]


def _with_order(ops: list[Op], agent: str, order: list[Op], agents: Iterable[str]) -> list[Op]:
    """`ops` with the ops of `agent` in this order, but for those that would come before one of their operands."""
    made = {o.out: o for o in order if o.out}
    ordered = iter(topological(order, lambda o: {made[a] for a in o.args if a in made}))
    return merged([next(ordered) if o.agent == agent else o for o in ops], agents)


def _sums(mine: list[Op], carried: Sequence[Carry]) -> list[Op]:
    """The products whose sum is the next carried value, in order. Empty if there are several carried values."""
    out, defs = list[Op](), {o.out: o for o in mine if o.out}
    x = defs.get(carried[0].next) if len(carried) == 1 else None
    while x is not None and x.kind == "matmul":
        out.insert(0, x)
        x = defs.get(x.args[2]) if x.args[2:] else None
    return out


def _products(outputs: list[Op]) -> list[Op]:
    """The products among `outputs` and what they are computed from, in order. Empty if one waits for the result of another."""
    products = [o for o in outputs if o.kind == "matmul"]
    needed = {*products, *_leading_to({x for o in products for x in o.args}, outputs)}
    waits = any(o.kind != "matmul" and not _outs(products).isdisjoint(o.args) for o in needed)
    return [] if waits else [o for o in outputs if o in needed]


def _of_current(values: Collection[str], outputs: list[Op]) -> list[Op]:
    """Those of `outputs` that read carried `values` where they are: before the next ones overwrite them. So do expressions of
    them, which their readers compute. The operands of a product are tiles of their own."""
    read = after([o for o in outputs if o.kind != "matmul"], values)
    return [o for o in outputs if not read.isdisjoint(o.args[2:] if o.kind == "matmul" else o.args)]


def _readers(values: Collection[str], ops: list[Op]) -> list[Op]:
    """Those of `ops` that read `values`, or what `ops` compute from them."""
    read = after(ops, values)
    return [o for o in ops if not read.isdisjoint(o.args)]


def _leading_to(values: Collection[str], ops: list[Op]) -> set[Op]:
    """Those of `ops` from which `values` are computed."""
    wanted, out = set(values), set[Op]()
    for o in reversed(ops):
        if o.out in wanted:
            wanted |= set(o.args)
            out.add(o)
    return out


def _outs(ops: Iterable[Op]) -> set[str]:
    """The values that `ops` compute."""
    return {o.out for o in ops if o.out}
