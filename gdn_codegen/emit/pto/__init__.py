"""The emitter for PTO C++ on Ascend. Rules give the text of placed and synchronised ops.

Each kernel becomes one function, with a section for each agent.
"""
from __future__ import annotations

from ..base import Heads, Kernel, KernelText, Program, blocks, heads_tag, integers, numbers
from .kernel import KernelWriter
from .memory import EACH, Memory
from .rules import rule
from .values import parameter

__all__ = ["emit", "rule"]


def emit(p: Program, layout: str, heads: Heads = None) -> list[KernelText]:
    """The text of each launch, with the data that the template declares for it, such as its parameters in order."""
    dtype = next((t.dtype for t in p.role("input") if len(t.dims) > 1 and t.index == "token"), "float32")
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[dtype]
    name = "_".join(x for x in (p.name, heads_tag(heads)) if x)
    if p.launch == "single":
        return [_launched(p, p.kernels, layout, heads, "all", f"{name}_{short}")]
    return [_launched(p, (k,), layout, heads, k.name, f"{name}_{k.name}_{short}") for k in p.kernels]


def _launched(p: Program, kernels: tuple[Kernel, ...], layout: str, heads: Heads, name: str, symbol: str) -> KernelText:
    """The text of one launch, which runs its kernels one after the other."""
    m = Memory(p, kernels)
    scalars = tuple(dict.fromkeys(n for k in kernels for n in numbers(k)))
    sizes = ("N", "T", "batched", *(() if heads else ("H", "HV")), "slots")
    flags = sorted(dict.fromkeys(x for k in kernels for x in integers(p, k) if x not in m.strides),
                   key=lambda x: not x.startswith("has_"))
    plain = [*(f"int64_t {x}" for x in (*sizes, *flags)), *(f"float {parameter(x)}" for x in scalars)]
    bytes_ = [f"uint8_t *{x}" for x in m.pointers]
    declared = m.declarations()
    if heads:
        declared |= {n: f"constexpr int64_t {n} = {x};" for n, x in zip(("H", "HV"), heads, strict=True)}
    texts = [KernelWriter(p, k, layout).run(declared) for k in kernels]
    grid = "chunks" if any(k.grid == "chunks" for k in kernels) else "sequences"
    return KernelText(name, grid, max(blocks(p, k) for k in kernels), m.given, scalars,
                      texts[0] if len(texts) == 1 else "\n".join(map(_block, texts)), {
        "symbol": symbol, "over": "; ".join(f"{k.name} over {k.grid}" for k in kernels), "doc": m.doc(),
        "device_params": [*(f"__gm__ {x}" for x in bytes_), *plain, "uint64_t ffts"],
        "host_params": ["uint32_t block_dim", "void *stream", *bytes_, *plain],
        "names": [x.split()[-1].lstrip("*") for x in (*bytes_, *plain)] + ["ffts"],
        "kinds": [m.kind(t) for t in m.given], "used": {t.name: m.kind(t) for t in m.regions}, "masks": m.masks,
        "ints": (*flags, *m.strides), "strides": len(m.strides),
        "regions": [(t.name, EACH[t.index], (*((t.slots,) if t.slots > 1 else ()), *t.tile.shape(p.sizes)), t.dtype)
                    for t in m.regions],
        "constants": [(t.name, t.fill, t.tile.shape(p.sizes), t.dtype) for t in m.constants]})


def _block(text: str) -> str:
    """A kernel's text in braces, for a launch of several kernels."""
    deeper = (x if not x or x.startswith("#") else f"    {x}" for x in text.split("\n"))
    return "\n".join(("    {", *deeper, "    }"))
