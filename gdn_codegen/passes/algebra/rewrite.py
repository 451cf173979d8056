"""rewrite: algebra on the algorithm's graph, by `form`.

"wy": a product M @ Y of a Y affine in the carried state S, Y = Y0 + F S, becomes an offset M Y0 and a weight M F: M Y0 + (M F) S.
"split": a product M @ (b * (Y0 - Z)) of a state-free M and column b, with Z of the carried state, becomes M' @ Y0 + M' @ -Z with
M' = M * b^T.
"unit": a product of an inverse M, which has ones on its diagonal, with X becomes X + M' @ X, M' what M has below them: as an
operand X is rounded to 16 bit, as a summand it is not.
In both, (I + b * N)^-1 @ (b * Y) of a column b is b times delta = (I + N * b^T)^-1 @ Y: what reads the product reads delta, and b
multiplies what does not wait for the state. So M' is the inverse itself: rounded to 16 bit it is still nearly the inverse of
something near, which M * b^T is not, and keys that are alike tell.
"gate-free": decay D[i, j] = exp(x_i - x_j) is a conjugation by diag(exp(x)), so the inverse of I + (B * D) is the
inverse of I + B, times D.
"""
from __future__ import annotations

from collections.abc import Callable

from ...ir.builder import Body
from ...ir.core import Loop, Op, Program, types, uses
from ...schedule.schedule import Schedule, ScheduleError
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def rewrite(p: Program, s: Schedule) -> Program:
    """`p` in the schedule's form."""
    if s.form == "direct":
        return p
    forms: dict[str, Callable[[Program, Schedule, Loop], tuple[Op, ...]]] = {
        "gate-free": _gate_free, "wy": _wy, "split": _split, "unit": _unit}
    return with_walk_body(p, forms[s.form](p, s, p.walk))


def _ops(loop: Loop) -> list[Op]:
    return [o for o in loop.body if isinstance(o, Op)]


def _is_plain(o: Op) -> bool:
    """A product of two tiles as they lie."""
    return o.kind == "matmul" and len(o.args) == 2 and not o.attr("ta") and not o.attr("tb")


def _gate_free(p: Program, s: Schedule, loop: Loop) -> tuple[Op, ...]:
    """The walk with decay moved out of inverses: that of A * D is that of A, times D entry by entry, for D = exp(x[:, None] -
    x[None, :]).

    ScheduleError where no inverted tile has a decay as a factor.
    """
    defs = {o.out: o for o in _ops(loop)}
    count, tile = uses(loop.body), types(loop.body)
    b, decays = walk_body(p), {}
    for o in defs.values():  # the tiles to be inverted whose decay factors out, with that decay
        a = defs.get(o.args[0]) if o.kind == "unit_lower_inverse" else None
        if a is not None and a.kind == "strictly_lower" and count[a.out] == 1:
            factors = _factors(a.args[0], defs)
            decay = next((f for f in factors if _is_decay(f, defs)), None)
            rest = [f for n, f in enumerate(factors) if decay is None or n != factors.index(decay)]
            if decay is not None and any(tile[f] == tile[a.out] for f in rest):  # which is then masked alone
                decays[a.out] = decays[o.out] = decay
    if not decays:
        raise ScheduleError(f"schedule {s.name}: form gate-free needs unit_lower_inverse(strictly_lower(... * "
                            f"exp(lower(x[:, None] - x[None, :], fill=-inf)))), which {p.name} has not")
    for o in _ops(loop):
        decay = decays.get(o.out)
        if decay is None:
            b.copy(o)
        elif o.kind == "strictly_lower":
            factors = _factors(o.args[0], defs)
            factors.remove(decay)
            b.op("strictly_lower", _product(b, factors, o.line), line=o.line, name=o.out)
        else:
            free = b.op("unit_lower_inverse", o.args[0], line=o.line, name=b.fresh(f"{o.out}_free"))
            b.op("mul", free, decay, line=o.line, name=o.out)
    return b.finish()  # type: ignore[return-value]


