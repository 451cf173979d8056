import atexit
import gc
import os
import shutil
import sys
import tempfile
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from keyword import iskeyword
from math import exp, isfinite
from pathlib import Path

# Outputs and workspaces of generated modules start as NaN, and nothing is shared with a user's cache.
os.environ["GDN_CODEGEN_POISON"] = "1"
os.environ.setdefault("GDN_CODEGEN_CACHE", str(Path(tempfile.gettempdir()) / f"gdn_codegen_tests_{os.getuid()}"))
os.environ.setdefault("TILELANG_CACHE_DIR", str(Path(os.environ["GDN_CODEGEN_CACHE"]) / "tilelang"))
# TileLang's C backend leaves its sources in the temporary folder.
_scratch = tempfile.mkdtemp(prefix="gdn_codegen_scratch_")
os.environ["TMPDIR"] = tempfile.tempdir = _scratch
atexit.register(shutil.rmtree, _scratch, ignore_errors=True)
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from compiler import with_header
from triton_interpreter import keep_types

from gdn_codegen import algorithms
from gdn_codegen.ir.core import Batch, Loop, Op, Program, loops
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.ops import OPS
from gdn_codegen.ir.padding import chunk_tokens
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.cut.partition import BOUND
from gdn_codegen.tools.peer_ops import peers_of

if cxx := with_header(Path(os.environ["GDN_CODEGEN_CACHE"])):
    os.environ["CXX"] = str(cxx)
torch.set_num_threads(1)
# TVM, Triton and torch bring a million objects that stay. A tenth of the time went into looking at them again and again.
gc.set_threshold(100_000, 20, 50)
if find_spec("triton"):
    keep_types()
