"""Differentiates a page: the program of its gradients, and the program of the states that this one reads.

A traced program walks the chunks of a sequence and carries its states. The derivative of a loss by the state after a chunk is
known once all later chunks are done. So the program of the gradients walks the chunks from the last to the first (a loop of step
-1), and carries these derivatives (`d_S`). In a chunk it computes what it needs of the page's values again, from the inputs and
from the state before the chunk. Then it goes through the page's ops in reverse order, and `OpDef.vjp` gives each operand its part
of the cotangent. No rule knows a page.

The state before each chunk comes from memory, one tile for each chunk slot. `saving` gives a program that stores them: the page
itself, or without its outputs, where a call computes the states again instead of keeping them. It may also store what solves the
system of each chunk, which takes a product with the inverse and one with the state, and the inverse. Of the inverse it stores
what lies below the diagonal. The ones on the diagonal are a sum: T^T dU = dU + (T below the diagonal)^T dU. And it may store what
else both programs compute of a chunk's inputs alone (`ir/stored.py`).

A sum over the value heads of a key head is left to the caller: gradients of inputs of key heads have a row for each value head.
So is the sum over chunks of the gradient by a vector of a value head: the program gives the share of each chunk (index "slot").
By a number it gives the shares that `ir/reverse.py` describes.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .body import Body
from .core import NO_LINE, Carry, Loop, Op, Program, Stmt, walk
from .dataflow import ops_of
from .ops import OPS, TypeRuleError
from .padding import sums_over_padding
from .ranges import ANY, steps
from .reverse import Reverse
from .stored import Solved, held, stored, wide
from .types import ZEROED, Dim, Tensor


def chunk_states(name: str) -> str:
    """The tensor with the state `name` before each chunk, or with the solution `name` of each chunk."""
    return f"{name}_chunks"


#: The end of the name of such a tensor where its tiles lie as [V, K] (`passes/loops/transposition.py`).
TRANSPOSED = "_vk"


def derivative(name: str) -> str:
    """The name of the derivative of the loss by a value or tensor."""
    return f"d_{name}"


def saving(p: Program, outputs: bool = True, solved: Solved = "") -> Program:
    """The traced program `p`, which also stores the states before each chunk that its gradient reads.

    outputs: whether it stores the page's outputs, too. solved: as for `differentiate`; it stores what that one reads.
    """
    loop = p.walk
    kept = tuple(replace(t, role="output") for t in differentiate(p, solved).role("input") if t.index == "slot")
    read, states = stored(p, solved), {chunk_states(c.name): c.name for c in loop.carried}
    values, below = states | {chunk_states(x): x for x in read.values()}, {n: x for n, x in read.items() if n != x}
    stores, after = ([Op("store", "", (values[t.name],), (("tensor", t.name),)) for t in kept if (t.name in states) is first]
                     for first in (True, False))
    dropped = {t.name for t in p.role("output") if t.index == "token" and not outputs}
    body = [x for o in loop.body if isinstance(o, Op) and not (o.kind == "store" and o.attr("tensor") in dropped)
            for x in (o, *([Op("strictly_lower", below[o.out], (o.out,), (), o.type, o.line)] if o.out in below else []))]
    done = replace(p, name=f"{p.name}_saving" if outputs else f"{p.name}_states",
                   tensors=(*(t for t in p.tensors if t.name not in dropped), *kept))
    return _pruned(done.with_walk(replace(loop, body=(*stores, *body, *after))))


def differentiate(p: Program, solved: Solved = "") -> Program:
    """The program of the gradients of the traced program `p`.

    Its inputs are those of `p`, the states before each chunk, and the derivatives of the loss by the outputs (`d_o`) and by the
    final states (`d_final_state`, zero where absent). Its outputs are the derivatives by the inputs (`d_q`) and by the initial
    states (`d_initial_state`). TypeRuleError for an op without a derivative, with the line of the page.

    solved: what it reads from memory, too, as it does the states.
    """
    return _Gradient(p, stored(p, solved)).run()


class _Gradient:
    """Builds the program of the gradients of one page."""

    def __init__(self, p: Program, stored: Mapping[str, str]) -> None:
        """Nothing is built yet. stored: as for the function `stored`."""
        self.p, self.loop, self.stored = p, p.walk, stored
        self.inputs = [t for t in p.role("input") if t.index in ("token", "head") and not t.setting]
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
            if o.out in self.stored:
                x = self.stored[o.out]
                b.op("load", name=x if o.kind == "unit_lower_inverse" else o.out, line=o.line, tensor=chunk_states(x))
            elif o.kind != "store":
                b.copy(o)
        r = Reverse(self.p, b, {n: x for n, x in self.stored.items() if n not in b.types})
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
        """The tensors of the program: the page's inputs, states before chunks, and derivatives. Those of heads are as `program`
        finds them."""
        derived = [replace(t, name=derivative(t.name), role={"output": "input", "input": "output"}[t.role],
                           heads="HV", fill="", wide=t.wide or t.index == "head" or t.heads == "H",
                           optional=t.index == "sequence")
                   for t in self.p.tensors if t.index in ("token", "head", "sequence") and not t.setting]
        given = [t for t in self.p.role("input") if t.index != "sequence"]
        ops, in_float32, to_end, bounds = ops_of(self.p), wide(self.p), held(self.p), steps(self.p)
        states = [Tensor(chunk_states(c.name), "input", "slot", "HV", c.type.dims) for c in self.loop.carried]
        read = [Tensor(chunk_states(x), "input", "slot", "HV", o.type.dims, wide=n in in_float32,
                       fill="last" if n in to_end else "", least_step=bounds.get(n, ANY)[0])
                for n, x in self.stored.items() if (o := ops[n]).type is not None]
        return (*given, *states, *read, *derived)

    def in_shares(self, tensors: tuple[Tensor, ...], dims: Mapping[str, tuple[Dim, ...]]) -> tuple[Tensor, ...]:
        """The tensors, of which those by what a head has hold shares. dims: input -> of its gradient."""
        shares = {derivative(t.name): dims[t.name] for t in self.inputs if t.index == "head"}
        return tuple(t if t.name not in shares else replace(t, index="token", dims=("C",)) if shares[t.name] == ("C",)
                     else replace(t, index="slot", dims=shares[t.name], fill=ZEROED) for t in tensors)

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
        given = {t.name: self.unmasked(r, ct.get(reads.get(t.name, ""))) for t in self.inputs}
        dims = {t.name: r.type(x).dims if (x := given[t.name]) is not None else t.dims or ("C",) for t in self.inputs}
        tensors = self.in_shares(tensors, dims)
        found = [*((given[n], d) for n, d in dims.items()), *((ct.get(c.name), c.type.dims) for c in self.loop.carried)]
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
        done = replace(self.p, name=f"{self.p.name}_gradient", tensors=tensors, scales=(),
                       kernels=(replace(kernel, body=(*before, loop, *after)),))
        return _without_padding(_pruned(done))

    def unmasked(self, r: Reverse, ct: str | None) -> str | None:
        """The cotangent without zeros in rows past the sequence's end, which are not stored."""
        while ct is not None and ct not in r.ops and ct in r.defs and r.defs[ct].kind == "valid":
            (ct,) = r.defs[ct].args
        return ct

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


