"""behind_products: lets an agent go on while its product runs. For Hopper's warp groups.

A product is asynchronous if the iteration reads its result, and its agent moves a tile that does not depend on it before its next
product. `mbarriers` puts the drain before the first op that reads the result. Until then the agent also waits for the tile, and
reads vectors.

With it begins another product of the agent that does not depend on it (`two_at_once`). If that one adds to a third, which does,
the third adds to it instead. So the latency of one hides that of the other.

Example: with p asynchronous, s there, and u computed from p,
    before:  p = a @ s                    ...  x = b @ u      y = c @ s + x
    after:   p = a @ s      z = c @ s     ...  y = b @ u + z
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ...ir.core import Op


def behind_products(ops: list[Op], agent: str) -> list[Op]:
    """`ops`, in the order in which agents run them, with asynchronous products of `agent`."""
    mine = [o for o in ops if o.agent == agent]
    read = {a for o in mine for a in o.args}
    started = {o for n, o in enumerate(mine)
               if o.kind == "matmul" and o.out in read and any(map(_moves_tile, _beside(o, mine[n + 1:])))}
    return [o.with_attrs(asynchronous=True) if o in started else o for o in ops]


def two_at_once(ops: list[Op], agent: str, carried: Collection[str], fresh: Callable[[str], str]) -> list[Op]:
    """`ops` with a product that begins with the first asynchronous product of `agent`, if there is one. carried: the next carried
    values, which the next iteration reads as well. fresh: gives a name that no value has."""
    defs, place = {o.out: o for o in ops if o.out}, {o: n for n, o in enumerate(ops)}
    mine = [o for o in ops if o.agent == agent]
    later = mine[next((n for n, o in enumerate(mine) if o.attr("asynchronous")), len(mine)):]
    after = set[str]()  # what depends on that product, or on what comes after it
    for o in ops:
        if o in later or not after.isdisjoint(o.args):
            after.add(o.out)
    for o in (o for o in later[1:] if o.kind == "matmul" and after.isdisjoint(o.args[:2])):
        readers = [r for r in ops if o.out in r.args]
        at = max(place[y] for y in (later[0], *(defs[a] for a in o.args[:2] if a in defs)))
        if not readers or o.out in carried or any(later[0].out in y.args for y in later if place[y] <= at):
            continue
        x = next((x for x in later[1:] if o.args[2:] == (x.out,)), None)
        if x is None and not o.args[2:]:
            instead, beside = dict[Op, list[Op]]({o: []}), o
        elif x is not None and _adds_alone(x, o, ops) and x.out not in carried:
            beside = o.changed(out=fresh(f"{o.out}_begun"), args=o.args[:2])
            instead = {x: [], o: [x.changed(out=o.out, args=(*x.args, beside.out))]}
        else:
            continue
        begun = [beside.with_attrs(asynchronous=True)]
        return [y for n, z in enumerate(ops) for y in (*instead.get(z, [z]), *(begun if n == at else []))]
    return ops


def _adds_alone(x: Op, o: Op, ops: list[Op]) -> bool:
    """Whether `x` is a product that adds to nothing yet, and that `o` of the same type alone reads."""
    return x.kind == "matmul" and not x.args[2:] and x.type == o.type and [r for r in ops if x.out in r.args] == [o]


def _moves_tile(o: Op) -> bool:
    """Whether `o` copies a tile from shared memory to registers."""
    return o.attr("space") == "fragment" and o.type is not None and o.type.rank == 2


def _beside(product: Op, after: list[Op]) -> Iterator[Op]:
    """The ops between a product and the agent's next one that do not depend on it. after: the agent's ops after it."""
    depends = {product.out}
    for o in after:
        if o.kind == "matmul":
            return
        if depends.isdisjoint(o.args):
            yield o
        else:
            depends.add(o.out)
