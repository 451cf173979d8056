"""Emitters print: what they are given as data changes the text, and they look neither at devices nor at other ops."""
import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gdn_codegen.emit.base import EmitError
from gdn_codegen.ir.core import map_ops
from gdn_codegen.ir.ops import BESIDE, ORDER
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied
from gdn_codegen.targets import find

EMIT = Path(__file__).parents[2] / "gdn_codegen" / "emit"
FILES = sorted(EMIT.rglob("*.py"))
NAMES = lambda p: str(p.relative_to(EMIT))
#: Functions that go through a kernel's ops: what a kernel is passed, where its values lie, which agents it has.
SEARCHES = {
    "base.py": {"numbers", "written", "in_pairs", "by_token", "described", "in_buffers"},
    "parameters.py": {"touched", "integers"},
    "pto/__init__.py": {"_launched"},
    "pto/values.py": {"__init__", "counted", "moves_all_heads", "agents"},
}


def imported(text):
    """The modules that a file imports, relative names without their dots."""
    return {n.module or "" for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)} \
        | {x.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for x in n.names}


def searches(text):
    """The functions that call walk or loops, by name."""
    return {f.name for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef)
            and any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ("walk", "loops")
                    for n in ast.walk(f))}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_emitter_imports_no_device_pass_or_schedule(path):
    assert not {m for m in imported(path.read_text()) for folder in ("devices", "passes", "schedule", "targets")
                if folder in m.split(".")}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_rule_reads_no_op_but_its_own(path):
    assert searches(path.read_text()) <= SEARCHES.get(NAMES(path), set())


def lengths(text):
    """The lines of a file, and of its longest function."""
    functions = [n.end_lineno - n.lineno + 1 for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    return len(text.splitlines()), max(functions, default=0)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_and_functions_are_short(path):
    lines, longest = lengths(path.read_text())
    assert lines < 300 and longest < 60


def test_the_checks_see_what_they_forbid():
    assert imported("from ...devices import Cores\nimport gdn_codegen.passes.common") == {"devices", "gdn_codegen.passes.common"}
    assert searches("def rule(w, o):\n    return [x for x in walk(w.k.body) if x.kind == o.kind]") == {"rule"}
    assert lengths("x = 1\ndef f():\n    return x") == (3, 2)


def changed(b, kernel):
    """The texts of a build before and after a change of its kernels."""
    p = lowered(b)
    return (b.of.emit(q, b.layout, b.heads) for q in (p, p.map_kernels(kernel)))


def all_buffers(**fields):
    """A change of all buffers of a kernel."""
    return lambda k: replace(k, buffers=tuple(replace(x, **fields) for x in k.buffers))


@pytest.mark.parametrize("threads", [64, 512])
def test_threads_are_printed_as_they_come(threads):
    before, after = changed(Build("tilelang", schedule="staged"), lambda k: replace(k, threads=threads))
    assert {re.search(r"threads=(\d+)", t.body)[1] for t in after} == {str(threads)}
    assert {re.search(r"threads=(\d+)", t.body)[1] for t in before} == {"128", "256"}
    assert {t.extra["warps"] for t in list(changed(Build("triton"), lambda k: replace(k, threads=threads)))[1]} == {threads // 32}


def test_blocks_of_a_multiprocessor_are_printed_as_they_come():
    found = [[re.findall(r"blocks_at_least\((\d+)\)", t.body) for t in texts]
             for texts in changed(Build("tilelang", schedule="replay"), lambda k: replace(k, blocks_per_sm=3))]
    assert found == [[["8"], []], [["3"], ["3"]]]


def test_registers_of_warp_groups_are_printed_as_they_come():
    def more(k):
        return replace(k, registers=24, agents=tuple(replace(a, registers=a.registers + 8) for a in k.agents))
    before, after = ([re.findall(r"set_max_nreg\((\d+), (\d)\)", t.body) for t in texts if "set_max_nreg" in t.body]
                     for texts in changed(Build("tilelang", arch="sm_90a", schedule="walk"), more))
    assert before == [[("192", "1"), ("104", "0"), ("24", "0")]] and after == [[("200", "1"), ("112", "1"), ("32", "1")]]


def test_layouts_are_printed_as_they_come():
    free = all_buffers(layout="")
    before, after = (next(iter(texts)).body for texts in changed(Build("tilelang", schedule="replay"), free))
    assert before.count("t.staged((C, C)") == 1 and "t.staged((C, C)" not in after


def test_side_by_side_is_printed_as_it_comes():
    def apart(k):
        return replace(k, body=map_ops(k.body, lambda o: [o.with_attrs(**{BESIDE: None})]))
    before, after = ("".join(t.body for t in texts)
                     for texts in changed(Build("tilelang", schedule=varied("walk", value_heads=4)), apart))
    tiles = r"t\.whole_inverses\(\s*\(([^)]*)\)"
    assert [len(x.split(", ")) for x in re.findall(tiles, before)] == [4]
    assert [len(x.rstrip(",").split(", ")) for x in re.findall(tiles, after)] == [1] * 4


def test_copies_are_printed_as_they_come():
    def looped(k):
        return replace(k, body=map_ops(k.body, lambda o: [o.with_attrs(**{ORDER: None})]))
    before, after = ("".join(t.body for t in texts) for texts in changed(Build("tilelang", schedule="staged"), looped))
    assert "t.copy(A, A_f16)" in before and "A_f16[i, j] = A[i, j]" not in before
    assert "t.copy(A, A_f16)" not in after and "A_f16[i, j] = A[i, j]" in after


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_a_kernel_that_no_pass_gave_threads_is_refused(target):
    p = lowered(Build(target))
    bare = p.map_kernels(lambda k: replace(k, threads=0, registers=0, blocks_per_sm=0))
    with pytest.raises(EmitError, match=r"has no number of threads; pass (instance_warps|block_threads) should have given one"):
        find(target).emit(bare, "bthd", None)


def test_what_launch_passes_say_is_printed_parsed_and_verified():
    p = lowered(Build("tilelang", arch="sm_90a", schedule=varied("walk", "sm_90a", value_heads=4)))
    text = program_text(p)
    assert {"threads=", "registers=", "blocks_per_sm=", "layout='swizzled'", "beside=4", "order='sums'"} <= set(
        re.findall(r"threads=|registers=|blocks_per_sm=|layout='swizzled'|beside=4|order='sums'", text))
    assert parse_program(text) == p
    for broken, error in ((lambda k: replace(k, threads=32), "a multiple of 32 that is at least 448"),
                          (lambda k: replace(k, threads=33, agents=()), "a multiple of 32"),
                          (lambda k: replace(k, threads=0, agents=()), "but no `threads`"),
                          (all_buffers(layout="x"), "has the layout 'x'"), (all_buffers(dims=("K", "K", "K")), "and the dims"),
                          (all_buffers(pad=4), "only in a kernel that batches heads by threads")):
        with pytest.raises(VerifyError, match=error):
            verify(p.map_kernels(broken))


def test_ops_side_by_side_that_are_not_in_a_row_are_refused():
    p = lowered(Build("tilelang", schedule=varied("walk", value_heads=4)))
    (first, *rest) = p.kernels
    at = next(n for n, o in enumerate(first.body) if o.attr(BESIDE) == 4)
    body = (*first.body[:at], first.body[at].with_attrs(**{BESIDE: None}), *first.body[at + 1:])
    with pytest.raises(VerifyError, match="is one of 4 ops side by side, and 1 of them do not follow"):
        verify(replace(p, kernels=(replace(first, body=body), *rest)))
