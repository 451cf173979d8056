"""What emitters share: a rule table a target, the source line as a comment, and what a template is told."""
from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..ir.core import Kernel, Loop, Op, Program, Stmt, walk
from ..ir.ops import OPS
from ..ir.types import Tensor

#: Query/key and value head counts that a build is for; None where its kernels take them at run time.
Heads = tuple[int, int] | None


class EmitError(ValueError):
    """A program reached an emitter with an op that its target has no rule for."""


class Rules:
    """The rules of one target: @rule("matmul") on a function that gives the text of one op.

    unsupported: ops that a pass removes before this target's emitter, with the name of that pass. base: the rules of ops
    that this table leaves alone.
    """

    def __init__(self, target: str, unsupported: dict[str, str], base: Rules | None = None) -> None:
        self.target, self.unsupported, self.base = target, unsupported, base
        self.table: dict[str, Callable[..., Any]] = {}

    def __call__(self, *kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            for kind in kinds:
                assert kind in OPS and kind not in self.table, kind
                self.table[kind] = fn
            return fn
        return add

    def of(self, op: Op) -> Callable[..., Any]:
        """The rule of an op: the target's own, or that of the table it is based on.

        EmitError where there is none; it names the pass that should have removed the op, if one should.
        """
        if op.kind in self.table:
            return self.table[op.kind]
        if self.base is not None:
            return self.base.of(op)
        made_by = self.unsupported.get(op.kind)
        raise EmitError(f"{self.target} has no rule for {op.kind} ({op.out or 'effect'}, line {op.line})"
                        + (f"; pass {made_by} should have removed it" if made_by else ""))


#: Chunks from checkpoint to checkpoint.
EVERY = "checkpoint_chunks"
#: Whether the host launches the kernels that sum up parts.
SUMMED = "summed"

#: Characters of a line of emitted text.
WIDTH = 120
#: Of an output, whether the host has the rows cleared that no sequence covers.
CLEAR = "clear_"

#: How tightly operators of emitted Python bind.
ATOM, UNARY, PRODUCT, SUM = 4, 3, 2, 1


@dataclass(frozen=True)
class Text:
    """An expression, and how tightly its outermost operator binds."""

    code: str
    level: int = ATOM

    def __str__(self) -> str:
        return self.code

    def at(self, level: int) -> str:
        """The text as an operand that must bind at least as tightly as `level`."""
        return self.code if self.level >= level else f"({self.code})"


class Writer:
    """Lines of text, indented, with a comment where the algorithm's line changes: the line, or what `k` computes there."""

    def __init__(self, p: Program, comment: str, indent: int = 0, k: Kernel | None = None) -> None:
        self.source, self.comment, self.indent = {**dict(p.source), **dict(k.comments if k else ())}, comment, indent
        self.lines: list[str] = []
        self.line = 0

    def at(self, op: Op) -> None:
        """Say which line of the algorithm follows."""
        if op.line and op.line != self.line and op.line in self.source:
            self.line = op.line
            width = WIDTH - 4 * self.indent - len(self.comment) - 1
            self(*(f"{self.comment} {x}" for text in self.source[op.line].split("\n") for x in textwrap.wrap(text, width)))

    def __call__(self, *lines: str) -> None:
        self.lines += [("    " * self.indent + x).rstrip() for x in lines]

    def text(self) -> str:
        """The lines so far."""
        return "\n".join(self.lines)


def wrapped(text: str, width: int) -> list[str]:
    """The line of Python, or where it is too long the operands of its longest outermost bracket on lines of their own.

    Operands of a call end in a comma, of parentheses that group and of an index only where there are several.
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


@dataclass(frozen=True)
class KernelText:
    """One kernel for a template. tensors, scalars: what it is passed, in order; body: its emitted lines."""

    name: str
    grid: str
    blocks: int  # a split dim's blocks
    tensors: tuple[Tensor, ...]
    scalars: tuple[str, ...]
    body: str
    extra: dict[str, Any]


def heads_tag(heads: Heads) -> str:
    """What tells builds for head counts apart, in names."""
    return f"h{heads[0]}hv{heads[1]}" if heads else ""


def no_heads(target: str, heads: Heads) -> None:
    """For a target that compiles no head counts in."""
    if heads:
        raise EmitError(f"heads: got {heads[0]}/{heads[1]}; accepted: none, since {target} takes head counts at run time")


def touched(p: Program, k: Kernel) -> tuple[Tensor, ...]:
    """The tensors that a kernel loads or stores, and the numbers that say where they lie and what is left out, in the program's
    order: its pointer parameters."""
    reads = ("load", "store", "warm_up_length", "scalar")
    named = {o.attr(x) for o in walk(k.body) if o.kind in reads for x in ("tensor", "kept")}
    used = [t for t in p.tensors if t.name in named]
    names = {t.over or t.name for t in used} | {t.at for t in used} | {p.skips}
    return tuple(t for t in p.tensors if t.name in names)


def numbers(k: Kernel) -> tuple[str, ...]:
    """The caller's numbers that a kernel reads, in order of first use."""
    return tuple(dict.fromkeys(o.attr("param") for o in walk(k.body) if o.kind == "scalar" and o.attr("param")))


def written(p: Program, k: Kernel) -> tuple[str, ...]:
    """The tensors that a kernel stores to, in the program's order."""
    names = {t.over or t.name for o in walk(k.body) if o.kind == "store" for t in [p.tensor(o.attr("tensor"))]}
    return tuple(x.name for x in touched(p, k) if x.name in names)


def halves(k: Kernel) -> bool:
    """Whether a kernel's instances come twice, for parts with a long warm-up and for the others."""
    return any(o.kind == "claim_part" for o in walk(k.body))


def described(k: Kernel) -> bool:
    """Whether a kernel makes descriptors of rows."""
    return any(o.attr("described") for o in walk(k.body))


def in_buffers(k: Kernel) -> list[Op]:
    """The ops whose value has a buffer."""
    return [o for o in walk(k.body) if o.buffer]


def strides(t: Tensor) -> tuple[str, ...]:
    """What a kernel calls the strides of a tensor that is addressed by them: from batch to batch, token and head."""
    return tuple(f"{t.name}_stride_{x}" for x in ("b", "t", "h")) if t.strided else ()


def stride_unit(p: Program, t: Tensor) -> int:
    """Elements that divide a tensor's strides wherever it lies dense: those of 16 bytes, where a row is a multiple of them."""
    return math.gcd(p.shape(t)[-1], 4 if t.dtype == "float32" else 8) if len(t.dims) > 1 else 1


def integers(p: Program, k: Kernel) -> tuple[str, ...]:
    """The whole numbers that a kernel gets from the host, beside the sizes: whether optional tensors are there, how far apart
    tiles lie that numbers name, chunks from checkpoint to checkpoint, whether parts are summed up, whether outputs are cleared,
    strides."""
    tensors = touched(p, k)
    stored = [p.tensor(o.attr("tensor")) for o in walk(k.body) if o.kind == "store"]
    return (*(f"has_{t.name}" for t in tensors if t.optional), *(f"{t.name}_stride" for t in tensors if t.at),
            *([EVERY] if any(t.index == "checkpoint" for t in stored) else []),
            *([SUMMED] if any(o.attr("kept") for o in walk(k.body)) else []), *(f"{CLEAR}{t.name}" for t in p.clears(k)),
            *(x for t in tensors for x in strides(t)))


def is_of_a_part(k: Kernel, t: Tensor, o: Op) -> bool:
    """Whether `o` stores a chunk's tile in a walk that may begin before its part, and that of the part's own chunks alone."""
    begins = any(isinstance(s, Loop) and s.warm_up and s.index == "chunk" for s in k.body)
    return begins and o.kind == "store" and t.index in ("token", "slot", "checkpoint")


def blocks(p: Program, k: Kernel) -> int:
    """Instances of a kernel for each chunk, part or sequence and head: blocks of its split dim, times slices."""
    return k.slices * (p.sizes[k.split] // k.sizes[k.split] if k.split else 1)


__all__ = [
    "ATOM",
    "CLEAR",
    "EVERY",
    "PRODUCT",
    "SUM",
    "SUMMED",
    "UNARY",
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
    "described",
    "halves",
    "heads_tag",
    "in_buffers",
    "integers",
    "is_of_a_part",
    "no_heads",
    "numbers",
    "stride_unit",
    "strides",
    "touched",
    "walk",
    "wrapped",
    "written",
]
