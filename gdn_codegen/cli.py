"""gdn_codegen: build, list, show, verify, bench, tune, doctor."""
from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import algorithms
from .runtime.build import CHUNKS, DEFAULT_SCHEDULE, DEFAULTS, DTYPES, LAYOUTS, TARGETS, Build, lowered, render
from .schedule import SCHEDULES, Schedule, named
from .schedule.contract import Contract
from .schedule.pipelines import ARCHS
from .schedule.schedule import LAUNCHES, PARTITIONS

if TYPE_CHECKING:
    from .runtime.problems import Shape


def _build_options(p: argparse.ArgumentParser, *, several: bool, extra: tuple[str, ...] = ()) -> None:
    targets = (*TARGETS, "all") if several else TARGETS
    default = "all" if several else TARGETS[0]
    p.add_argument("--target", default=default, choices=targets, help=f"what to emit (default: {default})")
    p.add_argument("--chunk", type=int, default=64, choices=CHUNKS, help="tokens of a chunk (default: 64)")
    p.add_argument("--algorithm", default="gated_delta_rule", metavar="NAME|FILE.py:FUNCTION",
                   help=f"one of {', '.join(algorithms.names())}, or a page of your own (default: gated_delta_rule)")
    bare: dict[str, Any] = {} if several else {"nargs": "?", "const": ""}
    p.add_argument("--schedule", default=None, choices=(*SCHEDULES, *([] if several else [""]), *extra),
                   metavar="NAME",
                   help=f"one of {', '.join((*SCHEDULES, *extra))} (default: {DEFAULT_SCHEDULE})"
                   + ("" if several else "; without a name, print the schedule"), **bare)
    p.add_argument("--launch", default="kernels", choices=LAUNCHES,
                   help="kernels one by one, or in a single launch with barriers over the device (pto) (default: kernels)")
    p.add_argument("--partition", default=None, choices=PARTITIONS[1:],
                   help="a long sequence in parts that run side by side (default: whole)")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE",
                   help="a field of the schedule, as lanes=1 or kernels=G,Tinv/o,S; may be given again")
    _inputs_options(p)
    p.add_argument("--accept", default="", metavar="WORDS",
                   help="what callers pass where it differs: g=raw|linear, beta=sigmoid|twice_sigmoid, q=l2norm, k=l2norm|unit, "
                        "g=float16 and so on, state=vk|DTYPE|pool|in_place|checkpoints (joined by /), strided; joined by commas")
    p.add_argument("--arch", default="", metavar="NAME", help="the architecture to build for: "
                   f"{', '.join(f'{a} ({t})' for t, a in ARCHS)} (default: any)" + ("; triton: those that --check compiles for, "
                   "joined by commas" if several else ""))


def _inputs_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--layout", default="bthd", choices=LAYOUTS,
                   help="order of tokens and heads; bsnd and bnsd are other names of bthd and bhtd (default: bthd)")
    p.add_argument("--dtype", default="float16", choices=DTYPES, help="of q, k, v and o (default: float16)")
    p.add_argument("--head-dim-k", type=int, default=128, metavar="N", help="K (default: 128)")
    p.add_argument("--head-dim-v", type=int, default=128, metavar="N", help="V (default: 128)")


def _heads_option(p: argparse.ArgumentParser) -> None:
    p.add_argument("--heads", metavar="H/HV", help="head counts compiled in (pto) (default: taken at run time)")


def _builds(a: argparse.Namespace) -> list[Build]:
    targets = TARGETS if a.target == "all" else (a.target,)
    schedule = named(a.schedule or DEFAULTS.get(a.arch, DEFAULT_SCHEDULE))
    schedule = replace(schedule, launch=a.launch, partition=a.partition, **_fields(a.set))
    heads = _heads(a.heads) if getattr(a, "heads", None) else None
    contract = Contract.parse(a.accept)
    return [Build(t, a.chunk, a.layout, a.algorithm, schedule, a.dtype, a.head_dim_k, a.head_dim_v, heads, a.arch, contract)
            for t in targets]


