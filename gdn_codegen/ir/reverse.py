"""The body of a gradient: cotangents of a page's values, which the rules of `ir/vjps.py` add up."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .body import Body
from .core import NO_LINE, Op, Program
from .ops import TypeRuleError
from .types import Dim, Tile


class Reverse:
    """The body of the gradient: the page's values, and the cotangents of those that depend on an input or a state.

    A number of the value head is the same for all tokens. Its cotangent is in shares, which the caller adds up: one for each
    token (a vector of the dim C), or one for each column of the tiles that it multiplies (K or V). Columns stay apart, because a
    kernel may have a block of them.
    """

    def __init__(self, p: Program, body: Body, below: Mapping[str, str]) -> None:
        """p: the page. body: has the page's values. below: of inverses that it lacks, the value without the ones on the
        diagonal."""
        self.p, self.b, self.line, self.below = p, body, NO_LINE, below
        self.ops = {o.out: o for o in p.walk.body if isinstance(o, Op) and o.out}
        self.tensors = {t.name: t for t in p.tensors}
        self._defs: dict[str, Op] = {}
        self.heads: set[str] = set()
        self.actives = {c.name for c in p.walk.carried}
        self.cotangents: dict[str, str] = {}
        numbers: set[str] = set()
        for o in self.ops.values():
            read = self.tensors.get(o.attr("tensor", ""))
            if read is not None or self.actives & set(o.args):
                self.actives.add(o.out)
            elif o.type is not None and o.type.rank == 0:
                numbers.add(o.out)
            only = bool(self.heads & set(o.args)) and self.heads | numbers >= set(o.args)
            if o.type is not None and o.type.rank == 0 and (only or (read is not None and read.index == "head")):
                self.heads.add(o.out)

    # --- what rules use ---
    def op(self, kind: str, *args: str | float, **attrs: Any) -> str:
        """Append an op. Numbers become constants."""
        names = [self.b.op("const", value=a, line=self.line) if isinstance(a, float) else a for a in args]
        return self.b.op(kind, *names, line=self.line, **attrs)

    @property
    def defs(self) -> dict[str, Op]:
        """The ops of the body, by the name of their value."""
        for s in self.b.stmts[len(self._defs):]:
            assert isinstance(s, Op)
            self._defs[s.out] = s
        return self._defs

    def type(self, value: str) -> Tile:
        """The type of a value."""
        return self.b.types[value]

    def made(self, value: str) -> Op | None:
        """The page's op that computes a value, None for a state."""
        return self.ops.get(value)

    def loaded(self, value: str) -> str:
        """The value as it was loaded behind its boundary, if it was: a boundary changes no value. In memory it may be rounded."""
        behind = [o.out for o in self.ops.values() if o.kind == "boundary" and o.args == (value,)]
        return next((n for n in behind if n in self.defs and self.defs[n].kind == "load"), value)

    def active(self, value: str) -> bool:
        """Whether a value depends on an input or a state."""
        return value in self.actives

    def of_head(self, value: str) -> bool:
        """Whether a value is a number, and computed of numbers of the value head only."""
        return value in self.heads

    def times(self, ct: str, x: str) -> str:
        """ct * x. Of a cotangent that was broadcast, the narrow tile, if x has the other's dims."""
        o = self.defs.get(ct)
        if o is not None and o.kind == "expand" and self.type(x).dims == self.type(ct).dims:
            ct = o.args[0]
        return self.op("mul", ct, x)

    def rows(self, row: str, dims: tuple[Dim, ...]) -> str:
        """A number or row for every token, as a tile."""
        return self.op("expand", self.op("row", row) if dims[1:] else row, dims=dims)

    def vector(self, ct: str, kind: str) -> str:
        """The vector of a column or row."""
        o = self.defs.get(ct)
        return o.args[0] if o is not None and o.kind == kind else self.op("row_sum" if kind == "col" else "column_sum", ct)

    def give(self, value: str, ct: str) -> None:
        """Add `ct` to the cotangent of a value, summed over what was broadcast. No effect for a value that is not active."""
        if not self.active(value):
            return
        ct = self.in_shares(ct) if self.of_head(value) else self.reduced(ct, self.type(value).dims)
        before = self.cotangents.get(value)
        if before is not None and self.type(before) != self.type(ct):  # a number's, by token and by column
            before, ct = self.by_token(before), self.by_token(ct)
        self.cotangents[value] = ct if before is None else self.total(before, ct)

    def total(self, a: str, b: str) -> str:
        """a + b. Of two columns or rows, that of the sum of their vectors."""
        x, y = self.defs.get(a), self.defs.get(b)
        if x is not None and y is not None and x.kind == y.kind and x.kind in ("col", "row", "expand") \
                and self.type(x.args[0]) == self.type(y.args[0]):
            return self.op(x.kind, self.op("add", x.args[0], y.args[0]), **dict(x.attrs))
        return self.op("add", a, b)

    # --- sums over what was broadcast ---
    def in_shares(self, ct: str) -> str:
        """The cotangent of a number of the value head, which was broadcast to what has `ct`: a share for each column of a tile of
        tokens, or of a row. Otherwise, a share for each token."""
        dims = self.type(ct).dims
        if len(dims) == 1:
            return ct
        if len(dims) == 2 and dims[0] in ("C", 1) and dims[1] not in ("C", 1):
            return self.vector(ct, "row")
        return self.by_token(self.op("row_sum", ct) if dims else ct)

    def by_token(self, ct: str) -> str:
        """The cotangent of a number of the value head, with a share for each token. What is of the whole chunk, the first token
        has."""
        if self.type(ct).dims == ("C",):
            return ct
        before = self.op("cumsum", self.op("full", dims=("C",), value=1.0), exclusive=True)
        return self.op("mul", self.op("sub", 1.0, self.op("minimum", before, 1.0)), self.reduced(ct, ()))

    def reduced(self, ct: str, want: tuple[Dim, ...]) -> str:
        """`ct`, summed to these dims: those of a column, a row, a vector or a number, or broadcast to them."""
        have = self.type(ct).dims
        if have == want:
            return ct
        if not want:
            return self.reduced(self.op("row_sum", ct), want)
        if len(have) == 2 and want == (have[0], 1):
            return self.op("col", self.op("row_sum", ct))
        if len(have) == 2 and want == (1, have[1]):
            return self.op("row", self.op("column_sum", ct))
        if len(have) == 2 and want in (have[:1], have[1:]):
            return self.op("row_sum" if want == have[:1] else "column_sum", ct)
        if all(x in (1, y) for x, y in zip(have, want, strict=False)):
            return self.op("expand", ct, dims=want)
        raise TypeRuleError(f"{self.p.name}, {self.line}: got a cotangent {self.type(ct)}; accepted here: dims "
                            f"{' '.join(map(str, want))}")
