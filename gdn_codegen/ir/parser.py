"""Parses the text that ir/printer.py prints. The text has the syntax of Python. The parser reads it and never executes it."""
from __future__ import annotations

import ast
from typing import Any

from .core import Agent, Buffer, Carry, Kernel, Line, Loop, Op, Program, Stmt
from .ops import OPS, infer
from .types import Batch, Tensor, Tile


class ParseError(ValueError):
    """The text is not a printed program."""


def _value(n: ast.expr) -> Any:
    """The value of a literal, or of `inf`. ParseError for anything else."""
    if isinstance(n, ast.Constant):
        return n.value
    if isinstance(n, ast.Name) and n.id == "inf":
        return float("inf")
    if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub):
        return -_value(n.operand)
    try:
        return ast.literal_eval(n)
    except ValueError as e:
        raise ParseError(f"line {n.lineno}: {ast.unparse(n)} is not a literal") from e


def _call(n: ast.expr) -> tuple[str, list[ast.expr], dict[str, Any]]:
    if not isinstance(n, ast.Call) or not isinstance(n.func, ast.Name):
        raise ParseError(f"line {n.lineno}: expected a call, got {ast.unparse(n)}")
    return n.func.id, n.args, {k.arg or "": _value(k.value) for k in n.keywords}


def _with(n: ast.stmt, what: str) -> tuple[list[ast.expr], dict[str, Any], list[ast.stmt]]:
    assert isinstance(n, ast.With)
    name, args, kw = _call(n.items[0].context_expr)
    if name != what:
        raise ParseError(f"line {n.lineno}: expected `with {what}(...)`, got {name}")
    return args, kw, n.body


class _Reader:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def op(self, n: ast.stmt, env: dict[str, Tile]) -> Op:
        """Parse one op. Its type follows from its operands.

        ParseError for an unknown op, or for a value that is read before it is defined.
        """
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name):
            out, expr = n.targets[0].id, n.value
        elif isinstance(n, ast.Expr):
            out, expr = "", n.value
        else:
            raise ParseError(f"line {n.lineno}: not an op: {ast.unparse(n)}")
        kind, args, kw = _call(expr)
        if kind not in OPS:
            raise ParseError(f"line {n.lineno}: op {kind!r} is not in the table")
        names = tuple(a.id if isinstance(a, ast.Name) else ast.unparse(a) for a in args)
        line = Line(kw.pop("line", 0), kw.pop("statement", 0))
        meta = {k: kw.pop(k) for k in ("agent", "buffer") if k in kw}
        tile = None
        if out:
            if kind == "load":
                tile = self.tensors[kw["tensor"]].moved(kw.get("heads", 0), kw.get("transposed", False), kw.get("last", False),
                                                        kw.get("one_token", False), kw.get("tokens", 0), kw.get("piece"))
            else:
                missing = [a for a in names if a not in env]
                if missing:
                    raise ParseError(f"line {n.lineno}: {missing[0]} is read before it is defined")
                tile = infer(kind, tuple(env[a] for a in names), tuple(kw.items()))
            env[out] = tile
        return Op(kind, out, names, tuple(sorted(kw.items())), tile, line, **meta)

    def body(self, nodes: list[ast.stmt], env: dict[str, Tile]) -> tuple[Stmt, ...]:
        """Parse a body of ops and loops. env: the types of the values so far, to which this function adds those of the body."""
        out: list[Stmt] = []
        for n in nodes:
            if isinstance(n, ast.Pass):
                continue
            if isinstance(n, ast.With):
                args, kw, inner = _with(n, "loop")
                carried = tuple(Carry(name, i, x, r, Tile(tuple(d), t), *n) for name, (i, x, r, d, t, *n) in kw.items())
                env.update({c.name: c.type for c in carried})
                words = [ast.unparse(a) for a in args[1:]]
                step = int(words.pop()) if words and words[-1].lstrip("-").isdigit() else 1
                out.append(Loop(_value(args[0]), carried, self.body(inner, env), "".join(words), step))
                env.update({c.result: c.type for c in carried})
            else:
                out.append(self.op(n, env))
        return tuple(out)


def parse_program(text: str) -> Program:
    """Parse the text of `program_text`. Returns a program equal to the printed one. ParseError for other text."""
    r = _Reader()
    head: dict[str, Any] = {}
    source: list[tuple[int, str]] = []
    kernels: list[Kernel] = []
    for n in ast.parse(text).body:
        if isinstance(n, ast.With):
            args, kw, inner = _with(n, "kernel")
            buffers = []
            while inner and isinstance(inner[0], ast.Expr) and _call(inner[0].value)[0] == "buffer":
                _, bargs, bkw = _call(inner.pop(0).value)  # type: ignore[attr-defined]
                buffers.append(Buffer(_value(bargs[0]), **bkw))
            kernels.append(Kernel(_value(args[0]), kw["grid"], r.body(inner, {}), tuple(kw["dims"].items()),
                                  kw.get("blocked_dim", ""), tuple(buffers), Batch(*kw.get("batch", ())),
                                  tuple(Agent(a, *x) for a, x in kw.get("agents", {}).items()),
                                  kw.get("slices", 1), kw.get("threads", 0), kw.get("registers", 0),
                                  kw.get("blocks_per_sm", 0), kw.get("lanes", 0), kw.get("piece", 0), kw.get("one_loop", ()),
                                  kw.get("by_length", False), kw.get("places", ""), kw.get("by_part", False), kw.get("start", ""),
                                  tuple((Line(*line), text) for line, text in kw.get("comments", {}).items())))
            continue
        assert isinstance(n, ast.Expr)
        kind, args, kw = _call(n.value)
        if kind == "program":
            head = {"name": _value(args[0]), **kw}
        elif kind == "source":
            source.append((_value(args[0]), _value(args[1])))
        elif kind == "tensor":
            t = Tensor(_value(args[0]), **kw)
            r.tensors[t.name] = t
        else:
            raise ParseError(f"line {n.lineno}: {kind} does not stand at top level")
    if not head:
        raise ParseError("the text has no program(...) line")
    return Program(head["name"], head["stage"], tuple(r.tensors.values()), tuple(kernels), tuple(head["scalars"]),
                   tuple(head["dims"].items()), tuple(source), head.get("launch", "kernels"),
                   head.get("forgets", ""), head.get("scales", ()), tuple(head.get("extents", {}).items()),
                   head.get("tokens", 0))
