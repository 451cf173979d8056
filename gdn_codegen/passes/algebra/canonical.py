"""canonical: one form for all spellings of a page.

Every value is made again, operands first, and rules (`rules`) are applied to it until none fits. Equal values become one. Then
ops are put in an order that follows from what they compute: decays, inverses, what inverses multiply, outputs, states; each after
its operands. Nothing in this depends on names or on the order of statements. A value that a schedule names stays as it is, and
rules do not look into it.

Last, products of columns become columns of products (`JOINING`), which is less work and what every target takes.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...ir.builder import Body
from ...ir.core import Op, Program
from ...ir.ops import infer
from ...ir.types import Tile
from ...schedule.schedule import Schedule
from ..common import walk_body, with_walk_body
from ..match import Found, matched
from ..stage import takes
from .rules import JOINING, RULES, Rule

#: Ops in the order in which their values stand in sums and products; others stand before the first.
ORDER = ("const", "scalar", "load", "last", "cumsum", "row_sum", "col", "row", "div", "mul", "sub", "add", "neg", "matmul",
         "lower", "strictly_lower", "unit_lower_inverse", "log", "exp")
LEAVES = ("const", "scalar", "load")
Attrs = tuple[tuple[str, Any], ...]


@takes("traced")
def canonical(p: Program, s: Schedule) -> Program:
    """`p` in canonical form, but for the values that groups of `s` name."""
    named = {n for g in s.kernels for n in g}
    for rules in (RULES, JOINING):
        p = _Canonical(p, named, rules).run()
    return p


class Terms:
    """Values made so far, each once. `defs`: the ops that rules may look into."""

    def __init__(self, states: Iterable[str], types: dict[str, Tile], rules: list[Rule]) -> None:
        self.rules = rules
        self.states: tuple[str, ...] = tuple(states)
        self.type: dict[str, Tile] = dict(types)
        self.defs: dict[str, Op] = {}
        self.keys: dict[str, Any] = {n: (2, -1, "", i) for i, n in enumerate(self.states)}
        self.seen: dict[Any, str] = {}

    def make(self, kind: str, args: tuple[str, ...], attrs: Attrs = (), line: int = 0, type: Tile | None = None) -> str:
        """The value of an op on values, in canonical form."""
        o = Op(kind, "", args, attrs, None, line)
        for rule in self.rules:
            if kind in rule.kinds and (new := rule.apply(self, o)) is not None:
                return new
        key = (kind, args, attrs)
        if key not in self.seen:
            name = self.seen[key] = f"%{len(self.seen)}"
            self.type[name] = type or infer(kind, tuple(self.type[a] for a in args), dict(attrs))
            self.defs[name] = replace(o, out=name, type=self.type[name])
            self.keys[name] = self.key(self.defs[name])
        return self.seen[key]

    def key(self, o: Op) -> Any:
        """What orders values: a number, a column or a row before a tile, then by op, then by operands."""
        dims = self.type[o.out].dims
        size = 0 if not dims else 1 if 1 in dims else 2
        at = ORDER.index(o.kind) if o.kind in ORDER else -1
        leaf = o.kind in ("load", "scalar")  # which have names, and are told apart by their place among parameters
        return (size, at, o.kind, len(self.seen) if leaf else 0, "" if leaf else repr(o.attrs),
                tuple(self.keys[a] for a in o.args))

    # --- what rules ask ---
    def number(self, a: str) -> float | None:
        """The number that a value is, or None."""
        return self.defs[a].attr("value") if a in self.defs and self.defs[a].kind == "const" else None

    def is_a(self, kind: str, a: str) -> bool:
        """Whether a value is made by an op of that kind."""
        return a in self.defs and self.defs[a].kind == kind

    def sums(self, a: str) -> bool:
        """Whether a value is a sum or a difference."""
        return self.is_a("add", a) or self.is_a("sub", a)

    def kind(self, a: str) -> str:
        """"col" or "row" of such a value, "" of a number, else "tile"."""
        if not self.type[a].dims:
            return ""
        return self.defs[a].kind if a in self.defs and self.defs[a].kind in ("col", "row") else "tile"

    def scales(self, f: str) -> bool:
        """Whether the factor `f` is a number, or a column or row of a vector."""
        return self.kind(f) != "tile"

    def before(self, found: Found, names: str) -> bool:
        """Whether the first of two names of a match stands for a value that comes before the second's."""
        a, b = (self.keys[found[n]] for n in names)
        return bool(a < b)

    def ranks(self, found: Found, names: str) -> tuple[int, ...]:
        """Ranks of the values that the names of a match stand for."""
        return tuple(self.type[found[n]].rank for n in names)

    def difference(self, a: str) -> bool:
        """Whether `a` is the difference of a number a token from another token's."""
        return matched("x[:, None] - y[None, :]", self.defs.get(a), self.defs) is not None

    def factors(self, a: str) -> list[str]:
        """The factors of a value that is an elementwise product, else the value itself."""
        o = self.defs.get(a)
        return [a] if o is None or o.kind != "mul" else [f for x in o.args for f in self.factors(x)]

    def product(self, factors: list[str], line: int) -> str:
        """The elementwise product of factors, in canonical form."""
        x, *rest = factors
        for f in rest:
            x = self.make("mul", (x, f), line=line)
        return x


