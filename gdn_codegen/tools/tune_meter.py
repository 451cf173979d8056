"""What `gdn_codegen tune` measures of a build: whether its kernels are right, the memory that they hold, and times on a GPU."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from ..host.check import Check
from ..host.host import Host
from ..ir import interpret
from ..runtime.build import Build, lowered
from ..runtime.call import choose
from ..runtime.load import module
from ..schedule import varied
from . import bench_calls, bench_gpu
from .peers import Problem
from .problems import BETAS, Reference, alike, errors, head_errors, problem, reference
from .shapes import Shape
from .verify import TOLERANCE

#: With nearly equal keys a candidate's error may be at most so many times that of its target's `fused`, or what `Check`
#: accepts.
ALIKE = 2


class DeviceLost(RuntimeError):
    """The GPU does not answer any more. Further measurements of this process would say nothing about candidates."""


class Meter(Protocol):
    """What `tune` can measure of a build."""

    def wrong(self, b: Build) -> str:
        """Why its kernels are wrong; "" if they are not."""
    def workspace(self, b: Build, s: Shape) -> int:
        """Bytes that a call holds between its kernels."""
    def time(self, b: Build, s: Shape) -> dict[str, Any]:
        """{"ms", "wall_ms"}, or {"dropped": why there is no time}."""


@dataclass
class Gpu:
    """A meter that measures times as `gdn_codegen bench` does."""

    runs: int = 15

    def wrong(self, b: Build) -> str:
        """Why results differ from float64; "" if they do not.

        Sequences have several chunks, a partial one, or less than one; one head has no decay. Then keys are nearly equal.
        """
        s = small(b.chunk)
        x = problem(s, b.dtype, b.head_dim_k, b.head_dim_v)
        x.inputs["g"][:, :, 0] = 0.0
        try:
            got = errors(bench_calls.ours(b, x)(), reference(x, range(4)))
            if not all(e <= TOLERANCE[b.dtype] for e in got):
                return f"off by {got[0]:.1e} (o) and {got[1]:.1e} (state)"
            y, want, accepted = _alike(b.target, b.chunk, b.dtype, b.head_dim_k, b.head_dim_v)
            each = by_beta(*head_errors(bench_calls.ours(b, y)(), want))
        except Exception as e:  # whatever a toolchain raises is a finding
            self.alive()
            return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        return next((f"off by {e:.1e} ({of}) on similar keys, beta {beta}; {accepted[of, beta]:.1e} is accepted"
                     for (of, beta), e in each.items() if not e <= accepted[of, beta]), "")

    def workspace(self, b: Build, s: Shape) -> int:
        """Bytes that a call holds between its kernels."""
        host: Host = module(b).HOST
        return host.workspace_bytes(sum(s.lens), len(s.lens), s.HV, "cuda")

    def time(self, b: Build, s: Shape) -> dict[str, Any]:
        """ms of a call on the device and in a queue, or why the build is dropped."""
        about = s, b.dtype, b.head_dim_k, b.head_dim_v
        x, want = _inputs(*about), _reference(*about)
        row = bench_gpu.measured({}, lambda: bench_calls.ours(b, x), want, self.runs, {}, None, TOLERANCE[b.dtype], host=False)
        self.alive()
        return {"dropped": row["error"]} if "error" in row else {"ms": row["device_ms"], "wall_ms": row["wall_ms"]}

    def alive(self) -> None:
        """Raises DeviceLost if the GPU does not answer any more."""
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
        except Exception as e:
            raise DeviceLost(str(e).splitlines()[0]) from e


def small(chunk: int) -> Shape:
    """The shape on which kernels are checked: two key heads, and eight value heads."""
    return Shape("small", (11 * chunk + 3, chunk // 2 + 1, 2 * chunk), 2, 8)


@lru_cache(maxsize=4)
def _inputs(s: Shape, dtype: str, K: int, V: int) -> Problem:
    return problem(s, dtype, K, V)


@lru_cache(maxsize=16)  # two heads of each shape, which take longer to compute than to hold
def _reference(s: Shape, dtype: str, K: int, V: int) -> Reference:
    return reference(_inputs(s, dtype, K, V))


def by_beta(o: Sequence[float], state: Sequence[float]) -> dict[tuple[str, float], float]:
    """Errors on similar keys: for each beta the RMS over its value heads, which differ in draws."""
    return {(of, beta): math.sqrt(sum(e * e for e in each[i::len(BETAS)]) / len(each[i::len(BETAS)]))
            for of, each in (("o", o), ("state", state)) for i, beta in enumerate(BETAS)}


@lru_cache(maxsize=4)
def _alike(target: str, chunk: int, dtype: str, K: int, V: int) -> tuple[Problem, Reference, dict[tuple[str, float], float]]:
    """A problem with similar keys, its float64 results, and the accepted errors.

    The accepted errors come from the interpreter, which rounds as kernels do. It runs `fused`, with V in blocks if that does not
    fit otherwise, or a schedule that needs less memory."""
    s = small(chunk)
    x = alike(problem(s, dtype, K, V))
    want = reference(x, range(s.HV))
    plans: list[Any] = ["fused", *(varied("fused", v_block=n) for n in (64, 32) if n < V), "replay", "staged"]
    builds = [Build(target, chunk, schedule=plan, dtype=dtype, head_dim_k=K, head_dim_v=V) for plan in plans]
    p = lowered(next(filter(choose.fits, builds), builds[-1]))
    given: dict[str, Any] = {n: t[0].cpu() for n, t in x.inputs.items()}
    got = interpret.interpret(p, interpret.Problem(list(s.lens), s.H, s.HV), given, x.numbers, exact=False)
    known = by_beta(*head_errors((got["o"][None].to(x.ends.device), got["final_state"].to(x.ends.device)), want))
    return x, want, {n: max(Check.ACCEPTED[dtype], ALIKE * e) for n, e in known.items()}
