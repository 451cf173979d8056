"""behind_products: lets an agent move tiles into its registers while its product runs. For Hopper's warp groups.

A product is asynchronous if the iteration reads its result, and its agent moves a tile that does not depend on it before its next
product. `mbarriers` puts the drain before the first op that reads the result. Until then the agent also waits for the tile, and
reads vectors.
"""
from __future__ import annotations

from collections.abc import Iterator

from ...ir.core import Op


def behind_products(ops: list[Op], agent: str) -> list[Op]:
    """`ops`, in the order in which agents run them, with asynchronous products of `agent`."""
    mine = [o for o in ops if o.agent == agent]
    read = {a for o in mine for a in o.args}
    started = {o for n, o in enumerate(mine)
               if o.kind == "matmul" and o.out in read and any(map(_moves_tile, _beside(o, mine[n + 1:])))}
    return [o.with_attrs(asynchronous=True) if o in started else o for o in ops]


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
