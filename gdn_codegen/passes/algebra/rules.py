"""rules: the identities of algebra that `canonical` applies.

A rule has a name, a pattern of values, a condition and a replacement. Each rule holds in exact arithmetic. No rule makes a
value overflow that did not overflow before. The result of the rules:
- A product is a flat list of factors; numbers and columns come first.
- A sum is a flat list of terms; subtracted terms come last.
- Signs and scales are outside of products of tiles.
- A factor of all terms is outside of the sum.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ...ir.core import Op
from ..match import Found, build, matches

if TYPE_CHECKING:
    from .terms import Terms

Apply = Callable[["Terms", Op], "str | None"]


@dataclass(frozen=True)
class Rule:
    """name: what the rule does. kinds: the ops that it may replace. apply: gives the value that replaces an op, or None."""

    name: str
    kinds: tuple[str, ...]
    apply: Apply


#: `canonical` applies RULES until none applies. Then it applies JOINING, which joins columns and rows that RULES separate.
RULES: list[Rule] = []
JOINING: list[Rule] = []
BOTH = (RULES, JOINING)
#: Of a mask in an exponent.
FILLED = (("fill", -inf),)


def _rule(name: str, old: str, new: str, kind: str, when: Callable[[Terms, Found], bool] = lambda t, x: True,
          ordered: bool = False, into: tuple[list[Rule], ...] = (RULES,)) -> None:
    """Add a rule to the lists `into`: an op `kind` that matches `old` becomes `new` if `when` holds. ordered: operands keep
    their order."""
    def apply(t: Terms, o: Op) -> str | None:
        found = next((x for x in matches(old, o, t.defs, ordered) if when(t, x)), None)
        return None if found is None else build(new, found, lambda kind, args, attrs: t.make(kind, args, attrs, o.line))
    for rules in into:
        rules.append(Rule(name, (kind,), apply))


def _written(name: str, *kinds: str) -> Callable[[Apply], Apply]:
    """Add a rule whose replacement is a function. name: what it does. kinds: the ops that it may replace."""
    def add(apply: Apply) -> Apply:
        RULES.append(Rule(name, kinds, apply))
        return apply
    return add


# --- signs: move out of products and masks, into sums ---------------------------------------------------------------------
_rule("a sign twice", "-(-x)", "x", "neg")
_rule("a sign of an exponent", "exp(-(x - y))", "exp(y - x)", "exp")
_rule("a sign of a masked exponent", "lower(-(x - y), fill=-inf)", "lower(y - x, fill=-inf)", "lower")
_rule("a sign of a factor that is a difference", "-(z * (x - y))", "z * (y - x)", "neg")
_rule("a sign of a mask", "-lower(x)", "lower(-x)", "neg")
_rule("a sign of a strict mask", "-strictly_lower(x)", "strictly_lower(-x)", "neg")
_rule("minus one as a factor", "x * c", "-x", "mul", lambda t, x: t.number(x["c"]) == -1)
_rule("a factor's sign", "(-x) * y", "-(x * y)", "mul")
_rule("a numerator's sign", "(-x) / y", "-(x / y)", "div")
_rule("a column's sign", "(-x)[:, None]", "-(x[:, None])", "col")
_rule("a row's sign", "(-x)[None, :]", "-(x[None, :])", "row")
_rule("the last one's sign", "last(-x)", "-last(x)", "last")
_rule("a summand's sign", "x + (-y)", "x - y", "add")
_rule("a subtracted sign", "x - (-y)", "x + y", "sub")
_rule("two subtracted", "(-x) - y", "-(x + y)", "sub")
for _x, _y in (("x", "y"), ("x.T", "y"), ("x", "y.T"), ("x.T", "y.T")):
    _rule(f"a left operand's sign in {_x} @ {_y}", f"{_x.replace('x', '(-x)')} @ {_y}", f"-({_x} @ {_y})", "matmul")
    _rule(f"a right operand's sign in {_x} @ {_y}", f"{_x} @ {_y.replace('y', '(-y)')}", f"-({_x} @ {_y})", "matmul")

# --- columns and rows: a column of a product becomes a product of columns; sums and functions are computed on vectors ----
for _f in ("exp", "log", "sigmoid"):
    _rule(f"{_f} of a column", f"{_f}(x[:, None])", f"{_f}(x)[:, None]", _f, into=BOTH)
    _rule(f"{_f} of a row", f"{_f}(x[None, :])", f"{_f}(x)[None, :]", _f, into=BOTH)
    _rule(f"{_f} before the last one", f"last({_f}(x))", f"{_f}(last(x))", "last")
for _v in ("[:, None]", "[None, :]"):
    _kind = "col" if _v == "[:, None]" else "row"
    _rule(f"a {_kind} of a product", f"(x * y){_v}", f"x{_v} * y{_v}", _kind, lambda t, x: t.ranks(x, "xy") == (1, 1))
    _rule(f"a {_kind} of a multiple", f"(x * y){_v}", f"x * y{_v}", _kind, lambda t, x: t.ranks(x, "xy") == (0, 1))
    for _op, _name in (("+", "add"), ("-", "sub")):
        _rule(f"{_name} of {_kind}s", f"x{_v} {_op} y{_v}", f"(x {_op} y){_v}", _name, into=BOTH)
        _rule(f"{_name} of a {_kind} and a number", f"x{_v} {_op} y", f"(x {_op} y){_v}", _name,
              lambda t, x: t.ranks(x, "y") == (0,), into=BOTH)
    _rule(f"a number less a {_kind}", f"y - x{_v}", f"(y - x){_v}", "sub", lambda t, x: t.ranks(x, "y") == (0,), into=BOTH)
    _rule(f"two exponentials as {_kind}s", f"exp(x){_v} * exp(y){_v}", f"exp(x + y){_v}", "mul")
    _rule(f"two more exponentials as {_kind}s", f"(z * exp(x){_v}) * exp(y){_v}", f"z * exp(x + y){_v}", "mul")

# --- products of exponentials of vectors and numbers: one exponential of a sum, which is in range if the product is ----------
FEW = ((0, 0), (1, 1))
_rule("two exponentials", "exp(x) * exp(y)", "exp(x + y)", "mul", lambda t, x: t.ranks(x, "xy") in FEW)
_rule("two more exponentials", "(z * exp(x)) * exp(y)", "z * exp(x + y)", "mul", lambda t, x: t.ranks(x, "xy") in FEW)
_rule("a quotient of exponentials", "exp(x) / exp(y)", "exp(x - y)", "div", lambda t, x: t.ranks(x, "xy") in FEW)

# --- masks: around products; the mask of a decay is inside its exponential ----------------------------------------------
_rule("a mask of a factor", "lower(x) * y", "lower(x * y)", "mul")
_rule("a strict mask of a factor", "strictly_lower(x) * y", "strictly_lower(x * y)", "mul")
_rule("a masked exponential", "lower(exp(x))", "exp(lower(x, fill=-inf))", "lower")
_rule("a strictly masked exponential", "strictly_lower(exp(x))", "exp(strictly_lower(x, fill=-inf))", "strictly_lower")


@_written("a mask of decays", "lower", "strictly_lower")
def _decays(t: Terms, o: Op) -> str | None:
    """The mask of a product moves into the exponentials of its decays. Then a mask `lower` of the product is dropped.

    It is kept if another factor may be infinite above the diagonal, because 0 * inf is NaN.
    """
    factors = t.factors(o.args[0])
    bare = [f for f in factors if t.is_a("exp", f) and t.difference(t.defs[f].args[0])]
    masked = [t.make("exp", (t.make("lower", t.defs[f].args, FILLED, o.line),), line=o.line) if f in bare else f for f in factors]
    goes = o.kind == "lower" and any(map(t.is_masked, masked)) and all(t.is_masked(f) or t.in_range(f) for f in masked)
    if o.attrs or len(factors) == 1 or not (bare or goes):
        return None
    product = t.product(masked, o.line)
    return product if goes else t.make(o.kind, (product,), line=o.line)


# --- differences: flat, in order; subtracted terms come last ------------------------------------------------------------
_rule("a sum with a difference", "x + (y - z)", "(x + y) - z", "add")
_rule("a sum subtracted", "x - (y + z)", "(x - y) - z", "sub")
_rule("a difference subtracted", "x - (y - z)", "(x + z) - y", "sub")
_rule("order of what is subtracted", "(x - y) - z", "(x - z) - y", "sub", lambda t, x: t.before(x, "zy"))
# --- sums and products: flat, in order --------------------------------------------------------------------------------------
def _unsorted(kind: str, *names: str) -> Callable[[Terms, Found], bool]:
    """The condition that two values are in the wrong order. names: first the two names, as one text, then names whose values
    must not be an op `kind`."""
    return lambda t, x: t.before(x, names[0]) and not any(t.is_a(kind, x[n]) for n in names[1:])


for _k, _op in (("add", "+"), ("mul", "*")):
    _rule(f"{_k} of {_k}", f"x {_op} (y {_op} z)", f"(x {_op} y) {_op} z", _k, ordered=True)
    _rule(f"order of {_k}", f"x {_op} y", f"y {_op} x", _k, _unsorted(_k, "yx", "x", "y"), ordered=True)
    _rule(f"order of more {_k}", f"(x {_op} y) {_op} z", f"(x {_op} z) {_op} y", _k, _unsorted(_k, "zy", "z"), ordered=True)
_rule("order of a maximum", "maximum(x, y)", "maximum(y, x)", "maximum", lambda t, x: t.before(x, "yx"), ordered=True)


def _without(factors: list[str], fewer: list[str]) -> list[str]:
    """`factors` without those of `fewer`. A factor that occurs n times in `fewer` is removed n times."""
    out = list(factors)
    for f in fewer:
        out.remove(f)
    return out


@_written("a factor of both terms", "add", "sub")
def _common(t: Terms, o: Op) -> str | None:
    """c * x + c * y becomes c * (x + y), where c is a number, a column or a row."""
    left, right = (t.factors(a) for a in o.args)
    small: list[str] = []
    for f in left:  # a factor that both have n times leaves n times
        if t.scales(f) and small.count(f) < right.count(f):
            small.append(f)
    rest = [_without(factors, small) for factors in (left, right)]
    if not small or not all(rest) or any(t.type[t.product(x, o.line)].dims != t.type[a].dims
                                         for x, a in zip(rest, o.args, strict=True)):
        return None
    inner = t.make(o.kind, tuple(t.product(x, o.line) for x in rest), line=o.line)
    return t.product([*small, inner], o.line)


# --- products of tiles ------------------------------------------------------------------------------------------------------
@_written("a scaling of a product's operand", "matmul")
def _scaling(t: Terms, o: Op) -> str | None:
    """Numbers and scales of the result's rows or columns move out of the product, to the result. A scale of the contracted dim
    moves from the left operand to the right one."""
    if len(o.args) != 2:
        return None
    attrs = dict(o.attrs)
    x, y = (t.factors(a) for a in o.args)
    summed, there = "col" if attrs.get("ta") else "row", "row" if attrs.get("tb") else "col"
    outer = [f for f in x if t.scales(f) and t.kind(f) != summed]
    moved = [f for f in x if t.kind(f) == summed]
    last = [f for f in y if t.scales(f) and t.kind(f) != there]
    if not outer and not moved and not last:
        return None
    left, right = [f for f in x if f not in (*outer, *moved)], [f for f in y if f not in last]
    if not all(any(t.type[f].dims == t.type[a].dims for f in side) for side, a in ((left, o.args[0]), (right, o.args[1]))):
        return None  # an outer product of vectors

    def turned(f: str, kind: str) -> str:
        return t.make(kind, t.defs[f].args, line=o.line) if t.kind(f) in ("col", "row") else f

    right = [*(turned(f, there) for f in moved), *right]
    product = t.make("matmul", (t.product(left, o.line), t.product(right, o.line)), o.attrs, line=o.line)
    return t.product([*(turned(f, "col") for f in outer), *(turned(f, "row") for f in last), product], o.line)


for _x, _y, _z in ((a, b, c) for a in ("x", "x.T") for b, c in (("y", "z"), ("y.T", "z.T"))):
    for _op, _kind in (("+", "add"), ("-", "sub")):
        _to = f"{_x} @ {'(y ' + _op + ' z)' + ('.T' if _y == 'y.T' else '')}"
        _rule(f"{_kind} of products {_x} @ {_y}", f"{_x} @ {_y} {_op} {_x} @ {_z}", _to, _kind)
_rule("a product with a state first", "(x @ y) @ s", "x @ (y @ s)", "matmul",
      lambda t, x: x["s"] in t.states and t.type[x["x"]].dims == ("C", "C"))

# --- joining: a value of one number a token is computed as a vector -------------------------------------------------------------
for _v, _kind in (("[:, None]", "col"), ("[None, :]", "row")):
    for _op, _name in (("*", "mul"), ("/", "div")):
        _rule(f"{_name} of {_kind}s", f"x{_v} {_op} y{_v}", f"(x {_op} y){_v}", _name, into=(JOINING,))
        _rule(f"{_name} of a {_kind} and a number", f"x{_v} {_op} y", f"(x {_op} y){_v}", _name,
              lambda t, x: t.ranks(x, "y") == (0,), into=(JOINING,))
    _rule(f"a number by a {_kind}", f"y / x{_v}", f"(y / x){_v}", "div", lambda t, x: t.ranks(x, "y") == (0,), into=(JOINING,))
