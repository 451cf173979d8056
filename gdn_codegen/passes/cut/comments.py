"""comments: corrects the comments of a kernel where rewrites have changed a line. All targets run it.

Emitted text has the page's lines as comments. A kernel may compute something else on a line, such as a part of it or what a
form makes of it. Then the comments say that, in the page's notation: one statement for each value that has a name of the page or
is read more than once. Each statement stands over the ops that compute its value, so the ops have the number of their statement.
"""
from __future__ import annotations

import ast
from dataclasses import replace

from ...ir.core import NO_LINE, Kernel, Line, Op, Program, loops, map_ops
from ..stage import takes

#: Precedence of operators. A matrix product gets parentheses inside other products.
_ATOM, _UNARY, _PRODUCT, _MATMUL, _SUM = 5, 4, 3, 2, 1
_INFIX = {"add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT)}
_NO_STATEMENT = ("const", "scalar", "load", "col", "row")


@takes("cut")
def comments(p: Program) -> Program:
    """`p` with comments on each kernel for the lines that it computes differently from the page."""
    stated = {number: _stated(text) for number, text in p.source}
    return p.map_kernels(lambda k: _Comments(stated, k).kernel())


class _Comments:
    """The comments of one kernel."""

    def __init__(self, stated: dict[int, tuple[str, str]], k: Kernel) -> None:
        """stated: number of a line of the page -> what `_stated` makes of it."""
        self.stated, self.k = stated, k
        self.defs = {o.out: o for o in k.ops if o.out}
        self.page = {name for name, _ in stated.values()} | {c.next for lp in loops(k.body) for c in lp.carried}
        self.reads: dict[str, list[Line]] = {}  # value -> lines of the ops that read it, NO_LINE for stores and loops
        view = {o.out: o.args[0] for o in k.ops if o.kind in ("col", "row")}
        for o in k.ops:
            for a in o.args if o.out not in view else ():
                self.reads.setdefault(view.get(a, a), []).append(o.line)
        for x in (x for lp in loops(k.body) for x in (*(y for c in lp.carried for y in (c.init, c.next)), lp.warm_up)):
            self.reads.setdefault(x, []).append(NO_LINE)

    def kernel(self) -> Kernel:
        """The kernel with a comment for each statement of a changed line, and with the number of the statement on its ops."""
        told = [o for o in self.defs.values() if o.kind not in _NO_STATEMENT and self.is_stated(o)]
        names, texts = {o.out for o in told}, []
        lines: dict[str, Line] = {}  # value -> the line of its statement
        for number, (name, tree) in self.stated.items():
            here = [o for o in told if o.line.number == number]
            if here and not any(_shown(o.out) == name and _tree(_parsed(self.expression(o, set())[0])) == tree for o in here):
                for n, o in enumerate(here):
                    texts.append((Line(number, n), f"{_shown(o.out)} = {self.expression(o, names)[0]}"))
                    self.number(o, Line(number, n), names, lines)
        body = map_ops(self.k.body, lambda o: [o.changed(line=lines.get(o.out, o.line))])
        return replace(self.k, body=body, comments=tuple(texts))

    def number(self, o: Op, line: Line, stop: set[str], lines: dict[str, Line]) -> None:
        """Give `line` to `o`, and to the ops on its line that compute a part of it, up to the values in `stop`."""
        lines[o.out] = line
        for a in o.args:
            part = self.defs.get(a)
            if part is not None and part.line == o.line and a not in stop and a not in lines:
                self.number(part, line, stop, lines)

    def is_stated(self, o: Op) -> bool:
        """Whether a value gets a statement: it has a name of the page, is read more than once, or is read outside its line."""
        return o.out in self.page or self.reads.get(o.out) != [o.line]

    def operand(self, a: str, stop: set[str], level: int) -> str:
        """The text of an operand, in parentheses if its precedence is below `level`."""
        o = self.defs.get(a)
        if o is None or a in stop or a in self.page or o.kind in ("load", "scalar"):
            return _shown(a)
        text, own = self.expression(o, stop)
        return text if own >= level else f"({text})"

    def expression(self, o: Op, stop: set[str]) -> tuple[str, int]:
        """The text of `o` and its precedence. Names of the page, loads and the names in `stop` are not expanded."""
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
    """The name of a value on the page. The next value of a state has the state's name."""
    return name.removesuffix("_next")


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _tree(tree: ast.expr) -> str:
    """The text of a syntax tree, with all numbers as floats."""
    for n in ast.walk(tree):
        if isinstance(n, ast.Constant) and isinstance(n.value, int):
            n.value = float(n.value)
    return ast.dump(tree)


def _stated(text: str) -> tuple[str, str]:
    """The name and the expression's tree of an assignment on the page. "" and "" for any other line."""
    try:
        (s,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return "", ""
    if isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.targets[0], ast.Name):
        return s.targets[0].id, _tree(s.value)
    return "", ""
