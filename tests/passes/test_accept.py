"""accept and scale: inputs in the forms in which callers pass them, and row scales that leave products."""
from dataclasses import replace

import pytest
import torch
from reference import expected, in_form, passed, problem, rms_error

from gdn_codegen import algorithms
from gdn_codegen.ir.body import Body
from gdn_codegen.ir.builder import algorithm, carried, strictly_lower, unit_lower_inverse
from gdn_codegen.ir.core import Loop, walk
from gdn_codegen.ir.interpret import Interpreter, Problem, interpret
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.abi.caller_inputs import caller_inputs
from gdn_codegen.passes.algebra.row_scales import row_scales
from gdn_codegen.schedule import SCHEDULES, ScheduleError, named
from gdn_codegen.schedule.contract import Contract, ContractError
from gdn_codegen.targets import lower

FULL = "beta=sigmoid,g=raw,k=l2norm,q=l2norm"
SIZES = {"C": 16, "K": 16, "V": 16}
LENGTHS = [17, 0, 5]


def find(name):
    return algorithms.find(name).trace()


def errors(p, contract, sizes=SIZES, lengths=LENGTHS, delta=True, span=0):
    x, page = passed(lengths, 1, 2, sizes["K"], sizes["V"], dict(Contract.parse(contract).inputs), dtype=torch.float64)
    given = {**x, **x["more"], "initial_state": x["S"]}
    got = interpret(p, Problem(lengths, 1, 2, span), {t.name: given[t.name] for t in p.role("input")}, {"scale": x["scale"]})
    o, S = expected(page, delta)
    return max(rms_error(got["o"], o), rms_error(got["final_state"], S))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["triton", "tilelang"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_takes_every_form(target, schedule):
    p = lower(find("gated_delta_rule"), target, SCHEDULES[schedule], SIZES, "float16", contract=Contract.parse(FULL))
    assert errors(p, FULL) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("contract", ["g=linear", "g=raw", "beta=sigmoid", "beta=twice_sigmoid", "k=l2norm", "q=l2norm"])
@pytest.mark.parametrize("form", ["direct", "gate-free"])
def test_each_form_alone(contract, form):
    s = in_form(SCHEDULES["fused"], form)
    p = lower(find("gated_delta_rule"), "triton", s, SIZES, "float16", contract=Contract.parse(contract))
    assert errors(p, contract) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fused", "walk"])
@pytest.mark.parametrize("partition", ["exact", "decay"])
def test_parts(schedule, partition):
    s = replace(SCHEDULES[schedule], partition=partition)
    p = lower(find("gated_delta_rule"), "triton", s, SIZES, "float32", contract=Contract.parse(FULL))
    assert errors(p, FULL, lengths=[70, 5], span=2) < 1e-8


def keys_read(contract, schedule="walk"):
    """The kernels before the walks that load k, of a walk in parts that begin early."""
    s = replace(SCHEDULES[schedule], partition="decay")
    p = lower(find("gated_delta_rule"), "triton", s, SIZES, "float32", contract=Contract.parse(contract))
    before = (k for k in p.kernels if k.grid == "chunks" or k.slices > 1)
    return p, [k.name for k in before if any(o.attr("tensor") == "k" for o in walk(k.body))]


@pytest.mark.slow
def test_the_promise_of_unit_keys_saves_reading_them():
    """F of tokens whose keys have norm 1 is of g and beta alone; parts begin as early as where the kernels look at k."""
    assert keys_read("", "fused_walk")[1] == ["F_chunk"]
    p, read = keys_read("k=unit", "fused_walk")
    assert read == [] and errors(p, "k=unit", lengths=[70, 5], span=2) < 1e-8
    assert keys_read("k=unit")[1] == ["G_Tinv_scaled_F_chunk"]  # for k @ k.T


@pytest.mark.slow
def test_the_promise_is_what_counts():
    """With the promise, warm-ups still depend on a beta above 1, and not on the length of keys."""
    x = problem([9 * 16], 1, 1, 16, 16, torch.float64, gate=-0.05)
    found = {}
    for how, contract, beta, longer in (("seen", "", 1.0, 3.0), ("not seen", "k=unit", 1.0, 3.0), ("beta", "k=unit", 3.0, 1.0)):
        p, _ = keys_read(contract, "fused_walk")
        i = Interpreter(p, Problem(x["lengths"], 1, 1, 2), {"scale": 1.0}, exact=True)
        i.run({"q": x["q"], "k": longer * x["k"], "v": x["v"], "g": x["g"], "beta": torch.full_like(x["beta"], beta),
               "initial_state": None})
        found[how] = i.memory["F_chunk_ws"][:9, 0]
    assert (found["seen"] > 0).all() and (found["beta"] > 0).all() and (found["not seen"] < 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("page, schedule", [("gated_delta_rule", "fused"), ("gated_delta_rule", "staged"),
                                            ("gated_delta_rule", "walk"), ("simple_gla", "fused")])
def test_cores_that_share_no_memory(page, schedule):
    contract = FULL if page != "simple_gla" else "g=raw,k=l2norm,q=l2norm"
    p = lower(find(page), "pto", SCHEDULES[schedule], SIZES, "float16", contract=Contract.parse(contract))
    assert p.kernels[0].name == "rq_rk"
    assert errors(p, contract, delta=page != "simple_gla") < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("partition", [None, "decay"])
def test_warp_groups_load_tiles_and_scales(partition):
    sizes = {"C": 64, "K": 64, "V": 64}
    plan = replace(named("walk", "sm_90a"), partition=partition)
    p = lower(find("gated_delta_rule"), "tilelang", plan, sizes, "float16", "sm_90a",
              Contract.parse(FULL))
    loaded = {o.attr("tensor") for o in walk(p.kernels[-1].body) if o.kind == "load"}
    assert {"q", "k", "rq_ws", "rk_ws"} <= loaded and not {"g", "beta"} & loaded
    assert errors(p, FULL, sizes, [70, 5], span=1 if partition else 0) < 1e-8


def accepted(page, contract):
    return verify(caller_inputs(find(page), Contract.parse(contract)))


def test_products_read_inputs_as_they_lie():
    for page in ("gated_delta_rule", "simple_gla"):
        p = row_scales(accepted(page, "k=l2norm,q=l2norm"))
        defs = {o.out: o for o in walk(p.kernels[0].body)}
        products = [o for o in defs.values() if o.kind == "matmul"]
        assert {defs[a].attr("tensor") for o in products for a in o.args if a in defs and defs[a].kind == "load"} >= {"q", "k"}
        made = [o for o in defs.values() if o.kind == "mul" and o.type.dims == ("C", "K")]
        assert all(o.args[0] == o.args[1] for o in made)  # squares, no scaled rows
        p = replace(p, dims=tuple(SIZES.items()))
        assert errors(p, "k=l2norm,q=l2norm", delta=page != "simple_gla") < 1e-12


def test_a_scaled_input_that_is_read_as_it_is():
    @algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
    def odd(q, k, v, S):
        o = (k + q) @ S
        S = S + (k - q).T @ v
        return o, S
    p = replace(row_scales(caller_inputs(odd.trace(), Contract.parse("k=l2norm"))), dims=tuple(SIZES.items()))
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 1, 16, generator=gen, dtype=torch.float64) for _ in range(3))
    S = torch.randn(1, 1, 16, 16, generator=gen, dtype=torch.float64)
    got = interpret(p, Problem([5], 1, 1), {"q": q, "k": k, "v": v, "initial_state": S}, {})
    n = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    assert rms_error(got["o"][:, 0], (n + q)[:, 0] @ S[0, 0]) < 1e-14
    assert rms_error(got["final_state"][0, 0], S[0, 0] + (n - q)[:, 0].T @ v[:, 0]) < 1e-14


