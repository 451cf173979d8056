"""Parses expressions in the notation of pages, for patterns of values (passes/match.py) and formulas of input forms."""
from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import Any

OPERATORS: dict[type[ast.AST], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul"}


@dataclass(frozen=True)
class Pattern:
    """An op of a pattern. If `kind` is "", a name that matches any value."""

    kind: str
    name: str = ""
    args: tuple[Pattern, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()


@cache
def pattern(text: str) -> Pattern:
    """The pattern that `text` describes. text: an expression in the notation of pages."""
    return _pattern(ast.parse(text, mode="eval").body)


def _pattern(x: ast.expr) -> Pattern:
    """The pattern of a parsed Python expression."""
    if isinstance(x, ast.Name):
        return Pattern("", x.id)
    if isinstance(x, ast.Constant):
        return Pattern("const", attrs=(("value", float(x.value)),))  # type: ignore[arg-type]
    if isinstance(x, ast.UnaryOp) and isinstance(x.operand, ast.Constant):  # a number, which passes look for
        return Pattern("const", attrs=(("value", -float(x.operand.value)),))  # type: ignore[arg-type]
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
    sides, transposed = [x.left, x.right], []
    for n, (side, attr) in enumerate(zip(tuple(sides), ("ta", "tb"), strict=True)):
        if isinstance(x.op, ast.MatMult) and isinstance(side, ast.Attribute):
            sides[n] = side.value
            transposed.append((attr, True))
    return Pattern(OPERATORS[type(x.op)], args=tuple(map(_pattern, sides)), attrs=tuple(transposed))
