"""The command line's options: the parser, what their values mean, and which options are refused beside others."""
from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from . import algorithms
from .runtime.build import CHUNKS, DEFAULT_SCHEDULE, DEFAULTS, DTYPES, LAYOUTS, Build
from .schedule import SCHEDULES, Schedule, named
from .schedule.contract import Contract
from .schedule.schedule import LAUNCHES, PARTITIONS
from .targets import find, names

if TYPE_CHECKING:
    from .runtime.call.choose import Choice

#: The reason of a choice that the command line made.
ASKED = "asked for"
#: Tokens of a chunk if the command line names a schedule and no chunk.
CHUNK = 64
#: How the help text describes the default chunk.
OPEN = f"{CHUNK} with --schedule, else as the op chooses"

#: The least value of each numeric option.
LEAST = {"tokens": 1, "value_heads": 1, "blocks": 1, "runs": 1, "budget": 0, "memory": 0}
#: Defaults of `bench`. The parser gives None for an absent option, so that an option that would have no effect can be refused.
BENCH: dict[str, Any] = {"heads": "16", "tokens": 2048, "blocks": 24, "seed": 0, "runs": 15, "gates": "layer"}
#: The ways of `bench`, and the options that only some ways have.
WAYS = {"pto": "with --target pto", "gpu": "with times on a GPU", "errors": "with --errors"}
MEANT = {"blocks": ("pto",), "trace": ("pto",), "runs": ("gpu",), "interpret": ("errors",), "plot": ("pto", "gpu"),
         "detail": ("pto", "gpu"), **dict.fromkeys(("seed", "gates", "peers", "shapes", "only"), ("gpu", "errors"))}
#: Defaults of `tune`: --budget in seconds, --memory in GiB, and --runs of each measurement.
TUNE = {"budget": None, "memory": 8.0, "runs": 15}


def _build_options(p: argparse.ArgumentParser, *, several: bool, extra: tuple[str, ...] = (), target: str = "",
                   chunk: str = OPEN, compiles: bool = False) -> None:
    """Options that commands on builds share. chunk: how help describes its default. compiles: whether --arch also says for
    which GPUs --check compiles."""
    known = names()
    targets = (*known, "all") if several else known
    target = target or ("all" if several else known[0])
    p.add_argument("--target", default=target, choices=targets, help=f"what to emit (default: {target})")
    p.add_argument("--chunk", type=int, choices=CHUNKS,
                   help=f"tokens of a chunk (default: {chunk})")
    p.add_argument("--algorithm", default="gated_delta_rule", metavar="NAME|FILE.py:FUNCTION",
                   help=f"one of {', '.join(algorithms.names())}, or a page of your own (default: gated_delta_rule)")
    bare: dict[str, Any] = {} if several else {"nargs": "?", "const": ""}
    p.add_argument("--schedule", default=None, metavar="NAME|FILE.py:NAME",
                   help=f"one of {', '.join((*SCHEDULES, *extra))}, or a schedule of your own "
                   "(default: what the op would choose on the GPUs of --arch)"
                   + ("" if several else "; without a name, print the schedule"), **bare)
    p.add_argument("--launch", default="kernels", choices=LAUNCHES,
                   help="kernels one by one, or in a single launch with barriers over the device (pto) (default: kernels)")
    p.add_argument("--partition", default=None, choices=PARTITIONS[1:],
                   help="split long sequences into parts that run side by side (default: do not split)")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE",
                   help="a field of the schedule, as value_heads=1 or kernels=G,@inverse/o,S; may be given again")
    _inputs_options(p)
    p.add_argument("--accept", default="", metavar="WORDS",
                   help="how callers pass inputs and states, if not in the default way: g=raw|linear, "
                        "beta=sigmoid|twice_sigmoid, q=l2norm, k=l2norm|unit, "
                        "g=float16 and so on, state=vk|DTYPE|pool|in_place|checkpoints (joined by /), strided; joined by commas")
    p.add_argument("--arch", default="", metavar="NAME", help="the architecture to build for: "
                   f"{', '.join(f'{a} ({t})' for t in known for a in find(t).archs)} (default: any); triton: GPUs for which to "
                   "choose a schedule"
                   + (", and --check compiles for" if compiles else "") + ", joined by commas")


