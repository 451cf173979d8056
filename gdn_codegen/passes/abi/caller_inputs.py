"""caller_inputs: computes the page's inputs from what callers pass, as the contract's input forms say. All targets run it.

The contract names an input form for an input (`input_forms.py`). The pass inserts ops between the load and its readers:
- An elementwise form is an expression in the page's notation. It reads the loaded input x, and perhaps further tensors of one
  number per value head, or of one vector if x has rows.
- "l2norm": the rows of x, divided by sqrt(their sum of squares + 1e-6). This is a row scale; `row_scales` moves it out of
  products.
- "unit": x, whose rows have norm 1. Sums of squares of its rows become the constant 1. A load of x whose only use was such a
  sum is then dropped.

Values that are not zero on padding go through `valid`. Where a gradient is taken, each form ends with an op `boundary`.
"""
from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ...input_forms import INPUT_FORMS, InputForm
from ...ir.body import Body
from ...ir.core import Line, Op, Program
from ...ir.types import Tensor
from ...schedule.contract import Contract, ContractError
from ..common import walk_body, with_walk_body
from ..match import build
from ..stage import takes

EPS = 1e-6  # as in FLA


@takes("traced")
def caller_inputs(p: Program, c: Contract, narrow: bool = True, scaled: bool = True) -> Program:
    """`p` for callers that pass inputs as `c` says.

    narrow: whether the device reads 16-bit numbers per head; if not, the host casts them to float32. scaled: False where a
    gradient is taken. Else products may take rows before their norm, and what meets these is scaled. The scale of a row of zeros
    is then 0, which is no matter but for its derivative: that of x / sqrt(sum(x^2) + eps) is 1 / sqrt(eps) there. Raises
    ContractError if `c` names an input that `p` does not have, or a form or dtype that does not fit the input's dims.
    """
    tokens = {t.name: t for t in p.role("input") if t.index == "token"}
    of_heads = {n: fill for _, form in c.inputs for n, fill in INPUT_FORMS[form].heads.items()}
    numbers = {t.name: t for t in p.role("input") if t.index == "head" and not t.dims}
    dtypes = set(dict(c.dtypes)) - set(of_heads)
    of_chunks = {t.name: t for t in p.tensors if t.index == "slot" or (t.role == "output" and (t.wide or t.dims == ("C",)))}
    for field, names, known in (("inputs", dict(c.inputs), tokens), ("dtypes", dtypes, tokens | numbers | of_chunks)):
        for n in sorted(names):
            if n not in known:
                raise ContractError(f"{field}: got {n!r}; accepted: {', '.join(known)}, the inputs of {p.name}")
    for n in sorted(dtypes):
        if n in tokens and len(tokens[n].dims) > 1 and not tokens[n].wide:
            raise ContractError(f"dtypes: got {n}={c.dtype(n)!r}; accepted: a dtype for inputs of one number per token "
                                "and head, and log decays: "
                                f"{', '.join(x for x, t in tokens.items() if len(t.dims) == 1 or t.wide)}")
    for n, form in c.inputs:
        if INPUT_FORMS[form].rows and len(tokens[n].dims) == 1:
            fit = [f for f, x in INPUT_FORMS.items() if not x.rows]
            raise ContractError(f"inputs: got {n}={form!r}; accepted for {n}, dims {' '.join(map(str, tokens[n].dims))}: "
                                f"{', '.join(fit)}")
        if INPUT_FORMS[form].heads and [f for _, f in c.inputs].count(form) > 1:
            raise ContractError(f"inputs: got several {form} inputs; accepted: one, to which "
                                f"{' and '.join(INPUT_FORMS[form].heads)} belong")
    narrowed = {n for n in numbers if narrow and c.dtype(n) != "float32"}
    if not c.inputs and not narrowed:
        return p
    vectors = {n: tokens[of].dims[1:] for of, form in c.inputs for n in INPUT_FORMS[form].vectors}
    made = tuple(Tensor(n, "input", "head", "HV", dims := vectors.get(n, ()), c.dtype(n) if narrow and not dims else "float32",
                        fill=x, setting=any(n in INPUT_FORMS[f].settings for _, f in c.inputs)) for n, x in of_heads.items())
    if wide := [n for n, _ in c.dtypes if vectors.get(n)]:
        raise ContractError(f"dtypes: got {wide[0]}={c.dtype(wide[0])!r}; accepted: no dtype for a vector of each value head")
    clash = {t.name for t in made} & {*(t.name for t in p.tensors), *p.scalars}
    if clash:
        form = next(f for _, f in c.inputs if clash & set(INPUT_FORMS[f].heads))
        raise ContractError(f"inputs: got {form!r}, which needs tensors {', '.join(sorted(clash))}; {p.name} has other tensors "
                            "of these names")
    kept = tuple(replace(t, dtype=c.dtype(t.name)) if t.name in narrowed else t for t in p.tensors)
    return _Accept(replace(p, tensors=(*kept, *made)), c, scaled).run()