def _heads(given: str) -> tuple[int, int]:
    """H and HV of the words H/HV."""
    h, _, hv = given.partition("/")
    if not (h.isdecimal() and hv.isdecimal()):
        raise ValueError(f"heads: got {given!r}; accepted: H/HV, as 16/32")
    return int(h), int(hv)


def _fields(given: list[str]) -> dict[str, Any]:
    """Fields of a schedule, from words FIELD=VALUE."""
    defaults = {f.name: f.default for f in fields(Schedule) if isinstance(f.default, (str, int)) and f.name != "launch"}
    out: dict[str, Any] = {}
    for word in given:
        name, _, value = word.partition("=")
        groups = tuple(tuple(g.split(",")) for g in value.split("/"))
        if name == "kernels" and all(n.isidentifier() for g in groups for n in g):
            out[name] = groups
            continue
        default = defaults.get(name)
        ok = default is not None and (isinstance(default, str) or (value in ("0", "1") if isinstance(default, bool)
                                                                   else value.isascii() and value.isdecimal()))
        if not ok:
            raise ValueError(f"set: got {word!r}; accepted: FIELD=VALUE, a name or a number (0 and 1 for no and yes), with "
                             f"FIELD one of {', '.join(defaults)}; or kernels=G,Tinv/o,S, names of a page's values")
        out[name] = value if isinstance(default, str) else bool(int(value)) if isinstance(default, bool) else int(value)
    return out


def _import_line(path: Path, function: str) -> str:
    parts = path.with_suffix("").parts
    if path.is_absolute() or any(not x.isidentifier() for x in parts):
        return f"sys.path.insert(0, {str(path.parent)!r}); from {path.stem} import {function}"
    return f"from {'.'.join(parts)} import {function}"


def _compiled_for(a: argparse.Namespace) -> tuple[str, ...]:
    """What --arch names where text runs on any architecture: those for which --check compiles it; `a` is then for any."""
    from .runtime.check import ARCHES
    names = tuple(a.arch.split(",")) if a.arch and a.target in ARCHES else ()
    if names and (set(names) - set(ARCHES[a.target]) or not a.check):
        raise ValueError(f"arch: got {a.arch!r}{'' if a.check else ' without --check'}; accepted for {a.target}: with --check, "
                         f"any of {', '.join(ARCHES[a.target])}, joined by commas")
    a.arch = "" if names else a.arch
    return names


def build(a: argparse.Namespace) -> int:
    from .runtime.load import cached, write
    arches = _compiled_for(a)
    builds, failed = _builds(a), False
    for i, b in enumerate(builds):
        if len(builds) > 1:
            print(f"[{i + 1}/{len(builds)}] {b.target}: {b.name}", flush=True)
        start = time.perf_counter()
        path = cached(b) if a.cached else write(b, Path(a.out))
        print(f"{path}  ({time.perf_counter() - start:.2f} s)\n{_import_line(path, b.function)}", flush=True)
        if a.check:
            from .runtime.check import check
            for line, ok in check(b, path, arches):
                failed |= not ok
                print(f"  {line}", flush=True)
        if a.compile:
            from .runtime.ahead import compile_ahead
            for line in compile_ahead(b, path, a.compile, [_heads(x) for x in a.compile_heads]):
                print(f"  {line}", flush=True)
    return int(failed)


def list_(a: argparse.Namespace) -> int:
    print("algorithms")
    for n in algorithms.names():
        page = algorithms.find(n)
        print(f"  {n:18} {page.doc.splitlines()[0] if page.doc else ''}")
    print("schedules")
    for s in SCHEDULES.values():
        print(f"  {s.name:18} {' '.join('[' + ' '.join(g) + ']' for g in s.kernels)}, form {s.form}, inverse {s.inverse}")
    print("targets\n  " + "\n  ".join(TARGETS))
    return 0


def show(a: argparse.Namespace) -> int:
    from .ir.printer import program_text
    from .runtime.show import graph_dot, kernels_text, schedule_text
    (b,) = _builds(a)
    wanted = [w for w in ("kernels", "ir", "source", "graph") if getattr(a, w)]
    if a.schedule == "" or not wanted:
        wanted.insert(0, "schedule")
    text = {"schedule": lambda: schedule_text(b), "kernels": lambda: kernels_text(b), "source": lambda: render(b),
            "ir": lambda: program_text(lowered(b)), "graph": lambda: graph_dot(b)}
    print("\n".join(text[w]() for w in wanted))
    return 0