def _inputs_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--layout", default="bthd", choices=LAYOUTS,
                   help="order of tokens and heads; bsnd and bnsd are other names of bthd and bhtd (default: bthd)")
    p.add_argument("--dtype", default="float16", choices=DTYPES, help="of q, k, v and o (default: float16)")
    p.add_argument("--head-dim-k", type=int, default=128, metavar="N", help="K (default: 128)")
    p.add_argument("--head-dim-v", type=int, default=128, metavar="N", help="V (default: 128)")


def _heads_option(p: argparse.ArgumentParser) -> None:
    p.add_argument("--heads", metavar="H/HV", help="head counts compiled in (pto) (default: taken at run time)")


def _module_options(p: argparse.ArgumentParser) -> None:
    """The options of `build`."""
    _build_options(p, several=True, compiles=True)
    _heads_option(p)
    p.add_argument("--out", metavar="DIR", help="folder of DIR/TARGET/NAME.py (default: generated)")
    p.add_argument("--check", action="store_true", help="compile as far as this machine allows")
    p.add_argument("--strict", action="store_true", help="with --check: what cannot be checked here is an error")
    p.add_argument("--compile", metavar="ARCH", nargs="?", const="sm_90a",
                   help="compile ahead for a GPU that need not be here, so that no call does: sm_90a (the default), gfx942, ...")
    p.add_argument("--compile-heads", metavar="H/HV", action="append", default=[],
                   help="head counts to compile for (triton); may be given again")
    p.add_argument("--cached", action="store_true", help="write to the cache of the package's op instead of --out")


def _show_options(p: argparse.ArgumentParser) -> None:
    """The options of `show`."""
    _build_options(p, several=False)
    _heads_option(p)
    for flag, text in (("--kernels", "each kernel's grid, reads and writes"),
                       ("--ir", "the lowered program"), ("--source", "the emitted module")):
        p.add_argument(flag, action="store_true", help=text)
    p.add_argument("--graph", nargs="?", const="dot", choices=("dot", "svg"), metavar="dot|svg",
                   help="the chunk graph, cut into kernels (default: dot)")


def _verify_options(p: argparse.ArgumentParser) -> None:
    """The options of `verify`."""
    _build_options(p, several=True)
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the tensors live (default: cpu)")
    p.add_argument("--quick", action="store_true", help="a few short cases only")
    p.add_argument("--strict", action="store_true", help="a target that does not run here is an error")
    p.add_argument("--reference", metavar="FILE.py:FUNCTION", help="a recurrence of your own to compare with: called in float64 "
                   "once per sequence and value head, with the page's parameters by name, [T, dims] each (default: the page in "
                   "chunks of one token)")
    p.add_argument("--report", metavar="DIR", help="instead run many lengths, and write DIR/report.md, report.json and plots")


