"""token_ops: how an op is replaced where a chunk has one token, and what becomes of ops that move rows. `token_values` has the
rest."""
from __future__ import annotations

from typing import Any

from ...ir.body import Body
from ...ir.core import Op
from ...ir.types import Dim, Tile


def _without_tokens(t: Tile) -> tuple[Dim, ...]:
    """The dims of a tile without its axes of tokens. A column [C, 1] and a row [1, C] become numbers."""
    if "C" not in t.dims:
        return t.dims
    return tuple(d for d in t.dims if d not in ("C", 1))


class TokenOps:
    """Appends what replaces one op."""

    def __init__(self, o: Op, before: list[Tile], b: Body) -> None:
        """before: the types of the operands of `o` with the axis of tokens. b: the body that gets the new ops."""
        assert o.type is not None
        self.o, self.before, self.b, self.dims = o, before, b, _without_tokens(o.type)

    def put(self, kind: str, *args: str, name: str = "", **attrs: Any) -> str:
        """A further op on the same line, or an equal one that exists."""
        return self.b.equal(kind, *args, **attrs) or self.b.op(kind, *args, name=name, line=self.o.line, **attrs)

    def constant(self, value: float) -> str:
        """A number."""
        return self.put("const", value=value)

    def is_constant(self, a: str, value: float) -> bool:
        """Whether `a` is this number."""
        return a == self.b.equal("const", value=value)

    def delay(self) -> str:
        """The row that comes first: the token's own moves past the end."""
        return self.o.args[1]

    def latest(self) -> str:
        """The operand, the row of the one token, as a value of its own. A state may become it."""
        return self.put("mul", self.o.args[0], self.constant(1.0), name=self.o.out)

    def advance(self) -> str:
        """Zeros, as no token follows."""
        return self.put("full", dims=self.dims, value=0.0, name=self.o.out)
