"""gdn_codegen: build, list, show, verify, bench, tune, doctor, cache."""
from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import algorithms, cli_parser, options
from .options import ASKED
from .runtime.build import Build, lowered, render
from .runtime.progress import under_way
from .schedule import SCHEDULES
from .schedule.contract import Contract

if TYPE_CHECKING:
    from .tools.shapes import Shape


def build(a: argparse.Namespace) -> int:
    """`gdn_codegen build`: write a module for each target; compile them with --check or --compile.

    Returns the exit status: 1 where a kernel does not compile, or where --strict is given and a target could not be checked here.
    ValueError for a wrong option, before anything is written.
    """
    from .runtime import cache
    from .runtime.load import cached, import_line, write
    options.check_build(a)
    options.check_model(a, vars(cli_parser.parser().parse_args(["build"])))
    if a.model is not None:
        from .tools import served
        return served.command(a)
    arches, choices = options.gpus(a), options.choices(a)
    builds, failed, left = [c.build for c in choices], False, []
    heads = [options.heads(x, "compile_heads") for x in a.compile_heads]
    if a.compile is not None:
        from .tools.compile_ahead import check_ahead, compile_ahead
        for b in builds:
            check_ahead(b, a.compile, heads)
    with under_way(f"emitting {', '.join(b.name for b in builds)}"):
        for b in builds:  # what one of them refuses is said before any is written
            render(b)
    out = Path("generated" if a.out is None else a.out)
    cache.place(*(("GDN_CODEGEN_CACHE", cache.folder()) if a.cached else ("out", out)), folder=True)
    for i, b in enumerate(builds):
        if len(builds) > 1:
            print(f"[{i + 1}/{len(builds)}] {b.target}: {b.name}", flush=True)
        what, why = choices[i].why[-1]
        if why != ASKED:
            print(f"gdn_codegen: {b.target}: {what}: {why}", file=sys.stderr)
        start = time.perf_counter()
        path = cached(b) if a.cached else write(b, out)
        print(f"{path}  ({time.perf_counter() - start:.2f} s)\n{import_line(path, b.function)}", flush=True)
        if a.check:
            from .tools.check import check
            for line, ok in check(b, path, arches):
                failed |= ok is False
                left += [b.target] if ok is None else []
                print(f"  {line}", flush=True)
        if a.compile is not None:
            for line in compile_ahead(b, path, a.compile, heads):
                print(f"  {line}", flush=True)
    if left:
        print(f"not checked, or in part: {', '.join(dict.fromkeys(left))}")
    return int(failed or a.strict and bool(left))


def list_(a: argparse.Namespace) -> int:
    """`gdn_codegen list`: print what the algorithms need, the schedules and the targets. Returns 0.

    ValueError for an algorithm that there is not.
    """
    from .tools.listing import listed
    for line in listed(a.algorithm):
        print(line, flush=True)
    return 0


def show(a: argparse.Namespace) -> int:
    """`gdn_codegen show`: print the views of one build that were asked for (schedule, kernels, IR, source, graph). Returns 0.

    ValueError for a wrong option, or for a page that the schedule does not serve.
    """
    from .ir.printer import program_text
    from .tools import graph
    from .tools.show import kernels_text, schedule_text
    (b,) = options.builds(a)
    wanted = [w for w in ("kernels", "ir", "source", "graph") if getattr(a, w)]
    if a.schedule == "" or not wanted:
        wanted.insert(0, "schedule")
    text = {"schedule": lambda: schedule_text(b), "kernels": lambda: kernels_text(b), "source": lambda: render(b),
            "ir": lambda: program_text(lowered(b)), "graph": lambda: graph.svg(b) if a.graph == "svg" else graph.dot(b)}
    print("\n".join(text[w]() for w in wanted))
    return 0


def _verdict(good: bool, ran: bool, left: dict[str, str], strict: bool) -> int:
    """Prints the result of `verify` and the targets that did not run. Returns the exit status."""
    if not ran:
        print("FAILED: nothing ran")
    elif left:
        print(f"{'all comparisons that ran hold' if good else 'FAILED'}; not run: {', '.join(left)}")
    else:
        print("all comparisons hold" if good else "FAILED")
    return int(not (good and ran) or strict and bool(left))


