"""Rules about columns and rows: a column of a product becomes a product of columns; sums and functions are computed on vectors.

JOINING comes after all other rules: a value of one number per token is then computed as a vector.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from ...match import Found
from .rule import Rules

if TYPE_CHECKING:
    from ..terms import Terms

COLUMNS, JOINING = Rules(), Rules()
VIEWS = (("[:, None]", "col"), ("[None, :]", "row"))


def _number(t: Terms, x: Found) -> bool:
    """Whether y is a number."""
    return t.ranks(x, "y") == (0,)


def _few(t: Terms, x: Found) -> bool:
    """Whether x and y are two numbers or two vectors."""
    return t.ranks(x, "xy") in ((0, 0), (1, 1))


for _f in ("exp", "log", "sigmoid"):
    for _rules in (COLUMNS, JOINING):
        _rules.rule(f"{_f} of a column", f"{_f}(x[:, None])", f"{_f}(x)[:, None]", _f)
        _rules.rule(f"{_f} of a row", f"{_f}(x[None, :])", f"{_f}(x)[None, :]", _f)
    COLUMNS.rule(f"{_f} before the last one", f"last({_f}(x))", f"{_f}(last(x))", "last")
for _v, _kind in VIEWS:
    COLUMNS.rule(f"a {_kind} of a product", f"(x * y){_v}", f"x{_v} * y{_v}", _kind, lambda t, x: t.ranks(x, "xy") == (1, 1))
    COLUMNS.rule(f"a {_kind} of a multiple", f"(x * y){_v}", f"x * y{_v}", _kind, lambda t, x: t.ranks(x, "xy") == (0, 1))
    for _rules in (COLUMNS, JOINING):
        for _op, _name in (("+", "add"), ("-", "sub")):
            _rules.rule(f"{_name} of {_kind}s", f"x{_v} {_op} y{_v}", f"(x {_op} y){_v}", _name)
            _rules.rule(f"{_name} of a {_kind} and a number", f"x{_v} {_op} y", f"(x {_op} y){_v}", _name, _number)
        _rules.rule(f"a number less a {_kind}", f"y - x{_v}", f"(y - x){_v}", "sub", _number)
    COLUMNS.rule(f"two exponentials as {_kind}s", f"exp(x){_v} * exp(y){_v}", f"exp(x + y){_v}", "mul")
    COLUMNS.rule(f"two more exponentials as {_kind}s", f"(z * exp(x){_v}) * exp(y){_v}", f"z * exp(x + y){_v}", "mul")

# products of exponentials of vectors and numbers: one exponential of a sum, which is in range if the product is
COLUMNS.rule("two exponentials", "exp(x) * exp(y)", "exp(x + y)", "mul", _few)
COLUMNS.rule("two more exponentials", "(z * exp(x)) * exp(y)", "z * exp(x + y)", "mul", _few)
COLUMNS.rule("a quotient of exponentials", "exp(x) / exp(y)", "exp(x - y)", "div", _few)

for _v, _kind in VIEWS:
    for _op, _name in (("*", "mul"), ("/", "div")):
        JOINING.rule(f"{_name} of {_kind}s", f"x{_v} {_op} y{_v}", f"(x {_op} y){_v}", _name)
        JOINING.rule(f"{_name} of a {_kind} and a number", f"x{_v} {_op} y", f"(x {_op} y){_v}", _name, _number)
    JOINING.rule(f"a number by a {_kind}", f"y / x{_v}", f"(y / x){_v}", "div", _number)
JOINING.rule("the sum of a column", "row_sum(x[:, None])", "x", "row_sum")
JOINING.rule("the sum of a row", "column_sum(x[None, :])", "x", "column_sum")
