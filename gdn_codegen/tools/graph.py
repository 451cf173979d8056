"""Pictures of the chunk graph: the values that each kernel reads, computes and writes, as DOT or as SVG."""
from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from ..ir.core import Kernel, Op, Program, loops
from ..runtime.build import Build
from ..targets import lower

#: The kinds of values of a kernel, with their colours in pictures (fill, border).
KINDS = {"input": ("#ffffff", "#57606a"), "state": ("#fff8c5", "#9a6700"), "read": ("#ddf4ff", "#0969da"),
         "computed": ("#f6f8fa", "#8c959f"), "written": ("#54aeff", "#0550ae"), "output": ("#4ac26b", "#116329")}
MEANING = {"input": "caller's tensor", "state": "state", "read": "read from a workspace",
           "computed": "stays in the kernel", "written": "written to a workspace", "output": "written to the caller's tensor"}
#: How a kernel's instances share the work.
GRIDS = {"chunks": "parallel over chunks", "sequences": "one chunk after another", "parts": "one chunk of a part after another"}


@dataclass(frozen=True)
class Node:
    """A value in a kernel. kind: one of KINDS; note: where it was read from."""

    name: str
    kind: str
    note: str = ""


@dataclass(frozen=True)
class Box:
    """A kernel: its values by key, and which is computed from which (keys). Values without a name on the page are left out, and
    what they were computed from leads to what reads them."""

    name: str
    grid: str
    nodes: dict[str, Node]
    edges: tuple[tuple[str, str], ...]


def boxes(b: Build) -> list[Box]:
    """The kernels of a build as they are when the page has been cut, before any are added for parts of a sequence."""
    p = lower(b.page.trace(), b.target, b.plan, b.sizes, b.dtype, b.arch, b.contract, upto="cut")
    named = {m[1] for _, text in p.source if (m := re.match(r"(\w+) =", text))}
    writer = {o.attr("tensor"): i for i, k in enumerate(p.kernels, 1) for o in k.ops if o.kind == "store"}
    return [_box(p, k, named, writer) for k in p.kernels]


def _box(p: Program, k: Kernel, named: set[str], writer: dict[str, int]) -> Box:
    """The picture's content of one kernel. named: values with a name on the page. writer: workspace -> number of the kernel that
    stores it.
    """
    ops = {o.out: o for o in k.ops if o.out}
    carried = {c.name: c for loop in loops(k.body) for c in loop.carried}
    after = {c.next: c.name for c in carried.values()} | {c.result: c.name for c in carried.values()}
    nodes = {c: Node(c, "state", "before the chunk") for c in carried}
    for o in ops.values():
        if o.kind == "load" and p.tensor(o.attr("tensor")).index != "sequence":
            at = o.attr("tensor")
            own = p.tensor(at).role == "workspace"
            nodes[o.out] = Node(o.out, "read", f"of kernel {writer[at]}") if own else Node(o.out, "input")
        elif o.kind == "scalar" and o.attr("tensor"):
            nodes[o.out] = Node(o.out, "input", "of the head")
        elif o.out in named:
            nodes[o.out] = Node(o.out, "computed")
    for o in k.ops:
        if o.kind == "store" and o.args[0] not in carried:  # a state that is stored as it comes has its node
            value = next((c.next for c in carried.values() if c.result == o.args[0]), o.args[0])
            kind = "output" if p.tensor(o.attr("tensor")).role == "output" else "written"
            nodes[value] = Node(after[value], kind, "after the chunk") if value in after else Node(value, kind)
        elif o.kind == "store":
            nodes[o.args[0]] = Node(o.args[0], "written", "before the chunk")
    edges = dict.fromkeys((a, n) for n in nodes if n in ops and ops[n].kind != "load" for a in _from(n, ops, nodes))
    used = {x for e in edges for x in e}
    return Box(f"kernel {k.name}", GRIDS[k.grid], {n: x for n, x in nodes.items() if n in used}, tuple(edges))


