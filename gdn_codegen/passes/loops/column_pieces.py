"""column_pieces: computes kernels in pieces of the columns of V, where the schedule says so (`v_piece`, `walk_piece`), for
devices with cores. `in_pieces` does so for one kernel and K or V. `register_room` calls it for kernels whose tiles have no room
in registers (Triton), and `place` calls `pieces_of_k` for those whose tiles have none in shared memory (TileLang). Both order the
pieces.

A value along that dim gets pieces of so many columns. Products and sums over it are sums over the pieces. The mask of a product
is applied to each piece's product, so that one piece can be finished before the next one is loaded.

Example, two pieces:
    before:  k = load; S = load; k_kT = k @ k.T; k_S = k @ S.T; r = row_sum(k * k_S); ...
    after:   k_0 = load of columns 0..63; k_1 = load of columns 64..127; k_kT = k_1 @ k_1.T + k_0 @ k_0.T; ...
"""
from __future__ import annotations

from collections.abc import Iterator

from ...ir.core import Kernel, Op, Program, uses
from ...ir.core import types as types_of
from ...ir.ops import OPS
from ...schedule.schedule import Schedule
from ..stage import takes
from .few_live import few_live
from .row_pieces import Pieces

#: Columns of a piece of K.
COLUMNS = 64
#: The most ops of a kernel in pieces, if wider ones fit: TileLang's passes take time for each op (docs/performance/gradients.md).
MANY = 600
#: Ops with the same meaning on a piece of the columns, besides elementwise ones.
ALONG = ("column_sum", "cumsum", "to_middle", "from_middle", "last", "move")


@takes("decomposed")
def column_pieces(p: Program, s: Schedule) -> Program:
    """`p` with kernels over chunks in pieces of `v_piece` columns of V, in the order with the fewest bytes of tiles at once, and
    with walks in pieces of `walk_piece` columns, whose states are apart: while one crosses between the cores another is computed.
    """
    def split(k: Kernel) -> Kernel:
        if k.grid != "chunks":
            return in_pieces(p, k, s, "V", s.walk_piece) if s.walk_piece else k
        x = in_pieces(p, k, s, "V", s.v_piece) if s.v_piece else k
        return k if x is k else few_live(x, {**p.sizes, **k.sizes})

    return p.map_kernels(split)


def in_pieces(p: Program, k: Kernel, s: Schedule, dim: str = "K", columns: int = 0) -> Kernel:
    """The kernel in pieces of so many columns of `dim`, by default COLUMNS. `k` itself if it has no more
    columns, if its grid cuts the dim, or if it has ops that are not sums over pieces. If s.padded_pieces, tiles may have
    padding along the dim, of which pieces are as wide as others."""
    size, columns = p.sizes[dim], columns or COLUMNS
    moves = ("load", "store") if s.padded_pieces else ()
    if size <= columns or size % columns or k.blocked_dim == dim or not all(splits(p, k, o, dim, moves) for o in k.ops):
        return k
    return _Columns(p, dim, [(first, columns) for first in range(0, size, columns)]).kernel(k)


def pieces_of_k(p: Program, k: Kernel, s: Schedule) -> Iterator[Kernel]:
    """The kernel in pieces of K, for a device with shared memory. One with more than MANY ops is in wider pieces first."""
    x = in_pieces(p, k, s)
    if len(x.ops) > MANY:
        yield in_pieces(p, k, s, columns=2 * COLUMNS)
    yield x


def splits(p: Program, k: Kernel, o: Op, dim: str, padded: tuple[str, ...] = ()) -> bool:
    """Whether `o` has the same meaning on pieces of `dim`, or sums over them. padded: which of loads and stores may move tiles
    with padding along it."""
    types = types_of(k.body)
    if o.kind in ("load", "store"):
        t = p.tensor(o.attr("tensor"))
        return dim not in t.dims or (t.dims[-1] == dim and t.dims.count(dim) == 1 and not o.attr("transposed")
                                     and (not p.padded(t)[-1] or o.kind in padded) and not o.args[1:])
    dims = [types[a].dims for a in o.args]
    if not any(dim in d for d in (*dims, o.type.dims if o.type else ())):
        return True
    if any(dim in d[:-1] for d in dims) and o.kind != "row":
        return False
    return OPS[o.kind].elementwise or o.kind in (*ALONG, "row_sum", "matmul", "row")


class _Columns(Pieces):
    """Rewrites one kernel over chunks."""

    def kernel(self, k: Kernel) -> Kernel:
        """The kernel in pieces."""
        self.count = uses(k.body)
        self.masked = {o.args[0] for o in k.ops if o.kind == "pairs" and self.count[o.args[0]] == 1}
        self.types = types_of(k.body)
        return super().kernel(k)

    def op(self, o: Op) -> None:
        """An op on pieces, or a sum over them."""
        over = [n for n, a in enumerate(o.args[:2]) if self.along(a, o, n)] if o.kind == "matmul" else []
        if over:
            self.product(o)
        elif o.kind == "pairs" and o.args[0] in self.masked and len(self.names[o.args[0]]) > 1:
            self.names[o.out] = [self.total(o, [self.again(o, x) for x in self.names[o.args[0]]])]
        elif o.kind == "row_sum" and len(self.names[o.args[0]]) > 1:
            self.names[o.out] = [self.total(o, [self.again(o, x) for x in self.names[o.args[0]]])]
        else:
            dims, ((_, columns), *_) = o.attr("dims", ()), self.pieces
            super().op(o.with_attrs(dims=tuple(columns if d == self.dim else d for d in dims)) if self.dim in dims else o)

    def along(self, a: str, o: Op, n: int) -> bool:
        """Whether the product `o` sums over the dim, along which its operand `n` has pieces."""
        dims = self.types[a].dims
        flipped = bool(o.attr("tb" if n else "ta"))
        return dims[flipped if n else 1 - flipped] == self.dim

    def again(self, o: Op, x: str) -> str:
        """`o` on one piece."""
        return self.b.op(o.kind, x, name=self.b.fresh(f"{o.out}_0"), line=o.line, agent=o.agent, **dict(o.attrs))

    def total(self, o: Op, terms: list[str]) -> str:
        """The sum of terms, under the name of `o`."""
        x = terms[0]
        for n, term in enumerate(terms[1:], 1):
            x = self.b.op("add", x, term, name=o.out if n == len(terms) - 1 else "", line=o.line, agent=o.agent)
        return x

    def product(self, o: Op) -> None:
        """A product that sums over the dim: one that adds onto the one before, or where a mask follows one for each piece."""
        left, right, *acc = (self.names[a] for a in o.args)
        out: list[str] = []
        so_far = acc[0] if acc else []
        for n, (x, y) in enumerate(zip(left, right, strict=True)):
            last = n == len(left) - 1 and o.out not in self.masked
            out.append(self.b.op("matmul", x, y, *so_far, name=o.out if last else self.b.fresh(f"{o.out}_{n}"), line=o.line,
                                 agent=o.agent, **dict(o.attrs)))
            so_far = [] if o.out in self.masked else [out[-1]]
        self.names[o.out] = out if o.out in self.masked else out[-1:]
