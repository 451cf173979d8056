"""Text and pictures of what a build does."""
from __future__ import annotations

from ..passes.cut.resolve import resolved
from ..runtime.build import Build, lowered
from ..targets import lower


def schedule_text(b: Build) -> str:
    """The fields of the schedule as it serves this page, one per line."""
    s = b.plan.adapted(b.page.trace())
    p = lower(b.page.trace(), b.target, b.plan, b.sizes, b.dtype, b.arch, b.contract, upto="rewrite")
    roles, groups = (" ".join(f"[{' '.join(g)}]" for g in x.kernels) for x in (s, resolved(p, s)))
    return "\n".join([f"schedule {s.name}", f"  kernels        {groups}",
                      *([f"  by role        {roles}"] if s.generic else []), f"  form           {s.form}",
                      f"  inverse        {s.inverse}",
                      f"  v_block        {s.v_block or 'as the device has it'}", f"  partition      {s.partition or 'none'}"])


def kernels_text(b: Build) -> str:
    """A line for each kernel: its grid, the tensors that it reads and writes, its products."""
    p = lowered(b)
    lines = []
    for k in p.kernels:
        ops = k.ops
        reads = dict.fromkeys(o.attr("tensor") for o in ops if o.kind in ("load", "scalar") and o.attr("tensor"))
        writes = dict.fromkeys(o.attr("tensor") for o in ops if o.kind == "store")
        grid = {"chunks": "parallel over chunks", "parts": "walks a part's chunks"}.get(k.grid, "walks a sequence's chunks")
        grid = "looks at chunks before a part" if k.slices > 1 else grid
        lines += [f"{k.name}: {grid}", f"  reads     {', '.join(reads)}", f"  writes    {', '.join(writes)}",
                  f"  products  {sum(o.kind == 'matmul' for o in ops)}"]
    return "\n".join(lines)
