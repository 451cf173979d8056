"""`verify --report`: errors of targets against float64 at many lengths, as report.json, report.md and scatter plots."""
from __future__ import annotations

import io
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..runtime import cache
from ..runtime.build import Build
from ..runtime.progress import under_way
from ..targets.machine import version
from .cases import Case, inputs
from .verify import TOLERANCE, accepted, reference, rms_error, run

#: Lengths around a chunk's end and far past it, and the lengths of a quick report.
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 447, 512, 640, 1920)
QUICK = (1, 65)
#: Random packs: how many, and the most tokens of one.
PACKS, MOST = 3, 4096
#: Mean log decay of a token: a state remembers tens of tokens.
GATE = -0.05
#: Points of a scatter plot.
POINTS = 20_000
#: Chunk of the fast reference, and how close to the recurrence it has to be.
FAST, CLOSE = 64, 1e-10


@dataclass(frozen=True)
class Numbers:
    """An output against float64. r2 is None where float64 is constant, r where either is; all are where got is not finite."""

    rmse_over_rms: float | None
    r2: float | None
    pearson_r: float | None
    max_error: float | None
    not_finite: int


@dataclass
class Result:
    """The result of a case of a build. error: why it could not run."""

    name: str
    lengths: tuple[int, ...]
    outputs: dict[str, Numbers] = field(default_factory=dict)
    seconds: float = 0.0
    ok: bool = False
    plot: str | None = None
    error: str | None = None


def measure(got: torch.Tensor, want: torch.Tensor) -> Numbers:
    """RMSE over RMS, R2 (1 - squared error over squared deviation from the mean), Pearson r, greatest error."""
    if not want.numel():
        return Numbers(0.0, None, None, 0.0, 0)
    g, w = got.double().flatten(), want.double().flatten()
    bad = int((~g.isfinite()).sum())
    if bad:
        return Numbers(None, None, None, None, bad)
    dg, dw, error = g - g.mean(), w - w.mean(), g - w
    spread, both = dw.pow(2).sum().item(), (dg.norm() * dw.norm()).item()
    return Numbers(rms_error(got, want), 1 - error.pow(2).sum().item() / spread if spread else None,
                   (dg @ dw).item() / both if both else None, error.abs().max().item(), 0)