def verify(a: argparse.Namespace) -> int:
    import torch

    from .runtime.targets import runs
    from .runtime.verify import CASES, table
    if a.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got 'cuda'; accepted: cpu, since torch sees no GPU here")
    builds = [b for b in _builds(a) if runs(b.target, a.device)]
    for b in _builds(a):
        if b not in builds:
            print(f"{b.target}: does not run {a.device} tensors here; see gdn_codegen doctor")
    if a.report:
        from .runtime.report import LENGTHS, QUICK, write_report
        good = bool(builds) and write_report(builds, Path(a.report), a.device, QUICK if a.quick else LENGTHS)
        print("all comparisons hold" if good else "FAILED")
        return int(not good)
    cases = CASES[:2] if a.quick else CASES
    good = bool(builds)
    for i, b in enumerate(builds):
        lines, ok = table([b], cases, a.device)
        print("\n".join(lines if i == 0 else lines[1:]), flush=True)
        good &= ok
    print("all comparisons hold" if good else "FAILED")
    return int(not good)


def bench(a: argparse.Namespace) -> int:
    if a.target == "pto" and a.errors is None:
        a.chunk = a.chunk or 128
    return _bench_pto(a) if a.target == "pto" and a.errors is None else _bench_gpu(a)


def _bench_pto(a: argparse.Namespace) -> int:
    from .runtime.bench_pto import Problem
    from .runtime.bench_pto import bench as run
    fixed = None if a.heads.isdecimal() else a.heads  # H/HV: compiled in
    heads, value_heads = _heads(fixed) if fixed else (int(a.heads), a.value_heads or int(a.heads))
    if fixed and a.value_heads not in (None, value_heads):
        raise ValueError(f"value_heads: got {a.value_heads}; accepted: none beside --heads {fixed}")
    names = SCHEDULES if a.schedule == "all" else (a.schedule,)
    builds = [b for n in names for b in _builds(argparse.Namespace(**{**vars(a), "schedule": n, "heads": fixed}))]
    return run(builds, Problem(a.tokens, heads, value_heads, a.blocks), a.json, a.trace, a.plot, a.detail)


def _only(a: argparse.Namespace, default: Sequence[Shape]) -> list[Shape]:
    """The shapes of the file, or those by default; of these the ones that are named."""
    from .runtime.problems import shapes
    todo = shapes(Path(a.shapes)) if a.shapes else list(default)
    known = [s.name for s in todo]
    if set(a.only) - set(known):
        raise ValueError(f"only: got {', '.join(sorted(set(a.only) - set(known)))}; accepted: {'; '.join(known)}")
    return [s for s in todo if s.name in (a.only or known)]


