"""The emitter for PTO C++ on Ascend. Rules give the text of placed and synchronised ops.

Each kernel becomes one function, with a section for each agent.
"""
from __future__ import annotations

from ..base import Heads, Kernel, KernelText, Program, blocks, heads_tag, integers, numbers, touched
from .kernel import KernelWriter
from .rules import rule
from .values import CTYPE, parameter

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
    used = {t.name for k in kernels for t in touched(p, k)}
    given = tuple(t for t in p.tensors if t.name in used and t.index not in ("block", "const"))
    own = tuple(t for t in p.tensors if t.name in used and t.index in ("block", "const"))  # the launcher allocates them
    tensors = (*given, *own)
    scalars = tuple(dict.fromkeys(n for k in kernels for n in numbers(k)))
    sizes = ("N", "T", "batched", *(() if heads else ("H", "HV")), "slots")
    more = tuple(sorted(dict.fromkeys(x for k in kernels for x in integers(p, k)), key=lambda x: not x.startswith("has_")))
    ints = [f"int64_t {x}" for x in (*sizes, *more)]
    plain = [*ints, *(f"float {parameter(x)}" for x in scalars)]
    bytes_ = [f"uint8_t *{t.name}_bytes" for t in tensors] + ["uint8_t *cu_seqlens_bytes"]
    pointers = [(CTYPE[t.dtype], f"{t.name}_gm", f"{t.name}_bytes") for t in tensors]
    pointers.append(("int32_t", "cu_seqlens", "cu_seqlens_bytes"))
    declarations = [f"__gm__ {of} *{n} = reinterpret_cast<__gm__ {of} *>({raw});" for of, n, raw in pointers]
    declarations += [f"constexpr int64_t H = {heads[0]}, HV = {heads[1]};"] if heads else []
    ops = [o for k in kernels for o in k.ops]
    stored, loaded = ({t.over or t.name for o in ops if o.kind == kind for t in [p.tensor(o.attr("tensor"))]}
                      for kind in ("store", "load"))
    texts = [KernelWriter(p, k, layout).run() for k in kernels]
    grid = "chunks" if any(k.grid == "chunks" for k in kernels) else "sequences"
    return KernelText(name, grid, max(blocks(p, k) for k in kernels), given, scalars,
                      texts[0] if len(texts) == 1 else "\n".join(map(_block, texts)), {
        "symbol": symbol, "declarations": declarations,
        "over": "; ".join(f"{k.name} over {k.grid}" for k in kernels),
        "doc": [f"{t.name}: {t.role}, {t.index}, [{', '.join(map(str, t.dims))}] {t.dtype}"
                + (" (optional)" if t.optional else "") for t in tensors],
        "device_params": [*(f"__gm__ {x}" for x in bytes_), *plain, "uint64_t ffts"],
        "host_params": ["uint32_t block_dim", "void *stream", *bytes_, *plain],
        "names": [x.split()[-1].lstrip("*") for x in (*bytes_, *plain)] + ["ffts"],
        "kinds": [(1 if t.name in stored else 0) if t.name not in stored & loaded else 2 if t.role == "workspace" else 3
                  for t in tensors] + [0],
        "ints": more,
        "own": [t.name for t in own],
        "channels": [(t.name, [*((t.slots,) if t.slots > 1 else ()), *t.tile.shape(p.sizes)], t.dtype)
                     for t in own if t.index == "block"],
        "constants": [(t.name, t.fill, list(t.tile.shape(p.sizes)), t.dtype) for t in own if t.index == "const"]})


def _block(text: str) -> str:
    """A kernel's text in braces, for a launch of several kernels."""
    deeper = (x if not x or x.startswith("#") else f"    {x}" for x in text.split("\n"))
    return "\n".join(("    {", *deeper, "    }"))
