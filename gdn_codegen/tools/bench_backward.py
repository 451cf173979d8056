"""`gdn_codegen bench --backward`: gradients by all inputs, of our ops and of the peers', on the same tensors.

A run is one backward pass from a random gradient of the outputs, with none of the final states. The forward call is done once,
before; what it kept is kept for all runs. Device and wall times are those of `bench_gpu`. The forward call is timed, too: where
tensors require gradients, and for inference. With `--errors` gradients are compared with those of torch.autograd through the page
in float64.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..ir.page import Algorithm
from ..runtime import cache
from ..runtime.build import Build
from ..runtime.progress import under_way
from .bench_ahead import compile_first, first_calls
from .bench_calls import Auto, directions
from .bench_gpu import device_time, facts, kernel_rows, outcome, row, wall_time
from .bench_table import best_peer, kept
from .configurations import compiled_side_by_side
from .layer_inputs import as_layers_pass, check
from .peer_ops import LIBRARIES
from .peers import Peer, Problem, Run
from .problems import gradients, problem, worst
from .shapes import Shape
from .verify import rms_error
from .verify_backward import TOLERANCE


def timed(prepare: Callable[[Problem], Run], x: Problem, runs: int) -> dict[str, Any]:
    """The figures of a row of times, ms."""
    started = time.perf_counter()
    forward, backward, _ = directions(prepare, x)
    found = backward()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    wrong = [n for n, d in zip(x.inputs, found, strict=True) if d is not None and not d.isfinite().all()]
    for _ in range(3):
        backward()
    device, each = device_time(backward, runs)
    with torch.no_grad():
        inference = prepare(x)
    return {"device_ms": round(device, 5), "wall_ms": round(wall_time(backward, runs), 5), "first_call_s": round(first, 2),
            **{f"{n}_ms": round(device_time(run, runs)[0], 5) for n, run in (("forward", forward), ("inference", inference))},
            "kernels": kernel_rows(each, {}, None), **({"error": f"{', '.join(wrong)} not finite"} if wrong else {})}


def compared(prepare: Callable[[Problem], Run], problems: Sequence[Problem], limit: float | None) -> dict[str, Any]:
    """The figures of a row of errors: RMSE over RMS of each gradient, the largest of all problems. limit: what our own rows may
    reach."""
    found: dict[str, float] = {}
    for x in problems:
        _, backward, d_o = directions(prepare, x)
        want = gradients(x, d_o)
        for (n, y), got in zip(want.items(), backward(), strict=True):
            found[n] = worst([found.get(n, 0.0), 1.0 if got is None else rms_error(got, y)])
    off = {n: e for n, e in found.items() if limit is not None and not e <= limit}
    return {"errors": found, **({"error": f"at most {limit:g} is accepted: {off}"} if off else {})}


def rows(s: Shape, ours: Sequence[Build | Auto], peers: Sequence[Peer], figures: Callable[[Callable[[Problem], Run], bool],
         dict[str, Any]], jobs: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a shape: the peers', then those of our ops. figures: (what prepares a call, whether it is ours) -> its figures.
    A row without them has the reason. jobs: threads in which configurations of a peer compile."""
    all_of_them = [*((p.name, p.version, p.note, p.prepare, False) for p in peers),
                   *((f"{a.target} auto", "", "", a.prepare, True) for a in ours if isinstance(a, Auto))]
    for who, version, note, prepare, mine in all_of_them:
        with under_way(f"{s.name}: {who}"), compiled_side_by_side(1 if mine else jobs):
            yield outcome(row(s, who, version, note), partial(figures, prepare, mine))
        torch.cuda.empty_cache()


def _why(r: dict[str, Any]) -> str:
    """Why a row has no figures, or its remark."""
    return str(next((r[n] for n in ("absent", "refused", "error") if n in r), r["note"]))


