"""Rules about signs: they move out of products and masks, into sums."""
from __future__ import annotations

from .rule import Rules

SIGNS = Rules()
SIGNS.rule("a sign twice", "-(-x)", "x", "neg")
SIGNS.rule("a sign of an exponent", "exp(-(x - y))", "exp(y - x)", "exp")
SIGNS.rule("a sign of a masked exponent", "lower(-(x - y), fill=-inf)", "lower(y - x, fill=-inf)", "lower")
SIGNS.rule("a sign of a factor that is a difference", "-(z * (x - y))", "z * (y - x)", "neg")
SIGNS.rule("a sign of a mask", "-lower(x)", "lower(-x)", "neg")
SIGNS.rule("a sign of a strict mask", "-strictly_lower(x)", "strictly_lower(-x)", "neg")
SIGNS.rule("minus one as a factor", "x * c", "-x", "mul", lambda t, x: t.number(x["c"]) == -1)
SIGNS.rule("a factor's sign", "(-x) * y", "-(x * y)", "mul")
SIGNS.rule("a numerator's sign", "(-x) / y", "-(x / y)", "div")
SIGNS.rule("a column's sign", "(-x)[:, None]", "-(x[:, None])", "col")
SIGNS.rule("a row's sign", "(-x)[None, :]", "-(x[None, :])", "row")
SIGNS.rule("the last one's sign", "last(-x)", "-last(x)", "last")
SIGNS.rule("a summand's sign", "x + (-y)", "x - y", "add")
SIGNS.rule("a subtracted sign", "x - (-y)", "x + y", "sub")
SIGNS.rule("two subtracted", "(-x) - y", "-(x + y)", "sub")
for _x, _y in (("x", "y"), ("x.T", "y"), ("x", "y.T"), ("x.T", "y.T")):
    SIGNS.rule(f"a left operand's sign in {_x} @ {_y}", f"{_x.replace('x', '(-x)')} @ {_y}", f"-({_x} @ {_y})", "matmul")
    SIGNS.rule(f"a right operand's sign in {_x} @ {_y}", f"{_x} @ {_y.replace('y', '(-y)')}", f"-({_x} @ {_y})", "matmul")