def _bench_gpu(a: argparse.Namespace) -> int:
    from .runtime import bench_gpu
    from .runtime.problems import Shape
    given = _heads(a.heads if "/" in a.heads else f"{a.heads}/{a.value_heads or a.heads}")
    todo = _only(a, [Shape(f"1 x {a.tokens}, {given[0]}/{given[1]}", (a.tokens,), *given)])
    targets = bench_gpu.TARGETS if a.target == "all" else (a.target,)
    names = SCHEDULES if a.schedule == "all" else () if a.schedule in ("none", "auto") else (a.schedule,)
    builds: list[Build | bench_gpu.Auto] = [
        b for t in targets for n in names
        for b in _builds(argparse.Namespace(**{**vars(a), "chunk": a.chunk or 64, "target": t, "schedule": n, "heads": None}))]
    if a.schedule == "auto":
        from .ops import chunk_gated_delta_rule
        plain: dict[str, tuple[Any, ...]] = {"partition": (None,), "set": ([],), "arch": ("",), "accept": ("", "k=unit"),
                                             "algorithm": ("gated_delta_rule",)}
        for name, accepted in plain.items():
            if (value := getattr(a, name)) not in accepted:
                raise ValueError(f"{name}: got {value!r} with --schedule auto; accepted: "
                                 + ("k=unit, or none" if name == "accept" else "none, the op chooses"))
        builds = [bench_gpu.Auto(chunk_gated_delta_rule, t, a.chunk, a.layout, a.accept == "k=unit") for t in targets]
    if a.interpret and (a.errors is None or a.schedule == "auto" or a.peers not in (None, "none")):
        raise ValueError("interpret: got it without --errors, with --schedule auto or with peers; accepted: with --errors, and "
                         "builds that are named")
    peers = bench_gpu.rivals(a.peers or ("none" if a.interpret else "all"))
    options: dict[str, Any] = {"gates": a.gates, "seed": a.seed, "dtype": a.dtype, "dims": (a.head_dim_k, a.head_dim_v),
                               "command": shlex.join(["gdn_codegen", *a.words]), "json_to": a.json}
    if a.errors is not None:
        from .runtime import bench_errors
        if a.plot:
            raise ValueError("plot: got a file with --errors; accepted: --json")
        return bench_errors.bench(builds, todo, peers, seeds=a.errors, on_cpu=a.interpret, **options)
    return bench_gpu.bench(builds, todo, peers, runs=a.runs, plot_to=a.plot, detail=a.detail, **options)


def tune(a: argparse.Namespace) -> int:
    from .runtime import choices
    from .runtime import tune as t
    targets = t.TARGETS if a.target == "all" else (a.target,)
    if a.out and len(targets) > 1:
        raise ValueError("out: got a file for several targets; accepted: one --target")
    shapes, out, failed = _only(a, t.SHAPES), Path(a.out) if a.out else None, False
    names, arch, units = ((), a.compile, 0) if a.compile else t.here()
    for target in targets:
        about = Build(target, layout=a.layout, dtype=a.dtype, head_dim_k=a.head_dim_k, head_dim_v=a.head_dim_v,
                      contract=choices.UNIT if a.unit_keys else Contract())
        if a.compile:
            for line in t.compile_candidates(about, shapes, arch):
                print(line, flush=True)
        elif a.list:
            print("\n".join(t.listing(about, shapes, names, arch, units, out)))
        else:
            failed |= bool(t.tune(about, shapes, names, arch, units, t.Gpu(a.runs), out, budget=a.budget,
                                  memory=int(a.memory * 2**30)))
    return int(failed)