def _factors(name: str, defs: dict[str, Op]) -> list[str]:
    o = defs.get(name)
    return [name] if o is None or o.kind != "mul" else [f for a in o.args for f in _factors(a, defs)]


def _is_decay(name: str, defs: dict[str, Op]) -> bool:
    """exp(lower(x[:, None] - x[None, :], fill=-inf)) of one vector x."""
    chain = []
    for kind in ("exp", "lower", "sub"):
        o = defs.get(name)
        if o is None or o.kind != kind:
            return False
        chain.append(o)
        name = o.args[0]
    if chain[1].attr("fill") != float("-inf"):
        return False
    left, right = (defs.get(a) for a in chain[2].args)
    return (left is not None and right is not None and (left.kind, right.kind) == ("col", "row")
            and left.args == right.args)


def _wy(p: Program, s: Schedule, loop: Loop) -> tuple[Op, ...]:
    """The walk with T @ (y - W @ S) as T @ y - (T @ W) @ S: then two of the products need no state.

    ScheduleError where no state-free tile is multiplied with what is affine in a state.
    """
    defs = {o.out: o for o in _ops(loop)}
    states = {c.name for c in loop.carried}
    b, tile = walk_body(p), types(loop.body)
    depends: dict[str, bool] = dict.fromkeys(states, True)
    for o in defs.values():
        depends[o.out] = any(depends.get(a, False) for a in o.args)

    def affine(name: str) -> tuple[str | None, tuple[str, str, bool] | None]:
        """name = offset + sign * factor @ state, as (offset, (factor, state, negative)); None where it is not."""
        if not depends.get(name):
            return name, None
        o = defs.get(name)
        if o is None:
            raise _NotAffine
        free = [a for a in o.args if not depends.get(a)]
        if o.kind == "matmul" and o.args[1] in states and not depends.get(o.args[0]) and not o.attr("tb"):
            if o.attr("ta"):
                raise _NotAffine
            return None, (o.args[0], o.args[1], False)
        if o.kind == "mul" and len(free) == 1 and tile[free[0]].dims in ((), ("C", 1)):
            y0, f = affine(next(a for a in o.args if depends.get(a)))
            assert f is not None
            return (b.op("mul", free[0], y0, line=o.line) if y0 else None,
                    (b.op("mul", free[0], f[0], line=o.line), f[1], f[2]))
        if o.kind in ("add", "sub") and len(free) == 1:
            at = o.args.index(free[0])
            y0, f = affine(o.args[1 - at])
            assert f is not None
            negative = f[2] ^ (o.kind == "sub" and at == 0)
            if y0 is None:
                y0 = b.op("neg", free[0], line=o.line) if o.kind == "sub" and at == 1 else free[0]
            else:
                y0 = b.op(o.kind, *((free[0], y0) if at == 0 else (y0, free[0])), line=o.line)
            return y0, (f[0], f[1], negative)
        raise _NotAffine

    done = 0
    for o in _ops(loop):
        if _is_plain(o) and o.args[1] not in states and not depends[o.args[0]] and depends[o.args[1]]:
            try:
                y0, f = affine(o.args[1])
            except _NotAffine:
                y0, f = None, None
            if y0 is not None and f is not None:
                offset = b.op("matmul", o.args[0], y0, name=b.fresh(f"{o.out}_offset"), line=o.line)
                weight = b.op("matmul", o.args[0], f[0], name=b.fresh(f"{o.out}_weight"), line=o.line)
                b.op("sub" if f[2] else "add", offset, b.op("matmul", weight, f[1], line=o.line), name=o.out, line=o.line)
                done += 1
                continue
        b.copy(o)
    if not done:
        raise ScheduleError(f"schedule {s.name}: form wy needs a product of a state-free tile with one affine in the "
                            f"carried state, which {p.name} has not")
    return b.finish()  # type: ignore[return-value]


