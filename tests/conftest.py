import atexit
import gc
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from math import exp
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
from triton_interpreter import keep_types

from gdn_codegen.ir.core import NO_LINE, Batch, Loop, Program, walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.ops import OPS
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.cut.partition import BOUND

torch.set_num_threads(1)
# TVM, Triton and torch bring a million objects that stay. A tenth of the time went into looking at them again and again.
gc.set_threshold(100_000, 20, 50)
if find_spec("triton"):
    keep_types()
_seen: set[tuple[Program, Program]] = set()
_outputs: dict[tuple[Program, bool], dict[str, torch.Tensor]] = {}


def _small(p, parts):
    """Inputs of a program: two sequences, one of two chunks, both ending in a partial one; a head group of two value heads.
    With parts of a chunk, two chunks more in the first, and a head that forgets within one."""
    lengths = [p.sizes["C"] * (3 if parts else 1) + 3, p.sizes["C"] // 2 + 1]
    width = -(-lengths[0] // p.sizes["C"]) + 1
    pool = 2 * width + 1 if any(t.index == "numbers" for t in p.tensors) else 3
    problem = Problem(lengths, 1, 2, span=1, every=1 + parts, pool=pool, rest=3, width=width)
    gen, x = torch.Generator().manual_seed(0), {}
    for t in p.role("input"):
        if t.index in ("number", "numbers"):
            x[t.name] = _integers(p, t, width, pool, gen)
            continue
        heads = 1 if t.heads == "H" else 2
        lead = {"sequence": (pool if t.at else 2, heads), "head": (heads,)}.get(t.index, (problem.tokens, heads))
        dims = p.shape(t)[1 if t.index == "token" else 0:]
        x[t.name] = torch.randn(*lead, *dims, generator=gen, dtype=torch.float64) / 8
        if t.name.startswith("g"):
            x[t.name] = -x[t.name].abs()
            x[t.name][:, 0] *= 500 if parts else 1
    return problem, x


def _integers(p, t, width, pool, gen):
    """Integers of two sequences: slots, one for each chunk of them, how many to count, or the parents of chunks."""
    users = {x.index for x in p.tensors if x.at == t.name}
    if "numbers" in users:
        return torch.tensor([2, 1])
    if t.index == "number":
        return torch.randperm(pool, generator=gen)[:2]
    if users:
        return torch.randperm(pool, generator=gen)[:2 * width].view(2, width)
    return torch.tensor([[(7 * c + n) % (c + 1) - 1 for c in range(width)] for n in range(2)])


def computed(p):
    """`p` without what the interpreter does not read: waits, storage, agents, lines. Programs that are equal then compute the
    same, so one of them is interpreted (tests/ir/test_ir.py holds the interpreter to that)."""
    def of(body):
        return tuple(replace(s, carried=tuple(replace(c, slots=1) for c in s.carried), body=of(s.body)) if isinstance(s, Loop)
                     else replace(s, line=NO_LINE, agent="", buffer="")
                     for s in body if isinstance(s, Loop) or s.out or OPS[s.kind].effect != "sync")
    kernels = (replace(k, name="", body=of(k.body), buffers=(), agents=(), batch=k.batch if k.batch.in_body > 1 else Batch(),
                       slices=1, threads=0, registers=0, blocks_per_sm=0) for k in p.kernels)
    return replace(p, name="", stage="traced", kernels=tuple(kernels), source=(), launch="kernels", forgets="", scales=())


def _run(p, parts):
    key = computed(p), parts
    if key not in _outputs:
        problem, x = _small(p, parts)
        _outputs[key] = interpret(p, problem, x, dict.fromkeys(p.scalars, 0.5))
    return _outputs[key]


def _interface(p):
    """What callers pass and get."""
    return {(t.name, t.index, t.heads, t.dims, t.at, t.over) for t in p.tensors if t.role != "workspace"}


def check_pass(name, before, after, context):
    """After every pass, which verified it: print and parse back, interpret before and after. `accept` is to change what inputs
    mean."""
    if before == after or (before, after) in _seen:
        return
    _seen.add((before, after))
    changed = replace(after, kernels=tuple(k for k in after.kernels if k not in before.kernels))
    assert parse_program(program_text(changed)) == changed, f"{name}: the program does not survive print and parse"
    if name == "caller_inputs" or _interface(before) != _interface(after):
        return
    parts = context.schedule.partition is not None
    near = 1e-7 if any(o.kind == "softplus" for k in before.kernels for o in walk(k.body)) else 1e-9
    if name == "partition" and context.schedule.partition == "decay":  # the fraction of a state that a warm-up may leave out
        near = max(near, exp(-BOUND[context.dtype]))
    want, got = _run(before, parts), _run(after, parts)
    for n in want:
        there = ~want[n].isnan()  # a pool has tiles that are no sequence's, checkpoints have rows that are none's
        assert torch.equal(there, ~got[n].isnan()), f"{name} changed what is stored to {n}"
        scale = want[n][there].pow(2).mean().sqrt()
        assert not there.any() or (got[n] - want[n])[there].pow(2).mean().sqrt() <= near * scale, f"{name} changed {n}"


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