class _Canonical:
    """The walk of a traced program, with each value made once. named: values that keep their names."""
    def __init__(self, p: Program, named: set[str], rules: list[Rule]) -> None:
        self.p, self.named, loop = p, named, p.walk
        self.ops = [o for o in loop.body if isinstance(o, Op)]
        self.terms = Terms([c.name for c in loop.carried], {c.name: c.type for c in loop.carried}, rules)
        self.made = {c.name: c.name for c in loop.carried}  # value of the page -> term
        self.opaque: dict[str, Op] = {}  # terms that rules do not look into
        self.nexts = [c.next for c in loop.carried]
        self.b: Body = walk_body(p)
        self.name = {c: c for c in self.terms.states}  # term -> value
        self.done = set(self.terms.states)
        self.stores = [o for o in self.ops if o.kind == "store"]
        self.roots = dict.fromkeys([*(o.args[0] for o in self.stores), *self.nexts, *filter(None, [p.forgets])])

    def run(self) -> Program:
        """The program in canonical form; what callers get keeps its name."""
        for o in self.ops:
            if o.out:
                self.made[o.out] = self.value(o)
        for o in self.ops:
            if o.out and (o.out in self.roots or o.out in self.named):
                self.name.setdefault(self.made[o.out], o.out)
        for o in self.ops:
            if o.out:
                self.name.setdefault(self.made[o.out], o.out)
        for o in self.ops:
            if o.kind in ("load", "scalar"):
                self.emit(self.made[o.out])
        for root in (*self.first(), *(self.made[n] for n in self.roots)):
            self.emit(root)
        for n in self.roots:
            if self.name[self.made[n]] != n:  # what callers get is a value of its own, under its own name
                self.b.op("mul", self.name[self.made[n]], self.b.op("const", value=1.0), name=n)
        for o in self.stores:
            self.b.copy(o)
        return with_walk_body(self.p, self.b.finish())

    def value(self, o: Op) -> str:
        t = self.terms
        new = t.make(o.kind, tuple(self.made[a] for a in o.args), o.attrs, o.line, o.type)
        if o.out not in self.named or o.kind in LEAVES or new not in t.defs:
            return new
        alias = f"{new} {o.out}"
        self.opaque[alias], t.type[alias], t.keys[alias] = t.defs[new], t.type[new], t.keys[new]
        return alias

    def op(self, term: str) -> Op | None:
        return self.opaque.get(term) or self.terms.defs.get(term)

    def first(self) -> list[str]:
        """Decays, inverses, and their products that depend on a state, as outputs and states reach them."""
        found: dict[str, list[str]] = {"decay": [], "inverse": [], "product": []}
        seen: set[str] = set()
        waits: dict[str, bool] = dict.fromkeys(self.terms.states, True)
        inverses: set[str] = set()

        def visit(term: str) -> None:
            """Note a value's place in the order, after what it is made of."""
            o = self.op(term)
            if o is None or term in seen:
                return
            seen.add(term)
            for a in o.args:
                visit(a)
            waits[term] = any(waits.get(a, False) for a in o.args)
            if o.kind == "exp" and self.terms.type[term].dims == ("C", "C") and not waits[term]:
                found["decay"].append(term)
            if o.kind == "unit_lower_inverse":
                found["inverse"].append(term)
                inverses.add(term)
            if o.kind == "matmul" and inverses & set(o.args) and waits[term]:
                found["product"].append(term)
        for n in self.roots:
            visit(self.made[n])
        return [x for each in found.values() for x in each]

    def emit(self, term: str) -> None:
        """Append `term` after its operands, constants just before it."""
        if term in self.done:
            return
        self.done.add(term)
        o = self.op(term)
        assert o is not None
        for a in sorted(o.args, key=lambda a: self.terms.number(a) is not None):
            self.emit(a)
        self.name[term] = self.b.op(o.kind, *(self.name[a] for a in o.args), name=self.name.get(term, ""), line=o.line,
                                    **dict(o.attrs))