def doctor(a: argparse.Namespace) -> int:
    from .runtime.targets import findings
    for f in findings():
        print(f"{f.target:9} {f.what:16} {'yes' if f.ok else 'no':4} {f.detail}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="gdn_codegen", description="Gated DeltaNet kernels from one algorithm.")
    sub = top.add_subparsers(dest="command", required=True)
    p = sub.add_parser("build", help="write a module that stands alone")
    _build_options(p, several=True)
    _heads_option(p)
    p.add_argument("--out", default="generated", metavar="DIR", help="folder of DIR/TARGET/NAME.py (default: generated)")
    p.add_argument("--check", action="store_true", help="compile as far as this machine allows")
    p.add_argument("--compile", metavar="ARCH", nargs="?", const="sm_90a",
                   help="compile ahead for a GPU that need not be here, so that no call does: sm_90a (the default), gfx942, ...")
    p.add_argument("--compile-heads", metavar="H/HV", action="append", default=[],
                   help="head counts to compile for (triton); may be given again")
    p.add_argument("--cached", action="store_true", help="write where the package's own op looks, rather than to --out")
    p.set_defaults(run=build)
    sub.add_parser("list", help="algorithms, schedules, targets").set_defaults(run=list_)
    p = sub.add_parser("show", help="what a build does")
    _build_options(p, several=False)
    _heads_option(p)
    for flag, text in (("--kernels", "each kernel's grid, reads and writes"),
                       ("--ir", "the lowered program"), ("--source", "the emitted module"),
                       ("--graph", "the chunk graph with its kernel cuts, in DOT")):
        p.add_argument(flag, action="store_true", help=text)
    p.set_defaults(run=show)
    p = sub.add_parser("verify", help="run targets against the float64 recurrence")
    _build_options(p, several=True)
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the tensors live (default: cpu)")
    p.add_argument("--quick", action="store_true", help="a few short cases only")
    p.add_argument("--report", metavar="DIR", help="instead run many lengths, and write DIR/report.md, report.json and plots")
    p.set_defaults(run=verify)
    p = sub.add_parser("bench", help="time on a GPU, beside peers; target pto: simulated cycles of a stage and a pipe")
    _build_options(p, several=True, extra=("all", "none", "auto"))
    p.set_defaults(target="pto", chunk=None)
    p.add_argument("--heads", default="16", metavar="N|H/HV",
                   help="query and key heads, or these and value heads (pto: compiled in) (default: 16)")
    for flag, number, text in (("--value-heads", None, "value heads (default: heads)"), ("--tokens", 2048, "of one sequence"),
                               ("--blocks", 24, "pto: core groups; block 0 is timed"), ("--seed", 0, "GPU: of the inputs"),
                               ("--runs", 15, "GPU: times are medians of these")):
        p.add_argument(flag, type=int, default=number, metavar="N",
                       help=text + (f" (default: {number})" if number is not None else ""))
    p.add_argument("--shapes", metavar="FILE", help="GPU: shapes in JSON, as benchmarks/shapes/serving.json")
    p.add_argument("--only", action="append", default=[], metavar="NAME", help="GPU: a shape of the file; may be given again")
    p.add_argument("--errors", type=int, metavar="N", help="GPU: errors alone, on all value heads and N seeds")
    p.add_argument("--interpret", action="store_true", help="with --errors: interpret builds, with their roundings, on the CPU")
    p.add_argument("--peers", metavar="NAME,...", help="GPU: of fla, flashqla, tileops, flashinfer; all or none "
                   "(default: all; one that is not installed is said to be absent)")
    p.add_argument("--gates", default="layer", choices=("layer", "uniform"),
                   help="GPU: drawn as a layer does at initialisation, or -U(0, 1) a token (default: layer)")
    for flag, text in (("--json", "the figures as JSON"), ("--trace", "a Chrome trace (pto)"),
                       ("--plot", "PNG: a timeline (pto), or time against length, roofline, where the time goes (GPU)")):
        p.add_argument(flag, metavar="FILE", help=f"write {text}")
    p.add_argument("--detail", action="store_true", help="pto: each stage's instructions; GPU: peers' kernels too")
    p.set_defaults(run=bench)
    p = sub.add_parser("tune", help="time candidates on this GPU, and write the table from which calls choose")
    p.add_argument("--target", default="all", choices=("tilelang", "triton", "all"), help="(default: all)")
    _inputs_options(p)
    p.add_argument("--shapes", metavar="FILE", help="shapes in JSON, as benchmarks/shapes/serving.json (default: ten)")
    p.add_argument("--only", action="append", default=[], metavar="NAME", help="a shape of these; may be given again")
    p.add_argument("--unit-keys", action="store_true", help="for callers that promise keys of norm 1")
    p.add_argument("--budget", type=float, metavar="SECONDS", help="begin no measurement later; the same command goes on")
    p.add_argument("--memory", type=float, default=8, metavar="GIB",
                   help="that a candidate may hold between its kernels (default: 8)")
    p.add_argument("--runs", type=int, default=15, metavar="N", help="times are medians of these (default: 15)")
    p.add_argument("--out", metavar="FILE", help="the table, with its log beside it (default: where calls look for it)")
    p.add_argument("--compile", metavar="ARCH", help="only compile the candidates, for a GPU (sm_90a, ...) that need not be here")
    p.add_argument("--list", action="store_true", help="only say what was measured and what is pending")
    p.set_defaults(run=tune)
    sub.add_parser("doctor", help="which targets run here, and what is missing for the rest").set_defaults(run=doctor)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    a = parser().parse_args(words)
    a.words = words
    try:
        run: int = a.run(a)
    except ValueError as e:
        print(f"gdn_codegen: {e}", file=sys.stderr)
        return 2
    return run


if __name__ == "__main__":
    sys.exit(main())
