"""TileLang with warp groups: text, what nvcc makes of it, and what a build refuses."""
import ast
import re
import shutil
from dataclasses import replace
from math import prod

import pytest
import torch
from choices import choice_for
from devices import passes_for
from reference import call, problem

from gdn_codegen.ir.core import loops
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import Schedule, named
from gdn_codegen.tools import check_tilelang

pytest.importorskip("tilelang")
BUILDS = {b.name: b for b in (
    Build("tilelang", schedule="walk", arch="sm_90a"),
    Build("tilelang", layout="bhtd", schedule="walk", dtype="bfloat16", arch="sm_90a"),
    Build("tilelang", schedule=replace(named("walk", "sm_90a"), name="walk64", v_block=64, stages=3), arch="sm_90a"),
    Build("tilelang", schedule=replace(named("walk", "sm_90a"), name="walkstate", partition="decay", warm_up="state"),
          arch="sm_90a"),
    Build("tilelang", schedule="fused_walk", arch="sm_90a"),
    Build("tilelang", schedule=Schedule("own", (("G", "Tinv"), ("o", "S")), form="split", state_layout="vk"), arch="sm_90a"),
    Build("tilelang", schedule=replace(named("fused_walk", "sm_90a"), name="fusedstate", partition="decay", warm_up="state",
                                       longest_first=True), dtype="bfloat16", arch="sm_90a"),
)}
#: What nvcc makes of these, it makes of others: the walk and warm-ups of a state in `walkstate`.
ALIKE = ("gdn_c64_bthd_sm90a", "gdn_c64_bhtd_bf16_sm90a", "gdn_c64_bthd_walk64_sm90a", "gdn_c64_bthd_bf16_fusedstate_decay_sm90a")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of a CUDA toolkit")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in ALIKE else n for n in BUILDS])
def test_compiles_with_few_spills_and_products_side_by_side(name, tmp_path):
    """Shared memory is the rings, none laid over another: agents use theirs at the same time."""
    b = BUILDS[name]
    (tmp_path / f"{name}.py").write_text(render(b))
    (found,) = check_tilelang.compiled(tmp_path / f"{name}.py", ["o_S"])
    assert not found.error and found.wgmma and found.tma
    assert found.spills <= 480 and not found.serialised
    *_, k = (k for k in lowered(b).kernels if k.agents)
    rings = [x for x in k.buffers if x.space == "shared"]
    assert found.shared >= sum(x.slots * prod(x.shape) * (4 if x.dtype == "float32" else 2) for x in rings)
    assert found.shared <= 227 * 1024


def test_a_kernel_that_may_end_early_ends_for_all_agents():
    """What decides that, and what is stored before it, comes before the branches of agents. Else agents would wait for ever."""
    text = render(next(b for b in BUILDS.values() if b.plan.partition))
    for name, before in (("S_offset", ["S_warm_up[part + 1, hv] = warm_up_next", "if warm_up_next < 0:"]),
                         ("S_factor", ["< 0:"])):
        kernel = text[text.index(f"def {name}_kernel("):]
        at = [kernel.index(x) for x in (*before, "tx = T.get_thread_binding()", "if tx < ")]
        assert at == sorted(at)


@pytest.mark.parametrize("name", BUILDS)
def test_text(name):
    b = BUILDS[name]
    text = render(b)
    assert text == render(b) and text.isascii()
    body = text[text.index("def o_S_kernel("):text.index("# --- host")]
    assert max(map(len, body.splitlines())) <= 120 and not re.search(r"[ \t]$", text, re.M) and "\n\n\n\n" not in text
    *_, k = (k for k in lowered(b).kernels if k.agents)
    ops_ = [o for s in loops(k.body) for o in s.body if s.index != "before" or o.agent not in k.one_loop]
    tails = sum(bool(o.attr("tail")) for o in ops_)
    assert body.count("T.barrier_wait(") == tails + sum(o.kind == "wait" for o in ops_)
    multiplies = {o.agent for o in ops_ if o.kind == "matmul"}  # a fence before their loops keeps TileLang's out of these
    fences = sum(1 + bool(o.attr("late")) for o in ops_ if o.kind == "fence")  # a late op is also printed after the loop
    assert body.count("T.fence_proxy_async(") == fences + len(multiplies)
    assert body.count("if rows >= C:") == tails + 1  # warm-ups have whole chunks, and store nothing
    assert len(re.findall(r"if tx < \d+:", body)) == len(k.agents)
    assert body.count("T.wait_wgmma(0)") == sum(o.kind == "drain" for o in ops_)
    assert body.count("T.wgmma_gemm(") == sum(bool(o.attr("asynchronous")) for o in ops_)


