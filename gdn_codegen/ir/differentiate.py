"""Differentiates a page: the program of its gradients, and the program of the states that this one reads.

A traced program walks the chunks of a sequence and carries its states. The derivative of a loss by the state after a chunk is
known once all later chunks are done. So the program of the gradients walks the chunks from the last to the first (a loop of step
-1), and carries these derivatives (`d_S`). In a chunk it computes what it needs of the page's values again, from the inputs and
from the state before the chunk. Then it goes through the page's ops in reverse order, and `OpDef.vjp` gives each operand its part
of the cotangent. No rule knows a page.

The state before each chunk comes from memory, one tile for each chunk slot. `saving` gives a program that stores them: the page
itself, or without its outputs, where a call computes the states again instead of keeping them.

A sum over the value heads of a key head is left to the caller: gradients of inputs of key heads have a row for each value head.
So is the sum over tokens of the gradient of a number or vector of a value head: the program gives the part of each token.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from .builder import Algorithm, Body
from .core import NO_LINE, Carry, Loop, Op, Program, Stmt, walk
from .ops import OPS, TypeRuleError
from .padding import sums_over_padding
from .types import Dim, Tensor, Tile


def chunk_states(name: str) -> str:
    """The tensor with the state `name` before each chunk."""
    return f"{name}_chunks"


def derivative(name: str) -> str:
    """The name of the derivative of the loss by a value or tensor."""
    return f"d_{name}"


def saving(p: Program, outputs: bool = True) -> Program:
    """The traced program `p`, which also stores its states before each chunk.

    outputs: whether it stores the page's outputs, too.
    """
    loop = p.walk
    kept = tuple(Tensor(chunk_states(c.name), "output", "slot", "HV", c.type.dims) for c in loop.carried)
    stores = [Op("store", "", (c.name,), (("tensor", t.name),)) for c, t in zip(loop.carried, kept, strict=True)]
    dropped = {t.name for t in p.role("output") if t.index == "token" and not outputs}
    body = [o for o in loop.body if not (isinstance(o, Op) and o.kind == "store" and o.attr("tensor") in dropped)]
    done = replace(p, name=f"{p.name}_saving" if outputs else f"{p.name}_states",
                   tensors=(*(t for t in p.tensors if t.name not in dropped), *kept))
    return _pruned(done.with_walk(replace(loop, body=(*stores, *body))))


def differentiate(p: Program) -> Program:
    """The program of the gradients of the traced program `p`.

    Its inputs are those of `p`, the states before each chunk, and the derivatives of the loss by the outputs (`d_o`) and by the
    final states (`d_final_state`, zero where absent). Its outputs are the derivatives by the inputs (`d_q`) and by the initial
    states (`d_initial_state`). TypeRuleError for an op without a derivative, with the line of the page.
    """
    return _Gradient(p).run()


class Reverse:
    """The body of the gradient: the page's values, and the cotangents of those that depend on an input or a state.

    A number or vector of the value head is the same for all tokens. Its cotangent has an entry or row for each token, the part
    of that token.
    """

    def __init__(self, p: Program, body: Body) -> None:
        """p: the page. body: has the page's values."""
        self.p, self.b, self.line = p, body, NO_LINE
        self.ops = {o.out: o for o in p.walk.body if isinstance(o, Op) and o.out}
        self.tensors = {t.name: t for t in p.tensors}
        self._defs: dict[str, Op] = {}
        self.heads: set[str] = set()
        self.actives = {c.name for c in p.walk.carried}
        self.cotangents: dict[str, str] = {}
        for o in self.ops.values():
            read = self.tensors.get(o.attr("tensor", ""))
            if read is not None or self.actives & set(o.args):
                self.actives.add(o.out)
            of_heads = [a for a in o.args if a in self.heads]
            only = bool(of_heads) and all(a in self.heads or OPS[self.ops[a].kind].number for a in o.args)
            if (read is not None and read.index == "head") or (only and "C" not in self.type(o.out).dims):
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

    def active(self, value: str) -> bool:
        """Whether a value depends on an input or a state."""
        return value in self.actives

    def of_head(self, value: str) -> bool:
        """Whether a value is computed of numbers and vectors of the value head only."""
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
        ct = self.summed(ct, value)
        before = self.cotangents.get(value)
        self.cotangents[value] = ct if before is None else self.total(before, ct)

    def total(self, a: str, b: str) -> str:
        """a + b. Of two columns or rows, that of the sum of their vectors."""
        x, y = self.defs.get(a), self.defs.get(b)
        if x is not None and y is not None and x.kind == y.kind and x.kind in ("col", "row", "expand") \
                and self.type(x.args[0]) == self.type(y.args[0]):
            return self.op(x.kind, self.op("add", x.args[0], y.args[0]), **dict(x.attrs))
        return self.op("add", a, b)

    # --- sums over what was broadcast ---
    def wanted(self, value: str) -> tuple[Dim, ...]:
        """The dims of the cotangent of a value."""
        dims = self.type(value).dims
        return dims if not self.of_head(value) else ("C", *dims[dims[:1] == (1,):])

    def summed(self, ct: str, value: str) -> str:
        """`ct`, summed to the dims of the cotangent of `value`."""
        have, want = self.type(ct).dims, self.wanted(value)
        if have == want:
            return ct
        if self.of_head(value) and have[:1] != ("C",):  # of the chunk, not of a token: the last token has it
            plain = self.type(value).dims
            whole = self.reduced(ct, plain[1:] if plain[:1] == (1,) else plain)
            at_last = self.op("last", self.op("eye", dims=("C", "C")))
            return self.op("mul", self.op("col", at_last), self.op("row", whole)) if want[1:] else self.op("mul", at_last, whole)
        return self.reduced(ct, want)

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
        if len(have) == 2 and want == have[:1]:
            return self.op("row_sum", ct)
        if all(x in (1, y) for x, y in zip(have, want, strict=False)):
            return self.op("expand", ct, dims=want)
        raise TypeRuleError(f"{self.p.name}, {self.line}: got a cotangent {self.type(ct)}; accepted here: dims "
                            f"{' '.join(map(str, want))}")


