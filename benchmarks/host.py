"""CPU time of a call on the host, us, with launches stubbed: python benchmarks/host.py [TARGET]. Runs without a GPU.

A call of a kind that was called before, and one with a number of tokens that no call had, as in a server's every prefill; then
how long the model of parts takes for one, as if there were a GPU of 132 multiprocessors, and a tensor to be made.
"""
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from gdn_codegen import chunk_gated_delta_rule, chunk_kda
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import Schedule, named, varied

HEADS = 16, 32
SCHEDULES = {"fused": named("fused"), "walk, parts": varied("walk", partition="decay"), "staged": named("staged")}


def tensors(tokens: int) -> list[torch.Tensor]:
    q, k, v = (torch.zeros(1, tokens, n, 128, dtype=torch.float16) for n in (HEADS[0], *HEADS))
    return [q, k, v, *(torch.zeros(1, tokens, HEADS[1]) for _ in range(2))]


def microseconds(f: Callable[..., object], calls: list[list[torch.Tensor]], repeats: int) -> float:
    """The best mean of `repeats` runs through the calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        for x in calls:
            f(*x, output_final_state=True)
        best = min(best, (time.thread_time() - start) / len(calls))
    return best * 1e6


def cpu_time(f: Callable[[int], object], n: int, repeats: int = 20) -> float:
    """us of f(i), the best mean of n."""
    best = float("inf")
    for r in range(repeats):
        start = time.thread_time()
        for i in range(n):
            f(r * n + i)
        best = min(best, (time.thread_time() - start) / n)
    return best * 1e6


def member(target: str) -> None:
    """Prints the CPU time of a call of another member: Kimi Delta Attention."""
    build = Build(target, schedule=named("fused"), algorithm="kimi_delta_attention")
    function(build).__globals__["HOST"].launcher = lambda *a: lambda *b: None
    q, k, v, _, beta = tensors(2048)
    q, k = (x.repeat_interleave(2, 2) for x in (q, k))

    def package(*x: torch.Tensor, **options: bool) -> object:
        return chunk_kda(*x, target=target, schedule=named("fused"), chunk_size=64, **options)
    print(f"{target} chunk_kda: {microseconds(package, [[q, k, v, v.float(), beta]] * 300, 20):.1f}")


def main(target: str = "tilelang") -> None:
    """Prints CPU times of a call in us for each schedule: the module's function, the op, and the op at a new length. Then
    those of another member, of the model of parts and of two torch functions. Kernels are replaced by functions that do
    nothing."""
    for name, plan in SCHEDULES.items():
        op = function(Build(target, schedule=plan))
        host = op.__globals__["HOST"]
        host.launcher = lambda *a: lambda *b: None

        def package(*x: torch.Tensor, plan: Schedule = plan, **options: bool) -> object:
            return chunk_gated_delta_rule(*x, target=target, schedule=plan, chunk_size=64, **options)
        again = [microseconds(f, [tensors(2048)] * 300, 60) for f in (op, package)]
        new = min(microseconds(package, [tensors(n) for n in range(first, first + 25)], 1) for first in range(100, 600, 25))
        print(f"{target} {name:12} {len(host.tables.kernels)} kernels: module {again[0]:5.1f}, package {again[1]:5.1f}, "
              f"of a new length {new:5.1f}")
    member(target)
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)
    span, gpu = function(Build(target, schedule=SCHEDULES["walk, parts"])).__globals__["HOST"].span, torch.device("cuda", 0)
    print(f"parts of 1 x 32000, 16 value heads: {cpu_time(lambda i: span(32000 + i, 1, 16, gpu), 10):.1f}")
    shape = (1, 16, 16, 8)
    like = torch.empty(1).expand(shape)
    for name, make in (("torch.empty", lambda _: torch.empty(shape, dtype=torch.float32, device="cpu")),
                       ("torch.empty_like", lambda _: torch.empty_like(like))):
        print(f"{name}: {cpu_time(make, 1000):.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
