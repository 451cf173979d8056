"""Verification of draft tokens on an NVIDIA GPU, us: python benchmarks/draft_tokens.py OUT.jsonl [--flashinfer]

A line of JSON for each number of sequences, of draft tokens, and way to keep states. A time is the least of eight replays of a
CUDA graph of 16 calls, which take up to eight pools in turn, of 200 MB together if eight are that large. bfloat16 q, k and v,
H = 16, HV = 32, K = V = 128, raw gates of a layer, sigmoid beta, L2 norms, states [V, K], slots in random order. --flashinfer
also times its kernel (gdn_kernels.gdn_decode_bf16_state) in the ways that it has.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gdn_codegen import recurrent_gated_delta_rule

H, HV, K, V = 16, 32, 128, 128
SAID: dict[str, Any] = dict(gate="raw", beta_form="sigmoid", use_qk_l2norm_in_kernel=True, state_v_first=True, target="tilelang")
Calls = list[Callable[[], object]]


def inputs(n: int, tokens: int, gen: torch.Generator) -> dict[str, Any]:
    """q, k, v, g, beta and what gates are made of."""
    rand = lambda *shape: torch.randn(*shape, generator=gen, device="cuda").bfloat16()
    rate = torch.rand(HV, generator=gen, device="cuda") * 16 + .1
    return dict(q=rand(n, tokens, H, K), k=rand(n, tokens, H, K), v=rand(n, tokens, HV, V), g=rand(n, tokens, HV),
                beta=rand(n, tokens, HV), A_log=rate.log(), dt_bias=torch.randn(HV, generator=gen, device="cuda"))


def copies(n: int, tokens: int, dtype: torch.dtype) -> int:
    """How many pools the calls take in turn, so that L2 does not hold their states."""
    return max(1, min(8, -(-200_000_000 // (n * (tokens + 1) * HV * K * V * dtype.itemsize))))


def calls(n: int, tokens: int, dtype: torch.dtype) -> dict[str, tuple[Calls, Calls]]:
    """For each way to keep states our calls, one for each pool, and FlashInfer's, if it has the way.

    "slots": to a slot for each token, as vLLM does. "buffer": to a buffer, and the pool stays as it is, as SGLang and FlashInfer
    do. "updated": and the final state to the pool. "none": no state. "tree": tokens 2 t + 1 and 2 t + 2 come after token t.
    """
    gen = torch.Generator("cuda").manual_seed(1000 * n + tokens)
    x = inputs(n, tokens, gen)
    slots = torch.randperm(n * tokens, generator=gen, device="cuda").int().view(n, tokens)
    own = torch.empty(n, dtype=torch.int32, device="cuda").copy_(slots[:, 0])
    accepted = torch.ones(n, dtype=torch.int32, device="cuda")
    tree = torch.tensor([(t - 1) // 2 if t else -1 for t in range(tokens)], device="cuda").int().repeat(n, 1)
    pools = [torch.randn(n * tokens, HV, V, K, device="cuda").mul_(.1).to(dtype) for _ in range(copies(n, tokens, dtype))]
    buffers = [torch.empty(n, tokens, HV, V, K, dtype=dtype, device="cuda") for _ in pools]
    out = torch.empty_like(x["v"])

    def ours(buffered: bool, **said: Any) -> Calls:
        more = [dict(intermediate_states_buffer=b) if buffered else {} for b in buffers]
        return [lambda p=p, m=m: recurrent_gated_delta_rule(**x, **SAID, out=out, initial_state=p, **m, **said)
                for p, m in zip(pools, more, strict=True)]

    def theirs(buffered: bool, **said: Any) -> Calls:
        return flashinfer(x, pools, buffers if buffered else [None] * len(pools), own, out, said)

    vllm, kept = dict(state_indices=slots, num_accepted_tokens=accepted), dict(state_indices=own, disable_state_update=True)
    return {
        "slots": (ours(False, **vllm), theirs(False, ssm_state_indices=slots)),
        "slots, tree": (ours(False, **vllm, retrieve_parent_token=tree), []),
        "buffer": (ours(True, **kept), theirs(True, disable_state_update=True)),
        "buffer, tree": (ours(True, **kept, retrieve_parent_token=tree), []),
        "buffer, updated": (ours(True, state_indices=own), []),
        "none": (ours(False, **vllm, disable_state_update=True), theirs(False, disable_state_update=True))}


def flashinfer(x: dict[str, Any], pools: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor | None], own: torch.Tensor,
               out: torch.Tensor, said: dict[str, Any]) -> Calls:
    """FlashInfer's calls. It is imported when one is made, and takes states in bfloat16 alone."""
    def made(pool: torch.Tensor, buffer: torch.Tensor | None) -> object:
        from flashinfer.gdn_kernels.gdn_decode_bf16_state import gated_delta_rule_mtp
        more = {} if buffer is None else dict(intermediate_states_buffer=buffer)
        return gated_delta_rule_mtp(x["A_log"], x["g"], x["dt_bias"], 1.0, 20.0, x["q"], x["k"], x["v"], x["beta"],
                                    initial_state_source=pool, initial_state_indices=own, output=out, **said, **more)
    return [lambda p=p, b=b: made(p, b) for p, b in zip(pools, buffers, strict=True)]


def us(calls: Calls, rounds: int = 16) -> float:
    """The least time of a call."""
    for call in calls * 2:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds):
            calls[i % len(calls)]()
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / rounds)
    return round(min(times), 2)


def main() -> None:
    """Time each way, in the order of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="some of the ways, as the output names them; else all")
    parser.add_argument("--states", default="bfloat16", choices=["bfloat16", "float32"])
    a = parser.parse_args()
    for n in a.sequences:
        for tokens in a.tokens:
            for way, (ours, theirs) in calls(n, tokens, getattr(torch, a.states)).items():
                if a.ways and way not in a.ways:
                    continue
                row = dict(sequences=n, tokens=tokens, states=a.states, way=way, us=us(ours))
                if a.flashinfer and theirs and a.states == "bfloat16":
                    row["flashinfer"] = us(theirs)
                with a.out.open("a") as f:
                    f.write(json.dumps(row) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
