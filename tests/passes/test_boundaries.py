"""Boundaries: schedules of gradients that give input forms, and their derivatives, kernels of their own. conftest interprets each
program after each pass."""
from dataclasses import replace

import pytest

from gdn_codegen.algorithms import find as page
from gdn_codegen.derived_pages import derived
from gdn_codegen.input_forms import INPUT_FORMS, InputForm
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower
from gdn_codegen.passes.algebra import decayed_products
from gdn_codegen.passes.cut.boundaries import boundaries, without_boundaries
from gdn_codegen.passes.cut.roles import roles
from gdn_codegen.passes.storage.live_bytes import live_bytes
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.gradient_builds import asked_of, undecided
from gdn_codegen.runtime.load import module
from gdn_codegen.schedule import named, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower as lower_program

RAW = (("beta", "sigmoid"), ("g", "raw"), ("k", "l2norm"), ("q", "l2norm"))
SIZES = {"C": 16, "K": 16, "V": 32}
#: Ops of input forms that the pages themselves have not.
OF_FORMS = {"rsqrt", "sigmoid", "softplus"}


@algorithm(x="C K", y="C K", z="C V", a="C", S=carried("K V"))
def renamed(x, y, z, a, S):
    """Simple gated linear attention with other names."""
    total = cumsum(a)
    o = exp(total)[:, None] * (x @ S) + ((x @ y.T) * exp(lower(total[:, None] - total[None, :], fill=float("-inf")))) @ z
    S = exp(last(total)) * S + y.T @ (exp(last(total) - total)[:, None] * z)
    return o, S


def cut_kernels(of, forms, schedule, dtype="float32"):
    p = derived(of, "gradient", forms).trace()
    return lower_program(p, "triton", schedule, SIZES, dtype, contract=Contract(), upto="cut").kernels


def kinds(k):
    return {o.kind for o in k.ops}


def stored(k):
    return {o.attr("tensor") for o in k.ops if o.kind == "store"}


@pytest.mark.parametrize("of, forms", [
    (page("gated_delta_rule"), RAW), (renamed, (("a", "linear"), ("x", "l2norm"))),
    (page("kimi_delta_attention"), RAW)], ids=["gated_delta_rule", "renamed", "kimi_delta_attention"])
@pytest.mark.parametrize("schedule", ["gradient", "fused_gradient", "channel_gradient"])
def test_forms_have_kernels_of_their_own(schedule, of, forms):
    """The first kernel stores what the page reads, the last ones have the derivatives of forms, and none between them has ops of
    forms. It is so by the graph, whatever the inputs are called. Several last ones read nothing in common. In `channel_gradient`
    elementwise derivatives are where the cotangent is computed, those of raw gates and of a sigmoid."""
    kernels = cut_kernels(of, forms, named(schedule))
    between = [k for k in kernels[1:] if any(o.kind == "matmul" for o in k.ops)]
    last = kernels[kernels.index(between[-1]) + 1:]
    elementwise = {f"d_{n}" for n, form in forms if form != "l2norm"}
    elementwise |= {"d_A_log", "d_dt_bias"} if ("g", "raw") in forms else set()
    joined = [k for k in between if elementwise & stored(k)]
    assert elementwise & set().union(*map(stored, between)) == (elementwise if schedule == "channel_gradient" else set())
    forms = tuple((n, form) for n, form in forms if form == "l2norm" or not joined)
    assert between and not any(kinds(k) & (OF_FORMS | {"log"}) for k in between if k not in joined)
    read = {f"{n}_ws" for n, _ in forms} & {o.attr("tensor") for k in kernels[1:] for o in k.ops if o.kind == "load"}
    assert {f"{n}_ws" for n, form in forms if form == "l2norm"} <= read <= stored(kernels[0])
    assert {f"d_{n}" for n, _ in forms} <= set().union(*map(stored, last))
    loads = [{o.attr("tensor") for o in k.ops if o.kind == "load"} for k in last]
    rows = sum(len(of.trace().tensor(n).dims) > 1 for n, _ in forms) if schedule == "channel_gradient" else 1
    assert len(last) == rows and sum(map(len, loads)) == len(set().union(*loads))
    assert not any("boundary" in kinds(k) for k in kernels)


