"""Text and pictures of what a build does."""
from __future__ import annotations

from ..ir.core import Loop, Op, Program, walk
from ..runtime.build import Build, lowered

MEMORY_FREE = ("const", "scalar")


def schedule_text(b: Build) -> str:
    s = b.plan.adapted(b.page.trace(), b.device.joined)
    groups = " ".join(f"[{' '.join(g)}]" for g in s.kernels)
    return "\n".join([f"schedule {s.name}", f"  kernels        {groups}", f"  form           {s.form}",
                      f"  inverse        {s.inverse}", f"  inverse_dtype  {s.inverse_dtype}",
                      f"  v_block        {s.v_block or 'as the device has it'}", f"  partition      {s.partition or 'none'}"])


def kernels_text(b: Build) -> str:
    """A line a kernel: its grid, what it reads and writes, its products."""
    p = lowered(b)
    lines = []
    for k in p.kernels:
        ops = list(walk(k.body))
        reads = dict.fromkeys(o.attr("tensor") for o in ops if o.kind == "load")
        writes = dict.fromkeys(o.attr("tensor") for o in ops if o.kind == "store")
        grid = {"chunks": "parallel over chunks", "parts": "walks a part's chunks"}.get(k.grid, "walks a sequence's chunks")
        grid = "looks at chunks before a part" if k.slices > 1 else grid
        lines += [f"{k.name}: {grid}", f"  reads     {', '.join(reads)}", f"  writes    {', '.join(writes)}",
                  f"  products  {sum(o.kind == 'matmul' for o in ops)}"]
    return "\n".join(lines)


def graph_dot(b: Build) -> str:
    """The chunk graph in DOT, a box around the values that each kernel writes; dashed values are recomputed."""
    from ..passes.algebra.rewrite import rewrite
    page = b.page
    s = b.plan.adapted(page.trace(), b.device.joined)
    p: Program = rewrite(page.trace(), s)
    loop = next(x for x in p.kernels[0].body if isinstance(x, Loop))
    ops = {o.out: o for o in loop.body if isinstance(o, Op) and o.out and o.kind not in MEMORY_FREE}
    written = {n for g in s.kernels for n in g}
    carried = {c.name: c for c in loop.carried}
    lines = [f"digraph {p.name} {{", "  rankdir=TB; node [fontname=Helvetica, shape=box];"]
    for i, g in enumerate(s.kernels):
        lines += [f"  subgraph cluster_{i} {{", f'    label="kernel {i + 1}: {" ".join(g)}"; style=rounded;']
        lines += [f'    "{carried[n].next if n in carried else n}" [style=filled, label="{n}"];' for n in g]
        lines.append("  }")
    for n in carried:
        lines.append(f'  "{n}" [shape=ellipse, label="{n} (of the chunk before)"];')
    nexts = {c.next for c in loop.carried}
    for o in ops.values():
        if o.kind == "load":
            lines.append(f'  "{o.out}" [shape=ellipse];')
        elif o.out not in written and o.out not in nexts:
            lines.append(f'  "{o.out}" [style=dashed, label="{o.out}\\n{o.kind}"];')
        lines += [f'  "{a}" -> "{o.out}";' for a in dict.fromkeys(o.args) if a in ops or a in carried]
    return "\n".join([*lines, "}"]) + "\n"