def test_a_value_that_would_be_divided_by_a_norm():
    """Rows of U would be held as r U. The page gives U itself, and r is 0 for a row of zeros."""
    @algorithm(k="C K", v="C V", S=carried("K V"))
    def odd(k, v, S):
        U = unit_lower_inverse(strictly_lower(k @ k.T)) @ (v - k @ S)
        S = S + k.T @ U
        return U, S
    p = caller_inputs(odd.trace(), Contract.parse("k=l2norm"))
    assert p.scales and row_scales(p) == replace(p, scales=())


@pytest.mark.parametrize("contract", ["g=linear", "g=raw", "beta=sigmoid"])
def test_padding_stays_inert(contract):
    """A raw zero is no zero gate: without `valid` a sequence's tail is wrong, and the verifier sees the gate's cumsum."""
    p = accepted("gated_delta_rule", contract)
    (kernel,), name = p.kernels, contract[:contract.index("=")]
    loop = next(s for s in kernel.body if isinstance(s, Loop))
    b, names = Body({t.name: t for t in p.tensors}, {c.name: c.type for c in loop.carried}), {}
    for o in loop.body:
        if o.kind == "valid" and o.out == name:
            names[name] = o.args[0]
        else:
            b.copy(o, names)
    body = tuple(replace(s, body=b.finish()) if s is loop else s for s in kernel.body)
    broken = replace(p, kernels=(replace(kernel, body=body),), forgets="", dims=tuple(SIZES.items()))
    if name == "g":
        with pytest.raises(VerifyError, match="cumsum runs over the padding"):
            verify(broken)
        assert not errors(broken, contract) < 1e-3
    p = replace(p, dims=tuple(SIZES.items()))
    assert errors(p, contract) < 1e-12


