"""Ops of members with a gate for each channel of the key, beside token recurrences in float64."""
import inspect

import pytest
import torch
from members import Case, drawn, expected
from test_ops import HERE, ends, near

import gdn_codegen
from gdn_codegen.algorithms import find
from gdn_codegen.channels import (
    chunk_gdn2,
    chunk_gla,
    chunk_kda,
    chunk_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_gdn2,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_rwkv7,
)
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose, known_members, launch
from gdn_codegen.runtime.load import module
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.targets.triton import BY_CHANNEL

#: By page: the op and its name's counterpart for any number of tokens. PTO's simulator takes long; tests of pages run it.
OPS = {"gla": (chunk_gla, fused_recurrent_gla), "kimi_delta_attention": (chunk_kda, fused_recurrent_kda),
       "gated_delta_rule_2": (chunk_gdn2, fused_recurrent_gdn2), "rwkv7": (chunk_rwkv7, fused_recurrent_rwkv7)}
GPU = [t for t in HERE if t != "pto"]
SIZES = {"C": 64, "K": 32, "V": 64}
#: The positional arguments of FLA 0.6.0's functions after the inputs, as one text.
ORDER = {
    chunk_gla: "scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu",
    chunk_kda: "scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel "
               "allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states state_v_first cu_seqlens "
               "cu_seqlens_cpu cp_context use_graph max_num_seqs",
    chunk_gdn2: "scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel cu_seqlens cu_seqlens_cpu "
                "safe_gate lower_bound disable_recompute return_intermediate_states state_v_first cp_context",
    chunk_rwkv7: "scale initial_state output_final_state cu_seqlens cu_seqlens_cpu safe_gate chunk_size disable_recompute "
                 "cp_context lower_bound",
    fused_recurrent_kda: "A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
                         "use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens",
    fused_recurrent_gdn2: "A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
                          "lower_bound state_v_first cu_seqlens",
    fused_recurrent_rwkv7: "scale initial_state output_final_state cu_seqlens"}


def made(name, c, dtype=torch.bfloat16):
    """Packed inputs of a call, initial states, and what the recurrence makes of them. Gates are float32."""
    gate = "w" if name == "rwkv7" else "g"
    x = drawn(name, c, find(name).trace(), SIZES)
    x = {n: y.to(dtype) if y.ndim == 3 and n != gate else y for n, y in x.items()}
    want = expected(name, c, x)
    S = x.pop("S")
    return {n: y[None] for n, y in x.items()}, S, want


