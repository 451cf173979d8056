"""The parser of the command line: commands, their options, and the help texts. `options.py` says what the options mean."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from . import algorithms, models
from .options import BENCH, CHUNK, TUNE
from .runtime.build import CHUNKS, DTYPES, LAYOUTS
from .runtime.targets import tunable
from .schedule import SCHEDULES
from .schedule.schedule import LAUNCHES, PARTITIONS
from .targets import find, names

#: How the help text describes the default chunk.
OPEN = f"{CHUNK} with --schedule, else as the op chooses"


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
                   help=f"one of {', '.join(algorithms.names())}, or a page of your own; .gradient, .saving or .states after the "
                   "name: a page derived from it (default: gated_delta_rule)")
    bare: dict[str, Any] = {} if several else {"nargs": "?", "const": ""}
    p.add_argument("--schedule", default=None, metavar="NAME|FILE.py:NAME",
                   help=f"one of {', '.join((*SCHEDULES, *extra))}, or a schedule of your own "
                   "(default: what the op would choose on the GPUs of --arch)"
                   + ("" if several else "; without a name, print the schedule"), **bare)
    p.add_argument("--launch", default="kernels", choices=LAUNCHES,
                   help="kernels one by one, or in a single launch with barriers over the device (pto) (default: kernels)")
    p.add_argument("--partition", default=None, choices=[x for x in PARTITIONS if x not in (None, "short")],
                   help="split long sequences into parts: exact and decay run them side by side, pipelined one after the other, "
                        "each beside the kernel over chunks of the next one (default: do not split)")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE",
                   help="a field of the schedule, as value_heads=1 or kernels=G,@inverse/o,S; may be given again")
    _inputs_options(p)
    forms = ", ".join(f"{name}={'|'.join(accepted)}" for name, accepted in algorithms.FORMS.items() if accepted)
    p.add_argument("--accept", default="", metavar="WORDS",
                   help=f"how callers pass inputs and states, if not in the default way: {forms}, "
                        "g=float16 and so on, state=vk|DTYPE|pool|in_place|checkpoints|rows|slots|accepted|parents|frozen|"
                        "positions (joined by /), strided; joined by commas")
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
    p.add_argument("--backward", action="store_true", help="instead the two modules of a backward: the states before each "
                   "chunk (NAME.states), and the gradients (NAME.gradient)")
    p.add_argument("--out", metavar="DIR", help="folder of DIR/TARGET/NAME.py (default: generated)")
    p.add_argument("--check", action="store_true", help="compile as far as this machine allows")
    p.add_argument("--strict", action="store_true", help="with --check: what cannot be checked here is an error")
    p.add_argument("--compile", metavar="ARCH", nargs="?", const="sm_90a",
                   help="compile ahead for a GPU that need not be here, so that no call does: sm_90a (the default), gfx942, ...")
    p.add_argument("--compile-heads", metavar="H/HV", action="append", default=[],
                   help="head counts to compile for (triton); may be given again")
    p.add_argument("--cached", action="store_true", help="write to the cache of the package's op instead of --out")
    p.add_argument("--model", metavar="NAME", help="instead all builds that a server of this model calls, to the cache of the "
                   f"package's op: {', '.join(models.MODELS)}")
    p.add_argument("--engine", choices=models.ENGINES, help="with --model: the engine that makes the calls (default: each)")
    p.add_argument("--tensor-parallel", type=int, metavar="N", help="with --model: devices that share the heads (default: 1)")
    p.add_argument("--device", metavar="WORDS", help="with --model: the device of the calls, as 'NVIDIA H200', 'sm_90 x 132' or "
                   "cpu (default: the GPU that is here)")
    p.add_argument("--tokens", type=int, metavar="N", help="with --model: the most tokens of a call (default: 262144)")
    p.add_argument("--sequences", type=int, metavar="N", help="with --model: the most sequences of a call (default: 256)")
    p.add_argument("--speculative", action="store_true", help="with --model: also calls with draft tokens")
    p.add_argument("--jobs", type=int, metavar="N", help="with --model: builds that are compiled at a time (default: the cores)")
    p.add_argument("--prefix-caching", action="store_true", help="with --model: also prefill that stores states at "
                   "positions, for a cache of prefixes")
    p.add_argument("--state-dtype", choices=DTYPES, help="with --model: the dtype of states (default: the engine's own)")


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
    p.add_argument("--backward", action="store_true", help="instead gradients, compared with torch.autograd")
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
                       ("--runs", "GPU: a time is the median of so many calls"),
                       ("--jobs", "GPU: processes that compile at a time, before anything is measured; 1: each row compiles its "
                        "own (default: the cores)")):
        default = f" (default: {BENCH[flag[2:]]})" if flag[2:] in BENCH else ""
        p.add_argument(flag, type=int, metavar="N", help=text + default)
    p.add_argument("--shapes", metavar="FILE", help="GPU: shapes in JSON, as benchmarks/shapes/serving.json")
    p.add_argument("--only", action="append", default=[], metavar="NAME", help="GPU: only this shape; may be given again")
    p.add_argument("--errors", type=int, metavar="N", help="errors instead of times, on all value heads and N seeds")
    p.add_argument("--backward", action="store_true", help="GPU: times of gradients, of the op beside the peers' ops")
    p.add_argument("--layer-inputs", dest="layer", action="store_true", help="with --backward: inputs as layers of FLA pass "
                   "them: raw gates, beta before its sigmoid, q and k before their norms")
    p.add_argument("--interpret", action="store_true", help="with --errors: interpret builds, with their roundings, on the CPU")
    p.add_argument("--peers", metavar="NAME,...", help="GPU: libraries to compare with: of gated_delta_rule fla, flashqla, "
                   "tileops, flashinfer; of kimi_delta_attention fla, cudnn; of mamba2 mamba_ssm; of the package's other "
                   "pages fla; or all or none (default: all; those that are not installed are listed as absent)")
    p.add_argument("--gates", metavar="KIND,...", help="GPU: log decays: layer, as a layer draws them at initialisation; "
                   "uniform, -U(0, 1) per token and channel; mixed, 0 to -50 in a chunk; alike, -0.01 beside equal keys; or a "
                   "number, as --gates=-5. Several with --errors (default: layer)")
    for flag, text in (("--json", "the figures as JSON"), ("--trace", "a Chrome trace (pto)"),
                       ("--plot", "PNG: a timeline (pto), or time against length, roofline, where the time goes (GPU)")):
        p.add_argument(flag, metavar="FILE", help=f"write {text}")
    p.add_argument("--detail", action="store_true", help="pto: each stage's instructions; GPU: peers' kernels too")


def _tune_options(p: argparse.ArgumentParser) -> None:
    """The options of `tune`."""
    from .tools.shapes import SHAPES
    p.add_argument("--target", default="all", choices=(*tunable(), "all"), help="(default: all)")
    _inputs_options(p)
    p.add_argument("--shapes", metavar="FILE", help=f"shapes in JSON, as benchmarks/shapes/serving.json (default: {len(SHAPES)})")
    p.add_argument("--only", action="append", default=[], metavar="NAME", help="only this shape; may be given again")
    p.add_argument("--unit-keys", action="store_true", help="for callers that promise keys of norm 1")
    p.add_argument("--decode", action="store_true", help="decoding steps, of all targets, for one table")
    p.add_argument("--backward", action="store_true", help="gradients, of one target or of all, for one table")
    p.add_argument("--algorithm", metavar="NAME", help="with --backward: the page (default: gated_delta_rule)")
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
    sub.add_parser("list", help="algorithms with what they need, schedules, targets").add_argument(
        "--algorithm", metavar="NAME", help="only this page, or FILE.py:FUNCTION, with the schedules that serve it")
    sub.add_parser("doctor", help="which targets run here, what is missing for the rest, versions, and the cache")
    cache_command.options(sub.add_parser("cache", help="what the package keeps on disk"))
    return top
