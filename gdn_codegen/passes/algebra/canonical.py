"""canonical: one form for all spellings of a page.

Every value is made again, operands first, and rules (`rules`) are applied to it until none fits. Equal values become one. Then
ops are put in an order that follows from what they compute: decays, inverses, what inverses multiply, outputs, states; each after
its operands. Nothing in this depends on names or on the order of statements. A value that a schedule names stays as it is, and
rules do not look into it.

Last, products of columns become columns of products (`JOINING`), which is less work and what every target takes.
"""
from __future__ import annotations

from ...ir.builder import Body
from ...ir.core import Op, Program
from ...schedule.schedule import Schedule
from ..common import walk_body, with_walk_body
from ..stage import takes
from .rules import JOINING, RULES, Rule
from .terms import LEAVES, Terms


@takes("traced")
def canonical(p: Program, s: Schedule) -> Program:
    """`p` in canonical form, but for the values that groups of `s` name."""
    named = {n for g in s.kernels for n in g}
    for rules in (RULES, JOINING):
        p = _Canonical(p, named, rules).run()
    return p


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