@pytest.mark.parametrize("schedule", ["gradient", "fused_gradient", "channel_gradient"])
def test_without_forms_no_kernel_follows(schedule):
    """All outputs are then of the core."""
    p = derived(page("gated_delta_rule"), "gradient", ()).trace()
    found = roles(p)
    assert found["converted"] == () and set(found["core"]) == set(found["output"])
    last_one = cut_kernels(page("gated_delta_rule"), (), named(schedule))[-1]
    assert "matmul" in kinds(last_one)


def test_schedules_without_these_roles_have_no_boundaries():
    """They see a form and its readers together, under the names that these had."""
    p = derived(page("gated_delta_rule"), "gradient", RAW).trace()
    assert sum(o.kind == "boundary" for o in p.walk.ops) == 8
    done = boundaries(p, named("prepared"))
    assert not any(o.kind == "boundary" for o in done.walk.ops) and {"q", "k", "g", "beta"} <= {o.out for o in done.walk.ops}
    assert boundaries(p, named("gradient")) is p


def test_a_value_behind_two_boundaries_and_one_that_is_kept():
    p = derived(page("gated_delta_rule"), "gradient", RAW).trace()
    first = next(o for o in p.walk.ops if o.kind == "boundary")
    ops = [o for o in p.walk.ops if o.kind == "load"][:1]
    again = [first.changed(out=n, args=(ops[0].out,)) for n in ("one", "two")]
    read = replace(first, kind="add", out="sum", args=("one", "three"), attrs=())
    for kept in ("", ops[0].out):
        made, last_one = without_boundaries([*ops, *again, first.changed(out="three", args=("two",)), read], [kept])
        assert made.out == (kept or "one") and last_one.args == (made.out, made.out)


def test_gradients_by_log_decays_of_channels_stay_in_float32_between_kernels():
    """As they are where they are outputs: rounding them, and then the product with the form's derivative, would be twice. Here a
    kernel of its own has the form's derivative."""
    apart = tuple(tuple(x for x in g if x != "@elementwise") for g in named("channel_gradient").kernels)
    b = Build("triton", algorithm="kimi_delta_attention.gradient", dtype="bfloat16", chunk=16, head_dim_k=16, head_dim_v=32,
              contract=Contract(inputs=RAW), schedule=varied("channel_gradient", v_block=32, kernels=apart))
    p = lowered(b)
    behind = {o.attr("tensor") for k in p.kernels[-3:] for o in k.ops if o.kind == "load"}
    of = {t.name: (t.dims, t.dtype) for t in p.tensors if t.index == "slot" and t.role == "workspace" and t.name in behind}
    assert sorted(of.values()) == [(("C", "K"), "bfloat16"), (("C", "K"), "bfloat16"), (("C", "K"), "float32")]


@pytest.mark.parametrize("algorithm", ["gated_delta_rule.states", "gated_delta_rule.saving"])
def test_scales_of_rows_stay_values_of_their_own_in_derived_pages(algorithm):
    """`canonical` does not join them with what reads them. So the kernel over chunks stores them for the walk, which otherwise
    would sum rows of k again, and warp groups have no rule for that."""
    b = Build("tilelang", algorithm=algorithm, dtype="bfloat16", contract=Contract(inputs=RAW), arch="sm_90a",
              schedule=named("fused_walk", "sm_90a"))
    first, walk = lowered(b).kernels
    assert "rk_ws" in stored(first) and "row_sum" not in kinds(walk)


@algorithm(q="C K", k="C K", v="C V", w="C V", S=carried("K V"))
def added(q, k, v, w, S):
    """What is added to the output needs nothing but its cotangent."""
    o = q @ S + w
    S = S + k.T @ v
    return o, S


@pytest.mark.parametrize("schedule", ["gradient", "fused_gradient", "channel_gradient"])
def test_a_form_of_a_user_whose_derivative_does_not_read_the_input(schedule, monkeypatch):
    monkeypatch.setitem(INPUT_FORMS, "half", InputForm("{0} is halved.", "0.5 * x"))
    kernels = cut_kernels(added, (("w", "half"),), named(schedule))
    assert "d_w" in stored(kernels[-1])


