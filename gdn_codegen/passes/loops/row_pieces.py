"""row_pieces: holds rows of the state in pieces of 128 bytes, where a chunk has one token. For Triton.

Triton gives 16 bytes of a row to each thread. So 16 threads share a row of 128 entries in 16 bits, and each sum over a row takes
exchanges between them, for each row that a thread has. This pass makes tiles of 128 bytes a row of each value along a row.
Eight threads then share it. The pieces are added before they are summed, so half as many rows are exchanged, one time less.

Example, two pieces:
    before:  S_0 = load of the state; for each token: k_S = row_sum(k[None, :] * S); S = exp_g * S + k[None, :] * u[:, None]
    after:   S_0, S_1 = loads of the state's columns 0..63 and 64..127
             for each token: k_S = row_sum(k_0[None, :] * S_0 + k_1[None, :] * S_1); S_0 = exp_g * S_0 + ...; S_1 = ...
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Carry, Kernel, Loop, Op, Program, Stmt
from ...ir.core import types as types_of
from ...ir.ops import OPS
from ...ir.types import BYTES, Dim
from ..stage import takes

#: Bytes of a row of the state that a tile has: eight threads move 16 bytes each.
ROW = 128
#: Ops with the same meaning on a piece of a row, besides elementwise ones.
ALONG = ("column_sum",)


@takes("decomposed")
def row_pieces(p: Program) -> Program:
    """`p` with rows in pieces, where a chunk has one token."""
    return p.map_kernels(lambda k: _kernel(p, k))


def _kernel(p: Program, k: Kernel) -> Kernel:
    """The kernel with its rows in pieces. `k` itself if its chunks have several tokens, or if rows of states are not several
    pieces."""
    loop = next((s for s in k.body if isinstance(s, Loop) and s.index == "chunk"), None)
    if loop is None or not any(o.attr("one_token") for o in loop.ops):
        return k
    moved = [p.tensor(o.attr("tensor")) for o in k.ops if o.kind in ("load", "store")]
    rows = {t.dims[-1]: ROW // BYTES[t.dtype] for t in moved if t.index in ("sequence", "checkpoint") and len(t.dims) == 2}
    if len(rows) != 1:
        return k
    ((dim, columns),) = rows.items()
    size = p.sizes[dim] if isinstance(dim, str) else dim
    if dim == k.blocked_dim or size <= columns or size % columns or not _splits(p, k, dim):
        return k
    return Pieces(p, dim, [(first, columns) for first in range(0, size, columns)]).kernel(k)


def _splits(p: Program, k: Kernel, dim: Dim) -> bool:
    """Whether each op on values with this dim has the same meaning on pieces, or sums over them."""
    def along(name: str) -> bool:
        return bool(types[name]) and types[name][-1] == dim

    types = {name: tile.dims for name, tile in types_of(k.body).items()}
    for o in k.ops:
        if o.kind in ("load", "store"):
            t = p.tensor(o.attr("tensor"))
            as_in_memory = t.dims[-1:] == (dim,) and not o.attr("transposed") and not p.padded(t)[-1]
            fits = dim not in t.dims or (as_in_memory and not o.args[1:])
        else:
            with_dim = dim in types.get(o.out, ()) or any(dim in types[a] for a in o.args)
            fits = not with_dim or OPS[o.kind].elementwise or o.kind in ALONG or (o.kind == "row_sum" and along(o.args[0]))
        if not fits:
            return False
    return True


class Pieces:
    """Rewrites one kernel. names: the pieces of a value, or its one name."""

    def __init__(self, p: Program, dim: Dim, pieces: list[tuple[int, int]]) -> None:
        self.dim, self.pieces, self.names = dim, pieces, dict[str, list[str]]()
        self.b = Body({t.name: t for t in p.tensors})

    def kernel(self, k: Kernel) -> Kernel:
        """The kernel in pieces."""
        self.b.taken |= set(types_of(k.body))
        return replace(k, body=self.body(k.body))

    def body(self, stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The statements in pieces."""
        outer, self.b.stmts = self.b.stmts, []
        for s in stmts:
            if isinstance(s, Loop):
                self.b.stmts.append(self.loop(s))
            else:
                self.op(s)
        done, self.b.stmts = tuple(self.b.stmts), outer
        return done

    def split(self, name: str, n: int) -> str:
        """The name of piece `n` of a value."""
        return self.b.fresh(f"{name}_{n}")

    def loop(self, s: Loop) -> Loop:
        """A loop that carries pieces."""
        parts = [(c, [(self.split(c.name, n), self.split(c.result, n)) for n in range(len(self.pieces))]
                  if self.dim in c.type.dims else [(c.name, c.result)]) for c in s.carried]
        for c, names in parts:
            inits = self.names[c.init]
            for (name, result), init in zip(names, inits, strict=True):
                self.b.types[name] = self.b.types[result] = self.b.types[init]
            self.names[c.name], self.names[c.result] = [x for x, _ in names], [x for _, x in names]
        body = self.body(s.body)
        carried = [Carry(name, init, after, result, self.b.types[init], c.slots) for c, names in parts
                   for (name, result), init, after in zip(names, self.names[c.init], self.names[c.next], strict=True)]
        return replace(s, carried=tuple(carried), body=body)

    def op(self, o: Op) -> None:
        """An op on pieces: one for each, or a sum over all."""
        args = [self.names[a] for a in o.args]
        several = o.type is not None and self.dim in o.type.dims
        if o.kind == "row_sum" and len(args[0]) > 1:
            total = args[0][0]
            for x in args[0][1:]:
                total = self.b.op("add", total, x, line=o.line, agent=o.agent)
            args = [[total]]
        pieces = self.pieces if several or any(len(x) > 1 for x in args) else [()]
        self.names[o.out] = []
        for n, piece in enumerate(pieces):
            more = {"piece": piece} if piece and o.kind in ("load", "store") else {}
            name = "" if not o.out else self.split(o.out, n) if piece else o.out
            out = self.b.op(o.kind, *(x[n] if len(x) > 1 else x[0] for x in args), name=name, line=o.line, agent=o.agent,
                            **{**dict(o.attrs), **more})
            self.names[o.out].append(out)