class _Through:
    """Copies ops; columns that go through an inverse move to what reads the product. columns: from `_columns`."""

    def __init__(self, b: Body, loop: Loop, columns: dict[str, tuple[str, list[str]]]) -> None:
        self.b, self.columns = b, columns
        self.defs, self.tile = {o.out: o for o in _ops(loop)}, types(loop.body)
        self.scaled: dict[str, tuple[str, str]] = {}  # a product that is x[:, None] * z, as (x, z)

    def by_row(self, factors: list[str], x: str, line: int) -> str:
        """The factors' product, the last tile of them times x[None, :]."""
        at = max(n for n, f in enumerate(factors) if self.tile[f].dims == ("C", "C"))
        new = self.b.op("mul", factors[at], self.b.op("row", x, line=line), line=line)
        return _product(self.b, [*factors[:at], new, *factors[at + 1:]], line)

    def multiplied(self, o: Op, z: str) -> None:
        """`o`, a product in `columns`, as its column times z."""
        x = self.columns[o.out][0]
        self.scaled[o.out] = x, z
        self.b.op("mul", self.b.op("col", x, line=o.line), z, line=o.line, name=o.out)

    def copy(self, o: Op) -> None:
        """Copy an op; a column that goes through an inverse is applied where the product is read."""
        b, defs, tile = self.b, self.defs, self.tile
        if o.kind == "strictly_lower" and o.out in self.columns:
            x, factors = self.columns[o.out]
            b.op("strictly_lower", self.by_row(factors, x, o.line), line=o.line, name=o.out)
        elif _is_plain(o) and o.args[1] in self.scaled and tile[o.args[0]].dims == ("C", "C"):
            x, z = self.scaled[o.args[1]]
            factors = _factors(o.args[0], defs)
            if not any(tile[f].dims == ("C", "C") for f in factors):
                factors = [o.args[0]]
            b.op("matmul", self.by_row(factors, x, o.line), z, line=o.line, name=o.out)
        elif o.kind == "mul" and o.args[1] in self.scaled and o.args[0] in defs and defs[o.args[0]].kind == "col":
            x, z = self.scaled[o.args[1]]
            both = b.op("mul", defs[o.args[0]].args[0], x, line=o.line)
            b.op("mul", b.op("col", both, line=o.line), z, line=o.line, name=o.out)
        else:
            b.copy(o)


def _split(p: Program, s: Schedule, loop: Loop) -> tuple[Op, ...]:
    """The walk with T @ (b[:, None] * (y - z)), where z alone waits for the state, as (T * b[None, :]) @ y - (T * b[None, :]) @
    z.

    ScheduleError where there is no such product.
    """
    defs, b = {o.out: o for o in _ops(loop)}, walk_body(p)
    waits = {c.name for c in loop.carried}
    for o in _ops(loop):
        if waits & set(o.args):
            waits.add(o.out)

    def parts(o: Op) -> tuple[str, Op] | None:
        """b and y - z, where `o` is a state-free tile @ (b[:, None] * (y - z)) and z alone waits for the state."""
        scaled = defs.get(o.args[1]) if _is_plain(o) and o.args[0] not in waits else None
        if scaled is None or scaled.kind != "mul":
            return None
        column, rest = sorted((defs.get(a) for a in scaled.args), key=lambda x: x is None or x.kind != "col")
        if column is None or column.kind != "col" or column.out in waits or rest is None or rest.kind != "sub" \
                or [a in waits for a in rest.args] != [False, True]:
            return None
        return column.args[0], rest

    found = {o.out: x for o in _ops(loop) if (x := parts(o))}
    if not found:
        raise ScheduleError(f"schedule {s.name}: form split needs a product of a state-free tile with b[:, None] * (y - z), z "
                            f"of the carried state, which {p.name} has not")
    columns = {n: x for n, x in _columns(s, loop).items() if n in found or defs[n].kind == "strictly_lower"}
    through = _Through(b, loop, columns)
    inverses = {defs[n].args[0] for n in columns if n in found}
    names: dict[str, str] = {}
    for o in _ops(loop):
        if o.out in inverses:
            names[o.out] = b.op(o.kind, *o.args, line=o.line, name=b.fresh(f"{o.out}_scaled"))
        elif o.out in found:
            column, rest = found[o.out]
            weight = names.get(o.args[0])
            if weight is None:
                weight = b.op("mul", o.args[0], b.op("row", column, line=o.line), name=b.fresh(f"{o.args[0]}_scaled"),
                              line=o.line)
            start = b.op("matmul", weight, rest.args[0], name=b.fresh(f"{o.out}_offset"), line=o.line)
            more = b.op("matmul", weight, b.op("neg", rest.args[1], line=o.line), line=o.line)
            name = b.fresh(f"{o.out}_unscaled") if o.out in columns else o.out
            both = b.op("add", start, more, name=name, line=o.line)
            if o.out in columns:
                through.multiplied(o, both)
        else:
            through.copy(o)
    return b.finish()  # type: ignore[return-value]


