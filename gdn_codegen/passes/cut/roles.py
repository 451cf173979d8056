"""roles: finds the values that a schedule's groups name by role.

A role is a property of the graph, so a schedule of roles serves any page. An output or a state of the page has only the role
`output` or `state`. Other roles are given to values on which an output or a state depends:
- gate: an input of one number per token, as the page reads it. system: the x of an inverse (I + x)^-1.
- inverse: an inverse as products read it. The schedule's form may have scaled it or removed its diagonal.
- weight, offset: products of an inverse that do not depend on a state, but whose readers do. A weight multiplies a state.
- solution: the sum of products of an inverse, where it depends on a state. right_side: what an inverse multiplies there.
  state_solution: a solution on which a next state depends.
- operand: what a walk needs, if it computes only values that depend on a state, and tiles that these read otherwise than as an
  operand of a product: the operands of products and the vectors that it reads, and that depend on no state.
- pair: an operand with a number for each pair of tokens that is no inverse. keyed: an operand with the dim K.
- update: an operand that multiplies, in a sum over tokens, what depends on a state, where a next state depends on that product.
- summand: a tile of tokens that depends on no state, and is added to one on which the next state depends.
- factor: a tile of tokens x tokens that depends on no state, and multiplies one that does, entry by entry.
- score, late_score: a product over V of two tiles of tokens: a number for each pair of tokens. A late one depends on a state.
- keyless: a value of `core` without the dim K that depends on no running sum of what depends on a state.
- early: what a kernel before a walk can compute. That is a value of `core` that depends on no state, and a tile or vector of
  tokens that depends on none and is a term of a sum that does. early_keyless: those of them without the dim K.
- sum: a sum over rows or columns of a tile that depends on a state. gate_sum: a running sum that depends on none.
- stateless, stateless_keyed: outputs that depend on no state, all and those with the dim K. tile: one of several numbers a token.
- converted: an input after its form, and an output of which it is computed. normed: those that read sums over their rows.
- core: what the page gives; of an input with a form the cotangent of the converted value. elementwise: an output that is an
  elementwise function of a tile of `core`, or of its sums over the tokens of a chunk. keyless_elementwise: one of a vector.
"""
from __future__ import annotations

from ...ir.core import Op, Program, types, uses
from ...ir.dataflow import after
from ...ir.ops import OPS
from ...schedule.schedule import ROLES
from .elementwise import converted, elementwise, sums_rows
from .groups import keeps_state
from .sums import factors, found_inverses, scores, sums


def roles(p: Program) -> dict[str, tuple[str, ...]]:
    """The values of a traced program by role, in the order of their definition."""
    return _Roles(p).of()


