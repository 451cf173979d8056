"""Prints a traced page, and formulas of input forms, as torch code. Generated modules check their kernels against it.

The text has the ops of the traced page, before any pass. It works in the dtype of its inputs, with any leading dims (such as
heads) and any number of tokens in a chunk. There is no padding in it. Inputs are those of tokens, then those of heads, and then
those of chunks, such as the state before the chunk.
"""
from __future__ import annotations

from ..ir.core import Loop, Op, Program, types
from ..ir.notation import Pattern, pattern
from ..ir.ops import OPS
from .base import EmitError


def page_text(p: Program) -> str:
    """The text of a function `_page(_inputs, _states, _numbers)` for one chunk. It returns the outputs of tokens, those of the
    chunk, and then the next states. p: traced; its `dims` have the sizes of all dims that its text may need."""
    (kernel,) = p.kernels
    (loop,) = (x for x in kernel.body if isinstance(x, Loop))
    sizes = {d: n for d, n in p.dims if d != "C"}
    ops = {o.out: _sized(o, sizes) for o in loop.body if isinstance(o, Op) and o.out}
    stores = {o.attr("tensor"): o.args[0] for o in loop.body if isinstance(o, Op) and o.kind == "store"}
    outputs = [stores[t.name] for index in ("token", "slot") for t in p.role("output") if t.index == index]
    results = [*outputs, *(c.next for c in loop.carried)]
    ranks, wanted = {n: t.rank for n, t in types(kernel.body).items()}, _wanted(ops, results)
    reads = {o.attr("tensor"): o.out for o in ops.values() if o.attr("tensor")}
    inputs = [reads[t.name] for index in ("token", "head", "slot") for t in p.role("input") if t.index == index]
    groups = (("_inputs", inputs), ("_states", [c.name for c in loop.carried]), ("_numbers", list(p.scalars)))
    lines = [f"    {', '.join(names)}{',' if len(names) == 1 else ''} = {of}" for of, names in groups if names]
    if any("C" in o.attr("dims", ()) for n, o in ops.items() if n in wanted):
        lines.append(f"    _tokens = {inputs[0]}.shape[{-ranks[inputs[0]]}]")
    source = dict(p.source)
    line = 0
    for o in ops.values():
        if o.out not in wanted or o.kind in ("load", "scalar"):
            continue
        if o.line.number != line and o.line.number in source:
            lines.append(f"    # {source[o.line.number]}")
            line = o.line.number
        lines.append(f"    {o.out} = {_expression(o, ranks)}")
    lines.append(f"    return {', '.join(results)}{',' if len(results) == 1 else ''}")
    return "\n".join(("def _page(_inputs, _states, _numbers):", *lines))


def _wanted(ops: dict[str, Op], results: list[str]) -> set[str]:
    """The values that results depend on."""
    seen: set[str] = set()
    todo = list(results)
    while todo:
        n = todo.pop()
        if n in ops and n not in seen:
            seen.add(n)
            todo += ops[n].args
    return seen


def _sized(o: Op, sizes: dict[str, int]) -> Op:
    """`o` with numbers for the dims that its attribute names, other than the tokens of a chunk."""
    return o.with_attrs(dims=tuple(sizes.get(str(d), d) for d in o.attr("dims"))) if o.attr("dims") else o


def _expression(o: Op, ranks: dict[str, int]) -> str:
    """The op as an expression in torch. ranks: value -> the rank of its tile, without the leading dims.

    EmitError if the op has no `OpDef.text`.
    """
    d, rank = OPS[o.kind], o.type.rank if o.type is not None else 0
    if d.text is None:
        raise EmitError(f"the page in torch has no text for {o.kind} ({o.out}, {o.line}); OpDef.text gives it")
    # a number may have leading dims, which torch would align with the dims of the tile: broadcast it explicitly
    return d.text(o, [a + f"[..., {', '.join('None' for _ in range(rank))}]" if d.elementwise and rank and not ranks[a] else a
                      for a in o.args])


def formula(text: str, names: tuple[str, ...]) -> str:
    """An expression in the notation of pages as an expression in torch. names: those that it may use.

    EmitError if it is no expression over these, or if an op of it has no `OpDef.text`.
    """
    def shown(p: Pattern) -> str:
        if not p.kind:
            if p.name not in names:
                raise EmitError(f"{p.name!r} in {text!r}; accepted: {', '.join(names)}")
            return p.name
        rule = OPS[p.kind].text if p.kind in OPS else None
        if rule is None:
            raise EmitError(f"{p.kind!r} in {text!r}; accepted: ops of pages")
        args = [shown(a) if a.kind in ("", "const") else f"({shown(a)})" for a in p.args]
        return rule(Op(p.kind, "", tuple(args), p.attrs), args)
    try:
        found = pattern(text)
    except (SyntaxError, AssertionError, LookupError, AttributeError, TypeError) as e:
        raise EmitError(f"{text!r}; accepted: an expression in the notation of pages") from e
    return shown(found)