def test_a_contract_that_does_not_fit_is_refused():
    for text, what in (("w=raw", r"inputs: got 'w'; accepted: q, k, v, g, beta"), ("w=float16", "dtypes: got 'w'; accepted"),
                       ("g=l2norm", "inputs: got g='l2norm'; accepted for g, dims C: linear, raw, bounded, safe, floored, sig"),
                       ("k=float16", "dtypes: got k='float16'; accepted: .*: g, beta"),
                       ("beta=raw,g=raw", "got several raw inputs"), ("dt_bias=float16", "dtypes: got 'dt_bias'")):
        with pytest.raises(ContractError, match=what):
            accepted("gated_delta_rule", text)
    with pytest.raises(ContractError, match="inputs: got 'beta'; accepted: q, k, v, g, the"):
        accepted("simple_gla", "beta=sigmoid")


def test_a_plain_contract_changes_nothing():
    p = find("gated_delta_rule")
    assert caller_inputs(p, Contract.parse("g=bfloat16")) == p and row_scales(p) == p


@pytest.mark.parametrize("x", [-87.0, -20.0, -1.0, -1e-3, 0.0, 0.3, 5.0, 30.0, 200.0])
def test_softplus_keeps_its_digits(x):
    """Where log(1 + exp(x)) in float32 has none left."""
    @algorithm(v="C V", g="C")
    def page(v, g):
        o = v + g[:, None]
        return o
    p = lower(page.trace(), "triton", replace(SCHEDULES["fused"], kernels=(("o",),)), SIZES, "float32",
              contract=Contract.parse("g=raw"))
    zero, one = torch.zeros(1, 1), torch.zeros(1)
    got = interpret(p, Problem([1], 1, 1), {"v": torch.zeros(1, 1, 16), "g": zero + x, "A_log": one, "dt_bias": one}, {}, False)
    want = torch.logaddexp(torch.tensor(x).double(), torch.tensor(0.0).double())
    assert abs(-got["o"].double().mean() - want) <= 2e-6 * want


def test_other_forms_of_a_walk_stay_refused_for_warp_groups():
    with pytest.raises(ScheduleError):
        lower(find("gated_delta_rule"), "tilelang", in_form(SCHEDULES["walk"], "direct"), {"C": 64, "K": 64, "V": 64}, "float16",
              "sm_90a", Contract.parse(FULL))
