"""`gdn_codegen bench --target pto`: simulated cycles of each kernel and pipe, a Chrome trace, and a timeline."""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import pto_sim
from ..emit.base import heads_tag
from ..input_forms import INPUT_FORMS
from ..ir.interpret import TORCH
from ..runtime import cache
from ..runtime.build import Build
from ..runtime.load import function
from ..runtime.progress import under_way
from ..schedule import SCHEDULES
from .plots import pyplot
from .pto_time import CORES, PIPES, Replay, replay

#: Hand-written kernels, of megagdn-pto at 3a59190: names, and cycles by the flat and by the fitted model, as
#: benchmarks/pto_peers.py gives them for block 0 of 24, T 2048, the rest as below.
HAND = (("cumsum", 1644, 2189), ("kkt", 65201, 93457), ("solve", 232773, 257332), ("wy", 39311, 113083),
        ("state", 119352, 344056), ("output", 95872, 264887))
HAND_SIZES = {"chunk": 128, "head_dim_k": 128, "head_dim_v": 128}
COLUMNS = (("cube", "M"), ("cube", "MTE1"), ("cube", "MTE2"), ("cube", "FIX"), ("vector", "V"), ("vector", "MTE2"),
           ("vector", "MTE3"))


@dataclass(frozen=True)
class Problem:
    """One sequence of `tokens` and `heads` query and value heads, on block 0 of `blocks`."""

    tokens: int = 2048
    heads: int = 16
    value_heads: int = 16
    blocks: int = 24


@dataclass(frozen=True)
class Stage:
    """A kernel of a build, and block 0's time in it by the flat and by the fitted model. hand: the hand-written kernel's name and
    cycles by both, where it has one."""

    name: str
    time: Replay
    fitted: Replay
    hand: tuple[str, int, int] | None = None


def _inputs(b: Build, x: Problem) -> dict[str, torch.Tensor]:
    """Zeros for what the page reads: of tokens [1, T, heads, dims] in the build's layout, of heads [heads, dims]."""
    out = {}
    for t in (t for t in b.page.trace().role("input") if not t.optional):
        heads, of_tokens = x.heads if t.heads == "H" else x.value_heads, t.index == "token"
        order = (heads,) if not of_tokens else (1, x.tokens, heads) if b.layout == "bthd" else (1, heads, x.tokens)
        dims = t.tile.shape(b.sizes)[of_tokens:]
        out[t.name] = torch.zeros(*order, *dims, dtype=TORCH[b.dtype] if of_tokens and dims and not t.wide else torch.float32)
    return out


def check_contract(b: Build) -> None:
    """`_inputs` makes what a page reads, in the page's dtypes, and no states."""
    c = b.contract
    if c.pool or c.in_place or c.dtypes or any(INPUT_FORMS[form].heads for _, form in c.inputs):
        raise ValueError(f"accept: got {str(c)!r}; accepted: forms that need no further tensors, and dtypes of states alone: "
                         "g=linear, beta=sigmoid|twice_sigmoid, q=l2norm, k=l2norm|unit, state=vk|DTYPE|checkpoints, strided")


def stages(b: Build, x: Problem) -> list[Stage]:
    """Time of block 0 in each kernel. Only that block is run, on zeros: nothing in a kernel's course depends on values."""
    with pto_sim.record(x.blocks) as seen:
        numbers = {n: 1.0 for n, default in b.page.scalar_defaults(b.sizes).items() if default is None}
        function(b)(**_inputs(b, x), **numbers, output_final_state=True)
    hand: list[tuple[str, int, int] | None] = [None] * len(seen.launches)
    if hand_sum(b, x) and b.plan.kernels == SCHEDULES["staged"].kernels and len(hand) == len(HAND):
        hand = list(HAND)
    prefix = "".join(f"{x}_" for x in (b.page.name, heads_tag(b.heads)) if x)
    names = [n[len(prefix):] if n.startswith(prefix) else n for n, _ in seen.launches]
    return [Stage(n.rpartition("_")[0] or "all",  # a single launch has the page's name alone
                  replay(steps), replay(steps, "fitted"), h)
            for n, (_, steps), h in zip(names, seen.launches, hand, strict=True)]


def hand_sum(b: Build, x: Problem) -> tuple[int, int] | None:
    """What all the hand-written kernels take by the flat and by the fitted model, where the problem is theirs."""
    like = {n: getattr(b, n) for n in HAND_SIZES} == HAND_SIZES and x == Problem() and b.page.name == "gated_delta_rule"
    return (sum(n for _, n, _ in HAND), sum(n for *_, n in HAND)) if like else None


