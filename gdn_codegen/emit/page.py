"""Prints a traced page as torch code. Generated modules check their kernels against it.

The text has the ops of the traced page, before any pass. It works in the dtype of its inputs, with any leading dims (such as
heads) and any number of tokens in a chunk. There is no padding in it.
"""
from __future__ import annotations

from collections.abc import Callable

from ..ir.core import Loop, Op, Program, types
from ..ir.ops import OPS
from .base import EmitError

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_CALLS = {"maximum": "torch.maximum", "minimum": "torch.minimum", "exp": "torch.exp", "log": "torch.log", "rsqrt": "torch.rsqrt",
          "sigmoid": "torch.sigmoid"}
#: Functions for the text of other ops: (op, texts of operands) -> expression.
_OTHERS: dict[str, Callable[[Op, list[str]], str]] = {
    "const": lambda o, x: f"torch.tensor({o.attr('value')!r}, dtype=torch.float64)",
    "softplus": lambda o, x: f"torch.logaddexp({x[0]}, torch.zeros_like({x[0]}))",
    "cast": lambda o, x: x[0],
    "valid": lambda o, x: x[0],
    "col": lambda o, x: f"{x[0]}[..., :, None]",
    "row": lambda o, x: f"{x[0]}[..., None, :]",
    "cumsum": lambda o, x: f"{x[0]}.cumsum(-1)",
    "row_sum": lambda o, x: f"{x[0]}.sum(-1)",
    "diagonal": lambda o, x: f"{x[0]}.diagonal(dim1=-2, dim2=-1)",
    "lower": lambda o, x: _kept(x[0], 0, o.attr("fill", 0.0)),
    "strictly_lower": lambda o, x: _kept(x[0], -1, o.attr("fill", 0.0)),
    "unit_lower_inverse": lambda o, x: f"_unit_lower_inverse({x[0]})",
    "row_norm": lambda o, x: f"{x[0]} * torch.rsqrt({x[0]}.square().sum(-1, keepdim=True) + {o.attr('eps', 1e-6)!r})",
    "matmul": lambda o, x: f"{x[0]}{'.mT' if o.attr('ta') else ''} @ {x[1]}{'.mT' if o.attr('tb') else ''}",
}


def _kept(x: str, diagonal: int, fill: float) -> str:
    """The entries on and below a diagonal; the others become `fill`."""
    if not fill:
        return f"{x}.tril({diagonal})"
    return f"torch.where(torch.ones_like({x}).tril({diagonal}) > 0, {x}, float({str(fill)!r}))".replace("'", '"')


def page_text(p: Program) -> str:
    """The text of a function `_page(_inputs, _states, _numbers)` for one chunk. It returns the outputs, and then the next
    states."""
    (kernel,) = p.kernels
    (loop,) = (x for x in kernel.body if isinstance(x, Loop))
    ops = {o.out: o for o in loop.body if isinstance(o, Op) and o.out}
    stores = {o.attr("tensor"): o.args[0] for o in loop.body if isinstance(o, Op) and o.kind == "store"}
    outputs = [stores[t.name] for t in p.role("output") if t.index == "token"]
    results = [*outputs, *(c.next for c in loop.carried)]
    ranks, wanted = {n: t.rank for n, t in types(kernel.body).items()}, _wanted(ops, results)
    loads = {o.attr("tensor"): o.out for o in ops.values() if o.kind == "load"}
    inputs = [loads[t.name] for t in p.role("input") if t.index == "token"]
    groups = (("_inputs", inputs), ("_states", [c.name for c in loop.carried]), ("_numbers", list(p.scalars)))
    lines = [f"    {', '.join(names)}{',' if len(names) == 1 else ''} = {of}" for of, names in groups if names]
    source = dict(p.source)
    line = 0
    for o in ops.values():
        if o.out not in wanted or o.kind in ("load", "scalar"):
            continue
        if o.line != line and o.line in source:
            lines.append(f"    # {source[o.line]}")
            line = o.line
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


def _expression(o: Op, ranks: dict[str, int]) -> str:
    """The op as an expression in torch. ranks: value -> the rank of its tile, without the leading dims.

    EmitError if neither OpDef.text nor this file has an expression for the op.
    """
    rank = o.type.rank if o.type is not None else 0
    if o.kind in _INFIX or o.kind in _CALLS:
        # a number may have leading dims, which torch would align with the dims of the tile: broadcast it explicitly
        x = [a + f"[..., {', '.join('None' for _ in range(rank))}]" if rank and not ranks[a] else a for a in o.args]
        if o.kind in _CALLS:
            return f"{_CALLS[o.kind]}({', '.join(x)})"
        return f"{x[0]} {_INFIX[o.kind]} {x[1]}"
    if o.kind == "neg":
        return f"-{o.args[0]}"
    if o.kind == "last":
        return f"{o.args[0]}[..., -1]" if ranks[o.args[0]] == 1 else f"{o.args[0]}[..., -1:, :]"
    text = OPS[o.kind].text or _OTHERS.get(o.kind)
    if text is None:
        raise EmitError(f"the page in torch has no text for {o.kind} ({o.out}, line {o.line}); OpDef.text gives it")
    return text(o, list(o.args))