class _Roles:
    """The graph of a walk's values, with those that depend on a state and those on which a result depends."""
    def __init__(self, p: Program) -> None:
        """Finds what depends on a state (`waits`), and on what an output or a next state depends (`wanted`)."""
        self.p, loop, self.ops = p, p.walk, [o for o in p.walk.body if isinstance(o, Op)]
        self.defs, self.type, self.count = {o.out: o for o in self.ops if o.out}, types(loop.body), uses(loop.body)
        self.states = tuple(c.name for c in loop.carried)
        self.read = {o.out for o in self.ops if o.kind == "load" and p.tensor(o.attr("tensor")).index == "slot"}  # of chunks
        self.outputs = tuple(o.args[0] for o in self.ops if o.kind == "store" and not keeps_state(p, o))
        self.type |= {c.name: c.type for c in loop.carried}
        self.given = {*self.outputs, *(c.next for c in loop.carried)}  # results of the call
        self.waits = after(self.ops, self.states)  # values that depend on a state
        self.wanted, self.needed = set(self.given), {c.next for c in loop.carried}  # by a result, by a next state
        for o in reversed(self.ops):
            self.wanted |= set(o.args) if o.out in self.wanted else set()
            self.needed |= set(o.args) if o.out in self.needed else set()
        cotangents = {o.out for o in self.ops if o.kind == "boundary" and o.attr("back")}
        core = cotangents & self.wanted | set(self.outputs) - after(self.ops, cotangents)
        self.core = tuple(n for n in self.defs if n in core)

    def of(self) -> dict[str, tuple[str, ...]]:
        """The values of each role, in the order of their definition."""
        inverses = found_inverses(self.ops, self.read, self.waits)
        operands = {a for o in self.products(inverses) for a in o.args if a in inverses}
        free = [o.out for o in self.products(inverses) if o.out not in self.waits
                and any(o.out in x.args and x.out in self.waits for x in self.ops)]
        weights = {n for n in free if any(n in x.args and set(x.args) & set(self.states) for x in self.ops if x.kind == "matmul")}
        gates = {t.name for t in self.p.role("input") if t.index == "token" and len(t.dims) == 1}
        solutions = {n for o in self.products(inverses) if (n := self.grown(o.out)) in self.waits}
        found = {
            "gate": gates, "gate_sum": {o.out for o in self.ops if o.kind == "cumsum" and o.out not in self.waits},
            "system": {o.args[0] for o in self.ops if o.kind == "unit_lower_inverse" and o.out in self.wanted},
            "inverse": operands, "weight": weights, "offset": set(free) - weights,
            "solution": solutions, "state_solution": solutions & self.needed,
            "right_side": {a for o in self.products(inverses) for a in o.args if a in self.waits}, "operand": self.operands(),
            "summand": self.summands(), "factor": self.factors(), "sum": set(sums(self.ops, self.waits)),
            "keyed": {n for n in self.operands() if "K" in self.type[n].dims},
            "update": factors(self.ops, self.waits & self.needed, {self.type[n].dims for n in self.states}) & self.operands(),
            "pair": {n for n in self.operands() - inverses if self.type[n].dims == ("C", "C")},
            "score": scores(self.ops) - self.waits, "late_score": scores(self.ops) & self.waits}
        derived, of_vectors = (elementwise(self.ops, self.core, self.outputs, self.type, rank) for rank in (2, 1))
        own = {r: tuple(n for n in self.defs if n in names and n in self.wanted and n not in self.given | self.read)
               for r, names in found.items()}
        late = {"early": (early := self.early()), "early_keyless": tuple(n for n in early if "K" not in self.type[n].dims),
                "converted": (made := converted(self.ops, self.outputs)),
                "normed": tuple(n for n in made if sums_rows(n, self.defs)), "core": self.core,
                "elementwise": tuple(n for n in self.defs if n in derived),
                "keyless_elementwise": tuple(n for n in self.defs if n in of_vectors),
                "stateless": (alone := tuple(n for n in self.outputs if n not in self.waits)), "keyless": self.keyless(),
                "stateless_keyed": tuple(n for n in alone if "K" in self.type[n].dims), "state": self.states,
                "output": self.outputs, "tile": tuple(n for n in self.core if self.type[n].rank == 2)}
        assert {*own, *late} == set(ROLES)
        return {**own, **late}

    def products(self, inverses: set[str]) -> list[Op]:
        """The products that have one of `inverses` as an operand, and on which a result depends."""
        return [o for o in self.ops if o.kind == "matmul" and o.out in self.wanted and set(o.args) & inverses]

    def viewed(self, n: str) -> str:
        """The value of which `n` is a view, such as a column."""
        while n in self.defs and self.defs[n].kind in ("col", "row"):
            n = self.defs[n].args[0]
        return n

    def operands(self) -> set[str]:
        """Computed operands of products, and computed vectors, that depend on no state and that a walk without them would
        compute."""
        out, walked = set[str](), {*self.waits}
        for o in reversed(self.ops):
            for n in map(self.viewed, o.args if o.out in walked else ()):
                if n in self.defs and n not in self.waits and self.defs[n].kind != "load" and self.type[n].rank:
                    (out if o.kind == "matmul" or self.type[n].rank == 1 else walked).add(n)
        return out

    def summands(self) -> set[str]:
        """Computed tiles of tokens that depend on no state, and are added to one that does and that a next state needs."""
        return {n for n in self.added(self.waits & self.needed) if self.type[n].rank == 2}

    def factors(self) -> set[str]:
        """Computed tiles of tokens x tokens that depend on no state, and are factors of elementwise products that do."""
        return {a for o in self.ops if o.kind == "mul" and o.out in self.waits & self.wanted for a in o.args
                if a not in self.waits and a in self.defs and self.type[a].dims == ("C", "C") and not OPS[self.defs[a].kind].view}

    def keyless(self) -> tuple[str, ...]:
        """Values of `core` without the dim K that depend on no running sum of what depends on a state."""
        summed = after(self.ops, {o.out for o in self.ops if o.kind == "cumsum" and o.out in self.waits})
        return tuple(n for n in self.core if "K" not in self.type[n].dims and n not in summed)

    def added(self, sums: set[str]) -> set[str]:
        """Computed tiles and vectors of tokens that depend on no state, and are operands of the sums and differences `sums`."""
        return {a for o in self.ops if o.kind in ("add", "sub") and o.out in sums for a in o.args
                if a not in self.waits and self.defs[a].kind != "load" and self.type[a].dims[:1] == ("C",)}

    def early(self) -> tuple[str, ...]:
        """Values of `core` that depend on no state, and what is added to values that do."""
        found = {n for n in self.added(self.waits & self.wanted) if self.type[n].dims != ("C", "C")} | set(self.core)
        return tuple(n for n in self.defs if n in found - self.waits)

    def grown(self, n: str) -> str:
        """The last value of a chain of sums and multiples that starts at `n`, where each value of the chain has one reader."""
        while self.count.get(n) == 1:
            reader = next(o for o in self.ops if n in o.args)
            if reader.kind not in ("add", "sub", "mul", "neg") or reader.out in self.given \
                    or self.type[reader.out].dims != self.type[n].dims:
                return n
            n = reader.out
        return n
