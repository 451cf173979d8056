"""precision: gives memory and operands of products their dtypes, as explicit `cast` ops. All targets run it.

- Tensors of tiles (q, k, v, o) have the caller's dtype.
- Tensors of one number per token (gates, beta), and log decays of any shape, have the contract's dtype, float32 by default.
  Loads cast them to float32.
- Carried states are float32. States in callers' memory have the contract's dtype. They are cast to float32 where a walk begins,
  and rounded where it ends.
- Elementwise ops compute in float32.
- Operands of products have the caller's dtype. Products sum in float32.
- A workspace has the operands' dtype if only products read it, or an inverse that rounds it first, or if the schedule has
  `narrow_workspaces`, and it holds tiles of chunks that are neither part of an exponent or running sum nor log decays or their
  cotangents (`wide`). Otherwise it is float32. A running sum of the cotangents of log decays is small beside its terms: with
  these rounded to bfloat16, its error would be 1e-2 (`tests/family/test_gradient_rounding.py`).
- Tensors of callers with a tile for each chunk have the contract's dtype, float32 by default.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Op, Program, loops
from ...ir.dataflow import exponents, terms_of_sums
from ...ir.names import DTYPES
from ...ir.types import Tensor
from ...schedule.contract import Contract
from ...schedule.schedule import Schedule
from ..common import rebuild_kernels
from ..stage import takes


def _only_rounded(p: Program, rounds_first: tuple[str, ...]) -> dict[str, bool]:
    """Workspace -> whether all its readers are operands of ops of these kinds."""
    out = {t.name: True for t in p.role("workspace")}
    for k in p.kernels:
        loaded = {o.out: o.attr("tensor") for o in k.ops if o.kind == "load"}
        wide = {o.attr("tensor") for o in k.ops if o.kind == "warm_up_length"}
        wide |= {loaded.get(a) for o in k.ops for n, a in enumerate(o.args) if o.kind not in rounds_first or n > 1}
        wide |= {loaded.get(c.init) for lp in loops(k.body) for c in lp.carried}
        out |= {n: False for n in wide if n in out}
    return out


@takes("cut", gives="typed")
def precision(p: Program, s: Schedule, dtype: str, c: Contract, rounds_first: tuple[str, ...] = ("matmul",)) -> Program:
    """`p` with typed tensors and casts. dtype: of q, k, v and operands. c: gives dtypes of gates and states. rounds_first: the
    kinds of ops that read operands in `dtype`."""
    only_products, kept = _only_rounded(p, rounds_first), set[str]()
    for k in p.kernels:
        loaded = {o.out: o.attr("tensor") for o in k.ops if o.kind == "load"}
        kept |= {loaded[a] for a in exponents(k.ops) | terms_of_sums(k.ops) if a in loaded}

    def stored(t: Tensor) -> str:
        """The dtype of a tensor in memory."""
        if t.index in ("number", "numbers", "counter", "places"):
            return t.dtype
        if t.index in ("sequence", "checkpoint") and t.role != "workspace":
            return c.state_dtype
        if t.index == "token":
            return dtype if len(t.dims) > 1 and not t.wide else c.dtype(t.name)
        if t.index == "head":
            return t.dtype
        if t.index == "slot" and t.role != "workspace":
            return c.dtype(t.name)
        narrow = s.narrow_workspaces and t.index == "slot" and len(t.dims) == 2 and not t.wide and t.name not in kept
        return dtype if narrow or only_products.get(t.name) else "float32"

    tensors = tuple(replace(t, dtype=stored(t)) for t in p.tensors)
    typed = replace(p, tensors=tensors)
    by_name = {t.name: t for t in tensors}

    narrow: dict[str, str] = {}  # an initial state -> what was loaded of it

    def rule(o: Op, b: Body) -> str | None:
        """An op with casts: a store casts to the tensor's dtype, a product casts its operands to `dtype`, other ops cast to
        float32."""
        def cast(a: str, to: str) -> str:
            return a if b.types[a].dtype == to else b.op("cast", a, to=to, line=o.line)

        if o.kind == "store":
            b.op("store", cast(o.args[0], by_name[o.attr("tensor")].dtype), line=o.line, **dict(o.attrs))
            return ""
        if o.kind == "rounded":
            return cast(o.args[0], dtype)
        if o.kind in ("matmul", "decayed_blocks", "decayed_pairs"):
            left, right = (cast(a, dtype) for a in o.args[:2])
            rest = o.args[2:] if o.kind == "matmul" else [cast(a, "float32") for a in o.args[2:]]
            return b.op(o.kind, left, right, *rest, name=o.out, line=o.line, **dict(o.attrs))
        of = by_name[o.attr("tensor")] if o.kind == "load" else None
        if of is not None and of.index == "sequence" and of.dtype != "float32":
            narrow[o.out] = b.op("load", *o.args, name=b.fresh(f"{o.out}_{DTYPES[of.dtype]}"), line=o.line, **dict(o.attrs))
            return b.op("cast", narrow[o.out], to="float32", name=o.out, line=o.line)
        if o.kind == "resume":  # a walk keeps its initial state as it was loaded, in fewer registers
            return b.op("resume", o.args[0], narrow.get(o.args[1], o.args[1]), name=o.out, line=o.line, **dict(o.attrs))
        if o.kind == "load":
            return b.op("load", *o.args, name=o.out, line=o.line, **dict(o.attrs))
        if o.args and any(b.types[a].dtype != "float32" for a in o.args):
            return b.op(o.kind, *(cast(a, "float32") for a in o.args), name=o.out, line=o.line, **dict(o.attrs))
        return None

    return rebuild_kernels(typed, lambda k: rule)