def test_arguments_are_flas():
    for name, ops in OPS.items():
        for op in ops:
            given = [p.name for p in inspect.signature(op).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert op not in ORDER or given == [*find(name).inputs, *ORDER[op].split()], op.__name__
            assert getattr(gdn_codegen, op.__name__) is op
    given = inspect.signature(fused_recurrent_gla).parameters
    assert [*given][:-1] == ["q", "k", "v", "gk", "gv", "scale", "initial_state", "output_final_state", "reverse",
                             "state_v_first", "cu_seqlens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_the_self_check_draws_gates(name):
    """Logs of decays for channels, and rows that multiply a state without end are of norm 1: nothing overflows."""
    found = module(Build("triton", 16, algorithm=name, dtype="float32", head_dim_k=32, head_dim_v=32)).check("cpu")
    assert all(error <= accepted for error, accepted in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("partition", [None, "decay"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n == "gated_delta_rule_2" else []) for n in OPS])
def test_walks_that_serve_gates_of_channels_on_hopper(name, partition):
    """Kernels that load middle rows; one for each product of pairs of tokens where these are several."""
    chunk, fields = BY_CHANNEL
    b = Build("triton", chunk, algorithm=name, dtype="float32", head_dim_k=32, head_dim_v=32,
              schedule=varied("operand_walk", partition=partition, **fields))
    if name == "rwkv7" and partition:  # it bounds no token
        with pytest.raises(ScheduleError):
            module(b)
    else:
        assert all(error <= accepted for error, accepted in module(b).check("cpu").values())


@pytest.mark.parametrize("name", OPS)
def test_dispatch_takes_them_on_hopper_alone(name):
    def first(arch, few, chunk=None):
        options = choose.modelled(Build("triton", algorithm=name, dtype="bfloat16"), arch, few, (0, 4, 13), chunk)
        return next(b for b, _ in options if choose.fits(b))
    whole, parts = first("sm_90a", False), first("sm_90a", True)
    assert (whole.plan.name, whole.chunk, whole.plan.partition) == ("operand_walk", 32, None)
    assert parts.plan.partition == (None if name == "rwkv7" else "decay")
    assert {(b.plan.name, b.chunk) for b in (first("", False), first("sm_90a", False, 64))} == {("staged", 64)}


@pytest.mark.slow
@pytest.mark.parametrize("name, target", [(n, t) for n in OPS for t in GPU if t == GPU[0] or n == "gla"])
def test_a_pack(name, target):
    """A sequence of 65 tokens takes the chunked op; of at most 5, a step."""
    op, step = OPS[name]
    c = Case((17, 0, 65))
    x, S, want = made(name, c)
    near(op(**x, initial_state=S, output_final_state=True, cu_seqlens=ends(c), cu_seqlens_cpu=ends(c), target=target), want)
    c = Case((3, 5), gates="slow")
    x, S, want = made(name, c)
    said = {n if (step, n) != (fused_recurrent_gla, "g") else "gk": y for n, y in x.items()}
    scale = dict(scale=1.0) if name == "rwkv7" else {}
    near(step(**said, **scale, initial_state=S, output_final_state=True, cu_seqlens=ends(c), target=target), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_what_gated_delta_rule_takes(name):
    """A pool of states [V, K], written in place; heads first, views; a buffer for o."""
    c = Case((40, 24), gates="slow")
    x, S, want = made(name, c)
    pool = torch.full((4, 2, 64, 32), 7.0)
    pool[[3, 1]] = S.transpose(2, 3)
    out = torch.full((1, 64, 2, 64), 7.0).bfloat16().transpose(1, 2)
    o, _ = OPS[name][0](**{n: y.transpose(1, 2) for n, y in x.items()}, initial_state=pool, state_indices=torch.tensor([3, 1]),
                        state_v_first=True, head_first=True, cu_seqlens=ends(c), chunk_size=16, out=out, target=GPU[0])
    assert o is out and (pool[[0, 2]] == 7).all()
    near((o.transpose(1, 2), pool[[3, 1]].transpose(2, 3)), want)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("lower", [None, -5.0])
def test_raw_gates(lower, first):
    """Of both layouts; also norms and the sigmoid in the kernel."""
    c = Case((33,))
    x, S, _ = made("kimi_delta_attention", c)
    gen = torch.Generator().manual_seed(3)
    raw, A, bias = 3 * torch.randn(1, 33, 2, 32, generator=gen), torch.randn(2, generator=gen), torch.randn(64, generator=gen)
    y = raw.double() + bias.double().view(2, 32)
    rate = A.double().exp().view(2, 1)
    g = -rate * torch.log1p(torch.exp(y)) if lower is None else lower / (1 + torch.exp(-rate * y))
    want = expected("kimi_delta_attention", c, {"S": S, **{n: z[0] for n, z in dict(x, g=g).items()}})
    said = dict(x, g=raw, q=3 * x["q"], k=5 * x["k"], beta=torch.log(x["beta"] / (1 - x["beta"])))
    said = {n: z.transpose(1, 2) for n, z in said.items()} if first else said
    o, final = chunk_kda(**said, initial_state=S, output_final_state=True, use_gate_in_kernel=True, A_log=A, dt_bias=bias,
                         lower_bound=lower, safe_gate=lower is not None, use_qk_l2norm_in_kernel=True, head_first=first,
                         use_beta_sigmoid_in_kernel=True, target=GPU[0])
    near((o.transpose(1, 2) if first else o, final), want)


@pytest.mark.slow
def test_kernels_take_gates_as_they_come(monkeypatch):
    """Raw ones in 16 bits, with a bias that is a view."""
    known_members.forget()
    contracts, module = [], launch.module
    monkeypatch.setattr(launch, "module", lambda b: (contracts.append(str(b.contract)), module(b))[1])
    c = Case((9,))
    x, S, _ = made("kimi_delta_attention", c)
    x["g"] = torch.randn(x["g"].shape).bfloat16()
    A, bias = torch.tensor([0.5, -1.0]).bfloat16(), torch.randn(32, 2).t()
    more = dict(initial_state=S, target=GPU[0])
    o, _ = chunk_kda(**x, **more, use_gate_in_kernel=True, A_log=A, dt_bias=bias, lower_bound=-3)
    y = torch.exp(A.float())[:, None] * (x["g"].float() + bias)
    for safe in (False, True):
        near((o,), chunk_kda(**dict(x, g=-3 * torch.sigmoid(y)), **more, safe_gate=safe)[:1])
    chunk_kda(**x, **more, use_gate_in_kernel=True, lower_bound=-6)
    assert contracts == ["A_log=bfloat16,g=safe/bfloat16", "", "g=floored", "g=bounded/bfloat16"]


@pytest.mark.slow
def test_a_promise_about_gates(monkeypatch):
    """A gate below it counts as -5."""
    known_members.forget()
    contracts, module = [], launch.module
    monkeypatch.setattr(launch, "module", lambda b: (contracts.append(str(b.contract)), module(b))[1])
    x, S, _ = made("rwkv7", Case((20,)))
    x["w"][:, 3:9, :, ::2] = -9.0
    want = chunk_rwkv7(**dict(x, w=x["w"].clamp(min=-5)), initial_state=S, target=GPU[0])
    near(chunk_rwkv7(**x, initial_state=S, target=GPU[0], safe_gate=True)[:1], want[:1])
    known_members.forget()
    chunk_rwkv7(**x, initial_state=S, target=GPU[0], safe_gate=True, lower_bound=-6.0)
    assert contracts == ["", "w=floored", ""]


@pytest.mark.slow
def test_a_gate_without_rates_and_no_gate():
    c = Case((20,))
    x, S, _ = made("kimi_delta_attention", c)
    more = dict(initial_state=S, target=GPU[0])
    raw = dict(x, g=torch.randn(x["g"].shape))
    near(chunk_kda(**raw, **more, use_gate_in_kernel=True, lower_bound=-4)[:1],
         chunk_kda(**dict(x, g=-4 * torch.sigmoid(raw["g"])), **more)[:1])
    x, S, _ = made("gla", c)
    more = dict(initial_state=S, target=GPU[0])
    x["g"][:] = 0
    near(fused_recurrent_gla(x["q"], x["k"], x["v"], **more)[:1], chunk_gla(**x, **more)[:1])


@pytest.mark.slow
def test_the_product_of_kk_and_a():
    """As layers of RWKV-7 call it: 5 tokens after a state."""
    c = Case((5,), gates="slow")
    x, S, _ = made("rwkv7", c, torch.float32)
    kk, a = -x.pop("a"), torch.full_like(x["k"], 0.5)
    x.pop("b")
    more = dict(initial_state=S, output_final_state=True, target=GPU[0])
    got = fused_mul_recurrent_rwkv7(**x, kk=kk, a=a, **more)
    near(got, fused_recurrent_rwkv7(**x, a=-kk, b=kk / 2, scale=1.0, **more))
    assert [y.shape for y in got] == [y.shape for y in (x["v"], S)]
    given = inspect.signature(fused_mul_recurrent_rwkv7).parameters
    assert [*given][:-1] == ["r", "w", "k", "v", "kk", "a", "scale", "initial_state", "output_final_state", "reverse",
                             "cu_seqlens"]
    for said, message in ((dict(reverse=True), "reverse: got True"), (dict(a=a[:, :1]), "a: got shape .*; accepted: .*that of k"),
                          (dict(kk=None), "kk: got NoneType")):
        with pytest.raises(ValueError, match=message):
            fused_mul_recurrent_rwkv7(**{**x, "kk": kk, "a": a, **said})


@pytest.mark.parametrize("name, said, message", [
    ("kimi_delta_attention", dict(use_gate_in_kernel=True), r"A_log: got None; accepted: a tensor \[HV\], or lower_bound"),
    ("kimi_delta_attention", dict(use_gate_in_kernel=True, A_log=torch.zeros(3)), r"A_log: got shape \(3,\); accepted: shape"),
    ("kimi_delta_attention", dict(use_gate_in_kernel=True, A_log=torch.zeros(2), dt_bias=torch.zeros(2)), "dt_bias: got shape"),
    ("kimi_delta_attention", dict(use_gate_in_kernel=True, A_log=torch.zeros(2), safe_gate=True), "lower_bound: got None"),
    ("kimi_delta_attention", dict(use_gate_in_kernel=True, lower_bound=-9, safe_gate=True), "lower_bound: got -9; accepted: -5"),
    ("kimi_delta_attention", dict(lower_bound=1.0), "lower_bound: got 1.0; accepted: a number below 0"),
    ("kimi_delta_attention", dict(use_gate_in_kernel=1), "use_gate_in_kernel: got 1; accepted: True or False"),
    ("kimi_delta_attention", dict(return_intermediate_states=True), "return_intermediate_states: got True"),
    ("kimi_delta_attention", dict(cp_context=1), "cp_context: got 1"),
    ("kimi_delta_attention", dict(allow_neg_eigval=True), "allow_neg_eigval: got True with beta as given"),
    ("kimi_delta_attention", dict(g=torch.zeros(1, 9, 2)), "g: got rank 3; accepted: rank 4"),
    ("kimi_delta_attention", dict(g=None), "g: got NoneType"),
    ("gla", dict(use_qk_l2norm=3), "use_qk_l2norm_in_kernel: got 3"),
    ("gla", dict(beta=torch.zeros(1, 9, 2)), "beta: got a value; accepted: no value"),
    ("rwkv7", dict(cp_context=1), "cp_context: got 1"),
    ("rwkv7", dict(use_qk_l2norm_in_kernel=True), "use_qk_l2norm_in_kernel: got True; accepted: False: rwkv7 has no input q"),
    ("gated_delta_rule_2", dict(words=1), "words: got a keyword that this op does not know")])
def test_what_is_refused(name, said, message):
    x, *_ = made(name, Case((9,)))
    with pytest.raises(ValueError, match=message):
        OPS[name][0](**{**x, **said})


def test_steps_that_are_refused():
    x, *_ = made("gla", Case((4,)))
    for said, message in ((dict(gv=x["g"]), "gv: got a value; accepted: None"), (dict(reverse=True), "reverse: got True"),
                          (dict(gk=x["g"][0]), "gk: got rank 3")):
        with pytest.raises(ValueError, match=message):
            fused_recurrent_gla(x["q"], x["k"], x["v"], **said)
