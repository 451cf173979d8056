"""`gdn_codegen bench --errors N`: errors of our results and of the peers' against float64, on all value heads and N seeds.

There is a table for each shape and kind of gates.

`--interpret` needs no GPU: the interpreter runs the lowered program of each build, with every op in the dtype of its tile. It
rounds as the kernels do, with two exceptions: the order of sums, and roundings inside of one op, such as an inverse. A partition
without part_chunks is then one part.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from ..ir import interpret
from ..ir.page import Algorithm
from ..runtime import cache
from ..runtime.build import Build, lowered
from ..runtime.progress import under_way
from ..runtime.targets import serves
from .bench_ahead import compile_first, first_calls
from .bench_calls import Auto, ours_of
from .bench_gpu import check_build, facts, judged, outcome, row
from .bench_table import kept
from .configurations import compiled_side_by_side
from .peer_ops import LIBRARIES
from .peers import Peer, Problem, Run
from .problems import Reference, check_gates, head_errors, problem, reference, worst
from .shapes import Shape
from .verify import TOLERANCE


def lacks_gpu(target: str) -> str:
    """Why builds of `target` do not run on a GPU here; "" if they may."""
    if not serves(target, "cuda"):
        return "it has no kernels for a GPU"
    return "" if torch.cuda.is_available() else "torch sees no GPU here"


def interpreted(b: Build, x: Problem) -> Run:
    """A function that interprets the build's lowered program, with its roundings."""
    p = lowered(b)
    given = {n: t[0] if t.ndim > 2 else t for n, t in x.inputs.items()}
    sequences = interpret.Problem(list(x.lengths), *x.heads, b.plan.part_chunks)
    outs = sorted(x.page.trace().role("output"), key=lambda t: t.index != "token")

    def run() -> tuple[torch.Tensor, ...]:
        got = interpret.interpret(p, sequences, {t.name: given.get(t.name) for t in p.role("input")}, x.numbers, False)
        return tuple(got[t.name][None] if t.index == "token" else got[t.name] for t in outs)
    return run


@torch.no_grad()
def measured(base: dict[str, Any], prepare: Callable[[Problem], Run], problems: Sequence[tuple[Problem, Reference]],
             limit: float | None) -> dict[str, Any]:
    """The row with mean and largest error over all value heads of all problems. limit: the error that our own rows may reach."""
    def work() -> dict[str, Any]:
        of_o, of_state = [], []
        for x, want in problems:
            o, state = head_errors(prepare(x)(), want)
            of_o += o
            of_state += state
        found = {n: {"mean": math.fsum(each) / max(1, len(each)), "max": worst(each)}
                 for n, each in (("error_o", of_o), ("error_state", of_state))}
        return {"heads": len(of_o), **found, **judged(found["error_o"]["max"], found["error_state"]["max"], limit)}
    return outcome(base, work)


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines that are printed for a shape and a kind of gates."""
    title = f"{rows[0]['shape']}, gates {rows[0]['gates']}"
    width = max(len(title) - 2, *(len(r["who"]) for r in rows))
    out = [f"{title:{width + 2}} {'o mean':>10} {'o max':>10} {'state mean':>10} {'state max':>10} {'heads':>6}"]
    for r in rows:
        why = next((r[n] for n in ("absent", "refused", "error") if n in r), r["note"])
        figures = [f"{r[n][m]:10.3e}" for n in ("error_o", "error_state") for m in ("mean", "max")] if "heads" in r else []
        out.append(" ".join([f"  {r['who']:{width}}", *figures, *([f"{r['heads']:6}"] if figures else []), f" {why}"]).rstrip())
    return out


def bench(builds: Sequence[Build | Auto], todo: Sequence[Shape], peers: Sequence[Peer], *, page: Algorithm, seeds: int,
          gates: str = "layer", seed: int = 0, dtype: str = "float16", dims: tuple[int, int] = (128, 128),
          command: str = "", json_to: str | None = None, on_cpu: bool = False, jobs: int | None = None) -> int:
    """Run all, printing and writing each shape and kind of gates as it is there; 1 where a row of ours failed. seeds: how many,
    from `seed` on. gates: kinds, joined by commas. on_cpu: builds are interpreted there. jobs: of `compile_first`."""
    if seeds < 1:
        raise ValueError(f"errors: got {seeds}; accepted: 1 seed or more")
    for b in builds:
        check_build(b)
        why = lacks_gpu(b.target)
        if why and not on_cpu:
            raise ValueError(f"errors: got target {b.target}, and {why}; accepted: --interpret")
    cache.places(json=json_to)
    options = {"algorithm": page.name, "gates": gates, "seed": seed, "seeds": seeds, "dtype": dtype, "K": dims[0],
               "V": dims[1], "interpreted": on_cpu}
    data: dict[str, Any] = {"facts": facts(command, options), "rows": []}
    if not on_cpu:
        compile_first(first_calls(builds, todo, peers, page, gates, seed, dtype, dims), jobs)
    cells = list(product(todo, check_gates(gates)))
    for i, (s, kind) in enumerate(cells):
        drawn = [problem(s, dtype, *dims, kind, n, "cpu" if on_cpu else "cuda", page) for n in range(seed, seed + seeds)]
        found = shape_rows(s, kind, [(x, reference(x, range(s.HV))) for x in drawn], builds, peers, on_cpu, jobs)
        here = kept(found, data, json_to)
        print("\n".join([f"[{i + 1}/{len(cells)}]", *lines(here)]), flush=True)
    return int(any("error" in r for r in data["rows"] if r["who"] not in LIBRARIES))


def shape_rows(s: Shape, gates: str, problems: Sequence[tuple[Problem, Reference]], builds: Sequence[Build | Auto],
               peers: Sequence[Peer], on_cpu: bool, jobs: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a shape and a kind of gates: the peers', then ours. Errors of equal keys have no limit but numbers: rounding
    alone makes them as large as a product with the inverse makes it. jobs: threads in which configurations of a peer compile."""
    x = problems[0][0]
    for p in peers:
        with under_way(f"{s.name}: {p.name}"), compiled_side_by_side(jobs):
            yield measured({**row(s, p.name, p.version, p.note), "gates": gates}, p.prepare, problems, None)
    for wish in builds:
        b, who, prepare, _ = ours_of(wish, x)
        with under_way(f"{s.name}: {who}"):
            yield measured({**row(s, who, "", b.name), "gates": gates}, partial(interpreted, b) if on_cpu else prepare,
                           problems, math.inf if gates == "alike" else TOLERANCE[b.dtype])