PARTED = {f"{name}{i}": Build("tilelang", schedule=replace(named(name, "sm_90a"), name=f"{name}{i}", **fields), arch="sm_90a")
          for name in ("walk", "fused_walk") for i, fields in enumerate((
              {"warm_up": "all"}, {"partition": "decay", "warm_up": "all"}, {"partition": "decay", "warm_up": "state"},
              {"partition": "decay", "warm_up": "state", "longest_first": True}))}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTED)
def test_a_copy_arrives_where_its_ring_is_waited_for(name):
    """A copy counts its bytes on the barrier that its threads arrive on next. A slot of another iteration count would hang, or
    end a wait too early. So all uses of a barrier in a loop have the same slot."""
    lines = [x.strip() for x in walk_text(PARTED[name])]
    copies = [(n, x) for n, x in enumerate(lines) if "T.tma_copy(" in x]
    assert len(copies) >= 5
    for n, x in copies:
        (barrier,) = re.findall(r"^T\.tma_copy\(.*, barrier=(\w+\[.*\])\)$", x)
        ring = barrier[:barrier.index("[") + 1]
        after = next(y for y in lines[n + 1:] if y.startswith(("for iteration in", "for chunk in", f"T.barrier_arrive({ring}")))
        assert after == f"T.barrier_arrive({barrier})"
    slots = {}
    for x in lines:
        for ring, slot in re.findall(r"(?:T\.barrier_\w+\(|barrier=)(\w+)\[([^]]*)\]", x):
            slots.setdefault(ring, set()).add(slot)
    assert all(len(x) == 1 for x in slots.values()), slots


def walk_text(b):
    """The lines of the kernel that walks, a statement on each."""
    text = render(b)
    return ast.unparse(ast.parse(text[text.index("def o_S_kernel("):text.index("# --- host")])).splitlines()


@pytest.mark.parametrize("name", ["fused_walk0", "fused_walk2"])
def test_the_copy_of_a_second_tail_begins_before_the_wait_for_the_first(name):
    lines = [x.strip() for x in walk_text(PARTED[name])]
    own = [x for x in lines if re.search(r"\b[kv]_tail\[0\]", x)]
    assert [re.sub(r"^T\.(\w+)\(.*\b([kv]_tail)\[.*", r"\1 \2", x) for x in own] == [
        "tma_copy k_tail", "barrier_arrive k_tail", "tma_copy v_tail", "barrier_arrive v_tail", "barrier_wait k_tail",
        "barrier_wait v_tail"]


@pytest.mark.parametrize("name, loop, first, last", [
    ("fused_walk0", "for chunk in T.serial(T.ceildiv(length, C)):", "if chunk > 0:", "if length > 0:"),
    ("fused_walk1", "for iteration in T.serial(stop - begin):", "if chunk > begin:", "if stop > begin:"),
    ("fused_walk2", "for iteration in T.serial(first - begin, stop - begin):", "if chunk > first:", "if stop > first:")])
def test_an_arrival_for_stores_comes_in_the_next_iteration(name, loop, first, last):
    """Each but the last, which comes after the loop."""
    lines = [x.strip() for x in walk_text(PARTED[name])]
    arrive = "T.barrier_arrive(o_f16_shared_ready[0])"
    n, m = (i for i, x in enumerate(lines) if x == arrive)
    assert [lines[n - 2], lines[m - 2]] == [first, last] and {lines[n - 1], lines[m - 1]} == {"T.fence_proxy_async()"}
    starts = [i for i, x in enumerate(lines[:n]) if x.startswith("T.wgmma_gemm(S_f16, k[")]
    assert loop in lines[:starts[-1]] and starts[-1] == n - 3


