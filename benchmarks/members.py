"""Members of the family beside FLA's op of the same name, us: python benchmarks/members.py kimi_delta_attention
--builds tilelang:fused triton:staged fla --shapes 8192x64 32768x16

A build is TARGET:SCHEDULE, "op" for what the package's op of that name chooses, or "fla". K = V = 128, bfloat16, as many key
heads as value heads. q and k have rows of norm 1, log decays are logsigmoid of normal numbers in float32, beta is sigmoid of
normal numbers. Each time is the median of 10 calls with a flushed L2.
"""
import argparse
import importlib
from functools import partial

import torch
from torch.nn.functional import logsigmoid, normalize

import gdn_codegen
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import named

#: Page -> module of FLA. Its op is chunk_MODULE.
FLA = {"kimi_delta_attention": "kda", "gla": "gla", "simple_gla": "simple_gla", "delta_rule": "delta_rule",
       "gated_delta_rule": "gated_delta_rule"}


def drawn(page: str, tokens: int, heads: int) -> dict[str, torch.Tensor]:
    """The inputs of a page of one sequence."""
    gen = torch.Generator("cuda").manual_seed(0)
    p, out = lowered(Build("triton", algorithm=page, dtype="bfloat16")), {}
    for t in (t for t in p.role("input") if t.index == "token"):
        x = torch.randn(1, tokens, heads, *([128] if len(t.dims) > 1 else []), device="cuda", generator=gen)
        if t.wide or t.name == "g":
            out[t.name] = logsigmoid(x)
        elif len(t.dims) == 1:
            out[t.name] = x.sigmoid()
        else:
            out[t.name] = (normalize(x, dim=-1) if t.name in ("q", "k") else x).bfloat16()
    return out


def op(page: str, build: str) -> object:
    """The op of a build, the package's, or FLA's."""
    if build == "op":
        return getattr(gdn_codegen, f"chunk_{FLA[page]}")
    if build == "fla":
        return getattr(importlib.import_module(f"fla.ops.{FLA[page]}"), f"chunk_{FLA[page]}")
    target, schedule = build.split(":")
    return function(Build(target, algorithm=page, schedule=named(schedule), dtype="bfloat16", head_dim_k=128, head_dim_v=128))


def us(call: partial, flush: torch.Tensor) -> float:
    """The median time of 10 calls."""
    times = []
    for n in range(12):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) * 1000] if n > 1 else []
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def main() -> None:
    """Time each build at each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", choices=sorted(FLA))
    parser.add_argument("--builds", nargs="+", required=True, help="TARGET:SCHEDULE, op, or fla")
    parser.add_argument("--shapes", nargs="+", default=["8192x64", "32768x16"], help="TOKENSxHEADS")
    a = parser.parse_args()
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for shape in a.shapes:
        x = drawn(a.page, *map(int, shape.split("x")))
        for build in a.builds:
            print(f"{a.page}, {shape}, {build}: {us(partial(op(a.page, build), **x, output_final_state=True), flush):.1f}")


if __name__ == "__main__":
    main()