def lines_of_errors(found: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of errors of a shape."""
    names = next((list(r["errors"]) for r in found if "errors" in r), [])
    width = max(20, *(len(r["who"]) for r in found))
    lines = [f"{found[0]['shape']:{width + 2}} " + " ".join(f"{'d_' + n:>10}" for n in names)]
    for r in found:
        figures = [f"{r['errors'][n]:10.3e}" for n in names] if "errors" in r else []
        lines.append(" ".join([f"  {r['who']:{width}}", *figures, _why(r)]).rstrip())
    return lines


def table(found: Sequence[dict[str, Any]], detail: bool = False) -> list[str]:
    """The lines of a shape. detail: a line for each kernel."""
    best, width = best_peer(found, found[0]["shape"]), max(20, *(len(r["who"]) for r in found))
    lines = [f"{found[0]['shape']:{width + 2}} {'device ms':>10} {'wall ms':>9} {'x best':>7} {'forward':>9} {'inference':>9}"]
    for r in found:
        ratio = f"{best / r['device_ms']:.2f}" if best and "device_ms" in r else "-"
        times = f"{r['device_ms']:10.4f} {r['wall_ms']:9.4f} {ratio:>7} {r['forward_ms']:9.4f} {r['inference_ms']:9.4f}  " \
            if "device_ms" in r else ""
        lines.append(f"  {r['who']:{width}} {times}{_why(r)}".rstrip())
        lines += [f"    {k['name'][:width - 2]:{width - 2}} {k['ms']:10.4f}" for k in r.get("kernels", ()) if detail]
    return lines


def bench(ours: Sequence[Build | Auto], todo: Sequence[Shape], peers: Sequence[Peer], *, page: Algorithm, gates: str = "layer",
          seed: int = 0, runs: int = 15, dtype: str = "float16", dims: tuple[int, int] = (128, 128), command: str = "",
          json_to: str | None = None, detail: bool = False, seeds: int | None = None, jobs: int | None = None,
          layer: bool = False) -> int:
    """Run all, printing each shape and writing each row as it is there; 1 where a row of ours failed. seeds: errors instead of
    times, of so many, from `seed` on. jobs: of `compile_first`. layer: whether inputs are a layer's (`layer_inputs.py`)."""
    if seeds is not None and seeds < 1:
        raise ValueError(f"errors: got {seeds}; accepted: 1 seed or more")
    if not torch.cuda.is_available():
        raise ValueError("target: got a target that is timed on a GPU, and torch sees none; accepted: no --backward, which is "
                         "timed on a GPU only")
    if layer:
        check(page, gates)
    cache.places(json=json_to)
    options = {"algorithm": page.name, "layer_inputs": layer, "gates": gates, "seed": seed, "runs": runs, "dtype": dtype,
               "K": dims[0], "V": dims[1]}
    data: dict[str, Any] = {"facts": facts(command, options), "rows": []}
    print(data["facts"]["gpu"], flush=True)
    compile_first(first_calls(ours, todo, peers, page, gates, seed, dtype, dims, backward=True, layer=layer), jobs)
    for i, s in enumerate(todo):
        problems = [problem(s, dtype, *dims, gates, n, algorithm=page) for n in range(seed, seed + (seeds or 1))]
        problems = [as_layers_pass(x, seed + n) for n, x in enumerate(problems)] if layer else problems

        def figures(prepare: Callable[[Problem], Run], mine: bool, problems: list[Problem] = problems) -> dict[str, Any]:
            if seeds is None:
                return timed(prepare, problems[0], runs)
            return compared(prepare, problems, TOLERANCE[dtype] if mine else None)
        here = kept(rows(s, ours, peers, figures, jobs), data, json_to)
        torch.cuda.empty_cache()
        lines = table(here, detail) if seeds is None else lines_of_errors(here)
        print("\n".join([f"[{i + 1}/{len(todo)}]", *lines]), flush=True)
    return int(any("error" in r for r in data["rows"] if r["who"] not in LIBRARIES))
