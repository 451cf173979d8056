"""Code that all emitters share: tables of rules, lines with comments from the page, and the data of a kernel for templates."""
from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..ir.core import NO_LINE, Kernel, Line, Loop, Op, Program, Stmt, walk
from ..ir.ops import OPS
from ..ir.stages import is_decomposed
from ..ir.types import Tensor
from .parameters import (
    AT_A_TIME,
    CLEAR,
    EVERY,
    INSTANCES,
    LEAST_SPAN,
    PART,
    SUMMED,
    UNITS,
    WIDTH_OF,
    integers,
    is_pool,
    own_numbers,
    stride_unit,
    strides,
    touched,
)

#: (H, HV) if head counts are compiled into the kernels. None if kernels take them at run time.
Heads = tuple[int, int] | None


class EmitError(ValueError):
    """An emitter cannot print an op of the program, for example because its target has no rule for it."""


class Rules:
    """The rules of one target. The decorator @rule("matmul") registers a function that gives the text of an op of this kind.

    removed: kind of op -> the pass that removes such ops before the emitter runs, for ops that not all targets remove. base: a
    table whose rules apply to the ops that this table has no rule for. statements: the ops whose rules print lines.
    """

    def __init__(self, target: str, removed: dict[str, str] | None = None, base: Rules | None = None) -> None:
        self.target, self.removed, self.base = target, removed or {}, base
        self.table: dict[str, Callable[..., Any]] = {}
        self.statements: set[str] = set()

    def __call__(self, *kinds: str, statement: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator that adds a function as the rule of some kinds of op. statement: it prints lines, and returns no text."""
        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            for kind in kinds:
                assert kind in OPS and kind not in self.table, kind
                self.table[kind] = fn
            self.statements |= {*kinds} if statement else set()
            return fn
        return add

    def is_statement(self, op: Op) -> bool:
        """Whether the rule of an op prints lines."""
        if op.kind in self.table or self.base is None:
            return op.kind in self.statements
        return self.base.is_statement(op)

    def removed_by(self, kind: str) -> str:
        """The pass that removes such ops before the emitter runs, "" if none does."""
        return "decompose" if is_decomposed(kind) else self.removed.get(kind, "")

    def of(self, op: Op) -> Callable[..., Any]:
        """The rule of an op, from this table or from the base.

        EmitError if there is none. It names the pass that should have removed the op, if there is one.
        """
        if op.kind in self.table:
            return self.table[op.kind]
        if self.base is not None:
            return self.base.of(op)
        by = self.removed_by(op.kind)
        raise EmitError(f"{self.target} has no rule for {op.kind} ({op.out or 'effect'}, {op.line})"
                        + (f"; pass {by} should have removed it" if by else ""))


#: The most characters of a line of emitted text.
WIDTH = 120
#: Precedence levels of operators in emitted text. A higher level binds tighter.
ATOM, UNARY, PRODUCT, SUM = 4, 3, 2, 1


@dataclass(frozen=True)
class Text:
    """An expression, and the precedence level of its outermost operator."""

    code: str
    level: int = ATOM

    def __str__(self) -> str:
        return self.code

    def at(self, level: int) -> str:
        """The text as an operand. It gets parentheses if its level is lower than `level`."""
        return self.code if self.level >= level else f"({self.code})"


class Writer:
    """Collects indented lines of text. A comment shows the page's line wherever it changes.

    If passes have rewritten a line, the comment shows what the kernel `k` computes there.
    """

    def __init__(self, p: Program, comment: str, indent: int = 0, k: Kernel | None = None) -> None:
        self.source = {Line(n): text for n, text in p.source} | dict(k.comments if k else ())
        self.comment, self.indent = comment, indent
        self.lines: list[str] = []
        self.line = NO_LINE

    def at(self, op: Op) -> None:
        """Print the line of `op` as a comment, if it differs from the line of the op before."""
        if op.line != self.line and op.line in self.source:
            self.line = op.line
            width = WIDTH - 4 * self.indent - len(self.comment) - 1
            self(*(f"{self.comment} {x}" for x in textwrap.wrap(self.source[op.line], width)))

    def __call__(self, *lines: str) -> None:
        self.lines += [("    " * self.indent + x).rstrip() for x in lines]

    def text(self) -> str:
        """The lines so far."""
        return "\n".join(self.lines)


def wrapped(text: str, width: int) -> list[str]:
    """Break a line of Python that is longer than `width`: the operands of its longest outermost bracket go on separate lines.

    The last operand of a call ends in a comma. In an index, and in parentheses for grouping, it does so only if there are
    several.
    """
    if len(text) <= width:
        return [text]
    depth, cuts, best = 0, [0], [0, 0]
    for at, ch in enumerate(text):
        depth += (ch in "([") - (ch in ")]")
        if ch in "([" and depth == 1:
            cuts = [at]
        elif ch == "," and depth == 1:
            cuts.append(at)
        elif ch in ")]" and depth == 0 and at - cuts[0] > best[-1] - best[0]:
            best = [*cuts, at]
    if best[-1] == 0:
        return [text]
    out = [text[: best[0] + 1]]
    call = text[best[0]] == "(" and text[: best[0]][-1:].isidentifier()
    for first, end in pairwise(best):
        *most, last = wrapped(text[first + 1: end].strip(), width - 5)
        out += [f"    {x}" for x in (*most, f"{last}," if call or len(best) > 2 else last)]
    return [*out, text[best[-1]:]]


def quoted(x: Any) -> str:
    """A value as Python text with double quotes. No string in it has quotes of its own."""
    return repr(x).replace("'", '"')


@dataclass(frozen=True)
class KernelText:
    """One kernel, as data for a template. tensors, scalars: its parameters, in order. body: its emitted lines. extra: data of the
    target for its template."""

    name: str
    grid: str
    blocks: int  # instances for each chunk, part or sequence and head: see blocks()
    tensors: tuple[Tensor, ...]
    scalars: tuple[str, ...]
    body: str
    extra: dict[str, Any]


def heads_tag(heads: Heads) -> str:
    """The part of a name for head counts that are compiled in, "" for None."""
    return f"h{heads[0]}hv{heads[1]}" if heads else ""


def no_heads(target: str, heads: Heads) -> None:
    """Raise EmitError for head counts, for a target that does not compile them in."""
    if heads:
        raise EmitError(f"heads: got {heads[0]}/{heads[1]}; accepted: none, since {target} takes head counts at run time")


def numbers(k: Kernel) -> tuple[str, ...]:
    """The caller's numbers that a kernel reads, in order of first use."""
    return tuple(dict.fromkeys(o.attr("param") for o in k.ops if o.kind == "scalar" and o.attr("param")))


def written(p: Program, k: Kernel) -> tuple[str, ...]:
    """The tensors that a kernel stores to, in the program's order."""
    kinds = ("store", "clear_counter", "claim_item", "set_if_negative", "choose_parts")
    names = {t.over or t.name for o in k.ops if o.kind in kinds for t in [p.tensor(o.attr("tensor"))]}
    return tuple(x.name for x in touched(p, k) if x.name in names)


def in_pairs(k: Kernel) -> bool:
    """Whether a kernel has two instances for each part: one runs parts with a long warm-up, the other runs the other parts."""
    return any(o.kind == "claim_part" for o in k.ops)


def by_token(k: Kernel) -> bool:
    """Whether the chunks of a kernel are single tokens."""
    return any(o.attr("one_token") for o in k.ops)


def described(k: Kernel) -> bool:
    """Whether a kernel uses tensor descriptors of rows."""
    return any(o.attr("described") for o in k.ops)


def in_buffers(k: Kernel) -> list[Op]:
    """The ops whose value has a buffer."""
    return [o for o in k.ops if o.buffer]


def is_of_a_part(k: Kernel, t: Tensor, o: Op) -> bool:
    """Whether `o` stores the tile of a chunk in a loop that also runs the warm-up. Such a store must happen in the part's own
    chunks only."""
    begins = any(isinstance(s, Loop) and s.warm_up and s.index == "chunk" for s in k.body)
    return begins and o.kind == "store" and t.index in ("token", "slot", "checkpoint")


def blocks(p: Program, k: Kernel) -> int:
    """The number of instances for each head and each chunk, part or sequence: blocks of the blocked dim, times slices."""
    return k.slices * (p.sizes[k.blocked_dim] // k.sizes[k.blocked_dim] if k.blocked_dim else 1)


__all__ = [
    "ATOM",
    "AT_A_TIME",
    "CLEAR",
    "EVERY",
    "INSTANCES",
    "LEAST_SPAN",
    "PART",
    "PRODUCT",
    "SUM",
    "SUMMED",
    "UNARY",
    "UNITS",
    "WIDTH_OF",
    "EmitError",
    "Heads",
    "Kernel",
    "KernelText",
    "Loop",
    "Op",
    "Program",
    "Rules",
    "Stmt",
    "Text",
    "Writer",
    "blocks",
    "by_token",
    "described",
    "heads_tag",
    "in_buffers",
    "in_pairs",
    "integers",
    "is_of_a_part",
    "is_pool",
    "no_heads",
    "numbers",
    "own_numbers",
    "quoted",
    "stride_unit",
    "strides",
    "touched",
    "walk",
    "wrapped",
    "written",
]
