"""canonical: gives all spellings of a page the same form, so that later passes need to know one spelling only.

The pass computes every value again, operands first. It applies the rules of `rules` to each value until no rule applies. Equal
values become one value. Then it orders the ops: decays, inverses, products of inverses, outputs, states. Each comes after its
operands. Neither names nor the order of the page's statements affect the result. A value that the schedule names stays as the
page has it, and rules do not look into it.

A second run applies `JOINING`: elementwise products of columns become one column of a product of vectors. That is less work,
and all targets accept it. All targets run this pass first.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Op, Program
from ...schedule.schedule import Schedule
from ..common import walk_body, with_walk_body
from ..stage import takes
from .rules import JOINING, RULES, Rule
from .terms import LEAVES, Terms


@takes("traced")
def canonical(p: Program, s: Schedule) -> Program:
    """`p` in canonical form, except for values that groups of `s` name, and for `scales`, which `cut` finds by their names."""
    named = {n for g in s.kernels for n in g} | set(p.scales)
    for rules in (RULES, JOINING):
        p = _Canonical(p, named, rules).run()
    return p


class _Canonical:
    """Rebuilds the walk of a traced program and computes each value once. named: values that keep their names."""

    def __init__(self, p: Program, named: set[str], rules: list[Rule]) -> None:
        """Nothing is computed yet. `roots` are the values from which the walk is rebuilt: outputs, next states, `forgets`."""
        self.p, self.named, loop = p, named, p.walk
        self.ops = [o for o in loop.body if isinstance(o, Op)]
        self.terms = Terms([c.name for c in loop.carried], {c.name: c.type for c in loop.carried}, rules)
        self.made = {c.name: c.name for c in loop.carried}  # value of the page -> term
        self.opaque: dict[str, Op] = {}  # terms of named values, which rules do not look into
        self.nexts = [c.next for c in loop.carried]
        self.b: Body = walk_body(p)
        self.name = {c: c for c in self.terms.states}  # term -> value
        self.done = set(self.terms.states)
        self.stores = [o for o in self.ops if o.kind == "store"]
        self.roots = dict.fromkeys([*(o.args[0] for o in self.stores), *self.nexts, *filter(None, [p.forgets])])

    def run(self) -> Program:
        """The program in canonical form. Outputs and states keep their names."""
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
            if self.name[self.made[n]] != n:  # an output or state equals another value: it becomes a value of its own
                self.b.op("mul", self.name[self.made[n]], self.b.op("const", value=1.0), name=n)
        for o in self.stores:
            self.b.copy(o)
        return with_walk_body(self.p, self.b.finish())

    def value(self, o: Op) -> str:
        """The term of an op's value. A value that the schedule names gets a term of its own."""
        t = self.terms
        new = t.make(o.kind, tuple(self.made[a] for a in o.args), o.attrs, o.line, o.type)
        if o.out not in self.named or o.kind in LEAVES or new not in t.defs:
            return new
        alias = f"{new} {o.out}"
        self.opaque[alias], t.type[alias], t.keys[alias] = t.defs[new], t.type[new], t.keys[new]
        return alias

    def op(self, term: str) -> Op | None:
        """The op that computes a term, or None for a carried state."""
        return self.opaque.get(term) or self.terms.defs.get(term)

    def first(self) -> list[str]:
        """The terms to emit first: decays, inverses, computed or loaded, and products of inverses that depend on a state.

        Each list is in the order in which a walk from the outputs and states to their operands reaches the terms.
        """
        found: dict[str, list[str]] = {"decay": [], "inverse": [], "product": []}
        seen: set[str] = set()
        waits: dict[str, bool] = dict.fromkeys(self.terms.states, True)
        inverses: set[str] = set()

        def visit(term: str) -> None:
            """Add a term to the lists after its operands."""
            o = self.op(term)
            if o is None or term in seen:
                return
            seen.add(term)
            for a in o.args:
                visit(a)
            waits[term] = any(waits.get(a, False) for a in o.args)
            pairs = self.terms.type[term].dims == ("C", "C")
            if o.kind == "exp" and pairs and not waits[term]:
                found["decay"].append(term)
            if o.kind == "unit_lower_inverse" or (o.kind == "load" and pairs):  # a tile of pairs of tokens is a stored inverse
                found["inverse"].append(term)
                inverses.add(term)
            if o.kind == "matmul" and inverses & set(o.args) and waits[term]:
                found["product"].append(term)
        for n in self.roots:
            visit(self.made[n])
        return [x for each in found.values() for x in each]

    def emit(self, term: str) -> None:
        """Append a term's op after its operands. Constants come directly before the op that reads them."""
        if term in self.done:
            return
        self.done.add(term)
        o = self.op(term)
        assert o is not None
        for a in sorted(o.args, key=lambda a: self.terms.number(a) is not None):
            self.emit(a)
        self.name[term] = self.b.op(o.kind, *(self.name[a] for a in o.args), name=self.name.get(term, ""), line=o.line,
                                    **dict(o.attrs))
