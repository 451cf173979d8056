"""PTO: generated modules in the simulator against the token recurrence."""
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from reference import ON_CORES, TOLERANCE, call, check, expected, module, problem, rms_error, variant
from tiers import every

from gdn_codegen import pto_sim
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.prove.happens_before import RaceError, channels, without, without_barrier
from gdn_codegen.prove.happens_before import check_waits as check_waits
from gdn_codegen.runtime import build as build_module
from gdn_codegen.runtime import load
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import SCHEDULES
from gdn_codegen.schedule.contract import Contract

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ 12 or newer")
LADDER = [1, 17, 31, 32, 33, 63, 64, 65, 129]


def build(schedule="fused", **options):
    plan = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    return Build("pto", schedule=plan, **({"chunk": 32, "head_dim_k": 32, "head_dim_v": 32} | options))


def function(schedule="fused", **options):
    return load.function(build(schedule, **options))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, layout, dtype", every(2, ON_CORES, [
    ("bthd", "float16"), ("bhtd", "bfloat16"), ("bthd", "float32")]))
def test_schedules(schedule, dtype, layout):
    fn = function(schedule, dtype=dtype, layout=layout)
    x = problem([33, 0, 65], 1, 2, 32, 32, getattr(torch, dtype), gate=-0.2)
    check(fn, x, TOLERANCE[dtype], layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["staged", "fused"])
def test_lengths(schedule):
    """Each alone and all together, with gates that forget nothing and all; heads in groups; with and without a state."""
    fn = function(schedule, chunk=64, head_dim_k=64, head_dim_v=64)
    for n in LADDER:
        check(fn, problem([n], 1, 1, 64, 64, gate="mixed", seed=n))
    check(fn, problem([0, *LADDER, 0], 1, 3, 64, 64, gate="mixed"))
    check(fn, problem([70, 70], 2, 4, 64, 64, initial=False), batched=True)
    check(fn, problem([0, 0], 1, 2, 64, 64))
    for gate in (0.0, -50.0):
        check(fn, problem([130, 20], 1, 1, 64, 64, gate=gate, beta=1.0))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["staged", "fused"])
def test_a_walk_in_pieces_has_the_same_bits(schedule):
    """Columns of a state depend on no other columns."""
    x = problem([40, 0, 33], 1, 3, 32, 32, gate=-0.2)
    whole, pieces = (call(function(variant(schedule, walk_piece=n)), x) for n in (0, 16))
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, k, v, contract", [("staged", 36, 64, ""), ("fused", 72, 32, "state=in_place"),
                                                      ("prepared_vk", 72, 64, "state=vk/bfloat16")])
def test_a_walk_in_pieces_whose_other_size_is_no_tile(schedule, k, v, contract):
    """Of rows that exist in memory, a piece of the columns is loaded and stored."""
    fn = function(variant(schedule, walk_piece=16), head_dim_k=k, head_dim_v=v, contract=Contract.parse(contract))
    x, vk = problem([40, 0, 33], 1, 2, k, v, gate=-0.2), "vk" in contract
    want = expected(x)
    o, S = call(fn, {**x, "S": x["S"].transpose(-1, -2).contiguous().to(torch.bfloat16) if vk else x["S"]})
    assert rms_error(o, want[0]) < 5e-3 and rms_error(S.transpose(-1, -2) if vk else S, want[1]) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("chunk, k, v", [(16, 16, 16), (64, 128, 64), (128, 64, 128), (128, 128, 128)])