def cases(lengths: Sequence[int], packs: int = PACKS, most: int = MOST) -> list[tuple[str, Case]]:
    """Each length alone, all in one call, and random packs of up to `most` tokens (empty sequences too)."""
    out = [(f"length {n}", Case((n,), gate=GATE, seed=n)) for n in lengths]
    out.append((f"all {len(lengths)} packed", Case(tuple(lengths), gate=GATE)))
    for i in range(packs):
        draw = random.Random(i)
        total = draw.randint(most // 2, most)
        ends = sorted(draw.randint(0, total) for _ in range(draw.randint(1, 15)))
        out.append((f"random pack {i + 1}",
                    Case(tuple(b - a for a, b in zip([0, *ends], [*ends, total], strict=True)), gate=GATE, seed=i)))
    return out


def reference_chunk(b: Build) -> tuple[int, str]:
    """The chunk to interpret the page with, and the line that the report has on it."""
    case = Case((FAST + 5, 1, 2 * FAST), gate=GATE)
    x = inputs(b, b.page.trace(), case)
    slow, fast = reference(b, case, x), reference(b, case, x, FAST)
    far = max(rms_error(fast[n], slow[n]) for n in slow)
    if far <= CLOSE:
        return FAST, (f"the page interpreted in float64 with chunks of {FAST} tokens, which on lengths "
                      f"{'+'.join(map(str, case.lengths))} is {far:.0e} (RMSE over RMS) from the token recurrence")
    return 1, (f"the page interpreted in float64 token by token (chunks of {FAST} tokens are {far:.0e} away from that, "
               f"more than {CLOSE:.0e})")


def run_case(b: Build, name: str, case: Case, chunk: int, device: str) -> tuple[Result, dict[str, torch.Tensor],
                                                                                dict[str, torch.Tensor]]:
    """A case's numbers, and what they compare: got and float64."""
    result, start = Result(name, case.lengths), time.perf_counter()
    x = inputs(b, b.page.trace(), case)
    want: dict[str, torch.Tensor] = {}
    got: dict[str, torch.Tensor] = {}
    try:
        want = reference(b, case, x, chunk)
        got = run(b, case, x, device)
        result.outputs = {n: measure(got[n], want[n]) for n in want}
    except Exception as e:  # a kernel that stops is a finding of the report, and the other cases still run
        result.error = f"{type(e).__name__}: {e}"
    errors = {n: m.rmse_over_rms for n, m in result.outputs.items()}
    result.ok = bool(errors) and all(e is not None and e <= accepted(b, case, n) for n, e in errors.items())
    result.seconds = round(time.perf_counter() - start, 3)
    return result, got, want


def check_report(folder: Path) -> None:
    """ValueError if the report could not be written. It is called before any work."""
    if not version("matplotlib"):
        raise ValueError(f"report: got {folder}, and matplotlib, which draws its plots, is not installed; accepted: the same "
                         "after pip install 'gdn_codegen[bench]'")
    cache.place("report", folder, folder=True)


def scatter(title: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bytes:
    """Writes a PNG with a panel for each output: our result against float64."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5 * len(want), 5), layout="constrained")
    panels = figure.subplots(1, len(want), squeeze=False)[0]
    for axes, n in zip(panels, want, strict=True):
        g, w = got[n].double().flatten(), want[n].flatten()
        if len(w) > POINTS:
            pick = torch.randperm(len(w), generator=torch.Generator().manual_seed(0))[:POINTS]
            g, w = g[pick], w[pick]
        if len(w):
            low, high = w.min().item(), w.max().item()
            axes.plot([low, high], [low, high], color="0.6", linewidth=1)
        axes.scatter(w.tolist(), g.tolist(), s=2, linewidths=0)
        m = measure(got[n], want[n])
        axes.set(title=f"{n}: RMSE/RMS {_shown(m.rmse_over_rms)}, R2 {_shown(m.r2, 6)}", xlabel="float64", ylabel="got")
    figure.suptitle(title)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100, metadata={"Software": None})
    return out.getvalue()


def _shown(x: float | None, places: int = 0) -> str:
    """1.2e-3; with `places`, 0.999998."""
    if x is None or math.isnan(x):
        return "-"
    return f"{x:.{places}f}" if places and abs(x) < 100 else f"{x:.1e}"


def _lengths(n: tuple[int, ...]) -> str:
    return f"{len(n)} sequences, {sum(n)} tokens: {' '.join(map(str, n))}" if len(n) > 1 else f"{n[0]} tokens"


def markdown(builds: list[tuple[Build, str, list[Result]]], device: str, left: dict[str, str]) -> str:
    """The text of report.md. left: targets that did not run, and why."""
    good = all(r.ok for _, _, results in builds for r in results)
    one = Case((1,), gate=GATE)
    verdict = f"All comparisons{' that ran' if left else ''} hold" if good and builds else "FAILED"
    lines = ["# Accuracy against float64", "", f"{verdict}. {device} tensors, "
             f"{one.heads} query head, {one.value_heads} value heads, an initial state, gates in [{2 * GATE:g}, 0], "
             "seeded inputs."]
    lines += ["", *(f"Not run: {target}: {why}." for target, why in left.items())] if left else []
    for b, ref, results in builds:
        rounded = TOLERANCE[b.contract.state_dtype]
        states = f", and {rounded:g} for final states" if rounded > TOLERANCE[b.dtype] else ""
        lines += ["", f"## {b.target}: {b.name}", "", f"Schedule {b.plan.name}, K {b.head_dim_k}, V {b.head_dim_v}, {b.dtype}; "
                  f"RMSE over RMS may reach {TOLERANCE[b.dtype]:g}{states}.", f"Reference: {ref}.", "",
                  "| case | output | RMSE/RMS | R2 | Pearson r | max error | |", "| --- | --- | --- | --- | --- | --- | --- |"]
        for r in results:
            verdict = "ok" if r.ok else "FAILED"
            for n, m in r.outputs.items():
                bad = f"{m.not_finite} values are not finite" if m.not_finite else ""
                lines.append(f"| {r.name} | {n} | {_shown(m.rmse_over_rms)} | {_shown(m.r2, 8)} | {_shown(m.pearson_r, 8)} | "
                             f"{_shown(m.max_error)} | {bad or verdict} |")
            if r.error:
                lines.append(f"| {r.name} | {' '.join(r.error.split()).replace('|', '/')} | - | - | - | - | {verdict} |")
        lines += ["", *(f"- {r.name}: {_lengths(r.lengths)}" for r in results if len(r.lengths) > 1)]
        lines += [line for r in results if r.plot for line in ("", f"![{b.target}, {r.name}]({r.plot})")]
    return "\n".join(lines) + "\n"


def write_report(builds: Sequence[Build], folder: Path, device: str = "cpu", lengths: Sequence[int] = LENGTHS,
                 packs: int = PACKS, left: dict[str, str] | None = None) -> bool:
    """Run all cases of `builds`, showing each, and write the report; whether all comparisons hold. left: targets that do not
    run, and why."""
    check_report(folder)
    todo = cases(lengths, packs, min(MOST, 2 * sum(lengths)))
    done: list[tuple[Build, str, list[Result]]] = []
    for b in builds:
        with under_way(f"{b.target} {b.name}: the reference"):
            chunk, ref = reference_chunk(b)
        results: list[Result] = []
        print(f"{b.target}: {b.name}, {len(todo)} cases; reference: {ref}", flush=True)
        for i, (name, case) in enumerate(todo):
            with under_way(f"{b.target} {b.name}, {name}"):
                r, got, want = run_case(b, name, case, chunk, device)
            if not r.error:
                r.plot = f"{b.target}_{b.name}_{name.replace(' ', '_')}.png"
                cache.write(folder / r.plot, scatter(f"{b.target} {b.name}, {name}", got, want))
            shown = r.error or "  ".join(f"{n} {_shown(m.rmse_over_rms)}" for n, m in r.outputs.items())
            print(f"[{i + 1}/{len(todo)}] {name:16} RMSE/RMS {shown}  {'ok' if r.ok else 'FAILED'}  ({r.seconds:.1f} s)",
                  flush=True)
            results.append(r)
        done.append((b, ref, results))
    good = bool(done) and all(r.ok for _, _, results in done for r in results)
    facts = {"ok": good, "device": device, "torch": str(torch.__version__), "gate": GATE, "not_run": left or {}, "builds": [
        {"target": b.target, "module": b.name, "algorithm": b.page.name, "schedule": b.plan.name, "dtype": b.dtype,
         "tolerance": TOLERANCE[b.dtype], "reference": ref, "cases": [asdict(r) for r in results]}
        for b, ref, results in done]}
    cache.write(folder / "report.json", json.dumps(facts, indent=1, allow_nan=False) + "\n")
    path = cache.write(folder / "report.md", markdown(done, device, left or {}))
    print(path, flush=True)
    return good