class _Accept:
    """Inserts the computation of each input's form after its load."""
    def __init__(self, p: Program, c: Contract, scaled: bool) -> None:
        self.p, self.c, self.scaled = p, c, scaled
        self.source: dict[int, str] = {}  # added lines; their numbers are below 0
        self.scales: list[str] = []
        self.unit: set[str] = set()  # inputs with rows of norm 1, and their squares

    def run(self) -> Program:
        """The program with the computation of each input's form after its load."""
        b = walk_body(self.p)
        for o in self.p.walk.body:
            assert isinstance(o, Op)
            form = self.c.input_form(o.attr("tensor", "")) if o.kind == "load" else ""
            of = self.p.tensor(o.attr("tensor")) if o.kind == "scalar" and o.attr("tensor") else None
            if of is not None and of.dtype != "float32":  # a number of the page that comes in 16 bits
                b.op("cast", b.op("scalar", tensor=of.name, dtype=of.dtype, line=o.line), to="float32", name=o.out, line=o.line)
                continue
            if form == "unit" or (o.kind == "mul" and o.args[0] == o.args[1] and o.args[0] in self.unit):
                self.unit.add(o.out)
            if o.kind == "row_sum" and o.args[0] in self.unit:
                b.op("full", name=o.out, line=o.line, dims=b.types[o.args[0]].dims[:1], value=1.0)
                continue
            if form in ("", "unit"):
                b.copy(o)
                continue
            self.line, self.wide = Line(-len(self.source) - 1), self.p.tensor(o.attr("tensor")).wide
            x = b.op("load", name=b.fresh(f"{o.out}_in"), **dict(o.attrs))
            text = self.l2norm(b, x, o.out) if INPUT_FORMS[form].rows else self.value(b, INPUT_FORMS[form], x, o.out)
            self.source[self.line.number] = f"{o.out} = {text}"
        done = with_walk_body(self.p, b.finish())
        return replace(done, source=(*self.source.items(), *self.p.source), scales=tuple(self.scales))

    def op(self, b: Body, kind: str, *args: str | float, name: str = "", **attrs: Any) -> str:
        return b.op(kind, *(b.op("const", value=a) if isinstance(a, float) else a for a in args), name=name, line=self.line,
                    **attrs)

    def number(self, b: Body, tensor: str) -> str:
        """A number of the head, cast to float32, or a row for a vector."""
        dtype = self.p.tensor(tensor).dtype
        if self.p.tensor(tensor).dims:
            return self.op(b, "row", self.op(b, "load", tensor=tensor))
        if dtype == "float32":
            return self.op(b, "scalar", tensor=tensor)
        return self.op(b, "cast", self.op(b, "scalar", tensor=tensor, dtype=dtype), to="float32")

    def give(self, b: Body, kind: str, *args: str, name: str) -> None:
        """Compute the value `name` of a form. Where a gradient is taken, it lies behind a boundary."""
        made = self.op(b, kind, *args, name=name if self.scaled else "")
        if not self.scaled:
            self.op(b, "boundary", made, name=name, wide=self.wide)

    def value(self, b: Body, form: InputForm, x: str, name: str) -> str:
        """Compute a form's value of the loaded x and of numbers of the head. Returns the text of the added line."""
        found = {"x": x, **{n: self.number(b, n) for n in form.heads}}
        made = build(form.value, found, lambda kind, args, attrs: self.op(b, kind, *args, **dict(attrs)))
        self.give(b, "valid", made, name=name)
        return re.sub(r"\bx\b", x, form.value)

    def l2norm(self, b: Body, x: str, name: str) -> str:
        """Scale the rows of the loaded x by one divided by their norms. Returns the text of the added line."""
        total = self.op(b, "row_sum", self.op(b, "mul", x, x))
        r = b.fresh(f"r{name}")
        if self.scaled:
            some = self.op(b, "minimum", self.op(b, "mul", total, 2.0 ** 60), 1.0)  # 0 for a row of zeros, so that r is 0 there
            self.op(b, "mul", self.op(b, "rsqrt", self.op(b, "add", total, EPS)), some, name=r)
            self.scales.append(r)
        else:
            self.op(b, "rsqrt", self.op(b, "add", total, EPS), name=r)
        self.give(b, "mul", self.op(b, "col", r), x, name=name)
        return f"{r}[:, None] * {x} with {r} = rsqrt(row_sum({x} * {x}) + {EPS}); products take {x}, and what meets it is scaled"

