"""Products read chosen values in two parts: the schedule's field `residuals`."""
import pytest
import torch
from members import Case, computed, drawn, expected
from reference import rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import algorithm, carried, exp
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes.algebra.residuals import residuals
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import choose
from gdn_codegen.schedule import Schedule, ScheduleError, varied
from gdn_codegen.targets import find as target_of
from gdn_codegen.targets.candidates import Asked
from gdn_codegen.tools.bench_errors import interpreted
from gdn_codegen.tools.problems import head_errors, problem, reference
from gdn_codegen.tools.shapes import Shape

WALKS = (("@output", "@state"),)


@algorithm(a="C K", x="C V", w="C K", y=carried("K V"), z=carried("K V"))
def two(a, x, w, y, z):
    """Two states of other names. Products of each are terms of a sum, of a difference, and of nothing."""
    out = x - a @ y
    other = w @ z
    y = y + a.T @ out
    z = z + w.T @ exp(other)
    return out, other, y, z


def errors(page, target, schedule, gates="layer", arch="", dtype="bfloat16", tokens=256):
    """Mean errors of o and of the final state, interpreted with roundings."""
    b = Build(target, 64, algorithm=page, schedule=schedule, arch=arch, dtype=dtype)
    x = problem(Shape("", (tokens,), 2, 2), dtype, 128, 128, gates, 0, "cpu", page)
    return [sum(e) / len(e) for e in head_errors(interpreted(b, x)(), reference(x, range(2)))]


def products(b):
    return sum(o.kind == "matmul" for k in lowered(b).kernels for o in k.ops)


@pytest.mark.parametrize("page, schedule, words, gates, limits", [
    ("gla", "operand_walk", "@state,@pair", "layer", (0.87, 1.001)),
    ("gated_delta_rule_2", "operand_walk", "@update", "alike", (0.85, 0.85)),
    pytest.param("kimi_delta_attention", "operand_walk", "@update", "alike", (0.85, 0.95), marks=pytest.mark.slow),
    pytest.param("rwkv7", "operand_walk", "@right_side,@solution", "0", (0.97, 0.8), marks=pytest.mark.long),
    pytest.param("delta_rule", "fused_walk", "@right_side,@solution", "alike", (0.75, 0.75), marks=pytest.mark.slow)])
def test_errors_that_a_second_part_takes_away(page, schedule, words, gates, limits):
    """With the roles that dispatch gives these pages on Hopper, and with `@update`."""
    before, after = (errors(page, "tilelang", varied(schedule, "sm_90a", residuals=x), gates, "sm_90a") for x in ("", words))
    assert all(y < limit * x for x, y, limit in zip(before, after, limits, strict=True)), (before, after)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["triton", *(pytest.param(n, marks=pytest.mark.long) for n in ("tilelang", "pto"))])
@pytest.mark.parametrize("page, words", [("gla", "@state,@pair"), ("rwkv7", "@solution,@right_side"),
                                         ("delta_rule", "@state,@solution,@right_side")])
def test_kernels_compute_the_page(target, page, words):
    c = Case((70, 0, 16), repeat=True)
    b = Build(target, 16, "bthd", page, varied("walk", residuals=words), "float16", 32, 32)
    x = {n: t.half() if t.ndim > 2 and n in ("q", "k", "v", "r", "a", "b") else t
         for n, t in drawn(page, c, find(page).trace(), b.sizes).items()}
    for got, want in zip(computed(b, c, x), expected(page, c, x), strict=True):
        assert rms_error(got, want) < 1.5e-3


@pytest.mark.parametrize("words, more", [("", 0), ("@state", 2), ("y", 1), ("@state,out", 3), ("out", 1)])
def test_each_product_of_a_chosen_value_is_two(words, more):
    """Of several states, and of a value by its name: in sums, differences and alone."""
    def build(residuals, dtype="float16"):
        return Build("triton", 16, algorithm=f"{__file__}:two", schedule=Schedule("own", WALKS, residuals=residuals), dtype=dtype,
                     head_dim_k=16, head_dim_v=16)
    assert products(build(words)) == products(build("")) + more
    assert products(build(words, "float32")) == products(build("", "float32"))
    gen = torch.Generator().manual_seed(0)
    x = {n: torch.randn(50, 1, 16, generator=gen) / 4 for n in ("a", "x", "w")}
    p = lowered(build(words, "float32"))
    exact = [interpret(lowered(build(r)), Problem([50], 1, 1), {n: t.half() for n, t in x.items()}, {}) for r in ("", words)]
    assert all(torch.allclose(exact[0][t.name], exact[1][t.name]) for t in p.role("output"))


