"""What a gradient may read from memory beside states, because the program of the states computes it, too.

That is what solves the system of each chunk, the inverse, and values that depend on no state: operands of products, decayed
products, running sums, converted inputs. A gradient that reads them computes few of these values again.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Literal

from .body import Body, free
from .core import Op, Program
from .dataflow import after, exponents, ops_of, unit_rows
from .decays import channels_apart
from .padding import zero_beyond

#: What a gradient reads beside states: nothing, the solutions of each chunk, these and the inverses that only these read, or
#: these and what else `operands` finds. "bounds": also what bounds how much each token forgets (`by_token`).
Solved = Literal["", "solutions", "inverses", "operands", "bounds"]
#: How names of derived pages begin whose gradients read that.
PREFIXES: dict[Solved, str] = {"bounds": "bounded_", "operands": "stored_", "inverses": "inverse_", "solutions": "solved_",
                               "": ""}


def solutions(p: Program) -> list[str]:
    """The values of a chunk that solve a system: products of an inverse and of what depends on a state, with the columns of the
    first one."""
    ops, carried = ops_of(p), p.walk.carried
    of_state = after(ops.values(), {c.name for c in carried})
    return [o.out for o in ops.values() if o.kind == "matmul" and not o.attr("ta") and o.args[1] in of_state
            and o.args[0] in ops and ops[o.args[0]].kind == "unit_lower_inverse"
            and o.type is not None and o.type.dims == ("C", *carried[0].type.dims[1:])]


def inverses(p: Program) -> list[str]:
    """The inverses of a chunk that only solutions read, as the left operand of their product."""
    found, ops = set(solutions(p)), [o for o in p.walk.body if isinstance(o, Op)]
    return [x.out for x in ops if x.kind == "unit_lower_inverse"
            and all(o.out in found and o.args[1:] != (x.out,) and not o.attr("tb") for o in ops if x.out in o.args)]


def operands(p: Program) -> list[str]:
    """The values of a chunk that depend on tokens and on no state, and that take time to compute or that products read: computed
    operands of products, decayed products, running sums, converted inputs, one divided by the norm of each of their rows, and
    vectors by which a state, or what depends on one, is scaled.

    Leaves out tiles that are not zero past the caller's K or V, because readers assume zeros there. What stays in float32
    (`wide`) may be anything there.
    """
    ops, found = ops_of(p), set[str]()
    tokens = {o.out for o in ops.values() if o.kind == "load" and p.tensor(o.attr("tensor")).index == "token"}
    of_state, of_tokens = (after(ops.values(), x) for x in ({c.name for c in p.walk.carried}, tokens))
    for o in ops.values():
        if o.kind in ("decayed_product", "cumsum") or (o.kind == "boundary" and not o.attr("wide")):
            found.add(o.out)
            found |= set((unit_rows(ops[o.args[0]], ops) or ())[:1]) if o.kind == "boundary" else set()
        if o.kind == "matmul":
            found |= set(o.args)
        if o.out in of_state:
            found |= {v for a in o.args if a in ops and ops[a].kind in ("col", "row") for v in ops[a].args}
    zero, kept = zero_beyond(p), wide(p)
    return [n for n, o in ops.items() if n in (found & of_tokens) - of_state and o.kind != "load" and (
        n in kept or all(d == "C" or i in zero[n] for i, d in enumerate(o.type.dims if o.type else ())))]


def by_token(p: Program) -> Program:
    """`p`, in which one number of each token bounds what the token leaves of the state: that of the slowest channel, where a page
    has one for each channel and these do not keep apart (`passes/cut/decay_bound.py`). Otherwise `p` itself."""
    bound = ops_of(p)[p.forgets].type if p.forgets else None
    if bound is None or bound.rank == 1 or channels_apart(p):
        return p
    b, dim = Body({t.name: t for t in p.tensors}, {c.name: c.type for c in p.walk.carried}), bound.dims[-1]
    for o in p.walk.body:
        assert isinstance(o, Op)
        b.copy(o)
    rows = b.op("valid", b.op("row_max", p.forgets, within=dim), name=b.fresh(f"{p.forgets}_of_tokens"))
    return replace(p, forgets=rows).with_walk(replace(p.walk, body=b.finish()))


def stored(p: Program, solved: Solved) -> dict[str, str]:
    """What a gradient reads beside states: values of `p`, and what is stored of each. That is the value, or what lies below the
    diagonal, by a name that the page does not have. p: for "bounds" what `by_token` gives of a page that it changes."""
    all_operands = solved in ("operands", "bounds")
    strict = inverses(p) if solved == "inverses" or all_operands else []
    found = [*(solutions(p) if solved else ()), *(operands(p) if all_operands else ())]
    ops = ops_of(p)
    found += [p.forgets] if solved == "bounds" and p.forgets not in ("", *found) else []
    strict += [n for n in found if ops[n].kind == "decayed_product" and _below(ops, n)]
    return {n: n for n in found if n not in strict} | {n: free(f"{n}_below", set(ops)) for n in strict}


def wide(p: Program) -> set[str]:
    """The values that stay in float32 where they are stored: exponents, running sums, and vectors."""
    ops = ops_of(p)
    of_exp = exponents(list(ops.values()))
    return {n for n, o in ops.items() if n in of_exp or o.kind == "cumsum" or (o.type is not None and o.type.rank == 1)}


def held(p: Program) -> set[str]:
    """Those of `wide` that are not zero past a sequence's end. They have their last row there, as running sums of zeros do, or
    what no reader uses, as one divided by the norms of rows."""
    zero = zero_beyond(p)
    return {n for n in wide(p) if 0 not in zero[n]}


def _below(ops: dict[str, Op], n: str) -> bool:
    """Whether all that reads a value takes what lies below the diagonal, of it or of its product with a column or row."""
    readers = [o for o in ops.values() if n in o.args]
    return bool(readers) and all(
        o.kind == "strictly_lower" or (o.kind == "mul" and any(x in ops and ops[x].kind in ("col", "row") for x in o.args)
                                       and _below(ops, o.out)) for o in readers)
