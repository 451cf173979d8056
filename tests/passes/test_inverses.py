"""inverses: the inverse of a whole tile scales its own columns, and what it reads needs no mask."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.devices import Device
from gdn_codegen.ir.builder import algorithm, exp, lower, strictly_lower, unit_lower_inverse
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.ops import OPS
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.algebra.decompose import decompose
from gdn_codegen.passes.algebra.fold_into_inverse import fold_into_inverse
from gdn_codegen.passes.algebra.precision import precision
from gdn_codegen.passes.common import rebuild_kernel
from gdn_codegen.passes.cut.kernels import cut
from gdn_codegen.schedule import SCHEDULES, Schedule, named
from gdn_codegen.schedule.contract import PLAIN
from gdn_codegen.targets import lower as lower_program

SIZES = {"C": 64, "K": 32, "V": 32}


UNIT = {"named": replace(named("walk"), kernels=(("G", "Tinv_scaled"), ("U", "S"), ("o",))),
        "unit": replace(named("replay"), kernels=(("G", "Tinv_below"), ("o", "S")), form="unit")}


def around(schedule, page="gated_delta_rule", target="tilelang", dtype="float16", chunk=64, arch=""):
    """The programs before and after the pass."""
    seen = []
    see = lambda name, before, p, c: seen.append((before, p)) if name == "fold_into_inverse" else None
    pipelines.observers.append(see)
    try:
        sizes = {**SIZES, "C": chunk, **({"K": 64, "V": 64} if arch else {})}
        lower_program(find(page).trace(), target, UNIT.get(schedule) or named(schedule, arch), sizes, dtype, arch)
    finally:
        pipelines.observers.remove(see)
    (both,) = seen
    return both


def inverse_of(p):
    """The inverse, and the ops that lead to it or follow it alone."""
    (k,) = (k for k in p.kernels if any(o.kind == "diag_inverse" for o in walk(k.body)))
    ops = list(walk(k.body))
    (inverse,) = (o for o in ops if o.kind == "diag_inverse")
    leads, after = {inverse.args[0]}, {inverse.out}
    for o in reversed(ops):
        leads |= set(o.args) if o.out in leads else set()
    for o in ops:
        after |= {o.out} if set(o.args) & after and o.kind in ("cast", "mul") else set()
    return inverse, [o.kind for o in ops if o.out in leads], [o.kind for o in ops if o.out in after - {inverse.out}]


def run(p, x, exact=True):
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    return interpret(p, Problem(x["lengths"], x["q"].shape[1], x["v"].shape[1]),
                     {t.name: given[t.name] for t in p.role("input")}, {"scale": x["scale"]}, exact)


# --- the named schedules ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_scale_and_the_mask_are_gone(dtype):
    """Of form split where U is named, so that beta stays beside the inverse."""
    old, new = around("named", dtype=dtype)
    inverse, leads, after = inverse_of(old)
    assert len(inverse.args) == 1 and "strictly_lower" in leads and after == ["cast", "mul", "cast"]
    scaled, leads, after = inverse_of(new)
    assert scaled.args[1:] == ("beta",) and "strictly_lower" not in leads and after == []
    assert scaled.type == inverse.type and scaled.type.dtype == dtype and scaled.attr("size") == 64


@pytest.mark.parametrize("schedule", ["replay", "fused"])
def test_the_mask_is_gone_where_nothing_scales_and_what_is_widened_is_not_rounded_again(schedule):
    old, new = map(inverse_of, around(schedule))
    assert "strictly_lower" in old[1] and "strictly_lower" not in new[1]
    assert old[2] == ["cast", "cast"] and (new[0].args[1:], new[2], new[0].type.dtype) == ((), [], "float16")


@pytest.mark.parametrize("schedule", ["replay", "walk", "fused", "fused_walk"])
def test_it_means_the_same(schedule):
    """Past a sequence's end, and with gates whose exponentials above the diagonal overflow. It rounds no more than before."""
    x = problem([64 + 37, 16], 1, 2, 32, 32, torch.float16, gate="mixed")
    old, new = around(schedule)
    want, was, got = expected(x), run(old, x), run(new, x)
    assert old != new and all(rms_error(got[n], was[n]) < 1e-12 for n in was)
    assert rms_error(got["o"], want[0]) < 1e-11 and rms_error(got["final_state"], want[1]) < 1e-11
    was, got = run(old, x, exact=False), run(new, x, exact=False)
    assert all(rms_error(got[n], want[i]) < 1.1 * rms_error(was[n], want[i]) + 1e-5 for i, n in enumerate(("o", "final_state")))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("schedule, arch", [("unit", ""), ("walk", "sm_90a"), ("fused_walk", "sm_90a")])
def test_what_lies_below_the_ones_is_a_strict_inverse(schedule, arch, dtype):
    """The same values, of 16 bit as they are written, without a mask after the inverse."""
    old, new = around(schedule, dtype=dtype, arch=arch)
    assert not inverse_of(old)[0].attr("strict") and "strictly_lower" in [o.kind for k in old.kernels for o in walk(k.body)]
    inverse, leads, after = inverse_of(new)
    assert inverse.attr("strict") and len(inverse.args) == 1 and "strictly_lower" not in {*leads, *after}
    x = problem([70, 3, 0, 64], 1, 2, new.sizes["K"], new.sizes["V"], getattr(torch, dtype), gate=-0.1)
    want, was, got = expected(x), run(old, x), run(new, x)
    assert all(rms_error(got[n], was[n]) < 1e-12 for n in was)
    assert rms_error(got["o"], want[0]) < 1e-11 and rms_error(got["final_state"], want[1]) < 1e-11
    was, got = run(old, x, exact=False), run(new, x, exact=False)
    assert all(torch.equal(got[n], was[n]) for n in was)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, *UNIT])
