"""CPU time of a call on the host, us, with launches stubbed: python benchmarks/host.py [TARGET]. Runs without a GPU."""
import sys
import time
from collections.abc import Callable

import torch

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function


def microseconds(f: Callable[[], object], n: int = 300, repeats: int = 60) -> float:
    """The best of `repeats` means of n calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(n):
            f()
        best = min(best, (time.thread_time() - start) / n)
    return best * 1e6


def main(target: str = "tilelang") -> None:
    T, H, HV = 2048, 16, 32
    q, k, v = (torch.zeros(1, T, n, 128, dtype=torch.float16) for n in (H, H, HV))
    g, beta = torch.zeros(1, T, HV), torch.zeros(1, T, HV)
    for schedule in ("fused", "replay", "staged"):
        op = function(Build(target, schedule=schedule))
        op.__globals__["_launcher"] = lambda *a: lambda *b: None
        module = microseconds(lambda op=op: op(q, k, v, g, beta, output_final_state=True))
        package = microseconds(lambda s=schedule: chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True,
                                                                         target=target, schedule=s))
        print(f"{target} {schedule:8} {len(op.__globals__['KERNELS'])} kernels: module {module:5.1f}, package {package:5.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