def instructions(t: Replay) -> dict[str, tuple[int, int]]:
    """Kind of core, pipe and instruction -> how often the block ran it, and its cycles in all, the most first."""
    out: dict[str, tuple[int, int]] = {}
    for i in t.intervals:
        key = f"{i.core.split()[0]} {i.pipe} {i.name}"
        n, c = out.get(key, (0, 0))
        out[key] = n + 1, c + i.end - i.start
    return dict(sorted(out.items(), key=lambda x: (-x[1][1], x[0])))


def busy(t: Replay, kind: str, pipe: str) -> int:
    """Cycles in which a pipe works. For the vector cores: of the busier core."""
    return max(n for n in (t.busy.get((c, pipe), 0) for c in CORES if c.startswith(kind)))


def bound(t: Replay, most: int = 3) -> str:
    """The parts of the critical path, the largest first."""
    parts: dict[str, int] = {}
    for (core, pipe), n in t.path.items():
        name = f"{core.split()[0]} {pipe}"
        parts[name] = parts.get(name, 0) + n
    ranked = sorted(parts.items(), key=lambda p: -p[1])[:most]
    return ", ".join(f"{n} {100 * v // max(t.cycles, 1)}%" for n, v in ranked)


def table(name: str, found: list[Stage], whole: tuple[int, int] | None, detail: bool = False) -> list[str]:
    """The lines that `bench` prints for a schedule: both models' cycles side by side. Columns of pipes are the flat model's."""
    heads = " ".join(f"{pipe + ('.c' if kind == 'cube' else '.v'):>8}" for kind, pipe in COLUMNS)
    models = " ".join(f"{model:>8} {'by hand':>8} {'ratio':>6}" for model in ("flat", "fitted"))
    lines = [f"{name:18} {models} {heads}  critical path: flat; fitted"]
    def row(label: str, of: list[Stage], hand: tuple[int, int] | None, text: str) -> str:
        times = sum(s.time.cycles for s in of), sum(s.fitted.cycles for s in of)
        pairs = zip(times, hand or (0, 0), strict=True)
        both = " ".join(f"{n:8} {h or '-':>8} {f'{n / h:.2f}' if h else '-':>6}" for n, h in pairs)
        pipes = " ".join(f"{sum(busy(s.time, *c) for s in of):8}" for c in COLUMNS)
        return f"  {label:16} {both} {pipes}  {text}".rstrip()
    for s in found:
        lines.append(row(s.name, [s], s.hand[1:] if s.hand else None, f"{bound(s.time)}; {bound(s.fitted)}"))
        if detail:
            fitted = instructions(s.fitted)
            lines += [f"      {n:34} {count:6} x {c / count:8.1f} = {c:8}, fitted {fitted[n][1]:8}"
                      for n, (count, c) in instructions(s.time).items()]
    lines.append(row("sum", found, whole, ""))
    return lines


def _flat(d: dict[tuple[str, str], int]) -> dict[str, int]:
    return {" ".join(k): v for k, v in sorted(d.items())}


def _times(t: Replay) -> dict[str, Any]:
    return {"cycles": t.cycles, "busy": _flat(t.busy), "waiting": _flat(t.waiting), "chain": _flat(t.path),
            "instructions": instructions(t)}


def report(found: list[Stage], whole: tuple[int, int] | None) -> dict[str, Any]:
    """The content of `table` as data for JSON. A stage's own figures are the flat model's, those under "fitted" the other's."""
    none: tuple[None, None, None] = (None, None, None)
    rows = [{**dict(zip(("hand_name", "hand_cycles", "hand_fitted_cycles"), s.hand or none, strict=True)), "name": s.name,
             **_times(s.time), "fitted": _times(s.fitted)} for s in found]
    flat, fitted = whole or (None, None)
    return {"cycles": sum(s.time.cycles for s in found), "fitted_cycles": sum(s.fitted.cycles for s in found),
            "hand_cycles": flat, "hand_fitted_cycles": fitted, "stages": rows}


