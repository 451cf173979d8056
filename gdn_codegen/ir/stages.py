"""The stages of a program, and the ops, attributes and annotations that are legal at each stage. `verify` checks programs for
them, and for what a stage requires (ir/required.py).

A pass takes a program of one stage and returns a program of the same or the next stage (`passes.stage`). Only devices whose
cores share no memory have the stages "transferred" and "fed". Other pipelines go from "assigned" to "placed".
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from .core import Kernel, Op, Program, loops
from .ops import OPS

STAGES = {
    "traced": "one kernel that walks the chunks; all values are float32",
    "cut": "one or more kernels, with workspaces between them",
    "typed": "values may have other dtypes than float32",
    "decomposed": "only ops that some target has",
    "assigned": "each op has its agent: a core, a warp group, or the block",
    "transferred": "values cross cores through workspaces",
    "fed": "operands are moved to where an agent reads them, in a loop over the items of a core group",
    "placed": "values that are no expressions in their readers have buffers",
    "synchronised": "agents wait for each other where they share values",
    "checked": "the same; a checker has proved that the waits order all accesses, which `verify` does not",
}

#: Range of stages ("first..last") -> the features that are legal in it. A feature is the kind of an op, an attribute
#: (kind.attribute, or *.attribute for any op), an annotation (Class.field, if its value is not the default), "grid G", "batch
#: WAY", "loop INDEX", or "index INDEX" of a tensor. An attribute that the table does not list is legal wherever its op is.
LEGAL = {
    "traced..checked": """
        const scalar load store add sub mul div maximum minimum exp log rsqrt col row matmul cast last row_sum valid full
        expand cumsum
        Program.dims Program.extents Program.tokens Tensor.optional Tensor.fill Tensor.strided Tensor.at Tensor.over Tensor.wide
        Tensor.least_step Tensor.setting
        grid sequences; loop chunk; index token; index sequence; index checkpoint; index number; index numbers; index head;
        index slot; Loop.step""",
    "traced": "Program.scales boundary decayed_product decayed_matmul",
    "traced..cut": "Program.forgets rounded",
    "traced..typed": "unit_lower_inverse row_norm softplus",
    "traced..transferred placed..checked": "load.transposed store.transposed",
    "traced..assigned placed..checked": """
        neg sigmoid lower strictly_lower resume Tensor.cleared to_middle from_middle halves eye pairs column_sum diagonal
        delay advance latest delay.given load.delay
        diagonal_blocks row_max decayed_blocks decayed_pairs""",
    "cut..checked": "Kernel.blocked_dim Kernel.dims Kernel.comments grid chunks",
    "cut..assigned placed..checked": """
        load.one_token store.one_token
        warm_up_length return_unless_negative claim_part load.parts_ahead store.parts_ahead
        clear_counter set_if_negative return_if_zero return_if_set index counter;
        Kernel.by_part Loop.warm_up Kernel.slices grid parts; loop part; loop before; loop last; index part""",
    "typed..checked": "Op.dtype Tensor.dtype",
    "decomposed..assigned": "from_quarters",
    "decomposed..fed": "cumsum.by_head",
    "decomposed..checked": """
        load.piece store.piece segment join block blocks diagonal_stack insert matmul.stacked
        load.last load.heads store.heads batch columns; index const""",
    "decomposed..assigned placed..checked": """
        if_negative loop columns;
        diag_inverse load.middle to_middle.given from_middle.given maximum.bound minimum.bound""",
    "decomposed..assigned fed..checked": "*.ahead",
    "assigned..checked": "Op.agent Kernel.agents of_token load.tokens",
    "assigned fed..checked": "move transpose load.head store.head scalar.head",
    "assigned placed synchronised": "*.own_part",
    "assigned placed..checked": """
        *.by_columns matmul.asynchronous load.described batch key_head; batch threads
        Op.buffer Kernel.buffers Buffer.slots Buffer.dims""",
    "transferred..checked": "store.row store.col index block",
    "fed..checked": """
        add_rows load.columns store.columns transpose.columns move.transposed valid.given Carry.slots Tensor.slots loop item;
        batch interleaved""",
    "placed..checked": """
        claim_item next_item choose_parts return_unless_split matmul.absent
        wait load.channel load.unfilled *.beside *.order Kernel.threads Kernel.registers Kernel.blocks_per_sm
        Kernel.lanes Kernel.piece Kernel.by_length Kernel.places Buffer.offset Buffer.agent Buffer.layout Buffer.pad
        index places""",
    "synchronised..checked": "signal fence drain barrier warp_barrier load.tail load.begun Buffer.own Kernel.one_loop",
    "checked": "Program.launch Kernel.start await_kernels",
}


def between(ranges: str) -> tuple[str, ...]:
    """The stages in the ranges of a text. For "a..b c" these are the stages from a to b, and c."""
    order, out = list(STAGES), []
    for r in ranges.split():
        first, _, last = r.partition("..")
        out += order[order.index(first):order.index(last or first) + 1]
    return tuple(out)


def _names(text: str) -> list[str]:
    """The features in a row of LEGAL. "grid G" and its like are one name each; so is every other word."""
    words = text.replace(";", " ").split()
    out: list[str] = []
    while words:
        n = 2 if words[0] in ("grid", "batch", "loop", "index") else 1
        out.append(" ".join(words[:n]))
        del words[:n]
    return out


#: Feature -> the ranges of stages in which it is legal.
RANGES: dict[str, str] = {name: ranges for ranges, names in LEGAL.items() for name in _names(names)}
_LEGAL: dict[str, frozenset[str]] = {s: frozenset(n for n, r in RANGES.items() if s in between(r)) for s in STAGES}
#: The annotations of each class of node, with their default values.
_PROGRAM = {"dims": (), "extents": (), "tokens": 0, "scales": (), "forgets": "", "launch": "kernels"}
_TENSOR = {"optional": False, "fill": "", "strided": False, "at": "", "over": "", "wide": False, "cleared": False, "slots": 1,
           "least_step": -math.inf, "setting": False}
_KERNEL = {"blocked_dim": "", "dims": (), "slices": 1, "buffers": (), "agents": (),
           "threads": 0, "registers": 0, "blocks_per_sm": 0, "lanes": 0, "piece": 0, "one_loop": (), "by_length": False,
           "places": "", "by_part": False, "start": "", "comments": ()}
_BUFFER = {"offset": 0, "slots": 1, "agent": "", "dims": (), "layout": "", "pad": 0, "own": False}


def features(p: Program) -> Iterator[tuple[str, Kernel | None, Op | None]]:
    """The features that `p` has, with the kernel and op of each. Of the ops of a kernel that have the same features, only the
    first is given."""
    def annotations(node: object, fields: Mapping[str, object]) -> list[str]:
        return [f"{type(node).__name__}.{f}" for f, default in fields.items() if getattr(node, f) != default]

    yield from ((f, None, None) for f in annotations(p, _PROGRAM))
    for t in p.tensors:
        yield f"index {t.index}", None, None
        yield from ((f, None, None) for f in annotations(t, _TENSOR))
        if t.dtype != "float32" and t.index not in ("head", "number", "numbers", "counter", "places"):
            yield "Tensor.dtype", None, None
    for k in p.kernels:
        yield f"grid {k.grid}", k, None
        if k.batch.heads > 1:
            yield f"batch {k.batch.way}", k, None
        yield from ((f, k, None) for f in annotations(k, _KERNEL))
        yield from ((f, k, None) for b in k.buffers for f in annotations(b, _BUFFER))
        for lp in loops(k.body):
            yield f"loop {lp.index}", k, None
            if lp.warm_up:
                yield "Loop.warm_up", k, None
            if lp.step != 1:
                yield "Loop.step", k, None
            if any(c.slots > 1 for c in lp.carried):
                yield "Carry.slots", k, None
        yield from ((f, k, o) for f, o in _of_ops(k.ops).items())


def _of_ops(ops: Sequence[Op]) -> dict[str, Op]:
    """The rows of RANGES that ops fall under, each with the first such op: their kinds, attributes, and annotations that passes
    set."""
    out: dict[str, Op] = {}
    named: dict[tuple[str, str], Op] = {}
    for o in ops:
        out.setdefault(o.kind, o)
        for name, _ in o.attrs:
            named.setdefault((o.kind, name), o)
    for (kind, name), first in named.items():
        of = f"{kind}.{name}" if f"{kind}.{name}" in RANGES else f"*.{name}"
        if of in RANGES:
            out.setdefault(of, first)
    annotated = {"Op.agent": next((o for o in ops if o.agent), None), "Op.buffer": next((o for o in ops if o.buffer), None),
                 "Op.dtype": next((o for o in ops if o.type is not None and o.type.dims and o.type.dtype != "float32"), None)}
    return out | {f: o for f, o in annotated.items() if o is not None}


def illegal(p: Program) -> Iterator[tuple[str, Kernel | None, Op | None]]:
    """An error text for each feature of `p` that is not legal at its stage, with the kernel and op."""
    if p.stage not in STAGES:
        yield f"stage {p.stage!r} is none of {', '.join(STAGES)}", None, None
        return
    legal = _LEGAL[p.stage]
    for name, k, o in features(p):
        if name not in legal and p.stage not in between(ranges(name)):
            yield f"{name} is legal at the stages {ranges(name) or '(none)'}, and the program is {p.stage}", k, o


def ranges(name: str) -> str:
    """The ranges of stages in which a feature is legal, "" if it never is.

    An op that another package adds is legal from "traced" to "checked". If it has a decomposition, it is legal up to "typed".
    """
    if name in RANGES or name not in OPS:
        return RANGES.get(name, "")
    return "traced..typed" if OPS[name].decompose else "traced..checked"


def is_decomposed(kind: str) -> bool:
    """Whether an op is legal only up to "typed", so that the pass `decompose` replaces it on every target."""
    order, at = list(STAGES), between(ranges(kind))
    return bool(at) and order.index(at[-1]) < order.index("decomposed")