@pytest.mark.parametrize("chunk, dtype", [(32, "float16"), (128, "float16"), (64, "float32")])
def test_inverses_of_blocks_stay(schedule, chunk, dtype):
    old, new = around(schedule, dtype=dtype, chunk=chunk)
    assert old == new
    assert all(dict(o.attrs) == {"size": 16} and len(o.args) == 1
               for k in new.kernels for o in walk(k.body) if o.kind == "diag_inverse")


@pytest.mark.parametrize("target", ["triton", "pto"])
def test_other_devices_have_no_such_inverse(target):
    old, new = around("replay", target=target)
    assert old == new and not any(o.kind == "diag_inverse" for k in new.kernels for o in walk(k.body))


# --- what it takes ---------------------------------------------------------------------------------------------------
def twice(a, x):
    """The inverse is read twice."""
    t = unit_lower_inverse(strictly_lower(a))
    return t * x[None, :], t


def scale_twice(a, x):
    """What is scaled is read before it is rounded, too."""
    t = unit_lower_inverse(strictly_lower(a)) * x[None, :]
    return t, exp(t)


def rows(a, x):
    return (unit_lower_inverse(strictly_lower(a)) * x[:, None],)


def masked_twice(a, x):
    """Somebody else reads what the mask leaves, which an inverse of the whole would overwrite."""
    m = strictly_lower(a)
    return unit_lower_inverse(m) * x[None, :], exp(m)


def both(a, x):
    """A mask in an exponential, around and under a product."""
    return (unit_lower_inverse(strictly_lower(a * exp(lower(a, fill=float("-inf"))))) * x[None, :],)


def vector_first(a, x):
    return (x[None, :] * unit_lower_inverse(strictly_lower(a)),)


@pytest.mark.parametrize("values, scaled, masks", [(twice, 0, 0), (scale_twice, 0, 0), (rows, 0, 0), (masked_twice, 0, 1),
                                                   (both, 1, 0), (vector_first, 1, 0)])
def test_what_it_takes(values, scaled, masks):
    @algorithm(x="C", k="H C K", v="HV C V")
    def page(x, k, v):
        y = v
        for t in values(x[:, None] * (k @ k.T), x):
            y = t @ y
        return y

    p = precision(cut(page.trace(), Schedule("one", (("y",),)), SIZES), named("walk"), "float16", PLAIN)
    p = decompose(p, named("walk"), "float16", Device("d", "t", solves=16, solves_whole=64))
    new = fold_into_inverse(p, p.sizes["C"])
    (inverse,) = (o for k in new.kernels for o in walk(k.body) if o.kind == "diag_inverse")
    assert inverse.attr("size") == (16 if values is masked_twice else 64)
    assert inverse.args[1:] == ("x",) * scaled and sum("lower" in o.kind for k in new.kernels for o in walk(k.body)) == masks
    x = problem([70, 3], 1, 1, 32, 32, torch.float32)
    old, new = (interpret(q, Problem(x["lengths"], 1, 1), {"x": x["beta"], "k": x["k"], "v": x["v"]}, {}) for q in (p, new))
    assert old and all(rms_error(new[n], old[n]) < 1e-12 for n in old)


def test_what_was_rounded_stays_so_when_it_is_widened():
    def rounded(o, b):
        if o.kind != "load" or o.type.dims != ("C",):
            return None
        x = b.op("load", name=b.fresh("x"), **dict(o.attrs))
        return b.op("cast", b.op("cast", x, to="float16"), to="float32", name=o.out)

    old, _ = around("replay")
    p = replace(old, kernels=tuple(rebuild_kernel(old, k, rounded) for k in old.kernels))
    pairs = lambda p: [o.out for k in p.kernels for o in walk(k.body) if o.kind == "cast" and o.type.dims == ("C",)]
    assert pairs(fold_into_inverse(p, p.sizes["C"])) == pairs(p) and len(pairs(p)) > len(pairs(old))


def test_an_inverse_reads_only_what_lies_below_its_diagonal():
    """NaN or infinity above does not matter."""
    a, x = torch.randn(64, 64, dtype=torch.float64) / 8, torch.randn(64, dtype=torch.float64)
    above = torch.ones(64, 64, dtype=torch.bool).triu()
    want = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + a.tril(-1)) * x
    for what in (float("nan"), float("inf")):
        assert torch.allclose(OPS["diag_inverse"].evaluate({"size": 64}, a.masked_fill(above, what), x), want)


@pytest.mark.slow
def test_what_shares_the_tile_of_an_inverse_is_read_along_its_rows():
    """A product that reads the tile another way makes TileLang lay it out another way than the inverse's own code addresses it:
    with K = 256 and V in blocks of 64, U lay where the inverse lay, and results were off by up to 1e17."""
    for name, sizes, block in (("fused", {"C": 64, "K": 256, "V": 256}, 64), ("fused", {"C": 64, "K": 128, "V": 128}, 0),
                               ("replay", {"C": 64, "K": 192, "V": 192}, 64)):
        p = lower_program(find("gated_delta_rule").trace(), "tilelang", replace(named(name), v_block=block), sizes, "float16")
        found = 0
        for k in p.kernels:
            home = {o.out: o.buffer for o in walk(k.body)}
            pinned = {o.buffer for o in walk(k.body) if o.kind == "diag_inverse" and o.attr("size") == 64}
            for o in walk(k.body):
                for n, a in enumerate(o.args[:2] if o.kind == "matmul" else ()):
                    if home.get(a) in pinned:
                        found += 1
                        assert not o.attr("ta") if n == 0 else o.attr("tb"), (name, sizes, o)
        assert found or name == "replay"  # whose inverse goes to memory