def _from(name: str, ops: dict[str, Op], nodes: dict[str, Node]) -> dict[str, None]:
    """The nearest nodes from which a value is computed."""
    found: dict[str, None] = {}
    for a in ops[name].args:
        found |= {a: None} if a in nodes else _from(a, ops, nodes) if a in ops else {}
    return found


def dot(b: Build) -> str:
    """The graph in DOT, a box for each kernel."""
    lines = [f'digraph "{b.page.name}" {{', '  rankdir=LR; node [fontname=Helvetica, shape=box, style="rounded,filled"];']
    for i, box in enumerate(boxes(b), 1):
        lines += [f"  subgraph cluster_{i} {{", f'    label="{i}. {box.name}: {box.grid}"; style=rounded;']
        for key, node in box.nodes.items():
            fill, border = KINDS[node.kind]
            note = f"\\n{node.note}" if node.note else ""
            lines.append(f'    "{i}.{key}" [label="{node.name}{note}", fillcolor="{fill}", color="{border}"];')
        lines += [f'    "{i}.{a}" -> "{i}.{z}";' for a, z in box.edges] + ["  }"]
    return "\n".join([*lines, "}"]) + "\n"


#: Pixels: a node, the space between nodes, around a kernel's, and what fits in a row of kernels.
WIDTH, HEIGHT, ACROSS, DOWN, MARGIN, ROW = 88, 32, 40, 12, 14, 1060
HEAD = 42


@dataclass(frozen=True)
class _Placed:
    """A kernel's picture: its extent, where each node's middle is, and the points that each edge passes."""

    width: int
    height: int
    at: dict[str, tuple[int, int]]
    paths: tuple[tuple[tuple[int, int], ...], ...]


def _columns(box: Box) -> dict[str, int]:
    """A column for each node: right of all that it is computed from, what is loaded as far to the right as it can be."""
    column = dict.fromkeys(box.nodes, 0)
    for _ in box.nodes:  # as many rounds as the longest path can have
        for a, z in box.edges:
            column[z] = max(column[z], column[a] + 1)
    into = {z for _, z in box.edges}
    return {n: c if n in into else min(column[z] for a, z in box.edges if a == n) - 1 for n, c in column.items()}