def chrome_trace(results: dict[str, list[Stage]]) -> dict[str, Any]:
    """Chrome's trace format, a cycle a microsecond: a process a core, a thread a pipe, stages one after another."""
    events: list[dict[str, Any]] = []
    for g, (schedule, found) in enumerate(results.items()):
        for c, core in enumerate(CORES):
            pid = g * len(CORES) + c
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{schedule}: {core}"}})
            events += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": i, "args": {"name": p}}
                       for i, p in enumerate(PIPES[core.split()[0]])]
        at = 0
        for s in found:
            for v in s.time.intervals:
                events.append({"ph": "X", "name": v.name, "cat": s.name, "pid": g * len(CORES) + CORES.index(v.core),
                               "tid": PIPES[v.core.split()[0]].index(v.pipe), "ts": at + v.start, "dur": v.end - v.start,
                               "args": {"stage": s.name, "line": v.line}})
            at += s.time.cycles
    return {"displayTimeUnit": "ms", "otherData": {"unit": "a microsecond stands for a cycle"}, "traceEvents": events}


def plot(results: dict[str, list[Stage]], path: Path) -> None:
    """Writes a PNG with a row for each pipe of the cube core and of both vector cores."""
    plt = pyplot()
    pipes = [(core, p) for core in CORES for p in PIPES[core.split()[0]] if p != "S"]
    colours = {"MTE2": "tab:blue", "MTE1": "tab:cyan", "M": "tab:red", "FIX": "tab:orange", "V": "tab:green",
               "MTE3": "tab:purple"}
    figure, axes = plt.subplots(len(results), 1, figsize=(16, 3.6 * len(results)), squeeze=False)
    for ax, (schedule, found) in zip(axes[:, 0], results.items(), strict=True):
        total, at = sum(s.time.cycles for s in found), 0
        spans: dict[tuple[str, str], list[list[int]]] = {pipe: [] for pipe in pipes}
        for s in found:
            for v in s.time.intervals:
                pipe = spans.get((v.core, v.pipe))
                if pipe is None:
                    continue
                if pipe and at + v.start - pipe[-1][1] <= total // 4000:  # nearer than a pixel: one bar
                    pipe[-1][1] = at + v.end
                else:
                    pipe.append([at + v.start, at + v.end])
            at += s.time.cycles
            ax.axvline(at, color="black", linewidth=0.6)
            ax.text(at - s.time.cycles / 2, -1.1, s.name, ha="center", va="bottom", fontsize=7, clip_on=False)
        for y, key in enumerate(pipes):
            ax.broken_barh([(a, b - a) for a, b in spans[key]], (y - 0.4, 0.8), color=colours[key[1]])
        ax.set_yticks(range(len(pipes)), [f"{core} {p}" for core, p in pipes], fontsize=7)
        ax.set_ylim(len(pipes) - 0.5, -1)
        ax.set_xlim(0, total)
        ax.set_xlabel(f"{schedule}: {total} simulated cycles of block 0", fontsize=8)
    figure.tight_layout()
    with cache.naming(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)


def bench(builds: list[Build], x: Problem, json_to: str | None = None, trace_to: str | None = None,
          plot_to: str | None = None, detail: bool = False) -> int:
    """Print and write what the options ask for."""
    for b in builds:
        check_contract(b)
    cache.places(json=json_to, trace=trace_to, plot=plot_to)
    if plot_to is not None:
        if Path(plot_to).suffix not in ("", ".png"):
            raise ValueError(f"plot: got {plot_to}; accepted: a file *.png")
        pyplot()  # what is missing is said before the work
    results: dict[str, list[Stage]] = {}
    for b in builds:
        with under_way(f"{b.name}: simulating"):
            results[b.plan.name] = stages(b, x)
        print("\n".join(table(b.plan.name, results[b.plan.name], hand_sum(b, x), detail)), flush=True)
    if json_to is not None:
        b = builds[0]
        options = {"algorithm": b.page.name, "chunk": b.chunk, "layout": b.layout, "dtype": b.dtype,
                   "head_dim_k": b.head_dim_k, "head_dim_v": b.head_dim_v, "tokens": x.tokens, "heads": x.heads,
                   "value_heads": x.value_heads, "blocks": x.blocks}
        data = {"options": options, "schedules": {n: report(f, hand_sum(b, x)) for n, f in results.items()}}
        cache.write(Path(json_to), json.dumps(data, indent=1) + "\n")
    if trace_to is not None:
        cache.write(Path(trace_to), json.dumps(chrome_trace(results)) + "\n")
    if plot_to is not None:
        plot(results, Path(plot_to))
    return 0
