"""The options of the command line: what their words mean, their defaults, and which options are refused beside others.

`cli_parser.py` has the parser.
"""
from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from . import algorithms, derived_pages
from .runtime.build import LAYOUTS, Build
from .runtime.targets import serving
from .schedule import SCHEDULES, Schedule, named
from .schedule.contract import Contract
from .targets import DEFAULT_SCHEDULE, find, names

if TYPE_CHECKING:
    from .runtime.call.choose import Choice

#: The derived pages of the two modules that a backward calls.
BACKWARD = ("states", "gradient")
#: The reason of a choice that the command line made.
ASKED = "asked for"
#: Tokens of a chunk if the command line names a schedule and no chunk.
CHUNK = 64
#: The least value of each numeric option.
LEAST = {**dict.fromkeys(("tokens", "sequences", "tensor_parallel", "value_heads", "blocks", "runs", "jobs"), 1), "budget": 0,
         "memory": 0}
#: Defaults of `bench`. The parser gives None for an absent option, so that an option that would have no effect can be refused.
BENCH: dict[str, Any] = {"heads": "16", "tokens": 2048, "blocks": 24, "seed": 0, "runs": 15, "gates": "layer"}
#: The ways of `bench`, and the options that only some ways have.
WAYS = {"pto": "with --target pto", "gpu": "with times on a GPU", "errors": "with --errors"}
MEANT = {"blocks": ("pto",), "trace": ("pto",), "runs": ("gpu",), "backward": ("gpu", "errors"), "interpret": ("errors",),
         "plot": ("pto", "gpu"), "detail": ("pto", "gpu"),
         **dict.fromkeys(("jobs", "seed", "gates", "peers", "shapes", "only"), ("gpu", "errors"))}
#: Defaults of `tune`: --budget in seconds, --memory in GiB, and --runs of each measurement.
TUNE = {"budget": None, "memory": 8.0, "runs": 15}


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
    base = derived_pages.without_kind(a.algorithm)
    algorithms.find(base)  # a name that is none is said before torch is imported
    if getattr(a, "backward", False):
        if base != a.algorithm:
            raise ValueError(f"backward: got --backward with --algorithm {a.algorithm}; accepted: --algorithm {base}")
        return [c for kind in BACKWARD for c in choices(argparse.Namespace(
            **{**vars(a), "backward": False, "algorithm": f"{base}.{kind}"}))]
    asked = gpus(a)
    arch = "" if asked else a.arch
    targets = names() if a.target == "all" else (a.target,)
    default = next((find(t).archs[arch].schedule for t in targets if arch in find(t).archs), DEFAULT_SCHEDULE)
    plan = schedule(a.schedule or default, arch)
    from .runtime.call.choose import Choice
    from .runtime.call.device import SHARED_KIB
    from .runtime.defaults import planned, words
    fields = {**({"launch": a.launch} if a.launch != "kernels" else {}),
              **({"partition": a.partition} if a.partition else {}), **_fields(a.set)}
    counts = heads(a.heads) if getattr(a, "heads", None) is not None else None
    contract = Contract.parse(a.accept)
    for n, form in contract.inputs if base in algorithms.names() else ():
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
            found = planned(replace(b, arch=""), on, bool(a.partition), a.chunk, fields, SHARED_KIB.get(compiled or "", 0))
            if arch != found.build.arch:
                raise ValueError(f"arch: got {arch!r}, for which nothing fits ({found.why[0][1]}); accepted: no --arch; the op "
                                 f"then takes {words(found.build)}")
            out.append(found)
    return out


def of_gradients(a: argparse.Namespace) -> tuple[list[Build], dict[str, str]]:
    """The builds of gradients for `verify`. Of --target all those that there are, and by target why there is none."""
    found, left = [], {}
    for target in names() if a.target == "all" else (a.target,):
        try:
            found += builds(argparse.Namespace(**{**vars(a), "target": target}))
        except ValueError as e:
            if a.target != "all":
                raise
            left[target] = str(e)
    return [b for b in found if b.page.trace().walk.step < 0], left


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
        if name == "kernels" and all(re.fullmatch(r"[^\W\d]\w*|@\w+\*?", n) for g in groups for n in g):
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
    way = "errors" if a.errors is not None else "pto" if a.target == "pto" else "gpu"
    if way == "gpu" and a.target not in (accepted := [*serving("cuda"), "pto", "all"]):
        raise ValueError(f"target: got {a.target!r}, which has no kernels for a GPU; accepted: {', '.join(accepted)}")
    for name, ways in MEANT.items():
        if way not in ways:
            refuse(a, [name], WAYS[way], " or ".join(WAYS[w] for w in ways))
    if a.backward:
        refuse(a, ("plot", "interpret"), "with --backward", "without --backward")
        if a.schedule not in (None, "auto"):
            raise ValueError(f"schedule: got {a.schedule!r} with --backward; accepted: auto, because the op chooses both builds")
        a.schedule = "auto"
    elif a.layer:
        raise ValueError("layer_inputs: got it without --backward; accepted: with --backward")
    if a.shapes is not None:
        refuse(a, ("heads", "value_heads", "tokens"), "with --shapes", "without --shapes, for a single shape")
    for name, value in BENCH.items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    if way != "pto":
        from .tools.problems import check_gates
        if a.interpret:
            refuse(a, ["jobs"], "with --interpret", "without --interpret, which compiles nothing")
        if len(check_gates(a.gates)) > 1 and (a.backward or way != "errors"):
            raise ValueError(f"gates: got {a.gates!r}; accepted: one kind of gates, or several with --errors and no --backward")
    return way


def check_verify(a: argparse.Namespace) -> None:
    """ValueError for options of `verify` that do not go together."""
    if a.report is not None and a.reference is not None:
        raise ValueError("reference: got --reference with --report; accepted: one, as a report compares with the page")
    if a.report is not None and a.backward:
        raise ValueError("report: got --report with --backward; accepted: one, as a report is about outputs")
    if (base := derived_pages.without_kind(a.algorithm)) != a.algorithm:
        raise ValueError(f"algorithm: got {a.algorithm!r}; accepted: --algorithm {base}, with --backward for its gradients")


def check_tune(a: argparse.Namespace) -> None:
    """Sets absent options of `tune` to their defaults. ValueError for options that have no effect."""
    if not a.backward:
        refuse(a, ("algorithm",), "without --backward", "with --backward, as other tables are for Gated DeltaNet")
    elif a.decode or a.unit_keys:
        raise ValueError(f"{'decode' if a.decode else 'unit_keys'}: got it with --backward; accepted: one of them")
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


#: Options of `build --model`, which only it has, and those which it has too.
OF_MODELS = ("engine", "tensor_parallel", "device", "tokens", "sequences", "speculative", "prefix_caching", "state_dtype",
             "jobs")
WITH_MODELS = ("command", "words", "model", *OF_MODELS, "target", "accept", "compile", "cached", "out")


def check_model(a: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """ValueError for an option of `build` that has no effect beside --model, or needs it. defaults: of all options."""
    if a.model is None:
        refuse(a, OF_MODELS, "without --model", "with --model")
        return
    for name, default in defaults.items():
        if name not in WITH_MODELS and getattr(a, name) != default:
            raise ValueError(f"{name}: got {getattr(a, name)!r} with --model; accepted: no --{name.replace('_', '-')}, because "
                             "the op chooses for the model")


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