def test_a_product_that_was_begun_is_fenced_where_it_is_drained():
    """Registers of the fragment that a thread holds; between the start and the drain nothing names the fragment."""
    for name in ("fused_walk0", "fused_walk2"):
        lines = [x.strip() for x in walk_text(PARTED[name])]
        starts = [n for n, x in enumerate(lines) if x.startswith("T.wgmma_gemm(")]
        assert starts
        for n in starts:
            drain = lines.index("T.wait_wgmma(0)", n)
            (x,) = re.findall(r", (q_kT|k_S),", lines[n])
            assert not any(re.search(rf"\b{x}\b", y) or y.startswith("for turn") for y in lines[n + 1:drain])
            assert lines[drain + 1] == f"T.warpgroup_fence_operand({x}, num_regs={64 * 64 // 128})"


def test_tensors_of_the_cpu_are_refused():
    fn = function(BUILDS["gdn_c64_bthd_sm90a"])
    with pytest.raises(ValueError, match=r"q: got device cpu; accepted: a CUDA device \(this module was built for sm_90a\)"):
        call(fn, problem([5], 1, 1, 128, 128))


def test_an_architecture_of_another_target_is_refused():
    with pytest.raises(ValueError, match="arch: got 'sm_90a'; accepted: none for triton"):
        Build("triton", arch="sm_90a")
    with pytest.raises(ValueError, match="arch: got 'sm_80'; accepted: sm_90a for tilelang"):
        Build("tilelang", arch="sm_80")


@pytest.mark.parametrize("changes, schedule, name", [
    ({}, None, "gdn_c64_bthd_fused_walk_sm90a"), ({"chunk_size": 32}, None, "gdn_c32_bthd"),
    ({"dtype": torch.float32}, None, "gdn_c64_bthd_f32"),
    ({"K": 64}, None, "gdn_c64_bthd_k64v128_fused_walk_sm90a"), ({"K": 32}, None, "gdn_c64_bthd_k32v128"),
    ({}, "fused", "gdn_c64_bthd"),
    ({}, "walk", "gdn_c64_bthd_walk"), ({"target": "triton"}, None, "gdn_c64_bthd")])
def test_ops_pick_the_architecture_of_the_gpu_where_it_fits(monkeypatch, changes, schedule, name):
    passes_for(monkeypatch, Facts("cuda", (), "sm_90a"))
    q = torch.empty(1, 3, 2, changes.get("K", 128), dtype=changes.get("dtype", torch.float16))
    found = choice_for(q, q.new_empty(1, 3, 4, 128), changes.get("target", "tilelang"), changes.get("chunk_size", 64), schedule)
    assert found.build.name == name


@pytest.mark.slow
def test_few_walks_are_split_into_parts(monkeypatch):
    """Where walks fill the GPU at most once, or more if the pack may have a long one. Parts have one value head."""
    passes_for(monkeypatch, Facts("cuda", (), "sm_90a", 16))
    q, v = torch.empty(2, 6400, 2, 128, dtype=torch.float16), torch.empty(2, 6400, 4, 128, dtype=torch.float16)
    names = [choice_for(q, v, "tilelang", 64, sequences=n).build.name for n in (None, 2, 4, 6)]
    one = "gdn_c64_bthd_decay_sm90a"
    assert names == [one, one, one, "gdn_c64_bthd_fused_walk_bylength1_sm90a"]


def test_a_kernel_whose_products_wait_for_each_other_is_warned_of():
    slow = check_tilelang.Compiled("o_S", "sm_90a", registers=128, wgmma=True, serialised=True)
    assert str(slow).endswith("warning: each wgmma waits for the one before")
    assert "warning" not in str(replace(slow, serialised=False))
