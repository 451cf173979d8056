"""`gdn_codegen tune --backward`: times the two builds of gradients, for the table from which gradients choose.

The states before chunks and the gradient itself are measured apart, with random states and gradients of the outputs. A build is
timed after its module's self-check, which compares it with the page in float64.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

from ..derived_pages import without_kind
from ..host.host import Host
from ..host.tables import Tables
from ..ir.interpret import TORCH
from ..runtime.build import Build
from ..runtime.call import tables
from ..runtime.call.gradient_builds import asked_of, undecided
from ..runtime.load import module
from ..runtime.targets import tunable
from ..schedule import varied
from . import bench_gpu
from .compile_ahead import check_ahead
from .peers import Run
from .problems import problem
from .shapes import Shape
from .tune import compiled_ahead, here, listed, tuned
from .tune_jobs import Job, extent, gradient_choice, in_short_parts, shared_kib
from .tune_meter import Gpu

CHUNKS = (64, 32)
#: Schedules of the states before chunks and of gradients, with the values of their fields that are tried, by target.
BLOCKS: dict[str, tuple[Any, ...]] = {"v_block": (0, 64)}
PARTS: dict[str, tuple[Any, ...]] = {"partition": (None, "decay")}
WARPS: dict[str, tuple[Any, ...]] = {"warps": (4, 8)}
STAGES: dict[str, tuple[Any, ...]] = {"stages": (3, 2, 1)}
FIELDS = {"triton": {**BLOCKS, **WARPS}, "tilelang": {**BLOCKS, **STAGES}}
SCHEDULES: dict[str, tuple[tuple[str, dict[str, tuple[Any, ...]]], ...]] = {
    "states": (("fused_walk", PARTS), ("operand_walk", {}), ("walk", {})), "gradient": (("gradient", PARTS),)}


def candidates(b: Build, arch: str) -> Iterator[Build]:
    """The builds to try for the two modules of a gradient: those made for the architecture, and those for any. b: of what a
    gradient computes (`asked_of`)."""
    archs = [x for x in (arch, "") if x == "" or x in b.of.archs]
    for chunk, of in product(CHUNKS, archs):
        pair = undecided(replace(b, chunk=chunk, arch=of), True)
        for build in pair.all:
            for name, more in SCHEDULES[str(build.algorithm).rpartition(".")[2]]:
                fields = {**FIELDS.get(b.target, BLOCKS), **more}
                for values in product(*fields.values()):
                    yield replace(build, schedule=varied(name, of, **dict(zip(fields, values, strict=True))))


def jobs(abouts: Sequence[Build], shapes: Sequence[Shape], arch: str, units: int, kib: int = 0) -> list[Job]:
    """All that there is to time: at each shape the builds that a gradient takes now, then one candidate after the other. units:
    multiprocessors of the device. kib: as in Facts."""
    first, rest = [], []
    for about, s in product(abouts, shapes):
        every = [x.for_shared(kib) for x in candidates(asked_of(about, s.H == s.HV), arch)]
        first += [Job(gradient_choice(x, arch, extent(s).shape_class, units, kib), s.H, s.HV, s.lens, tables.BACKWARD)
                  for x in _one_of_each(every)]
        rest += [Job(x, s.H, s.HV, s.lens, tables.BACKWARD) for x in every]
    return list({j.key: j for j in (*first, *rest)}.values())


def _one_of_each(every: Sequence[Build]) -> list[Build]:
    """A build of the states before chunks, and one of the gradient."""
    return list({x.algorithm: x for x in reversed(every)}.values())


@dataclass
class Gradients(Gpu):
    """A meter for the two builds of a gradient."""

    device: str = "cuda"

    def wrong(self, b: Build) -> str:
        """Why the module's self-check refuses its kernels; "" if it does not."""
        try:
            errors = module(b).check.errors(torch.device(self.device))
        except Exception as e:  # whatever a toolchain raises is a finding
            self.alive()
            return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        return next((f"off by {e:.1e} ({n}); {most:.1e} is accepted" for n, (e, most) in errors.items() if not e <= most), "")

    def workspace(self, b: Build, s: Shape) -> int:
        """Bytes that a call holds between its kernels."""
        host: Host = module(b).HOST
        return host.workspace_bytes(sum(s.lens), len(s.lens), s.HV, self.device)

    def time(self, b: Build, s: Shape) -> dict[str, Any]:
        """ms of a call on the device, or why the build is dropped."""
        try:
            run = call(b, s, self.device)
            wrong = not all_finite(b, s, run())
            ms = self.measured(run)
        except Exception as e:  # whatever a toolchain raises is a finding
            self.alive()
            return {"dropped": f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"}
        self.alive()
        return {"dropped": "results are not finite"} if wrong else {"ms": round(ms, 5)}

    def measured(self, run: Run) -> float:
        """ms of a call on the device."""
        return bench_gpu.device_time(run, self.runs)[0]


def all_finite(b: Build, s: Shape, results: Sequence[torch.Tensor]) -> bool:
    """Whether what a call computed is finite. Slots of chunks that no sequence has are not written: what they hold says nothing.

    results: those of `call`."""
    t: Tables = module(b).HOST.tables
    starts = [0, *accumulate(s.lens)]
    used = [start // t.chunk + n + i for n, (start, tokens) in enumerate(zip(starts, s.lens, strict=False))
            for i in range(-(-tokens // t.chunk))]
    of_chunks = len(results) - len(t.saved)
    return all(bool((y[used] if i >= of_chunks else y).isfinite().all()) for i, y in enumerate(results))


def call(b: Build, s: Shape, device: str = "cuda") -> Run:
    """A call of a build: it returns outputs, final states, and tiles of chunks. Gates are as a layer draws them."""
    host: Host = module(b).HOST
    t, gen = host.tables, torch.Generator(device).manual_seed(0)
    x = problem(s, b.dtype, b.head_dim_k, b.head_dim_v, device=device, algorithm=without_kind(str(b.algorithm)))
    tokens, slots = sum(s.lens), sum(s.lens) // t.chunk + len(s.lens)

    def drawn(dtype: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device).to(TORCH[dtype]) / 10
    given = [x.inputs[n] if n in x.inputs else drawn(dtype, 1, tokens, {"H": s.H, "HV": s.HV}[heads], *dims)
             for n, heads, dims, dtype in t.inputs]
    given = [y if b.layout == "bthd" else y.transpose(1, 2).contiguous() for y in given]
    given += [x.inputs[row[0]] for row in t.head_inputs] + [drawn(dtype, slots, s.HV, *dims) for _, dims, dtype in t.chunk_inputs]
    numbers = host.numbers_of([x.numbers.get(n) for n in t.scalars])
    ends = x.ends if len(s.lens) > 1 else None
    rest = ([None] * len(t.initial), [None] * len(t.outputs), ends, [None] * len(t.final), t.backward)

    def run() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            memory = host.run(given, numbers, *rest)
        return tuple(y for y in host.results(memory, t.backward) if y is not None)
    return run


def command(a: argparse.Namespace, shapes: Sequence[Shape]) -> int:
    """`gdn_codegen tune --backward`. a: the parsed options. ValueError without a GPU, and for a target that is not tuned."""
    targets = tunable() if a.target == "all" else (a.target,)
    if a.compile is not None:
        for target in targets:
            check_ahead(Build(target), a.compile, [(s.H, s.HV) for s in shapes])
    names, arch, units = ((), a.compile, 0) if a.compile is not None else here()
    abouts = [Build(t, layout=a.layout, algorithm=a.algorithm or "gated_delta_rule", dtype=a.dtype, head_dim_k=a.head_dim_k,
                    head_dim_v=a.head_dim_v) for t in targets]
    todo = jobs(abouts, shapes, arch, units, shared_kib(names or (arch,)))
    if a.compile is not None:
        heads = sorted({(s.H, s.HV) for s in shapes})
        for line in compiled_ahead(list(dict.fromkeys(in_short_parts(j.build) for j in todo)), arch, heads):
            print(line, flush=True)
        return 0
    out = None if a.out is None else Path(a.out)
    if a.list:
        print("\n".join(listed(tables.BACKWARD, todo, names, out)))
        return 0
    return tuned(tables.BACKWARD, todo, names, arch, units, Gradients(a.runs), out, budget=a.budget, memory=int(a.memory * 2**30))
