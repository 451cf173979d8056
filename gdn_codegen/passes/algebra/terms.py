"""terms: the values that rules see. Each is in canonical form and exists once."""
from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from ...ir.core import NO_LINE, Attrs, Line, Op
from ...ir.ops import OPS, infer
from ...ir.types import Tile
from ..match import Found, matched
from .rules import Rule

#: The order of values in sums and products, by op. Values of other ops come first.
ORDER = ("const", "scalar", "load", "last", "cumsum", "row_sum", "col", "row", "div", "mul", "sub", "add", "neg", "matmul",
         "lower", "strictly_lower", "unit_lower_inverse", "log", "exp")
LEAVES = ("const", "scalar", "load")


class Terms:
    """All values made so far, each once. `defs`: the ops that rules may look into. states: the carried values."""

    def __init__(self, states: Iterable[str], types: dict[str, Tile], rules: list[Rule]) -> None:
        self.rules = rules
        self.states: tuple[str, ...] = tuple(states)
        self.type: dict[str, Tile] = dict(types)
        self.defs: dict[str, Op] = {}
        self.keys: dict[str, Any] = {n: (2, -1, "", i) for i, n in enumerate(self.states)}
        self.seen: dict[Any, str] = {}

    def make(self, kind: str, args: tuple[str, ...], attrs: Attrs = (), line: Line = NO_LINE, type: Tile | None = None) -> str:
        """The value of an op in canonical form. The op is created if no rule replaces it and no equal op exists."""
        o = Op(kind, "", args, attrs, None, line)
        for rule in self.rules:
            if kind in rule.kinds and (new := rule.apply(self, o)) is not None:
                return new
        key = (kind, args, attrs)
        if key not in self.seen:
            name = self.seen[key] = f"%{len(self.seen)}"
            self.type[name] = type or infer(kind, tuple(self.type[a] for a in args), attrs)
            self.defs[name] = o.changed(out=name, type=self.type[name])
            self.keys[name] = self.key(self.defs[name])
        return self.seen[key]

    def key(self, o: Op) -> Any:
        """The sort key of a value: first size (number, column or row, tile), then op, then operands."""
        dims = self.type[o.out].dims
        size = 0 if not dims else 1 if 1 in dims else 2
        at = ORDER.index(o.kind) if o.kind in ORDER else -1
        leaf = o.kind in ("load", "scalar")  # these are ordered by their place among the parameters, not by name
        return (size, at, o.kind, len(self.seen) if leaf else 0, "" if leaf else repr(o.attrs),
                tuple(self.keys[a] for a in o.args))

    # --- questions that rules ask ---
    def number(self, a: str) -> float | None:
        """The number if the value is a constant, else None."""
        return self.defs[a].attr("value") if a in self.defs and self.defs[a].kind == "const" else None

    def is_a(self, kind: str, a: str) -> bool:
        """Whether an op `kind` computes the value."""
        return a in self.defs and self.defs[a].kind == kind

    def sums(self, a: str) -> bool:
        """Whether the value is a sum or a difference."""
        return self.is_a("add", a) or self.is_a("sub", a)

    def kind(self, a: str) -> str:
        """"col" or "row" for a column or row of a vector, "" for a number, otherwise "tile"."""
        if not self.type[a].dims:
            return ""
        return self.defs[a].kind if a in self.defs and self.defs[a].kind in ("col", "row") else "tile"

    def scales(self, f: str) -> bool:
        """Whether the factor `f` is a number, or a column or row of a vector."""
        return self.kind(f) != "tile"

    def before(self, found: Found, names: str) -> bool:
        """Whether the value of the first name of a match comes before the value of the second name."""
        a, b = (self.keys[found[n]] for n in names)
        return bool(a < b)

    def ranks(self, found: Found, names: str) -> tuple[int, ...]:
        """The ranks of the values that the names have in a match."""
        return tuple(self.type[found[n]].rank for n in names)

    def difference(self, a: str) -> bool:
        """Whether `a` is x[:, None] - y[None, :], a difference between two tokens."""
        return matched("x[:, None] - y[None, :]", self.defs.get(a), self.defs) is not None

    def is_masked(self, a: str, mask: str = "lower") -> bool:
        """Whether `a` is exp(lower(x, fill=-inf)), which is zero above its diagonal, or that of a mask that is stricter."""
        kinds = ("lower", "strictly_lower")[mask == "strictly_lower":]
        return any(matched(f"exp({kind}(x, fill=-inf))", self.defs.get(a), self.defs) is not None for kind in kinds)

    def in_range(self, a: str) -> bool:
        """Whether `a` is surely finite where its operands are: no exp, log, div or infinite fill is among the elementwise ops
        that compute it."""
        o = self.defs.get(a)
        if o is None or not self.type[a].dims or o.kind in ("col", "row") or not OPS[o.kind].elementwise:
            return True
        return o.kind not in ("exp", "log", "div") and abs(o.attr("fill") or 0) < inf and all(map(self.in_range, o.args))

    def factors(self, a: str) -> list[str]:
        """The factors of an elementwise product. For another value, the value itself."""
        o = self.defs.get(a)
        return [a] if o is None or o.kind != "mul" else [f for x in o.args for f in self.factors(x)]

    def product(self, factors: list[str], line: Line) -> str:
        """The elementwise product of factors, in canonical form."""
        x, *rest = factors
        for f in rest:
            x = self.make("mul", (x, f), line=line)
        return x