def test_the_kernel_of_derivatives_on_hopper(monkeypatch):
    """It has its loads first, and then one output after another, so that few fragments are live. Two products of a level are
    one, as with plain inputs where levels compute them. The walk's agents store what they have."""
    def lowered_of(forms, of="gated_delta_rule", schedule="fused_gradient"):
        rows = (("S_chunks", "bfloat16"), ("d_k", "bfloat16"), ("d_q", "bfloat16"))
        return lowered(Build("tilelang", algorithm=f"{of}.gradient", dtype="bfloat16", arch="sm_90a",
                             contract=Contract(inputs=forms, dtypes=rows), schedule=named(schedule, "sm_90a")))
    *_, walk, last_one = lowered_of(RAW).kernels
    tiles = [n for n, o in enumerate(last_one.ops) if o.kind == "load" and o.type.rank == 2]
    stores = [n for n, o in enumerate(last_one.ops) if o.kind == "store"]
    squares = [n for n, o in enumerate(last_one.ops) if o.kind == "row_sum"]
    assert len(tiles) == 4 and tiles[-1] < squares[0] < squares[1] < stores[0] < squares[2] and last_one.threads == 256
    assert live_bytes(last_one, "fragment") <= 4 * 64 * 128 * 4
    by = {o.attr("tensor"): o.agent for o in walk.ops if o.kind == "store"}
    assert {by[n] for n in by if n.startswith("d_") and n.endswith("_ws")} == {"tokens", "vectors"}
    monkeypatch.setattr(decayed_products, "by_op", lambda *args: (0, None))
    lowered.cache_clear()
    plain, formed = (lowered_of(f, "kimi_delta_attention", "channel_gradient").kernels for f in ((), RAW))
    lowered.cache_clear()
    assert sum(o.kind == "matmul" for o in plain[0].ops) == sum(o.kind == "matmul" for o in formed[1].ops)


def test_warps_of_kernels_without_products():
    """On Triton each lane holds 32 entries of a tile."""
    b = Build("triton", algorithm="gated_delta_rule.gradient", dtype="bfloat16", contract=Contract(inputs=RAW),
              schedule=varied("gradient", v_block=64))
    assert lowered(b).kernels[-1].threads == 256


def test_gates_of_channels_in_16_bits_are_read_and_written_so():
    contract = Contract.parse("g=raw/bfloat16,beta=bfloat16")
    b = asked_of(Build("triton", algorithm="kimi_delta_attention", dtype="float16", contract=contract), False)
    assert b.contract.dtypes == tuple((n, "bfloat16") for n in ("beta", "d_beta", "d_g", "g"))
    before, back = ({t.name: t.dtype for t in lowered(replace(x, schedule=s)).tensors} for x, s in zip(
        undecided(replace(b, chunk=16, head_dim_k=16, head_dim_v=16), True).all, ("fused", "channel_gradient"), strict=True))
    assert before["g"] == back["g"] == back["d_g"] == "bfloat16" and back["d_A_log"] == "float32"
    assert before["beta"] == back["beta"] == back["d_beta"] == "bfloat16"


@pytest.mark.parametrize("algorithm, target", [
    ("gated_delta_rule.gradient", "triton"), ("gated_delta_rule.gradient", "tilelang"),
    ("kimi_delta_attention.gradient", "triton"),
    pytest.param("kimi_delta_attention.gradient", "tilelang", marks=pytest.mark.slow)])
def test_modules_with_forms_are_right(algorithm, target):
    """The module's own check compares it with torch.autograd through the forms and the page."""
    name = "channel_gradient" if "kimi" in algorithm else "gradient"
    b = Build(target, algorithm=algorithm, dtype="float32", chunk=16, head_dim_k=16, head_dim_v=32,
              contract=Contract(inputs=RAW), schedule=varied(name, v_block=16))
    assert all(error <= accepted for error, accepted in module(b).check("cpu").values())