def _without_padding(p: Program) -> Program:
    """`p`, whose sums over tokens leave out rows past the sequence's end where the graph does not show that these are zero.

    They are: no output depends on such a row, or the page itself would be wrong for a ragged tail. Below the diagonal, column j
    meets rows after j only. So once rows past the end are zero, columns are.
    """
    wrong = {o.out for _, o, d in sums_over_padding(p) if d == "C"}
    body: list[Stmt] = []
    below = {s.out for s in p.walk.body if isinstance(s, Op) and s.kind == "strictly_lower"}
    for s in p.walk.body:
        assert isinstance(s, Op)
        if s.kind == "mul" and below & set(s.args):
            below.add(s.out)
        if s.out in wrong:
            (a,) = s.args
            kept = f"{a}_valid"
            if not any(isinstance(o, Op) and o.out == kept for o in body):
                type_of = next(o.type for o in body if isinstance(o, Op) and o.out == a)
                rows = f"{a}_rows" if a in below else kept
                body.append(Op("valid", rows, (a,), (), type_of, s.line))
                if rows != kept:
                    body.append(Op("strictly_lower", kept, (rows,), (), type_of, s.line))
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
    p = replace(p, tensors=tuple(t for t in p.tensors if t.index not in ("token", "head", "slot") or t.name in read))
    return p.with_walk(replace(loop, body=tuple(reversed(body))))