def test_sizes(chunk, k, v):
    fn = function(chunk=chunk, head_dim_k=k, head_dim_v=v)
    check(fn, problem([chunk + 1, chunk // 2], 1, 2, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("form, inverse, schedule", [
    ("gate-free", "doubling", "fused"), ("wy", "doubling", "fused"), ("gate-free", "substitution", "prepared"),
    ("direct", "doubling", "staged"), ("unit", "doubling", "fused"), ("unit", "substitution", "prepared")])
def test_forms_and_inverses(form, inverse, schedule):
    fn = function(variant(schedule, form=form, inverse=inverse))
    check(fn, problem([40, 0, 33], 1, 2, 32, 32, gate=-0.2))


CHANGES = ({"inverse_block": 32}, {"value_heads": 1, "inverse_block": 0}, {"order": "page"},
           {"value_heads": 1, "order": "page", "cache_masks": False}, {"channel_slots": 2}, {"l0_slots": 1},
           {"walk_piece": 16})


@pytest.mark.slow
@pytest.mark.parametrize("schedule, dtype, changes", [  # each pair meets
    (schedule, ("float16", "float32")[(i + n) % 2], changes)
    for n, schedule in enumerate(("staged", "replay")) for i, changes in enumerate(CHANGES)])
def test_what_is_for_cores_only(schedule, dtype, changes):
    """Side by side, on the chip, in which order, in blocks: the same results; an odd head repeats itself."""
    fn = function(variant(schedule, **changes), dtype=dtype)
    check(fn, problem([40, 0, 33], 1, 3, 32, 32, getattr(torch, dtype), gate=-0.2), TOLERANCE[dtype])


@pytest.mark.slow
def test_columns_in_blocks():
    fn = function(variant("fused", v_block=16))
    check(fn, problem([40, 0, 33], 1, 2, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["staged", "fused"])
def test_another_algorithm(schedule):
    fn = function(schedule, algorithm="simple_gla")
    check(fn, problem([40, 0, 65], 1, 2, 32, 32), delta=False)


@pytest.mark.slow
def test_equal_keys_invert_well():
    fn = function(chunk=64, head_dim_k=64, head_dim_v=64)
    check(fn, problem([128], 1, 1, 64, 64, gate=0.0, beta=1.0, same_keys=True))


PAGE = """
from math import inf
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, log, lower, row_norm, sigmoid, valid


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def page(q, k, v, g, S, *, scale="K ** -0.5"):
    G = cumsum(valid(log(sigmoid(g)) * 0.5 - 0.25))
    kn = valid(row_norm(k) * 1.0)
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))
    o = scale * (exp(G)[:, None] * (q @ S) + ((q @ kn.T) * D) @ v) / (1.0 + exp(-g))[:, None]
    S = exp(last(G)) * S + kn.T @ (exp(last(G) - G)[:, None] * v)
    return o, S
"""


@pytest.mark.slow
def test_a_page_with_other_ops(tmp_path):
    """Sums along rows, values that are not zero on padding, divisions by a column."""
    (tmp_path / "page.py").write_text(PAGE)
    b = build("fused", algorithm=f"{tmp_path}/page.py:page")
    x = problem([33, 0, 5], 1, 2, 32, 32, gate=-0.3)
    p = b.page.trace()
    want = interpret(replace(p, dims=tuple(b.sizes.items())), Problem(x["lengths"], 1, 2),
                     {**{n: x[n] for n in "qkvg"}, "initial_state": x["S"]}, {"scale": 32 ** -0.5})
    fn = getattr(module(render(b)), b.function)
    o, S = fn(*(x[n][None] for n in "qkvg"), initial_state=x["S"], output_final_state=True,
              cu_seqlens=torch.tensor([0, 33, 33, 38]))
    assert rms_error(o[0], want["o"]) < 2e-3 and rms_error(S, want["final_state"]) < 2e-3


# --- the simulator sees what the checker sees ------------------------------------------------------------------------
@pytest.mark.slow
def test_a_wait_taken_out_stops_the_simulator(monkeypatch):
    b = build("fused")
    p = lowered(b)
    (k,) = p.kernels
    waits = {o.attr("channel"): o for o in walk(k.body) if o.kind == "wait"}
    crossing = [n for n in channels(k) if "." in waits[n].attr("src")]
    inside = [n for n in channels(k) if n not in crossing]
    for n in [crossing[0], crossing[-1], inside[len(inside) // 2]]:
        broken = replace(p, kernels=(without(k, n),))
        with pytest.raises(RaceError):
            check_waits(broken, ASCEND_A2)
        monkeypatch.setattr(build_module, "lowered", lambda b, broken=broken: broken)
        fn = getattr(module(render(b)), b.function)
        with pytest.raises(pto_sim.PtoSimError):
            call(fn, problem([100, 100], 1, 2, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_interleavings(monkeypatch, seed):
    monkeypatch.setenv("PTO_SIM_SHUFFLE", str(seed))
    check(function("prepared"), problem([33, 0, 65], 1, 2, 32, 32, gate=-0.2))


# --- text ------------------------------------------------------------------------------------------------------------
def test_source_says_which_line_of_the_algorithm_it_is():
    text = render(build("fused", chunk=64, head_dim_k=64, head_dim_v=64))
    p = lowered(build("fused"))
    lines = {o.line.number for k in p.kernels for o in walk(k.body)}
    assert len(lines) > 7
    for n, line in p.source:
        assert (f"// {line}" in text) == (n in lines)
    assert "\t" not in text and text.isascii() and not any(line != line.rstrip() for line in text.splitlines())


def test_same_build_same_bytes():
    assert render(build("staged")) == render(build("staged"))


def test_cores_are_told_by_old_and_new_macros():
    """Compilers for A2 and A3 defined names with the architecture first. CPU_SIM defines both new names, beside an old one."""
    text = re.sub(r"(?m)^#include.*$", "", load.module(Build("pto", 16, head_dim_k=16, head_dim_v=16)).SOURCE)

    def seen(*macros):
        run = [pto_sim.compiler(), "-E", "-P", "-x", "c++", "-D__CCE_AICORE__=220", *(f"-D__{m}" for m in macros), "-"]
        return subprocess.run(run, input=text, capture_output=True, text=True, check=True).stdout
    cube, vector = seen("DAV_C220_CUBE__"), seen("DAV_C220_VEC__")
    assert "TMATMUL" in cube and "TMATMUL" not in vector and "TEXP" in vector
    assert seen("DAV_CUBE__") == cube and seen("DAV_VEC__") == vector
    both = "DAV_CUBE__", "DAV_VEC__", "CPU_SIM"
    assert "TMATMUL" in seen("DAV_C220_CUBE__", *both) and "TMATMUL" not in seen("DAV_C220_VEC__", *both)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_running_sums_need_their_barriers(layout, monkeypatch):
    """The barriers are derived. Without one the checker refuses the kernel, and the simulator reports the race.

    Passes and checker know accesses by tiles, and the simulator by bytes. So it accepts the kernel without the barrier before the
    last addition, which uses other rows than the addition before.
    """
    b = build("staged", chunk=16, head_dim_k=16, head_dim_v=16, layout=layout)
    p = lowered(b)
    sums = next(k for k in p.kernels if k.name == "G")
    ops = list(walk(sums.body))
    guarded = [after for o, after in pairwise(ops) if o.kind == "barrier"]
    last = [o for o in ops if o.kind == "add_rows"][-1]
    assert len(guarded) == 14 and {"move", "exp", "add_rows", "transpose"} < {o.kind for o in guarded} and last in guarded
    x = problem([40, 0, 3], 1, 3, 16, 16, gate=-0.2)
    check(load.function(b), x, layout=layout)
    for n, after in enumerate(guarded):
        broken = replace(p, kernels=tuple(without_barrier(k, n) if k is sums else k for k in p.kernels))
        with pytest.raises(RaceError, match="kernel G"):
            check_waits(broken, ASCEND_A2)
        monkeypatch.setattr(build_module, "lowered", lambda b, broken=broken: broken)
        fn = getattr(module(render(b)), b.function)
        if after is last:
            check(fn, x, layout=layout)
            continue
        with pytest.raises(pto_sim.PtoSimError, match=r"_G_fp16: pto_sim \[v-after-v\]"):
            call(fn, x, layout=layout)
