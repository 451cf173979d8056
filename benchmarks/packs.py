"""Packs of random shapes on an sm_90a GPU, us: python benchmarks/packs.py OUT.jsonl [FIRST LAST] [--flashinfer]

A line of JSON for each pack: its size, how its lengths were drawn, and the time of each candidate of TileLang's dispatch.
Candidates are `fused_walk` and `walk` by value heads, whole (also by length) and in parts of several lengths; "auto" is what
the module chooses, on the device for packs. "op" is what the package's op chooses, and "op_cpu" what it chooses with
`cu_seqlens_cpu`. FlashInfer's prefill is timed if asked for (gdn_kernels.delta_rule_dsl). A time is the median of seven replays
of a CUDA graph of the call, each after a write of 256 MiB. A file that is there is continued. bfloat16, K = V = 128, gates as a
layer draws them.
"""
from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gdn_codegen
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import module
from gdn_codegen.schedule import named, varied

ARCH = "sm_90a"
#: Parts per multiprocessor and value head that are tried.
WAVES = (.5, .66, .8, 1, 1.33, 2, 3, 4)


def builds() -> dict[str, Build]:
    """The candidates by name: schedule, "p" for persistent walks, "l" for the longest first, "d" for parts, value heads."""
    plans = {"fw": named("fused_walk", ARCH), "fp": varied("fused_walk", ARCH, persistent=True),
             "fl": varied("fused_walk", ARCH, by_length=True), "fpl": varied("fused_walk", ARCH, persistent=True, by_length=True),
             "fwd": varied("fused_walk", ARCH, partition="decay")}
    for heads in (1, 2, 4):
        fields = {"value_heads": heads} if heads > 1 else {}
        plans[f"w{heads}"] = varied("walk", ARCH, **fields)
        plans[f"wd{heads}"] = varied("walk", ARCH, partition="decay", longest_first=True, **fields)
    return {n: Build("tilelang", 64, schedule=plan, dtype="bfloat16", arch=ARCH) for n, plan in plans.items()}


def pack(number: int) -> dict[str, Any]:
    """The pack with this number: 1 to 64 value heads, 1 to 64 sequences, 256 to 131072 tokens in all."""
    r = random.Random(1000 + number)
    while True:
        ratio, h = r.choice([1, 1, 2, 2, 3, 4, 4, 8]), 2 ** r.randint(0, 6)
        if h * ratio > 64:
            continue
        n, tokens = int(2 ** r.uniform(0, 6.01)), int(2 ** r.uniform(8, 17))
        if tokens < 16 * n or tokens * h * ratio > 131072 * 32:
            continue
        kind = r.choice(["equal", "dirichlet1", "dirichlet.3", "onelong"])
        if kind == "equal" or n == 1:
            kind, weights = "equal", [1.0] * n
        elif kind == "onelong":
            weights = [1.0 + r.random() for _ in range(n)]
            weights[r.randrange(n)] = sum(weights) * r.uniform(1, 8)
        else:
            weights = [r.gammavariate(1.0 if kind == "dirichlet1" else .3, 1) + 1e-3 for _ in range(n)]
        lens = [max(1, int(tokens * w / sum(weights))) for w in weights]
        return dict(i=number, H=h, HV=h * ratio, lens=lens, kind=kind)


def inputs(lens: list[int], h: int, hv: int, seed: int) -> dict[str, Any]:
    """q, k, v, g, beta and cu_seqlens on the GPU."""
    gen = torch.Generator("cuda").manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, device="cuda", generator=gen)
    tokens, K = sum(lens), 128
    q, k = (F.normalize(rand(1, tokens, h, K), dim=-1).bfloat16() for _ in "qk")
    a = torch.rand(hv, device="cuda", generator=gen) * 16
    dt = torch.exp(torch.rand(hv, device="cuda", generator=gen) * (math.log(.1) - math.log(.001)) + math.log(.001))
    g = -a * F.softplus(rand(1, tokens, hv) + dt + torch.log(-torch.expm1(-dt)))
    ends = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
    return dict(q=q, k=k, v=rand(1, tokens, hv, K).bfloat16(), g=g, beta=torch.sigmoid(rand(1, tokens, hv)), cu_seqlens=ends)


def us(call: Callable[[], object], flush: torch.Tensor, n: int = 7) -> float:
    """The median time of a replay of the call's graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in "ab") for _ in range(n)]
    torch.cuda._sleep(10**7)  # the host is then ahead: no event waits for it
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return round(sorted(a.elapsed_time(b) * 1e3 for a, b in events)[n // 2], 2)


def calls(x: dict[str, Any], hv: int, shared: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Candidates with their names; of parts with the chunks of a part after a colon."""
    tokens = x["q"].shape[1]
    lengths = x["cu_seqlens"].cpu()
    yield "op", lambda: gdn_codegen.chunk_gated_delta_rule(**x, output_final_state=True)
    yield "op_cpu", lambda: gdn_codegen.chunk_gated_delta_rule(**x, output_final_state=True, cu_seqlens_cpu=lengths)
    for name, b in builds().items():
        m, heads = module(b), int(name[-1]) if name[-1].isdigit() else 1
        run = lambda m=m: m.chunk_gated_delta_rule(**x, scale=128 ** -.5, output_final_state=True)
        if shared % heads:
            continue
        if "d" not in name:
            yield name, run
            continue
        chunks = -(-tokens // 64)
        for span in sorted({0, *(max(2, -(-chunks * hv // heads // int(132 * w))) for w in WAVES)}):
            if span < chunks:
                m.HOST.part_chunks = span
                m.HOST.plans.clear()
                yield f"{name}:{span or 'auto'}", run


def flashinfer(x: dict[str, Any], sequences: int, hv: int) -> Callable[[], object]:
    """FlashInfer's prefill, the one of its two kernels that its own rule takes on this GPU."""
    from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_cp_sm90 import cp_delta_rule_dsl_sm90
    from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_sm90 import delta_rule_prefill_dsl_sm90
    q, k, v, g, b = (x[n][0].contiguous() for n in ("q", "k", "v", "g", "beta"))
    o, state, decay = torch.empty_like(v), torch.empty(sequences, hv, 128, 128, device="cuda"), torch.exp(g)
    if sequences * hv * 2 < 132:
        return lambda: cp_delta_rule_dsl_sm90(o, state, q, k, v, decay, b, x["cu_seqlens"], 128 ** -.5, max_seqlen=len(q))
    return lambda: delta_rule_prefill_dsl_sm90(o, state, q, k, v, None, decay, b, x["cu_seqlens"], 128 ** -.5)


def main() -> None:
    """Time the packs that the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("span", type=int, nargs="*", default=[0, 200])
    parser.add_argument("--flashinfer", action="store_true")
    a = parser.parse_args()
    done = {json.loads(line)["i"] for line in a.out.read_text().splitlines()} if a.out.exists() else set()
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for number in sorted(set(range(*a.span)) - done):
        row = pack(number)
        h, hv, n = row["H"], row["HV"], len(row["lens"])
        x = inputs(row["lens"], h, hv, number)
        row["us"] = {name: us(call, flush) for name, call in calls(x, hv, hv // h)}
        if a.flashinfer:
            row["us"]["flashinfer"] = us(flashinfer(x, n, hv), flush)
        with a.out.open("a") as f:
            f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
