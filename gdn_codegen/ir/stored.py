"""What a gradient may read from memory beside states, because the program of the states computes it, too.

That is what solves the system of each chunk, the inverse, and values that depend on no state: operands of products, decayed
products, running sums. A gradient that reads them computes no value twice that takes time.
"""
from __future__ import annotations

from typing import Literal

from .body import free
from .core import Op, Program
from .padding import zero_beyond

#: What a gradient reads beside states: nothing, the solutions of each chunk, these and the inverses that only these read, or
#: these and what else `operands` finds.
Solved = Literal["", "solutions", "inverses", "operands"]
#: How names of derived pages begin whose gradients read that.
PREFIXES: dict[Solved, str] = {"operands": "stored_", "inverses": "inverse_", "solutions": "solved_", "": ""}


def solutions(p: Program) -> list[str]:
    """The values of a chunk that solve a system: products of an inverse and of what depends on a state, with the columns of the
    first one."""
    loop = p.walk
    defs, of_state = ops_of(p), {c.name for c in loop.carried}
    for o in defs.values():
        of_state |= {o.out} if of_state & set(o.args) else set()
    return [o.out for o in defs.values() if o.kind == "matmul" and not o.attr("ta") and o.args[1] in of_state
            and o.args[0] in defs and defs[o.args[0]].kind == "unit_lower_inverse"
            and o.type is not None and o.type.dims == ("C", *loop.carried[0].type.dims[1:])]


def inverses(p: Program) -> list[str]:
    """The inverses of a chunk that only solutions read, as the left operand of their product."""
    found, ops = set(solutions(p)), [o for o in p.walk.body if isinstance(o, Op)]
    return [x.out for x in ops if x.kind == "unit_lower_inverse"
            and all(o.out in found and o.args[1:] != (x.out,) and not o.attr("tb") for o in ops if x.out in o.args)]


def operands(p: Program) -> list[str]:
    """The values of a chunk that depend on no state, and that take time to compute or that products read: computed operands of
    products, decayed products, running sums, converted inputs, and vectors by which a state, or what depends on one, is scaled.
    Tiles are zero where they are larger than the caller's tensors, as readers assume (`ir/padding.py`)."""
    ops = ops_of(p)
    of_state, found = {c.name for c in p.walk.carried}, set[str]()
    for o in ops.values():
        of_state |= {o.out} if of_state & set(o.args) else set()
        found |= {o.out} if o.kind in ("decayed_product", "cumsum") or (o.kind == "boundary" and not o.attr("wide")) else set()
        found |= set(o.args) if o.kind == "matmul" else set()
        if o.out in of_state:
            found |= {v for a in o.args if a in ops and ops[a].kind in ("col", "row") for v in ops[a].args}
    zero = zero_beyond(p)
    return [n for n, o in ops.items() if n in found - of_state and o.kind != "load" and (
        wide(o) or all(d == "C" or i in zero[n] for i, d in enumerate(o.type.dims if o.type else ())))]


def ops_of(p: Program) -> dict[str, Op]:
    """The ops of a chunk, by the name of their value."""
    return {o.out: o for o in p.walk.body if isinstance(o, Op) and o.out}


def _below(p: Program, n: str) -> bool:
    """Whether all that reads a value takes what lies below the diagonal, of it or of its product with a column or row."""
    ops = ops_of(p)
    readers = [o for o in p.walk.body if isinstance(o, Op) and n in o.args]
    return bool(readers) and all(
        o.kind == "strictly_lower" or (o.kind == "mul" and any(x in ops and ops[x].kind in ("col", "row") for x in o.args)
                                       and _below(p, o.out)) for o in readers)


def stored(p: Program, solved: Solved) -> dict[str, str]:
    """What a gradient reads beside states: values of `p`, and what is stored of each. That is the value, or what lies below the
    diagonal. It has a name that the page does not have."""
    strict = inverses(p) if solved in ("inverses", "operands") else []
    found = [*(solutions(p) if solved else ()), *(operands(p) if solved == "operands" else ())]
    ops = ops_of(p)
    strict += [n for n in found if ops[n].kind == "decayed_product" and _below(p, n)]
    return {n: n for n in found if n not in strict} | {n: free(f"{n}_below", set(ops)) for n in strict}


def wide(o: Op) -> bool:
    """Whether what is stored of an op's value stays in float32: exponents, and vectors."""
    return o.kind == "cumsum" or (o.type is not None and o.type.rank == 1)
