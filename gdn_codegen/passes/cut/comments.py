"""comments: what the ops of a page's line compute, where rewrites have changed it.

Emitted text has the page's lines as comments. Where a kernel computes something else on a line (a part of it, or what a form
makes of it), its comment says that instead, in the page's notation: a statement for each value that is named, or read more than
once.
"""
from __future__ import annotations

import ast
from dataclasses import replace

from ...ir.core import Kernel, Op, Program, loops, uses, walk
from ..stage import takes

#: How tightly operators bind; a matrix product stands in parentheses within others.
_ATOM, _UNARY, _PRODUCT, _MATMUL, _SUM = 5, 4, 3, 2, 1
_INFIX = {"add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT)}
_NO_STATEMENT = ("const", "scalar", "load", "col", "row")


@takes("cut")
def comments(p: Program) -> Program:
    """`p` with comments on the kernels for the lines that they no longer compute as the page has them."""
    return p.map_kernels(lambda k: replace(k, comments=_Comments(p, k).changed()))


class _Comments:
    def __init__(self, p: Program, k: Kernel) -> None:
        self.source = dict(p.source)
        self.defs = {o.out: o for o in walk(k.body) if o.out}
        self.count = uses(k.body)
        self.page = {_stated(text)[0] for text in self.source.values()} | {c.next for lp in loops(k.body) for c in lp.carried}
        self.reads: dict[str, set[int]] = {}  # value -> lines that read it, 0 for stores and loops
        for o in walk(k.body):
            for a in o.args:
                self.reads.setdefault(a, set()).add(o.line)

    def changed(self) -> tuple[tuple[int, str], ...]:
        """Lines, and what is computed there instead; statements apart by line breaks."""
        told = [o for o in self.defs.values() if o.kind not in _NO_STATEMENT and self.is_stated(o)]
        names, out = {o.out for o in told}, []
        for line, text in self.source.items():
            here = [o for o in told if o.line == line]
            if here and not any(self.is_as_stated(o, text) for o in here):
                out.append((line, "\n".join(f"{_shown(o.out)} = {self.expression(o, names)[0]}" for o in here)))
        return tuple(out)

    def is_as_stated(self, o: Op, text: str) -> bool:
        """Whether `o` is what a line of the page says, down to the page's names."""
        name, tree = _stated(text)
        return _shown(o.out) == name and _tree(self.expression(o, set())[0]) == tree

    def is_stated(self, o: Op) -> bool:
        """Whether a value gets a statement: it has the page's name, or is read more than once or outside its line."""
        return o.out in self.page or self.count.get(o.out, 0) != 1 or self.reads.get(o.out, set()) != {o.line}

    def operand(self, a: str, stop: set[str], level: int) -> str:
        """An operand's text, in parentheses where its operator binds less tightly than `level`."""
        o = self.defs.get(a)
        if o is None or a in stop or a in self.page or o.kind in ("load", "scalar"):
            return _shown(a)
        text, own = self.expression(o, stop)
        return text if own >= level else f"({text})"

    def expression(self, o: Op, stop: set[str]) -> tuple[str, int]:
        """The text of `o` down to the page's names, loads and the names in `stop`; how tightly its outermost operator binds."""
        def at(n: int, level: int) -> str:
            return self.operand(o.args[n], stop, level)

        if o.kind in _INFIX:
            sign, level = _INFIX[o.kind]
            return f"{at(0, level)} {sign} {at(1, level + 1)}", level
        if o.kind == "matmul":
            left, right = (f"{at(n, _ATOM)}.T" if o.attr(key) else at(n, _UNARY) for n, key in ((0, "ta"), (1, "tb")))
            return f"{left} @ {right}", _MATMUL
        if o.kind == "neg":
            return f"-{at(0, _UNARY)}", _UNARY
        if o.kind == "const":
            return repr(o.attr("value")), _ATOM if o.attr("value") >= 0 else _UNARY
        if o.kind in ("col", "row"):
            return f"{at(0, _ATOM)}[{':, None' if o.kind == 'col' else 'None, :'}]", _ATOM
        fill = [f"fill={o.attr('fill')}"] if o.attr("fill") else []
        return f"{o.kind}({', '.join([*(at(n, 0) for n in range(len(o.args))), *fill])})", _ATOM


def _shown(name: str) -> str:
    """A value's name as the page has it: the next of a state is called as the state."""
    return name.removesuffix("_next")


def _tree(text: str) -> str:
    """The expression's tree, with all numbers as floats."""
    tree = ast.parse(text, mode="eval")
    for n in ast.walk(tree):
        if isinstance(n, ast.Constant) and isinstance(n.value, int):
            n.value = float(n.value)
    return ast.dump(tree)


def _stated(text: str) -> tuple[str, str]:
    """The name that a line of a page gives, and the tree of its expression; "" and "" for another kind of line."""
    try:
        (s,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return "", ""
    if isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.targets[0], ast.Name):
        return s.targets[0].id, _tree(ast.unparse(s.value))
    return "", ""
