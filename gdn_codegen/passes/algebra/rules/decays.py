"""Rules about decays: exponentials whose exponents are opposite running sums are joined, so that no exponent grows.

exp(G) * exp(-G') overflows where G falls far. exp(G - G') does not, where G has the tokens of G' and more. So pages may write
either. `masked_decays` has the product of tokens.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from ....ir.core import Line, Op
from ..exponents import Part, exponent, left, opposite, parts, sums
from .rule import Rules

if TYPE_CHECKING:
    from ..terms import Terms

DECAYS = Rules()


def total(t: Terms, terms: list[Part], line: Line) -> str:
    """The sum of terms, of which there is at least one."""
    def value(x: Part) -> str:
        numbers = [*x.by, *([t.make("const", (), (("value", abs(x.times)),), line)] if abs(x.times) != 1 else [])]
        return t.product([*numbers, t.make(x.view, (x.value,), line=line) if x.view else x.value], line)

    first = next((x for x in terms if x.times > 0), terms[0])
    out = value(first) if first.times > 0 else t.make("neg", (value(first),), line=line)
    for x in terms[:(at := terms.index(first))] + terms[at + 1:]:
        out = t.make("add" if x.times > 0 else "sub", (out, value(x)), line=line)
    return out


@DECAYS.written("a running sum without the token", "add", "sub")
def _exclusive(t: Terms, o: Op) -> str | None:
    """cumsum(x) - x is a sum of its own, in which `clamp_decay` bounds all terms alike. x may be a sum."""
    terms = parts(t.defs, o.args[0]) + parts(t.defs, o.args[1], Part(1.0 if o.kind == "add" else -1.0, ""))
    for x in terms:
        made = t.defs.get(x.value)
        if made is None or made.kind != "cumsum" or made.attrs:
            continue
        own = [y.opposite() for y in parts(t.defs, made.args[0], x)]
        rest = list(terms)
        rest.remove(x)
        if all(rest.count(y) >= own.count(y) for y in own):
            for y in own:
                rest.remove(y)
            before = t.make("cumsum", made.args, (("exclusive", True),), o.line)
            return total(t, [x._replace(value=before), *rest], o.line)
    return None


@DECAYS.written("a quotient by a decay", "div")
def _quotient(t: Terms, o: Op) -> str | None:
    """x / exp(y) is x * exp(-y), for a running sum y."""
    of = exponent(t.defs, o.args[1])
    if not any(sums(t.defs, of)):
        return None
    factor = t.make("exp", (total(t, [x.opposite() for x in of], o.line),), line=o.line)
    return factor if t.number(o.args[0]) == 1 else t.make("mul", (o.args[0], factor), line=o.line)


def _joined(t: Terms, some: list[Part], others: list[Part], line: Line) -> str:
    """One exponential for two exponents that have opposite running sums. "" for others, and where nothing would be left."""
    rest = left([*some, *others])
    return t.make("exp", (total(t, rest, line),), line=line) if rest and opposite(t.defs, some, others) else ""


@DECAYS.written("two opposite decays", "mul")
def _two(t: Terms, o: Op) -> str | None:
    """exp(x) * exp(y), of any shapes."""
    factors = t.factors(o.args[0]) + t.factors(o.args[1])
    for n, f in enumerate(factors):
        for m in range(n):
            if f_ := _joined(t, exponent(t.defs, factors[m]), exponent(t.defs, f), o.line):
                return t.product([*factors[:m], f_, *factors[m + 1:n], *factors[n + 1:]], o.line)
    return None


@DECAYS.written("a decay of a product with an opposite decay", "mul")
def _into_product(t: Terms, o: Op) -> str | None:
    """A decay that scales a product, or a sum of products, moves to an operand that has the opposite decay."""
    factors = t.factors(o.args[0]) + t.factors(o.args[1])
    for n, f in enumerate(factors):
        rest = factors[:n] + factors[n + 1:]
        for m, a in enumerate(rest):
            if t.scales(f) and (new := _scaled(t, f, a, o.line)):
                return t.product([*rest[:m], new, *rest[m + 1:]], o.line)
    return None


def _scaled(t: Terms, f: str, a: str, line: Line) -> str:
    """f * a, where the decay f has joined an opposite one in an operand of a product. "" if there is none in a."""
    o = t.defs.get(a)
    if o is None or o.kind not in ("add", "sub", "matmul", "mul", "neg") or not exponent(t.defs, f):
        return ""
    if o.kind != "matmul":
        new = [_scaled(t, f, x, line) for x in o.args]
        if not any(new):
            return ""
        if o.kind == "mul":  # one factor has joined the decay
            return t.product([new[0], o.args[1]] if new[0] else [o.args[0], new[1]], line)
        scaled = (x or t.product([f, *t.factors(y)], line) for x, y in zip(new, o.args, strict=True))
        return t.make(o.kind, tuple(scaled), line=line)
    for n, (side, turned) in enumerate((("col", "ta"), ("row", "tb"))):
        view = t.kind(f)
        if view not in ("", side):
            continue
        there = {"col": "row", "row": "col"}[side] if o.attr(turned) else side
        outer = [x._replace(view=there if x.view else "") for x in exponent(t.defs, f)]
        operand = t.factors(o.args[n])
        for m, x in enumerate(operand):
            if new_f := _joined(t, outer, exponent(t.defs, x), line):
                y = t.product([*operand[:m], new_f, *operand[m + 1:]], line)
                return t.make("matmul", (y, o.args[1]) if n == 0 else (o.args[0], y), o.attrs, line)
    return ""
