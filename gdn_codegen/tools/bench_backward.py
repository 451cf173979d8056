"""`gdn_codegen bench --backward`: the time of gradients by all inputs, of our ops and of the peers', on the same tensors.

The forward call is done once, before. A run is one backward pass from a random gradient of the outputs, with none of the final
states. What the forward call kept is kept for all runs. Device and wall times are those of `bench_gpu`.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..ir.builder import Algorithm
from ..runtime import cache
from ..runtime.build import Build
from ..runtime.progress import under_way
from .bench_gpu import Auto, device_time, facts, kernel_rows, outcome, row, wall_time
from .bench_table import best_peer
from .peer_ops import LIBRARIES
from .peers import Peer, Problem, Refused, Run
from .problems import problem
from .shapes import Shape


def gradient_of(prepare: Callable[[Problem], Run], x: Problem) -> Run:
    """A run of the backward pass of a call. prepare: makes the call. Refused if its outputs have no gradient."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.inputs.items()}
    with torch.enable_grad():
        o = prepare(replace(x, inputs=leaves))()[0]
    if not o.requires_grad:
        raise Refused("gradient: this call gives none")
    gen = torch.Generator(o.device).manual_seed(0)
    d_o = torch.randn(o.shape, generator=gen, device=o.device).to(o.dtype)
    return lambda: torch.autograd.grad(o, list(leaves.values()), d_o, retain_graph=True, allow_unused=True)


def rows(s: Shape, x: Problem, ours: Sequence[Build | Auto], peers: Sequence[Peer], runs: int) -> list[dict[str, Any]]:
    """The rows of a shape: the peers', then those of our ops. Each has device and wall time, or the reason why it has none."""
    def measured(prepare: Callable[[Problem], Run]) -> dict[str, Any]:
        """The figures of a row."""
        started = time.perf_counter()
        run = gradient_of(prepare, x)
        found = run()
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        wrong = [n for n, d in zip(x.inputs, found, strict=True) if d is not None and not d.isfinite().all()]
        for _ in range(3):
            run()
        device, each = device_time(run, runs)
        return {"device_ms": round(device, 5), "wall_ms": round(wall_time(run, runs), 5), "first_call_s": round(first, 2),
                "kernels": kernel_rows(each, {}, None), **({"error": f"{', '.join(wrong)} not finite"} if wrong else {})}

    all_of_them = [*((p.name, p.version, p.note, p.prepare) for p in peers),
                   *((f"{a.target} auto", "", "", a.prepare) for a in ours if isinstance(a, Auto))]
    made = []
    for who, version, note, prepare in all_of_them:
        with under_way(f"{s.name}: {who}"):
            made.append(outcome(row(s, who, version, note), partial(measured, prepare)))
    return made


def table(found: Sequence[dict[str, Any]], detail: bool = False) -> list[str]:
    """The lines of a shape. detail: a line for each kernel."""
    best, width = best_peer(found, found[0]["shape"]), max(20, *(len(r["who"]) for r in found))
    lines = [f"{found[0]['shape']:{width + 2}} {'device ms':>10} {'wall ms':>9} {'x best':>7}"]
    for r in found:
        why = next((r[n] for n in ("absent", "refused", "error") if n in r), r["note"])
        ratio = f"{best / r['device_ms']:.2f}" if best and "device_ms" in r else "-"
        times = f"{r['device_ms']:10.4f} {r['wall_ms']:9.4f} {ratio:>7}  " if "device_ms" in r else ""
        lines.append(f"  {r['who']:{width}} {times}{why}".rstrip())
        lines += [f"    {k['name'][:width - 2]:{width - 2}} {k['ms']:10.4f}" for k in r.get("kernels", ()) if detail]
    return lines


def bench(ours: Sequence[Build | Auto], todo: Sequence[Shape], peers: Sequence[Peer], *, page: Algorithm, gates: str = "layer",
          seed: int = 0, runs: int = 15, dtype: str = "float16", dims: tuple[int, int] = (128, 128), command: str = "",
          json_to: str | None = None, detail: bool = False) -> int:
    """Run all, printing and writing each shape as it is there; 1 where a row of ours failed."""
    if not torch.cuda.is_available():
        raise ValueError("target: got a target that is timed on a GPU, and torch sees none; accepted: no --backward, which is "
                         "timed on a GPU only")
    cache.places(json=json_to)
    options = {"algorithm": page.name, "gates": gates, "seed": seed, "runs": runs, "dtype": dtype, "K": dims[0], "V": dims[1]}
    data: dict[str, Any] = {"facts": facts(command, options), "rows": []}
    print(data["facts"]["gpu"], flush=True)
    for i, s in enumerate(todo):
        here = rows(s, problem(s, dtype, *dims, gates, seed, algorithm=page), ours, peers, runs)
        data["rows"] += here
        torch.cuda.empty_cache()
        if json_to is not None:
            cache.write(Path(json_to), json.dumps(data, indent=1) + "\n")
        print("\n".join([f"[{i + 1}/{len(todo)}]", *table(here, detail)]), flush=True)
    return int(any("error" in r for r in data["rows"] if r["who"] not in LIBRARIES))
