"""fold_into_inverse: moves masks, scales and roundings around an inverse of a whole tile into the inverse.

It runs after `decompose`, and changes kernels of devices that invert a whole chunk in one op. The first three changes apply
where the values between have no other reader.
- cast(cast(diag_inverse(a)) * row(x)) becomes diag_inverse(a, x), which rounds once and needs no second pass over the entries.
- cast(strictly_lower(cast(diag_inverse(a)))) becomes diag_inverse(a, strict=True), which does not write the ones of the
  diagonal.
- A mask of a is dropped, because the inverse reads only entries below the diagonal.
- A cast to a wider dtype and back is dropped.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program, types, uses
from ...ir.types import BYTES
from ..common import rebuild_kernels
from ..match import matched, matches
from ..stage import takes


@takes("decomposed")
def fold_into_inverse(p: Program, whole: int) -> Program:
    """`p` with these changes, or `p` itself if a chunk does not have `whole` tokens. whole: rows of the tiles that the device
    inverts whole, 0 for none."""
    if p.sizes["C"] != whole:
        return p
    return rebuild_kernels(p, _Inverses)


class _Inverses:
    """The rule for one op: it moves a mask, a scale or a rounding into `diag_inverse`. It returns None where the op stays."""
    def __init__(self, k: Kernel) -> None:
        self.defs, self.count, self.type = {o.out: o for o in k.ops if o.out}, uses(k.body), types(k.body)
        self.unmasked: dict[str, str] = {}  # value -> the same without masks

    def __call__(self, o: Op, b: Body) -> str | None:
        """Puts `o` into `b` as an inverse with a mask, a scale or a rounding of its own, and returns the name of its value."""
        if o.kind == "cast" and (same := self.rounded_again(o)):
            return same
        below = self.strict(o.args[0]) if o.kind == "cast" else None
        if below is not None and self.type[below.out] == self.type[o.out]:
            return b.op("diag_inverse", self.bare(below.args[0], b), name=o.out, line=below.line, strict=True,
                        **dict(below.attrs))
        found = self.scaled(o.args[0]) if o.kind == "cast" else None
        if found is not None and self.type[found[0].out] == self.type[o.out]:
            inverse, vector = found
            return b.op("diag_inverse", self.bare(inverse.args[0], b), vector, name=o.out, line=inverse.line,
                        **dict(inverse.attrs))
        if o.kind == "diag_inverse":
            return b.op(o.kind, self.bare(o.args[0], b), *o.args[1:], name=o.out, line=o.line, **dict(o.attrs))
        return None

    def rounded_again(self, o: Op) -> str:
        """If the cast `o` reverses a cast to a wider dtype: the value before both casts. Otherwise ""."""
        wide = self.defs.get(o.args[0])
        if wide is None or wide.kind != "cast" or self.type[wide.args[0]] != self.type[o.out]:
            return ""
        return wide.args[0] if BYTES[self.type[wide.out].dtype] > BYTES[self.type[o.out].dtype] else ""

    def strict(self, a: str) -> Op | None:
        """The inverse if `a` is strictly_lower of one and has one reader. Otherwise None."""
        found = matched("strictly_lower(x)", self.read_once(a), self.defs)
        return self.alone(found["x"]) if found else None

    def alone(self, x: str) -> Op | None:
        """The inverse that `x` is, or is a cast of, if it has no scale and no other reader. Otherwise None."""
        inverse = self.defs.get(x)
        if inverse is not None and inverse.kind == "cast":
            inverse = self.defs.get(inverse.args[0])
        if inverse is None or inverse.kind != "diag_inverse" or len(inverse.args) != 1:
            return None
        return inverse if self.count[x] == self.count[inverse.out] == 1 else None

    def scaled(self, a: str) -> tuple[Op, str] | None:
        """If `a` is an inverse with scaled columns: the inverse and the vector of scales. Otherwise None."""
        for found in matches("x * v[None, :]", self.read_once(a), self.defs):
            inverse = self.alone(found["x"])
            if inverse is not None:
                return inverse, found["v"]
        return None

    def read_once(self, a: str) -> Op | None:
        """The op of `a`, if it has one reader."""
        return self.defs.get(a) if self.count[a] == 1 else None

    def bare(self, a: str, b: Body) -> str:
        """`a` without its mask, if it has one reader. Casts, products and exponentials between are computed again without the
        mask."""
        o = self.read_once(a)
        if o is None:
            return a
        if o.kind in ("lower", "strictly_lower"):
            return self.bare(o.args[0], b)
        if o.kind not in ("cast", "mul", "exp"):
            return a
        args = [self.bare(x, b) for x in o.args]
        if args == list(o.args):
            return a
        if a not in self.unmasked:
            name = b.fresh(f"{a}_unmasked") if o.kind == "mul" else ""
            self.unmasked[a] = b.op(o.kind, *args, name=name, line=o.line, **dict(o.attrs))
        return self.unmasked[a]