def _bench_options(p: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    _build_options(p, several=True, extra=("all", "none", "auto"), target="pto",
                   chunk=f"128 for cycles of pto; {OPEN}")
    p.add_argument("--heads", metavar="N|H/HV", help="query and key heads, or these and value heads (pto: compiled in) "
                   f"(default: {BENCH['heads']})")
    for flag, text in (("--value-heads", "value heads (default: heads)"), ("--tokens", "tokens of the sequence"),
                       ("--blocks", "pto: core groups; block 0 is timed"), ("--seed", "GPU: seed of the inputs"),
                       ("--runs", "GPU: a time is the median of so many calls")):
        default = f" (default: {BENCH[flag[2:]]})" if flag[2:] in BENCH else ""
        p.add_argument(flag, type=int, metavar="N", help=text + default)
    p.add_argument("--shapes", metavar="FILE", help="GPU: shapes in JSON, as benchmarks/shapes/serving.json")
    p.add_argument("--only", action="append", default=[], metavar="NAME", help="GPU: only this shape; may be given again")
    p.add_argument("--errors", type=int, metavar="N", help="errors instead of times, on all value heads and N seeds")
    p.add_argument("--interpret", action="store_true", help="with --errors: interpret builds, with their roundings, on the CPU")
    p.add_argument("--peers", metavar="NAME,...", help="GPU: libraries to compare with, of fla, flashqla, tileops, flashinfer; "
                   "or all or none (default: all; those that are not installed are listed as absent)")
    p.add_argument("--gates", choices=("layer", "uniform"),
                   help="GPU: gates as a layer draws them at initialisation, or -U(0, 1) per token (default: layer)")
    for flag, text in (("--json", "the figures as JSON"), ("--trace", "a Chrome trace (pto)"),
                       ("--plot", "PNG: a timeline (pto), or time against length, roofline, where the time goes (GPU)")):
        p.add_argument(flag, metavar="FILE", help=f"write {text}")
    p.add_argument("--detail", action="store_true", help="pto: each stage's instructions; GPU: peers' kernels too")


def _tune_options(p: argparse.ArgumentParser) -> None:
    """The options of `tune`."""
    from .runtime.targets import tunable
    from .tools.shapes import SHAPES
    p.add_argument("--target", default="all", choices=(*tunable(), "all"), help="(default: all)")
    _inputs_options(p)
    p.add_argument("--shapes", metavar="FILE", help=f"shapes in JSON, as benchmarks/shapes/serving.json (default: {len(SHAPES)})")
    p.add_argument("--only", action="append", default=[], metavar="NAME", help="only this shape; may be given again")
    p.add_argument("--unit-keys", action="store_true", help="for callers that promise keys of norm 1")
    p.add_argument("--decode", action="store_true", help="decoding steps, of all targets, for one table")
    p.add_argument("--budget", type=float, metavar="SECONDS",
                   help="start no measurement after this time; the same command continues")
    p.add_argument("--memory", type=float, metavar="GIB",
                   help=f"limit for the workspaces of a candidate (default: {TUNE['memory']:g})")
    p.add_argument("--runs", type=int, metavar="N", help=f"a time is the median of so many calls (default: {TUNE['runs']})")
    p.add_argument("--out", metavar="FILE", help="the table, with its log beside it (default: where calls look for it)")
    p.add_argument("--compile", metavar="ARCH", help="only compile the candidates, for a GPU (sm_90a, ...) that need not be here")
    p.add_argument("--list", action="store_true", help="measure nothing; list what was measured and what is pending")


#: The commands that have options: what `--help` says of each, and the function that adds its options.
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "build": ("write a module that stands alone", _module_options),
    "show": ("what a build does", _show_options),
    "verify": ("compare targets with the token recurrence in float64", _verify_options),
    "bench": ("time builds beside other libraries on a GPU; target pto: simulated cycles", _bench_options),
    "tune": ("time candidates on this GPU, and write the table from which calls choose", _tune_options),
}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. It imports no torch, so that --help is quick."""
    from . import __version__
    from .tools import cache_command
    top = argparse.ArgumentParser(prog="gdn_codegen", description="Gated DeltaNet kernels from one algorithm.")
    top.add_argument("--version", action="version", version=f"gdn_codegen {__version__}")
    sub = top.add_subparsers(dest="command", required=True)
    for name, (text, add_options) in COMMANDS.items():
        add_options(sub.add_parser(name, help=text))
    sub.add_parser("list", help="algorithms, schedules, targets")
    sub.add_parser("doctor", help="which targets run here, what is missing for the rest, versions, and the cache")
    cache_command.options(sub.add_parser("cache", help="what the package keeps on disk"))
    return top


# --- what words mean -------------------------------------------------------------------------------------------------
def gpus(a: argparse.Namespace) -> tuple[str, ...]:
    """The GPUs that --arch names, for a target whose text runs on any architecture."""
    known = () if a.target == "all" else find(a.target).toolchain.check_archs
    gpus = tuple(a.arch.split(",")) if a.arch and known else ()
    if set(gpus) - set(known):
        raise ValueError(f"arch: got {a.arch!r}; accepted for {a.target}: any of {', '.join(known)}, joined by commas")
    if gpus and a.schedule and not getattr(a, "check", False):
        raise ValueError(f"arch: got {a.arch!r} with --schedule {a.schedule}; accepted for {a.target}: --arch without "
                         "--schedule, to choose a schedule for these GPUs, or with --check, to compile for them")
    return gpus


def builds(a: argparse.Namespace) -> list[Build]:
    """The builds that the options ask for, one for each target. ValueError for a wrong option."""
    return [c.build for c in choices(a)]


def choices(a: argparse.Namespace) -> list[Choice]:
    """A build for each target, with the reason: as the options say, or as the op would choose on the GPUs of --arch."""
    algorithms.find(a.algorithm)  # a name that is none is said before torch is imported
    asked = gpus(a)
    arch = "" if asked else a.arch
    plan = schedule(a.schedule or DEFAULTS.get(arch, DEFAULT_SCHEDULE), arch)
    from .runtime.call.choose import Choice
    from .runtime.defaults import planned, words
    targets = names() if a.target == "all" else (a.target,)
    fields = {**({"launch": a.launch} if a.launch != "kernels" else {}),
              **({"partition": a.partition} if a.partition else {}), **_fields(a.set)}
    counts = heads(a.heads) if getattr(a, "heads", None) is not None else None
    contract = Contract.parse(a.accept)
    for n, form in contract.inputs if a.algorithm in algorithms.names() else ():
        if form not in (fit := algorithms.FORMS.get(n, (form,))):  # what no page has, the build says
            raise ValueError(f"accept: got {n}={form}; accepted for {n}: {', '.join(fit) or 'no form'}")
    compiled = getattr(a, "compile", None)  # names a GPU, too
    given = "schedule" if a.schedule else "kernels" if "kernels" in fields else ""
    _refuse_unused(fields, targets, arch)
    out = []
    for t in targets:
        b = Build(t, a.chunk or CHUNK, a.layout, a.algorithm, plan, a.dtype, a.head_dim_k, a.head_dim_v, counts, arch, contract)
        if given:
            out.append(Choice(replace(b, schedule=replace(b.plan, **fields)), ((given, ASKED),)))
        else:
            on = asked or ((arch,) if arch else (compiled,) if compiled and find(t).toolchain.check_archs else ())
            found = planned(replace(b, arch=""), on, bool(a.partition), a.chunk, fields)
            if arch != found.build.arch:
                raise ValueError(f"arch: got {arch!r}, for which nothing fits ({found.why[0][1]}); accepted: no --arch; the op "
                                 f"then takes {words(found.build)}")
            out.append(found)
    return out


def schedule(spec: str, arch: str) -> Schedule:
    """The schedule that --schedule names: a name of the package, or FILE.py:NAME. ValueError for anything else."""
    if ":" in spec:
        found: Schedule = algorithms.load("schedule", spec, Schedule, "Schedule")
        return found
    if spec not in SCHEDULES:
        raise ValueError(f"schedule: got {spec!r}; accepted: {', '.join(SCHEDULES)}, or FILE.py:NAME")
    return named(spec, arch)


def _refuse_unused(given: Iterable[str], targets: Iterable[str], arch: str) -> None:
    """ValueError for a field of a schedule that no pass of these targets reads."""
    unused = set.intersection(*(set(find(t).lowered_for(arch if arch in find(t).archs else "").unused) for t in targets))
    for name in given:
        if name in unused:
            use = [f"{t}{f' --arch {n}' if n else ''}" for t in names() for n in ("", *find(t).archs)
                   if name not in find(t).lowered_for(n).unused]
            raise ValueError(f"set: got {name}, which has no effect for {', '.join(targets)}; accepted: {name} with --target "
                             f"{' or '.join(use)}")


def heads(given: str, name: str = "heads") -> tuple[int, int]:
    """H and HV of the words H/HV."""
    h, _, hv = given.partition("/")
    if not (h.isdecimal() and hv.isdecimal() and int(h) and int(hv)) or int(hv) % int(h):
        raise ValueError(f"{name}: got {given!r}; accepted: H/HV, as 16/32: HV a multiple of H, both at least 1")
    return int(h), int(hv)


def bench_heads(a: argparse.Namespace) -> tuple[int, int]:
    """H and HV of --heads and --value-heads."""
    if not a.heads.isdecimal():
        found = heads(a.heads)
        if a.value_heads not in (None, found[1]):
            raise ValueError(f"value_heads: got {a.value_heads}; accepted: no --value-heads beside --heads {a.heads}")
        return found
    h, hv = int(a.heads), a.value_heads or int(a.heads)
    if not h or hv % h:
        name, got = ("heads", a.heads) if a.value_heads is None or not h else ("value_heads", hv)
        raise ValueError(f"{name}: got {got!r}; accepted: " + ("1 or more, or H/HV" if name == "heads" else f"a multiple of {h}"))
    return h, hv


def _fields(given: list[str]) -> dict[str, Any]:
    """Fields of a schedule, from words FIELD=VALUE."""
    defaults = {f.name: f.default for f in fields(Schedule) if isinstance(f.default, (str, int)) and f.name != "launch"}
    out: dict[str, Any] = {}
    for word in given:
        name, _, value = word.partition("=")
        groups = tuple(tuple(g.split(",")) for g in value.split("/"))
        if name == "kernels" and all(n.removeprefix("@").isidentifier() for g in groups for n in g):
            out[name] = groups
            continue
        default = defaults.get(name)
        ok = default is not None and (isinstance(default, str) or (value in ("0", "1") if isinstance(default, bool)
                                                                   else value.isascii() and value.isdecimal()))
        if not ok:
            raise ValueError(f"set: got {word!r}; accepted: FIELD=VALUE, a name or a number (0 and 1 for no and yes), with "
                             f"FIELD one of {', '.join(defaults)}; or kernels=G,@inverse/o,S, groups "
                             "of a page's values and of roles")
        out[name] = value if isinstance(default, str) else bool(int(value)) if isinstance(default, bool) else int(value)
    return out


# --- which options are refused ---------------------------------------------------------------------------------------
def given(a: argparse.Namespace, name: str) -> bool:
    """Whether the command line has the option. Only for options whose default is None, False or []."""
    x = getattr(a, name)
    return x is not None and x is not False and x != []


def refuse(a: argparse.Namespace, names: Iterable[str], where: str, accepted: str) -> None:
    """ValueError for the first of these options that is given, because it would have no effect."""
    for name in names:
        if given(a, name):
            raise ValueError(f"{name}: got {getattr(a, name)!r} {where}; accepted: {accepted}")


def check_numbers(a: argparse.Namespace) -> None:
    """ValueError for a number that is less than its option accepts, or not finite."""
    for name, least in LEAST.items():
        x = getattr(a, name, None)
        if x is not None and not least <= x < math.inf:  # which NaN is not, either
            raise ValueError(f"{name}: got {x:g}; accepted: {least} or more")


def check_bench(a: argparse.Namespace) -> str:
    """The way of `bench`, a key of WAYS. Sets absent options to their defaults. ValueError for options that have no effect."""
    from .runtime.targets import serving
    way = "errors" if a.errors is not None else "pto" if a.target == "pto" else "gpu"
    if way == "gpu" and a.target not in (accepted := [*serving("cuda"), "pto", "all"]):
        raise ValueError(f"target: got {a.target!r}, which has no kernels for a GPU; accepted: {', '.join(accepted)}")
    for name, ways in MEANT.items():
        if way not in ways:
            refuse(a, [name], WAYS[way], " or ".join(WAYS[w] for w in ways))
    if a.shapes is not None:
        refuse(a, ("heads", "value_heads", "tokens"), "with --shapes", "without --shapes, for a single shape")
    for name, value in BENCH.items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    return way


def check_tune(a: argparse.Namespace) -> None:
    """Sets absent options of `tune` to their defaults. ValueError for options that have no effect."""
    if a.decode:
        refuse(a, ("unit_keys", "memory"), "with --decode",
               "without --decode, whose callers normalise keys in its only kernel")
        if a.target != "all":
            raise ValueError(f"target: got {a.target!r} with --decode; accepted: all, because Triton and TileLang share the "
                             "table")
        if LAYOUTS[a.layout] != "bthd":
            raise ValueError(f"layout: got {a.layout!r} with --decode; accepted: bthd")
    if a.compile is not None:
        refuse(a, ("list", "out", *TUNE), "with --compile", "without --compile, which times no candidates")
    if a.list:
        refuse(a, TUNE, "with --list", "without --list, which times no candidates")
    for name, value in TUNE.items():
        if getattr(a, name) is None:
            setattr(a, name, value)


def check_build(a: argparse.Namespace) -> None:
    """ValueError for an option of `build` that has no effect beside the others."""
    if not a.check:
        refuse(a, ["strict"], "without --check", "with --check")
    if a.cached:
        refuse(a, ["out"], "with --cached", "one of --out and --cached")
    need = [t for t in names() if (ahead := find(t).toolchain.ahead) and ahead.heads]
    if a.compile is None:
        refuse(a, ["compile_heads"], "without --compile", f"with --compile, for {' or '.join(need)}")
    elif a.target not in need:
        refuse(a, ["compile_heads"], f"with --target {a.target}", f"with --target {' or '.join(need)}")
