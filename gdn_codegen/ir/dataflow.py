"""The ops of a traced program by the names of their values, and what depends on what."""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from .core import Op, Program


def ops_of(p: Program) -> dict[str, Op]:
    """The ops of a chunk, by the name of their value."""
    return {o.out: o for o in p.walk.body if isinstance(o, Op) and o.out}


def after(ops: Iterable[Op], starts: Collection[str]) -> set[str]:
    """The values that depend on one of `starts`, and these themselves."""
    out = set(starts)
    for o in ops:
        if not out.isdisjoint(o.args):
            out.add(o.out)
    return out


def exponents(ops: Sequence[Op]) -> set[str]:
    """The values on which an exponent depends, other than through a product."""
    out: set[str] = set()
    for o in reversed(ops):
        if o.kind == "exp" or (o.out in out and o.kind != "matmul"):
            out |= set(o.args)
        elif o.kind in ("decayed_product", "decayed_matmul", "decayed_blocks", "decayed_pairs"):
            out |= set(o.args[2:])
    return out


def terms_of_sums(ops: Sequence[Op]) -> set[str]:
    """The values that running sums of tiles add up, and those of which these are sums. Not factors: their rounding is relative to
    the product."""
    out: set[str] = set()
    for o in reversed(ops):
        if o.kind == "cumsum" and o.type is not None and o.type.rank == 2:
            out |= set(o.args)
        elif o.out in out and o.kind in ("add", "sub", "neg", "valid"):
            out |= set(o.args)
    return out


def unit_rows(o: Op, defs: Mapping[str, Op]) -> tuple[str, str] | None:
    """(r, x) where `o` computes r[:, None] * x with r = rsqrt(row_sum(x * x) + c) and a constant c: rows divided by their norms.
    None for other ops. defs: the ops of values."""
    def made(value: str, kind: str) -> tuple[str, ...]:
        """The operands of the op that makes a value, () if it is of another kind."""
        found = defs.get(value)
        return found.args if found is not None and found.kind == kind else ()

    for scale, x in (o.args, o.args[::-1]) if o.kind == "mul" else ():
        for r in made(scale, "col"):
            for total in made(r, "rsqrt"):
                terms = made(total, "add") or (total,)
                squares = [a for a in terms if made(next(iter(made(a, "row_sum")), ""), "mul") == (x, x)]
                if len(squares) == 1 and all(a in squares or (a in defs and defs[a].kind == "const") for a in terms):
                    return r, x
    return None