def verify(a: argparse.Namespace) -> int:
    """`gdn_codegen verify`: run each target and compare it with the float64 recurrence, or write a report on many lengths.

    Returns the exit status: 1 where an error is above what the dtype allows, where nothing ran, or where --strict is given and a
    target did not run. ValueError for a wrong option, and for --device cuda without a GPU.
    """
    from .runtime.targets import lacks, serves
    if a.target != "all" and not serves(a.target, a.device):
        raise ValueError(f"device: got {a.device!r}; accepted for {a.target}: cpu, the tensors that it has kernels for")
    if a.report is not None:
        from .tools.report import check_report
        check_report(Path(a.report))
    options.check_verify(a)
    asked, left = options.of_gradients(a) if a.backward else (options.builds(a), {})
    asked = [b for b in asked if serves(b.target, a.device)]
    left |= {b.target: why for b in asked if (why := lacks(b.target, a.device))}
    builds = [b for b in asked if b.target not in left]
    if a.device == "cuda":
        import torch
        if not torch.cuda.is_available():
            raise ValueError("device: got 'cuda'; accepted: cpu, since torch sees no GPU here")
    for target, why in left.items():
        print(f"{target}: not run: {why}", flush=True)
    if a.report is not None:
        from .tools.report import LENGTHS, QUICK, write_report
        good = write_report(builds, Path(a.report), a.device, QUICK if a.quick else LENGTHS, left=left)
    else:
        from .tools.cases import CASES
        from .tools.verify import HEAD, lines
        good = True
        if builds:
            print(HEAD, flush=True)
        recurrence = None if a.reference is None else algorithms.load("reference", a.reference, Callable, "function")
        for line, ok in lines(builds, CASES[:2] if a.quick else CASES, a.device, recurrence, a.backward):
            print(line, flush=True)
            good &= ok
    return _verdict(good, bool(builds), left, a.strict)


def bench(a: argparse.Namespace) -> int:
    """`gdn_codegen bench`: simulated cycles of PTO kernels, or times or errors on a GPU. Returns the exit status.

    ValueError for options that mean nothing together.
    """
    way = options.check_bench(a)
    heads = options.bench_heads(a)
    return _bench_pto(a, heads) if way == "pto" else _bench_gpu(a, heads)


def _bench_pto(a: argparse.Namespace, heads: tuple[int, int]) -> int:
    from .tools.bench_pto import Problem
    from .tools.bench_pto import bench as run
    fixed = None if a.heads.isdecimal() else a.heads  # H/HV: compiled in
    names = SCHEDULES if a.schedule == "all" else (a.schedule,)
    builds = [b for n in names for b in options.builds(
        argparse.Namespace(**{**vars(a), "chunk": a.chunk or 128, "schedule": n, "heads": fixed}))]
    return run(builds, Problem(a.tokens, *heads, a.blocks), a.json, a.trace, a.plot, a.detail)


def _only(a: argparse.Namespace, default: Sequence[Shape]) -> list[Shape]:
    """The shapes of --shapes, or the default shapes; with --only, those that it names."""
    from .tools.shapes import shapes
    todo = shapes(Path(a.shapes)) if a.shapes is not None else list(default)
    known = [s.name for s in todo]
    if set(a.only) - set(known):
        raise ValueError(f"only: got {', '.join(sorted(set(a.only) - set(known)))}; accepted: {'; '.join(known)}")
    return [s for s in todo if s.name in (a.only or known)]


def _bench_gpu(a: argparse.Namespace, heads: tuple[int, int]) -> int:
    """Times, or errors with --errors, of builds and peers on a GPU. heads: H and HV. Returns the exit status."""
    from .runtime.targets import serving
    from .tools import bench_backward, bench_calls, bench_errors, bench_gpu, peer_ops
    from .tools.shapes import Shape
    page = algorithms.find(a.algorithm)
    todo = _only(a, [Shape(f"1 x {a.tokens}, {heads[0]}/{heads[1]}", (a.tokens,), *heads)])
    targets = serving("cuda") if a.target == "all" else (a.target,)
    names = SCHEDULES if a.schedule == "all" else () if a.schedule in ("none", "auto") else (a.schedule,)
    builds: list[Build | bench_calls.Auto] = [
        b for t in targets for n in names for b in options.builds(
            argparse.Namespace(**{**vars(a), "target": t, "schedule": n, "heads": None}))]
    if a.schedule == "auto":
        if page.name not in peer_ops.OPS:
            raise ValueError(f"algorithm: got {a.algorithm!r} with --schedule auto; accepted: {', '.join(peer_ops.OPS)}, which "
                             "have ops")
        plain: tuple[Any, ...] = (("partition", None), ("set", []), ("arch", ""), ("accept", "", "k=unit"), ("launch", "kernels"))
        for name, *accepted in plain:
            if (value := getattr(a, name)) not in accepted:
                raise ValueError(f"{name}: got {value!r} with --schedule auto; accepted: "
                                 + ("k=unit, or nothing" if name == "accept" else "nothing, because the op chooses"))
        builds = [bench_calls.Auto(peer_ops.OPS[page.name], t, a.chunk, a.layout, a.accept == "k=unit") for t in targets]
    if a.interpret and (a.schedule == "auto" or a.peers not in (None, "none")):
        raise ValueError("interpret: got --interpret with --schedule auto or peers; accepted: a named schedule, no peers")
    peers = peer_ops.rivals(("none" if a.interpret else "all") if a.peers is None else a.peers, page)
    if not builds and not peers:
        raise ValueError("schedule: got 'none' without peers; accepted: auto, all, one by name, or none beside peers")
    about: dict[str, Any] = {"page": page, "gates": a.gates, "seed": a.seed, "dtype": a.dtype, "json_to": a.json, "jobs": a.jobs,
                             "dims": (a.head_dim_k, a.head_dim_v), "command": shlex.join(["gdn_codegen", *a.words])}
    if a.backward:
        return bench_backward.bench(builds, todo, peers, runs=a.runs, detail=a.detail, seeds=a.errors, layer=a.layer, **about)
    if a.errors is not None:
        return bench_errors.bench(builds, todo, peers, seeds=a.errors, on_cpu=a.interpret, **about)
    return bench_gpu.bench(builds, todo, peers, runs=a.runs, plot_to=a.plot, detail=a.detail, **about)


