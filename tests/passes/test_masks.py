"""masks: a mask around a product and one in its exponential become one, if no other op reads the exponential."""
import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import algorithm, exp, lower, strictly_lower
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Interpreter, Problem, interpret
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.algebra.masks import masks
from gdn_codegen.passes.cut.kernels import cut
from gdn_codegen.schedule import SCHEDULES
from gdn_codegen.schedule.schedule import Schedule
from gdn_codegen.targets import lower as lower_program

SIZES = {"C": 16, "K": 16, "V": 16}
INF = float("inf")


def after(schedule, page="gated_delta_rule"):
    """What the pass made of it, and the last program."""
    seen = []
    see = lambda name, before, p, c: seen.append(p) if name == "masks" else None
    pipelines.observers.append(see)
    try:
        last = lower_program(find(page).trace(), "triton", SCHEDULES[schedule], SIZES, "float32")
    finally:
        pipelines.observers.remove(see)
    return seen[0], last


def kinds(p):
    return [[(o.kind, o.attr("fill")) for o in walk(k.body) if "lower" in o.kind] for k in p.kernels]


def test_the_kernel_of_the_inverse_has_one_mask():
    assert kinds(after("replay")[0]) == [[("strictly_lower", -INF), ("unit_lower_inverse", None)], [("lower", -INF)]]


def test_where_others_read_the_exponential_both_stay():
    assert kinds(after("fused")[0]) == [[("lower", -INF), ("strictly_lower", None), ("unit_lower_inverse", None)]]


@pytest.mark.parametrize("schedule", ["replay", "staged", "walk"])
def test_it_means_the_same(schedule):
    x = problem([37, 16], 1, 2, 16, 16, torch.float32)
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    p = after(schedule)[1]
    got = Interpreter(p, Problem(x["lengths"], 1, 2), {"scale": x["scale"]}, exact=True).run({t.name: given[t.name]
                                                                                             for t in p.role("input")})
    want = expected(x)
    assert rms_error(got["o"], want[0]) < 1e-11 and rms_error(got["final_state"], want[1]) < 1e-11


@pytest.mark.parametrize("fill, times, made", [(-INF, 1, True), (0.0, 1, False), (-INF, 2, False)])
def test_what_it_takes(fill, times, made):
    """Another fill leaves no zeros, and a second reader wants the diagonal."""
    @algorithm(x="C", v="HV C V")
    def page(x, v):
        d = exp(lower(x[:, None] - x[None, :], fill=fill))
        y = strictly_lower(x[:, None] * d) @ v
        return y + d @ v if times == 2 else y

    p = cut(page.trace(), Schedule("one", (("y_plus_d_v",) if times == 2 else ("y",),)), SIZES)
    new = masks(p)
    assert (kinds(new) == [[("strictly_lower", -INF)]]) == made and (made or new == p)
    x = problem([20], 1, 1, 16, 16, torch.float32)
    given = {"x": x["g"], "v": x["v"]}
    old, new = (interpret(q, Problem([20], 1, 1), given, {}) for q in (p, new))
    assert all(rms_error(new[n], old[n]) < 1e-13 for n in old) and old