class _Gradient:
    """Builds the program of the gradients of one page."""

    def __init__(self, p: Program) -> None:
        """Nothing is built yet."""
        self.p, self.loop = p, p.walk
        self.inputs = [t for t in p.role("input") if t.index in ("token", "head")]
        (kernel,) = p.kernels
        self.initial = {o.out: o.attr("tensor") for o in kernel.body if isinstance(o, Op) and o.kind == "load"}
        self.final = {o.args[0]: o.attr("tensor") for o in kernel.body if isinstance(o, Op) and o.kind == "store"}
        self.stores = [o for o in self.loop.body if isinstance(o, Op) and o.kind == "store"]

    def run(self) -> Program:
        """The program of the gradients."""
        tensors = self.tensors()
        b = Body({t.name: t for t in tensors})
        for c in self.loop.carried:
            b.op("load", name=c.name, tensor=chunk_states(c.name))
            b.types[derivative(c.name)] = c.type
        b.taken |= {o.out for o in walk(self.loop.body)}
        b.taken |= {f"{derivative(c.name)}_{end}" for c in self.loop.carried for end in "0T"} | set(b.types)
        for o in self.loop.body:
            assert isinstance(o, Op)
            if o.kind != "store":
                b.copy(o)
        r = Reverse(self.p, b)
        self.seed(r)
        for o in reversed(list(r.ops.values())):
            ct, r.line = r.cotangents.get(o.out), o.line
            if ct is not None and o.kind not in ("load", "scalar"):
                vjp = OPS[o.kind].vjp
                if vjp is None:
                    raise TypeRuleError(f"{self.p.name}, {o.line}: got {o.kind}, which has no derivative; accepted: ops whose "
                                        "OpDef has a vjp")
                vjp(r, o, ct)
        return self.program(r, tensors)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the program: the page's inputs, states before chunks, and derivatives."""
        derived = [replace(t, name=derivative(t.name), role={"output": "input", "input": "output"}[t.role],
                           heads="HV", index="token" if t.index == "head" else t.index,
                           dims=("C", *t.dims) if t.index == "head" else t.dims, fill="",
                           wide=t.wide or t.index == "head" or t.heads == "H", optional=t.index == "sequence")
                   for t in self.p.tensors if t.index in ("token", "head", "sequence")]
        given = [t for t in self.p.role("input") if t.index != "sequence"]
        states = [Tensor(chunk_states(c.name), "input", "slot", "HV", c.type.dims) for c in self.loop.carried]
        return (*given, *states, *derived)

    def seed(self, r: Reverse) -> None:
        """The cotangents of the page's outputs and next states."""
        for o in self.stores:
            r.give(o.args[0], r.b.op("load", name=derivative(o.attr("tensor")), tensor=derivative(o.attr("tensor"))))
        for c in self.loop.carried:
            r.give(c.next, derivative(c.name))

    def program(self, r: Reverse, tensors: tuple[Tensor, ...]) -> Program:
        """The program around the body."""
        ct, reads = r.cotangents, {o.attr("tensor"): o.out for o in r.ops.values() if o.attr("tensor")}
        r.line = NO_LINE
        dims = {t.name: ("C", *t.dims) if t.index == "head" else t.dims for t in self.inputs}
        found = [*((ct.get(reads.get(n, "")), d) for n, d in dims.items()),
                 *((ct.get(c.name), c.type.dims) for c in self.loop.carried)]
        results = self.distinct(r, [x or r.op("full", dims=d, value=0.0) for x, d in found])
        names = self.renaming(r)
        body: list[Stmt] = [s.renamed(names).changed(out=names.get(s.out, s.out)) for s in r.b.stmts if isinstance(s, Op)]
        results = [names.get(x, x) for x in results]
        body += [Op("store", "", (x,), (("tensor", derivative(n)),)) for n, x in zip(dims, results, strict=False)]
        carried, before, after = [], [], []
        for c, following in zip(self.loop.carried, results[len(dims):], strict=True):
            d = derivative(c.name)
            carried.append(Carry(d, f"{d}_T", following, f"{d}_0", c.type))
            before.append(Op("load", f"{d}_T", (), (("tensor", derivative(self.final[c.result])),), c.type))
            after.append(Op("store", "", (f"{d}_0",), (("tensor", derivative(self.initial[c.init])),)))
        loop = Loop("chunk", tuple(carried), tuple(body), step=-1)
        (kernel,) = self.p.kernels
        done = replace(self.p, name=f"{self.p.name}_gradient", tensors=tensors, forgets="", scales=(),
                       kernels=(replace(kernel, body=(*before, loop, *after)),))
        return _without_padding(_pruned(done))

    def distinct(self, r: Reverse, results: list[str]) -> list[str]:
        """The results, each a value of its own that the chunk computes, because passes assume that. Another one becomes a product
        with 1."""
        out: list[str] = []
        for x in results:
            o = r.defs.get(x)
            given = o is None or o.kind == "load" or x in r.ops
            out.append(r.b.op("mul", x, r.b.op("const", value=1.0), name=r.b.fresh(f"same_{x}")) if given or x in out else x)
        return out

    def renaming(self, r: Reverse) -> dict[str, str]:
        """Cotangent -> its name after the value whose cotangent it is, where the name is free."""
        names: dict[str, str] = {}
        for value, ct in r.cotangents.items():
            if ct in r.defs and r.defs[ct].kind != "load" and ct not in r.ops and ct not in names:
                names[ct] = r.b.fresh(derivative(value))
        return names