def _unit(p: Program, s: Schedule, loop: Loop) -> tuple[Op, ...]:
    """The walk with T @ y as y + strictly_lower(T) @ y, as the diagonal of the inverse T is 1.

    ScheduleError where no inverse is multiplied.
    """
    inverses = {o.out for o in _ops(loop) if o.kind == "unit_lower_inverse"}
    columns, b, done = _columns(s, loop), walk_body(p), 0
    through = _Through(b, loop, columns)
    for o in _ops(loop):
        if not _is_plain(o) or o.args[0] not in inverses:
            through.copy(o)
            continue
        y = _product(b, columns[o.out][1] if o.out in columns else [o.args[1]], o.line)
        off = b.op("strictly_lower", o.args[0], line=o.line, name=b.fresh(f"{o.args[0]}_below"))
        name = b.fresh(f"{o.out}_unscaled") if o.out in columns else o.out
        z = b.op("add", y, b.op("matmul", off, y, line=o.line), line=o.line, name=name)
        if o.out in columns:
            through.multiplied(o, z)
        done += 1
    if not done:
        raise ScheduleError(f"schedule {s.name}: form unit needs a product of a unit_lower_inverse, which {p.name} has not")
    return b.finish()  # type: ignore[return-value]


def _columns(s: Schedule, loop: Loop) -> dict[str, tuple[str, list[str]]]:
    """Where U = (I + A)^-1 @ (x[:, None] * Y), A = strictly_lower(x[:, None] * N), and U alone reads the inverse, and it alone A:
    x and the factors of N by A's name, and x and those of Y by U's."""
    defs, count, tile = {o.out: o for o in _ops(loop)}, uses(loop.body), types(loop.body)
    named = {n for g in s.kernels for n in g}
    found = {}
    for o in defs.values():
        inverse = defs.get(o.args[0]) if _is_plain(o) else None
        a = defs.get(inverse.args[0]) if inverse is not None and inverse.kind == "unit_lower_inverse" else None
        if inverse is None or a is None or a.kind != "strictly_lower" or count[inverse.out] > 1 or count[a.out] > 1 \
                or named & {o.out, inverse.out, a.out}:
            continue
        low, high = _factors(a.args[0], defs), _factors(o.args[1], defs)
        column = next((f for f in low if f in defs and defs[f].kind == "col" and f in high), "")
        if column:
            low.remove(column)
            high.remove(column)
            if any(tile[f].dims == ("C", "C") for f in low) and any(tile[f] == tile[o.args[1]] for f in high):
                found.update({a.out: (defs[column].args[0], low), o.out: (defs[column].args[0], high)})
    return found


def _product(b: Body, factors: list[str], line: int) -> str:
    x, *rest = factors
    for f in rest:
        x = b.op("mul", x, f, line=line)
    return x


class _NotAffine(Exception):
    pass