def _placed(box: Box) -> _Placed:
    """Where the nodes and edges of a kernel lie, in pixels.

    Nodes are in columns by `_columns`. Eight sweeps sort each column by the mean height of what its nodes are joined to.
    """
    column = _columns(box)
    # an edge over several columns has a place in each, so that it passes between nodes; edges from one node share theirs
    via = {(a, z): [a, *(f"{a}>{c}" for c in range(column[a] + 1, column[z])), z] for a, z in box.edges}
    cells = dict(column) | {n: column[a] + i for (a, _), path in via.items() for i, n in enumerate(path)}
    rows = [[n for n in cells if cells[n] == c] for c in range(max(cells.values(), default=0) + 1)]
    steps = list(dict.fromkeys(s for path in via.values() for s in pairwise(path)))
    tall = max(map(len, rows))
    y = {n: (i + (tall - len(row)) / 2) for row in rows for i, n in enumerate(row)}
    for sweep in range(8):  # each column in the order of what its nodes are joined to on one side
        for row in rows:
            side = {n: [y[a] for a, z in steps if z == n] if sweep % 2 == 0 else [y[z] for a, z in steps if a == n] for n in row}
            row.sort(key=lambda n: sum(side[n]) / len(side[n]) if side[n] else y[n])
            y |= {n: i + (tall - len(row)) / 2 for i, n in enumerate(row)}
    at = {n: (MARGIN + WIDTH // 2 + c * (WIDTH + ACROSS), HEAD + HEIGHT // 2 + round(y[n] * (HEIGHT + DOWN)))
          for n, c in cells.items()}
    text = 7 * max(len(box.name) + 3, len(box.grid))
    return _Placed(max(2 * MARGIN + len(rows) * (WIDTH + ACROSS) - ACROSS, text + 2 * MARGIN),
                   HEAD + tall * (HEIGHT + DOWN) - DOWN + MARGIN, {n: at[n] for n in box.nodes},
                   tuple(tuple(at[n] for n in path) for path in via.values()))


def _curve(points: tuple[tuple[int, int], ...]) -> str:
    """A path through the points, from a node's right edge to a node's left edge."""
    (x, y), *rest = points
    text = f"M{x + WIDTH // 2} {y}"
    for i, (nx, ny) in enumerate(rest):
        end = nx - WIDTH // 2 - (5 if i == len(rest) - 1 else 0)
        middle = (x + WIDTH // 2 + end) // 2
        text += f" C{middle} {y} {middle} {ny} {end} {ny}" + (f" H{nx + WIDTH // 2}" if i < len(rest) - 1 else "")
        x, y = nx, ny
    return text


def _text(x: int, y: int, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'


def _drawn(i: int, box: Box, placed: _Placed, x: int, y: int, height: int) -> list[str]:
    """SVG elements of a kernel. i: its number. x, y: its left upper corner; height: of its frame, all in pixels."""
    out = [f'<g transform="translate({x} {y})">',
           f'<rect width="{placed.width}" height="{height}" rx="8" fill="#ffffff" stroke="#8c959f"/>',
           _text(MARGIN, 19, f"{i}. {box.name}", 'font-weight="bold"'), _text(MARGIN, 34, box.grid, 'fill="#57606a"')]
    out += [f'<path d="{_curve(path)}" fill="none" stroke="#57606a" marker-end="url(#end)"/>' for path in placed.paths]
    for key, node in box.nodes.items():
        (cx, cy), (fill, border) = placed.at[key], KINDS[node.kind]
        out.append(f'<rect x="{cx - WIDTH // 2}" y="{cy - HEIGHT // 2}" width="{WIDTH}" height="{HEIGHT}" '
                   f'rx="{16 if node.kind in ("input", "state", "read") else 4}" fill="{fill}" stroke="{border}"/>')
        out.append(_text(cx, cy + (-1 if node.note else 4), node.name, 'text-anchor="middle" font-weight="bold"'))
        if node.note:
            out.append(_text(cx, cy + 11, node.note, 'text-anchor="middle" font-size="9"'))
    return [*out, "</g>"]


def svg(b: Build) -> str:
    """The graph in SVG: kernels in the order in which they run, with what the colours mean below."""
    kernels = boxes(b)
    rows: list[list[tuple[int, Box, _Placed]]] = [[]]
    for i, box in enumerate(kernels, 1):
        placed = _placed(box)
        if rows[-1] and sum(p.width + MARGIN for _, _, p in rows[-1]) + placed.width > ROW:
            rows.append([])
        rows[-1].append((i, box, placed))
    y, wide, body = MARGIN, 0, list[str]()
    for row in rows:
        left, tall = MARGIN, max(p.height for _, _, p in row)
        for i, box, placed in row:
            body += _drawn(i, box, placed, left, y, tall)
            left += placed.width + MARGIN
        y, wide = y + tall + MARGIN, max(wide, left)
    left = MARGIN
    for kind in (k for k in KINDS if any(n.kind == k for box in kernels for n in box.nodes.values())):
        length = 26 + 7 * len(MEANING[kind])
        if left > MARGIN and left + length > max(wide, ROW // 2):
            left, y = MARGIN, y + 20
        body += [f'<rect x="{left}" y="{y}" width="14" height="14" rx="3" fill="{KINDS[kind][0]}" stroke="{KINDS[kind][1]}"/>',
                 _text(left + 19, y + 11, MEANING[kind])]
        left += length
        wide = max(wide, left)
    y += 14 + MARGIN
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{y}" viewBox="0 0 {wide} {y}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(b.page.name)}, schedule {escape(b.plan.name)}</title>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="3" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>',
        f'<rect width="{wide}" height="{y}" fill="#ffffff"/>', *body, "</svg>"]) + "\n"