#: The kinds of pages that are derived from another one.
KINDS: dict[str, Callable[[Program], Program]] = {
    "saving": saving, "states": lambda p: saving(p, outputs=False), "gradient": differentiate}


class Derived(Algorithm):
    """A page that is derived from another one.

    of: that page. kind: a key of KINDS. forms: the input forms of a contract, as pairs (name, form), which become a part of the
    page before it is derived. So gradients are those of what callers pass.
    """

    def __init__(self, of: Algorithm, kind: str, forms: tuple[tuple[str, str], ...] = ()) -> None:
        """Derives nothing yet."""
        self.of, self.kind, self.forms = of, kind, forms
        self.fn, self.name, self.scalars = of.fn, f"{of.name}_{kind}", of.scalars
        first = of.doc.splitlines()[0] if of.doc else of.name
        self.doc = {"saving": f"{first} It also returns the states before each chunk.",
                    "states": f"The states before each chunk, and the final ones. {first}",
                    "gradient": f"The gradient of a loss by the inputs. {first}"}[kind]
        self._where = f"{of._where}, {kind}"

    @cached_property
    def _traced(self) -> Program:
        """The program that `trace` gives."""
        from ..passes.abi.caller_inputs import caller_inputs
        from ..schedule.contract import Contract
        p = self.of.trace()
        return KINDS[self.kind](caller_inputs(p, Contract(inputs=self.forms)) if self.forms else p)

    @cached_property
    def inputs(self) -> dict[str, tuple[str, tuple[Dim, ...]]]:  # type: ignore[override]
        """The heads and dims of each input."""
        return {t.name: (t.heads, t.dims) for t in self.trace().role("input") if t.index in ("token", "head")}

    @cached_property
    def states(self) -> dict[str, tuple[Dim, ...]]:  # type: ignore[override]
        """The dims of each state."""
        return {c.name: c.type.dims for c in self.trace().walk.carried}

    @cached_property
    def defaults(self) -> dict[str, float]:  # type: ignore[override]
        """The defaults of numbers of value heads."""
        return {t.name: float(t.fill) for t in self.trace().role("input") if t.index == "head" and t.fill}

    @cached_property
    def forgets(self) -> str:  # type: ignore[override]
        """The value that bounds what tokens forget."""
        return self.trace().forgets