def test_the_second_part_takes_no_registers_of_its_own():
    """On Hopper both products add to the sum in one fragment."""
    b = Build("tilelang", algorithm="delta_rule", schedule=varied("fused_walk", "sm_90a", residuals="@right_side"), arch="sm_90a",
              dtype="bfloat16")
    (walk,) = (k for k in lowered(b).kernels if k.agents)
    plain = Build("tilelang", algorithm="delta_rule", schedule=varied("fused_walk", "sm_90a"), arch="sm_90a", dtype="bfloat16")
    (before,) = (k for k in lowered(plain).kernels if k.agents)

    def wide(k):
        return sum(x.space == "fragment" and x.dtype == "float32" for x in k.buffers)
    assert wide(walk) == wide(before)


@algorithm(a="C K", k="C K", y=carried("K V"))
def handed_on(a, k, y):
    """A product is a term of a sum, and the next state."""
    p = k.T @ (a @ y)
    out = a @ exp(p + y)
    y = p
    return out, y


def test_a_product_that_is_the_next_state_has_its_second_part():
    p = residuals(handed_on.trace(), Schedule("own", WALKS, residuals="a_y"), "float16")
    (c,), ops = p.walk.carried, {o.out: o for o in p.walk.body}
    assert ops[c.next].kind == "add" and [ops[a].kind for a in ops[c.next].args] == ["matmul", "matmul"]


@pytest.mark.parametrize("words, said", [
    ("@none", "residuals='@none'; accepted are @output"), ("nothing", "nothing; accepted are roles"),
    ("@state*", "residuals='@state"), ("@state,", "residuals='@state,'"), ("@state, U", "residuals='@state, U'"),
    (("@state",), "residuals=.'@state',.; accepted"), (None, "residuals=None; accepted"), ("beta", "beta, which no product")])
def test_words_that_no_page_has(words, said):
    with pytest.raises(ScheduleError, match=said):
        lowered(Build("triton", 16, schedule=Schedule("own", WALKS, residuals=words)))


@pytest.mark.parametrize("few, shape_class", [(False, (0, 6, 13)), (True, (0, 4, 15)), (False, (0, 9, 6))])
def test_dispatch_asks_for_second_parts_where_errors_need_them(few, shape_class):
    """Whole walks, parts, and many short sequences."""
    def words(target, **facts):
        found = target_of(target).model(Asked((128, 128), "sm_90a", few, shape_class, None, **facts))
        return {c.schedule.residuals for c in found if isinstance(c.schedule, Schedule)}
    for target in ("tilelang", "triton"):
        assert words(target) == words(target, inverts=True, bounded=True) == {""}
        assert "@state,@pair" in words(target, channels=True)
    assert words("tilelang", inverts=True, channels=True, bounded=True) == {"@update"}
    assert words("triton", inverts=True, channels=True, bounded=True) == {""}
    assert words("tilelang", inverts=True) == words("tilelang", inverts=True, channels=True) == {"@right_side,@solution"}
    assert words("triton", inverts=True) == words("triton", inverts=True, channels=True) == {""}


@pytest.mark.parametrize("page, target, want", [
    ("delta_rule", "tilelang", "@right_side,@solution"), ("gated_delta_rule", "tilelang", ""), ("gla", "triton", "@state,@pair"),
    ("kimi_delta_attention", "tilelang", "@update"), ("gated_delta_rule_2", "tilelang", "@update"),
    ("rwkv7", "tilelang", "@right_side,@solution")])
@pytest.mark.parametrize("few", [True, False])
def test_what_a_call_gets(page, target, want, few, unchecked):
    options = choose.modelled(Build(target, algorithm=page, dtype="bfloat16"), "sm_90a", few, (0, 4, 15), None)
    assert next(b for b, _ in options if choose.fits(b)).plan.residuals == want
