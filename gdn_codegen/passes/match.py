"""match: patterns of values, written as a page writes them.

`matches("exp(lower(x[:, None] - x[None, :], fill=-inf))", o, defs)` gives what x may be where the op `o` computes that. A name in
a pattern is any value, the same one wherever it stands; a number is a constant; other attributes are to be as in the pattern.
Operands of sums, products and `maximum` may stand in either order. `build` makes a pattern's value.
"""
from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..ir.core import Op

COMMUTE = ("add", "mul", "maximum")
OPERATORS: dict[type[ast.AST], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul"}
Found = dict[str, str]  # a pattern's name -> a value
Make = Callable[[str, tuple[str, ...], tuple[tuple[str, Any], ...]], str]  # op, operands, attributes -> the value


@dataclass(frozen=True)
class Pattern:
    """An op of a pattern, or, with kind "", a name."""

    kind: str
    name: str = ""
    args: tuple[Pattern, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()


@cache
def pattern(text: str) -> Pattern:
    """The pattern that `text` is, an expression of a page."""
    return _pattern(ast.parse(text, mode="eval").body)


def _pattern(x: ast.expr) -> Pattern:
    """The pattern that a parsed Python expression stands for."""
    if isinstance(x, ast.Name):
        return Pattern("", x.id)
    if isinstance(x, ast.Constant):
        return Pattern("const", attrs=(("value", float(x.value)),))  # type: ignore[arg-type]
    if isinstance(x, ast.UnaryOp):
        return Pattern("neg", args=(_pattern(x.operand),))
    if isinstance(x, ast.Subscript):
        index = ast.unparse(x.slice)
        return Pattern({"(:, None)": "col", "(None, :)": "row"}[index if index[0] == "(" else f"({index})"],
                       args=(_pattern(x.value),))
    if isinstance(x, ast.Call):
        attrs = {str(k.arg): float(ast.unparse(k.value)) for k in x.keywords}
        return Pattern(ast.unparse(x.func), args=tuple(map(_pattern, x.args)), attrs=tuple(sorted(attrs.items())))
    assert isinstance(x, ast.BinOp), ast.dump(x)
    sides, turned = [x.left, x.right], []
    for n, (side, attr) in enumerate(zip(tuple(sides), ("ta", "tb"), strict=True)):
        if isinstance(x.op, ast.MatMult) and isinstance(side, ast.Attribute):
            sides[n] = side.value
            turned.append((attr, True))
    return Pattern(OPERATORS[type(x.op)], args=tuple(map(_pattern, sides)), attrs=tuple(turned))


def matches(text: str, o: Op | None, defs: Mapping[str, Op], ordered: bool = False) -> Iterator[Found]:
    """What the names of a pattern may be where it is what `o` computes. defs: the ops that patterns may look into, by value.
    ordered: operands stand as in the pattern."""
    if o is not None:
        yield from _op(pattern(text), o, defs, {}, ordered)


def matched(text: str, o: Op | None, defs: Mapping[str, Op]) -> Found | None:
    """The first of `matches`, or None."""
    return next(matches(text, o, defs), None)


def _op(p: Pattern, o: Op, defs: Mapping[str, Op], found: Found, ordered: bool) -> Iterator[Found]:
    if o.kind != p.kind or o.attrs != p.attrs or len(o.args) != len(p.args):
        return
    both = o.kind in COMMUTE and not ordered and o.args[0] != o.args[1]
    for args in (o.args, o.args[::-1])[: 1 + both]:
        yield from _all(p.args, args, defs, found, ordered)


def _all(patterns: tuple[Pattern, ...], args: tuple[str, ...], defs: Mapping[str, Op], found: Found,
         ordered: bool) -> Iterator[Found]:
    if not patterns:
        yield found
        return
    for more in _value(patterns[0], args[0], defs, found, ordered):
        yield from _all(patterns[1:], args[1:], defs, more, ordered)


def _value(p: Pattern, a: str, defs: Mapping[str, Op], found: Found, ordered: bool) -> Iterator[Found]:
    if p.kind:
        if a in defs:
            yield from _op(p, defs[a], defs, found, ordered)
    elif found.get(p.name, a) == a:
        yield {**found, p.name: a}


def build(text: str, found: Found, make: Make) -> str:
    """The value of a pattern whose names are `found`; `make` makes each of its ops."""
    def value(p: Pattern) -> str:
        return make(p.kind, tuple(map(value, p.args)), p.attrs) if p.kind else found[p.name]
    return value(pattern(text))