def tune(a: argparse.Namespace) -> int:
    """`gdn_codegen tune`: time candidates on this GPU and write tables; or list them, or only compile them.

    Returns the exit status: 1 where nothing could be measured. ValueError for options that mean nothing together.
    """
    from .runtime.call import tables as choices
    from .runtime.targets import tunable
    from .tools import tune as t
    from .tools.shapes import SHAPES
    from .tools.tune_meter import Gpu
    options.check_tune(a)
    if a.decode or a.backward:
        from .tools import tune_backward, tune_decode
        command = tune_decode.command if a.decode else tune_backward.command
        return command(a, _only(a, tune_decode.SHAPES if a.decode else SHAPES))
    targets = tunable() if a.target == "all" else (a.target,)
    if a.out is not None and len(targets) > 1:
        raise ValueError("out: got one file for several targets; accepted: one --target, as each has its own table")
    shapes, out, failed = _only(a, SHAPES), None if a.out is None else Path(a.out), False
    if a.compile is not None:
        from .tools.compile_ahead import check_ahead
        for target in targets:
            check_ahead(Build(target), a.compile, [(s.H, s.HV) for s in shapes])
    names, arch, units = ((), a.compile, 0) if a.compile is not None else t.here()
    for target in targets:
        about = Build(target, layout=a.layout, dtype=a.dtype, head_dim_k=a.head_dim_k, head_dim_v=a.head_dim_v,
                      contract=choices.UNIT if a.unit_keys else Contract())
        if a.compile is not None:
            for line in t.compile_candidates(about, shapes, arch):
                print(line, flush=True)
        elif a.list:
            print("\n".join(t.listing(about, shapes, names, arch, units, out)))
        else:
            failed |= bool(t.tune(about, shapes, names, arch, units, Gpu(a.runs), out, budget=a.budget,
                                  memory=int(a.memory * 2**30)))
    return int(failed)


def doctor(a: argparse.Namespace) -> int:
    """`gdn_codegen doctor`: print which targets run on this machine, and what is missing for the others. Returns 0."""
    from .runtime.targets import findings
    for f in findings():
        print(f"{f.target:9} {f.what:16} {'yes' if f.ok else 'no':4} {f.detail}")
    return 0


def cache_(a: argparse.Namespace) -> int:
    """`gdn_codegen cache`: list or clear what the package keeps on disk. Returns 0."""
    from .tools.cache_command import command
    return command(a)


COMMANDS = {"build": build, "list": list_, "show": show, "verify": verify, "bench": bench, "tune": tune, "doctor": doctor,
            "cache": cache_}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. argv: words after the program's name, None for those of sys.argv.

    Returns the exit status: 0 where all went well, 1 where a check failed, 130 after an interrupt, and 2 for a wrong option or a
    file that cannot be used; the message then goes to stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    a = cli_parser.parser().parse_args(words)
    a.words = words
    try:
        options.check_numbers(a)
        status = COMMANDS[a.command](a)
        if sys.stdout is not None:  # as where it was closed before the start
            sys.stdout.flush()
    except BrokenPipeError:  # a reader that has read enough, as head; what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as e:
        print(f"gdn_codegen: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gdn_codegen: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