#: Entries of a state from which on programs are not interpreted after each pass, and the names of last passes.
WIDE, LAST = 64 * 64, {x[-1][0] for x in (pipelines.ONE_AGENT, pipelines.INSTANCES, pipelines.GROUPS, pipelines.CORES)}
_same: set[tuple[Program, Program]] = set()
_printed: set[Program] = set()
_forms: dict[object, int] = {}
_parsed: set[int] = set()
_outputs: dict[object, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
_last: list[object] = []  # a program, whether it has parts, and its outputs
_since: list[object] = []  # a program, how near its results must be to those after the passes since, and what these gave


#: Numbers of raw gates with which a token forgets next to nothing.
SLOWEST = {"A_log": -50.0, "lower_bound": 0.0}


def _small(p, parts):
    """Inputs of a program: two sequences, one of two chunks, both ending in a partial one; a head group of two value heads.
    With parts of a chunk, two chunks more in the first, and a head that forgets within one."""
    C = p.sizes["C"]
    lengths = [C * (3 if parts else 1) + 3, C // 2 + 1]
    by_chunk = any(t.index == "numbers" or (t.index == "checkpoint" and t.at) for t in p.tensors)
    width = -(-lengths[0] // chunk_tokens(p)) + 1 if by_chunk else 0
    problem = Problem(lengths, 1, 2, span=1, every=1 + parts, pool=2 * width + 3, rest=3, width=width)
    inputs = tuple((t, _integers(p, t), ()) if t.index in ("number", "numbers") else (t, p.shape(t), t.tile.shape(p.memory))
                   for t in p.role("input"))
    gives_sums = any(t.index == "slot" and t.wide and len(t.dims) > 1 for t in p.role("output"))
    return problem, _drawn(problem.tokens, problem.slots(C), (10 if gives_sums else 500) if parts else 1, width, inputs)


@cache
def _drawn(tokens, slots, strong, width, inputs):
    """The inputs, tensors with the shapes of their tiles, and these without padding, which is zero in tiles of chunks unless they
    stay in float32; of integers, what they say. The interpreter copies them. strong: a factor of the log decays of one head.
    Where sums of them are a result, it is so small that no pass may clamp these.

    Where a program reads stored running sums of log decays, these are drawn apart from the log decays. No bound but 0 is true of
    them."""
    apart = any(t.index == "slot" and t.wide and len(t.dims) > 1 for t, *_ in inputs)
    gen, x, pool = torch.Generator().manual_seed(0), {}, 2 * width + 3
    draws = {"count": lambda: torch.tensor([2, 1]), "slot": lambda: torch.randperm(pool, generator=gen)[:2],
             "slots": lambda: torch.randperm(pool, generator=gen)[:2 * width].view(2, width),
             "parents": lambda: torch.tensor([[(7 * c + n) % (c + 1) - 1 for c in range(width)] for n in range(2)])}
    for t, shape, kept in inputs:
        if t.index in ("number", "numbers"):
            x[t.name] = draws[shape]()
            continue
        heads = 1 if t.heads == "H" else 2
        lead = {"sequence": (pool if t.at else 2, heads), "head": (heads,), "slot": (slots, heads)}.get(t.index, (tokens, heads))
        x[t.name] = torch.randn(*lead, *shape[t.index == "token":], generator=gen, dtype=torch.float64) / 8
        if t.name.startswith("g") or t.name == "A":  # log decays, and rates of them
            x[t.name] = -x[t.name].abs() * (not apart)
            x[t.name][0 if t.index == "head" else (slice(None), 0)] *= strong
        if apart and t.name in SLOWEST:
            x[t.name] = torch.full_like(x[t.name], SLOWEST[t.name])
        if t.index == "slot" and not t.wide:
            inside = torch.zeros_like(x[t.name])
            inside[(..., *(slice(n) for n in kept))] = 1
            x[t.name] *= inside
        if t.name == "dt" or (t.index == "slot" and t.dims == ("C",)):  # one may bound how much tokens forget
            x[t.name] = x[t.name].abs()
    return x


def _integers(p, t):
    """What the integers of a tensor say."""
    users = {x.index for x in p.tensors if x.at == t.name}
    if t.index == "number":
        return "count" if "numbers" in users else "slot"
    return "slots" if users else "parents"


def computed(p):
    """What the interpreter reads of `p`: all but waits, storage, agents, lines. Programs of which this is equal compute the
    same, so one of them is interpreted (tests/ir/test_ir.py holds the interpreter to that)."""
    def of(body):
        return tuple((s.index, s.warm_up, s.step, *((c.name, c.init, c.next, c.result, c.type) for c in s.carried), of(s.body))
                     if isinstance(s, Loop) else (s.kind, s.out, s.args, s.attrs, s.type)
                     for s in body if isinstance(s, Loop) or s.out or OPS[s.kind].effect != "sync")
    kernels = tuple((k.grid, k.dims, k.blocked_dim, k.batch if k.batch.in_body > 1 else Batch(), of(k.body)) for k in p.kernels)
    return kernels, p.tensors, p.scalars, p.dims, p.extents, p.tokens


def _run(p, parts):
    """By output: where something is stored, and this, with zeros elsewhere. A pool has tiles that are no sequence's, checkpoints
    have rows that are none's."""
    if not _last or _last[0] is not p or _last[1] != parts:  # what one pass gave is what the next one takes
        key = computed(p), parts
        if key not in _outputs:
            problem, x = _small(p, parts)
            got = interpret(p, problem, x, dict.fromkeys(p.scalars, 0.5))
            _outputs[key] = {n: (y.isnan().logical_not_(), y.nan_to_num(0.0, torch.inf, -torch.inf)) for n, y in got.items()}
        _last[:] = p, parts, _outputs[key]
    return _last[2]


def form(x):
    """What print and parse tell apart in a value: of a number its sign, of a text whether it can be a name."""
    if is_dataclass(x):
        return _form_of_line(x)
    if isinstance(x, tuple):
        return tuple(map(form, x))
    if isinstance(x, int | float):
        return type(x), x > 0, x < 0, isfinite(x)
    return type(x), bool(x), isinstance(x, str) and x.isidentifier() and not iskeyword(x)


@cache
def _form_of_line(x):
    """And of an op which it is and which attributes it has, of a field whether it has its default, which is not printed. As a
    number, one for each form."""
    if isinstance(x, Op):
        found = x.kind, *((n, form(v)) for n, v in x.attrs), *map(form, (x.out, x.args, x.type, x.line, x.agent, x.buffer))
    else:
        values = [(f, getattr(x, f.name)) for f in fields(x)]
        found = type(x), *((form(v), v == f.default) for f, v in values)
    return _number(found)


def _number(found):
    return _forms.setdefault(found, len(_forms))


def _survives(p, before, where):
    """Print and parse give `p` again. Kernels and ops that are those of `before`, if that was seen, are passed over. Print and
    parse go line by line, so a program of lines in forms that did survive is passed over, too: `verify` looks at what is between
    lines, which is names and their types."""
    seen = before.kernels if before else ()
    p, old = replace(p, kernels=tuple(k for k in p.kernels if k not in seen)), {id(o) for k in seen for o in k.ops}
    new = {*map(_form_of_line, (replace(p, tensors=(), kernels=()), *p.tensors))}
    for k in p.kernels:
        new.update(map(_form_of_line, (replace(k, body=(), buffers=(), agents=(), comments=()), *k.buffers, *k.agents)))
        new.update(map(_form_of_line, (replace(lp, body=()) for lp in loops(k.body))))
        new.update(_form_of_line(o) for o in k.ops if id(o) not in old)
        new.update(_number(form(c)) for c in k.comments)
    if not new <= _parsed:
        assert parse_program(program_text(p)) == p, f"{where}: the program does not survive print and parse"
        _parsed.update(new)


def _interface(p):
    """What callers pass and get."""
    return {(t.name, t.index, t.heads, t.dims, t.at, t.over) for t in p.tensors if t.role != "workspace"}


def _compare(where, before, after, parts, near):
    """Both programs store the same, to a relative error of `near`."""
    if before == after or (before, after) in _same:
        return
    want, got = _run(before, parts), _run(after, parts)
    for n, (there, values) in want.items() if want is not got else ():
        assert torch.equal(there, got[n][0]), f"{where} changed what is stored to {n}"
        assert (got[n][1] - values).norm() <= near * values.norm(), f"{where} changed {n}"
    _same.add((before, after))


def _near(name, p, context):
    """The relative error that a pass may make."""
    if name == "partition" and context.schedule.partition == "decay":
        # A warm-up may leave out this fraction of a state. The derivative of a norm may magnify the error.
        factor = 2 if any(o.kind == "rsqrt" for k in p.kernels for o in k.ops) else 1
        return max(1e-9, factor * exp(-BOUND[context.dtype]))
    return 1e-7 if any(o.kind == "softplus" for k in p.kernels for o in k.ops) else 1e-9


def check_pass(name, before, after, context):
    """After every pass, which verified it: print and parse back, interpret before and after. `caller_inputs` is to change what
    inputs mean. Programs of wide states, which take long, are interpreted before the first pass and after the last, and where
    passes change what callers pass."""
    follows = bool(_since) and _since[2] is before
    first, near = _since[:2] if follows else (before, 0.0)
    parts, changes = context.schedule.partition is not None, False
    if before != after:
        if after not in _printed:
            _survives(after, before if follows else None, name)
            _printed.add(after)
        changes = name == "caller_inputs" or _interface(before) != _interface(after)
        near = max(near, 0.0 if changes else _near(name, before, context))
    if changes or name in LAST or before.sizes.get("K", 1) * before.sizes.get("V", 1) <= WIDE:
        passes = name if first is before else f"what ran up to {name}"
        _compare(passes, first, before if changes else after, parts, near)
        first, near = after, 0.0
    _since[:] = first, near, after


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A long test is slow, too, so that `-m "not slow"` is the fast tier."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _every_pass_is_checked():
    pipelines.observers.append(check_pass)
    yield
    pipelines.observers.remove(check_pass)


@pytest.fixture(autouse=True)
def _compiles_are_forgotten():
    """torch compiles one function for eight signatures at most, which one test shall not take from another."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def unchecked(_every_pass_is_checked):
    """Without interpreting programs after every pass: for what raises, and for what is not about their meaning."""
    kept, pipelines.observers[:] = list(pipelines.observers), []
    yield
    pipelines.observers[:] = kept


@pytest.fixture
def no_peers(monkeypatch):
    """No library that `bench` compares with can be imported, whether it is installed or not."""
    for page in algorithms.names():
        for peer in peers_of(algorithms.find(page)).values():
            for name in (peer.module.partition(".")[0], peer.module):  # a test before may have imported it
                monkeypatch.setitem(sys.modules, name, None)