def _without_padding(p: Program) -> Program:
    """`p`, whose sums over tokens leave out rows past the sequence's end where the graph does not show that these are zero.

    They are: no output depends on such a row, or the page itself would be wrong for a ragged tail.
    """
    wrong = {o.out for _, o, d in sums_over_padding(p) if d == "C"}
    body: list[Stmt] = []
    for s in p.walk.body:
        if isinstance(s, Op) and s.out in wrong:
            (a,) = s.args
            kept = f"{a}_valid"
            if not any(isinstance(o, Op) and o.out == kept for o in body):
                type_of = next(o.type for o in body if isinstance(o, Op) and o.out == a)
                body.append(Op("valid", kept, (a,), (), type_of, s.line))
            s = s.changed(args=(kept,))
        body.append(s)
    return p.with_walk(replace(p.walk, body=tuple(body)))


def _pruned(p: Program) -> Program:
    """`p` without ops of its walk whose values nobody reads, and without inputs that it does not load."""
    loop, alive = p.walk, {c.next for c in p.walk.carried} | {p.forgets}
    body: list[Stmt] = []
    for s in reversed(loop.body):
        assert isinstance(s, Op)
        if s.kind == "store" or s.out in alive:
            alive |= set(s.args)
            body.append(s)
    read = {s.attr("tensor") for s in body if isinstance(s, Op)}
    p = replace(p, tensors=tuple(t for t in p.tensors if t.index not in ("token", "head") or t.name in read))
    return p.with_walk(replace(loop, body=tuple(reversed(body))))
