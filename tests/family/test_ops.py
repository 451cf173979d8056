"""Ops of the family's members, with FLA's names and argument orders, beside token recurrences in float64."""
import inspect

import pytest
import recurrences
import torch
from members import Case, Draws, drawn, expected, of_head
from reference import rms_error

import gdn_codegen
from gdn_codegen import fused_recurrent_delta_rule, fused_recurrent_lightning_attn, fused_recurrent_simple_gla
from gdn_codegen.algorithms import find
from gdn_codegen.family import chunk_delta_rule, chunk_gated_delta_product, chunk_simple_gla
from gdn_codegen.runtime.call import known_members, launch
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
OPS = {"delta_rule": chunk_delta_rule, "simple_gla": chunk_simple_gla}
STEPS = {"delta_rule": fused_recurrent_delta_rule, "simple_gla": fused_recurrent_simple_gla}
SIZES = {"C": 64, "K": 32, "V": 64}
#: The positional arguments of FLA 0.6.0's functions after the inputs.
ORDER = {"delta_rule": ["scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens",
                        "cu_seqlens_cpu"],
         "simple_gla": ["g_gamma", "scale", "initial_state", "output_final_state", "state_v_first", "cu_seqlens",
                        "cu_seqlens_cpu"]}


def made(name, c, dtype=torch.bfloat16):
    """Packed inputs of a call and what the recurrence makes of them."""
    x = drawn(name, c, find(name).trace(), SIZES)
    x = {n: y.to(dtype) if y.ndim == 3 else y for n, y in x.items()}
    want = expected(name, c, x)
    S = x.pop("S")
    return {n: y[None] for n, y in x.items()}, S, want


def ends(c):
    return torch.tensor([0, *c.lengths]).cumsum(0)


def near(results, want, most=5e-3):
    for got, y in zip(results, want, strict=False):
        assert rms_error(got.reshape(y.shape), y) < most


@pytest.mark.parametrize("name", OPS)
def test_arguments_are_flas(name):
    names = [p.name for p in inspect.signature(OPS[name]).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == [*find(name).inputs, *ORDER[name]]
    assert getattr(gdn_codegen, OPS[name].__name__) is OPS[name]


def test_arguments_of_steps_are_flas():
    last = ["initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"]
    turned = ["initial_state", "output_final_state", "reverse", "state_v_first", "cu_seqlens"]
    for op, want in ((fused_recurrent_delta_rule, ["beta", "scale", *last]),
                     (fused_recurrent_simple_gla, ["g", "g_gamma", "scale", *turned]),
                     (fused_recurrent_lightning_attn, ["layer_idx", "num_layers", "scale", *turned[:3], "cu_seqlens"])):
        given = inspect.signature(op).parameters.values()
        assert [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD] == ["q", "k", "v", *want]


def test_arguments_of_the_product_are_flas():
    given = inspect.signature(chunk_gated_delta_product).parameters.values()
    names = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ["q", "k", "v", "g", "beta", "num_householder", *ORDER["delta_rule"], "cp_context"]


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("name", OPS)
def test_a_pack(name, target):
    c = Case((17, 0, 65))
    x, S, want = made(name, c)
    near(OPS[name](**x, initial_state=S, output_final_state=True, cu_seqlens=ends(c), cu_seqlens_cpu=ends(c), target=target),
         want)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_what_gated_delta_rule_takes(name):
    """A pool of bfloat16 states [V, K], written in place; heads first, views; checkpoints; a buffer for o; raw forms."""
    c = Case((40, 24), heads=1, value_heads=2, gates="slow")
    x, S, want = made(name, c)
    pool = torch.full((4, 2, 64, 32), 7.0)
    pool[[3, 1]] = S.transpose(2, 3)
    views = {n: y.transpose(1, 2) for n, y in x.items()}
    out = torch.full((1, 64, 2, 64), 7.0).bfloat16().transpose(1, 2)
    o, _, marks = OPS[name](**views, initial_state=pool, state_indices=torch.tensor([3, 1]), state_v_first=True, head_first=True,
                            cu_seqlens=ends(c), checkpoint_chunks=1, chunk_size=16, out=out, target=HERE[0])
    assert o is out and (pool[[0, 2]] == 7).all() and marks.shape == (4, 2, 64, 32)
    near((o.transpose(1, 2), pool[[3, 1]].transpose(2, 3)), want)
    half = expected(name, Case((32,)), {"S": S[:1], **{n: y[0, :32] for n, y in x.items()}})[1]
    near((marks[1:2].transpose(2, 3),), (half,))


@pytest.mark.slow
def test_forms():
    c = Case((33,), strength=1.0)
    x, S, want = made("delta_rule", c, torch.float32)
    raw = dict(x, q=3 * x["q"], k=5 * x["k"], beta=torch.log(x["beta"] / (1 - x["beta"])))
    near(chunk_delta_rule(**raw, initial_state=S, output_final_state=True, use_qk_l2norm_in_kernel=True,
                          use_beta_sigmoid_in_kernel=True, target=HERE[0]), want)
    x, S, want = made("simple_gla", c, torch.float32)
    near(chunk_simple_gla(**dict(x, g=torch.exp(x["g"])), gate="linear", initial_state=S, output_final_state=True,
                          target=HERE[0]), want)
    x["g"][:] = 0
    more = dict(initial_state=S, target=HERE[0])
    near(chunk_simple_gla(x["q"], x["k"], x["v"], **more)[:1], chunk_simple_gla(**x, **more)[:1])


@pytest.mark.parametrize("name, said, message", [
    ("delta_rule", dict(g=torch.zeros(1, 9, 2)), "g: got a value; accepted: no value: delta_rule has the inputs q, k, v, beta"),
    ("delta_rule", dict(gate="raw", A_log=torch.zeros(2)), "gate: got 'raw'; accepted: 'log': delta_rule has no log decays"),
    ("delta_rule", dict(use_gate_in_kernel=True), "gate: got 'raw'"),
    ("delta_rule", dict(gk=torch.zeros(1)), "gk: got Tensor; accepted: None"),
    ("delta_rule", dict(allow_neg_eigval=True), "allow_neg_eigval: got True with beta as given"),
    ("delta_rule", dict(aligned_positions=True), "checkpoint_positions: got None; accepted: one integer for each of"),
    ("delta_rule", dict(checkpoint_slots=torch.zeros(1, 1).int()), "checkpoint_positions: got None; accepted: one integer"),
    ("delta_rule", dict(num_accepted_tokens=torch.zeros(1)), "num_accepted_tokens: got a tensor; accepted: None"),
    ("delta_rule", dict(chunk_sizes=16), "chunk_sizes: got a keyword that this op does not know.*did you mean chunk_size"),
    ("delta_rule", dict(beta=None), "beta: got NoneType; accepted: a torch.Tensor"),
    ("delta_rule", dict(beta=torch.zeros(1, 9, 2, 1)), "beta: got rank 4; accepted: rank 3, layout bthd"),
    ("delta_rule", dict(beta=torch.zeros(1, 9, 2).int()), "beta: got torch.int32; accepted: torch.float16"),
    ("delta_rule", dict(q=torch.zeros(1, 9, 1, 32).half()), "q: got torch.float16; accepted: torch.bfloat16, that of v"),
    ("delta_rule", dict(v=torch.zeros(1, 9, 2, 64, requires_grad=True), checkpoint_chunks=1), "checkpoint_chunks: got 1; .*grad"),
    ("delta_rule", dict(scale="1"), "scale: got str; accepted: a number"),
    ("simple_gla", dict(g_gamma=torch.zeros(2)), "g_gamma: got a value beside g; accepted: one of g and g_gamma"),
    ("simple_gla", dict(g=None, g_gamma=torch.zeros(2), gate="linear"),
     "gate: got 'linear'; accepted: 'log': lightning_attention has no log decays of tokens"),
    ("simple_gla", dict(g=None, g_gamma=[0.0, 0.0]), "g_gamma: got list; accepted: a torch.Tensor"),
    ("simple_gla", dict(g=None, g_gamma=torch.zeros(3)), r"g_gamma: got shape \(3,\); accepted: shape \(2,\)"),
    ("simple_gla", dict(g=None, gate="raw"), "g: got None; accepted: a tensor"),
    ("simple_gla", dict(g=-torch.ones(1, 9, 2), gate="linear"), "g: got -1 with gate='linear'"),
    ("simple_gla", dict(beta_form="sigmoid"), "beta_form: got 'sigmoid'; accepted: 'given': simple_gla has no input beta")])
def test_what_is_refused(name, said, message):
    x, *_ = made(name, Case((9,)))
    with pytest.raises(ValueError, match=message):
        OPS[name](**{**x, **said})


def test_memory_that_is_written_is_no_input():
    x, S, _ = made("delta_rule", Case((9,)))
    for said, message in ((dict(out=x["v"]), "out: got memory of v"),
                          (dict(initial_state=S, final_state=S[:]), "final_state: got memory of initial_state")):
        with pytest.raises(ValueError, match=message):
            chunk_delta_rule(**x, output_final_state=True, **said)


# --- decoding --------------------------------------------------------------------------------------------------------
@pytest.fixture
def built(monkeypatch):
    """The builds of the calls of a test."""
    known_members.forget()
    found, module = [], launch.module
    monkeypatch.setattr(launch, "module", lambda b: (found.append(b), module(b))[1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_few_tokens(name, target, built):
    """States in bfloat16 [V, K] in slots, in place; a sequence in no slot."""
    c = Case((3, 0, 2), gates="slow")
    x, S, want = made(name, c)
    pool = torch.full((4, 2, 64, 32), 7.0)
    pool[[3, 1, 0]] = S.transpose(2, 3)
    o, _ = STEPS[name](**x, initial_state=pool, state_indices=torch.tensor([3, -1, 0]), state_v_first=True, cu_seqlens=ends(c),
                       target=target)
    near((o[0], pool[[3, 1, 0]].transpose(2, 3)), want)
    assert [b.chunk for b in built] == [16] and (pool[2] == 7).all()
    x, S, want = made(name, Case((40,), gates="slow"))
    near(STEPS[name](**x, initial_state=S, output_final_state=True, target=target), want)
    assert built[-1].chunk > 16 and built[-1].algorithm == name


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_states_of_draft_tokens(name, built):
    """A slot for each token; sequences start from the state after the last token that was accepted."""
    c = Case((3, 2), gates="slow")
    x, S, want = made(name, c)
    pool, slots = torch.full((8, 2, 32, 64), 7.0), torch.tensor([[5, 1, 0], [2, 7, -1]])
    pool[[1, 2]] = S
    o, _ = STEPS[name](**x, initial_state=pool, state_indices=slots, num_accepted_tokens=torch.tensor([2, 1]), cu_seqlens=ends(c),
                       target=HERE[0])
    near((o[0], pool[[0, 7]]), want)
    first = expected(name, Case((1,)), {"S": S[:1], **{n: y[0, :1] for n, y in x.items()}})[1]
    near((pool[5:6],), (first,))
    assert [b.chunk for b in built] == [1] and (pool[[3, 4, 6]] == 7).all()


def test_defaults_of_steps():
    x, S, _ = made("delta_rule", Case((4,)))
    more = dict(initial_state=S, target=HERE[0])
    one = torch.ones_like(x["beta"])
    assert torch.equal(fused_recurrent_delta_rule(x["q"], x["k"], x["v"], **more)[0],
                       fused_recurrent_delta_rule(**dict(x, beta=one), **more)[0])
    with pytest.raises(ValueError, match="beta: got None; accepted: a tensor, from which"):
        fused_recurrent_delta_rule(x["q"], x["k"], x["v"], use_beta_sigmoid_in_kernel=True)
    with pytest.raises(ValueError, match="reverse: got True; accepted: False"):
        fused_recurrent_simple_gla(x["q"], x["k"], x["v"], reverse=True)
    near(fused_recurrent_lightning_attn(x["q"], x["k"], x["v"], 1, 4, **more)[:1],
         gdn_codegen.chunk_lightning_attn(x["q"], x["k"], x["v"], 1, 4, **more)[:1])


# --- n steps for each token ------------------------------------------------------------------------------------------
def product(c, n, dtype=torch.bfloat16, K=32, V=64):
    """Packed inputs of a call with n steps for each token, its initial states, and what the recurrence makes of them."""
    d, T = Draws(c), sum(c.lengths)
    x = {"q": d.unit((T, c.heads, K)), "k": d.unit((T * n, c.heads, K)), "v": d.normal((T * n, c.value_heads, V)),
         "g": d.log_decay((T, c.value_heads)), "beta": d.beta((T * n, c.value_heads))}
    x = {i: y.to(dtype) if y.ndim == 3 else y for i, y in x.items()}
    S = d.normal((len(c.lengths), c.value_heads, K, V)) / 4
    o, final, start = torch.zeros(T, c.value_heads, V, dtype=torch.float64), S.double().clone(), 0
    for s, length in enumerate(c.lengths):
        for h in range(c.value_heads):
            q, k, v, g, beta = (of_head(x[i], h, c.value_heads).double() for i in x)
            for t in range(start, start + length):
                at = slice(t * n, t * n + n)
                o[t, h], final[s, h] = recurrences.gated_delta_product(final[s, h], q[t], k[at], v[at], g[t], beta[at], K ** -0.5)
        start += length
    return {i: y[None] for i, y in x.items()}, S, (o, final)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("target", HERE)
def test_steps(target, n):
    c = Case((17, 0, 33), strength=2.0, repeat=True)
    x, S, want = product(c, n)
    results = chunk_gated_delta_product(*x.values(), n, initial_state=S, output_final_state=True, cu_seqlens=ends(c),
                                        cu_seqlens_cpu=ends(c), max_seqlen=33, target=target)
    assert results[0].is_contiguous()
    near(results, want, 1e-2)  # as beta reaches 2, errors of all tokens stay


@pytest.mark.slow
def test_what_steps_take():
    """Heads first, a pool of states [V, K], norms and the sigmoid in the kernel; no gate at all."""
    c = Case((20, 20), gates="slow")
    x, S, want = product(c, 2, torch.float32)
    raw = dict(x, q=3 * x["q"], k=5 * x["k"], beta=torch.log(x["beta"] / (1 - x["beta"])))
    pool = torch.full((3, 2, 64, 32), 7.0)
    pool[[2, 0]] = S.transpose(2, 3)
    o, _ = chunk_gated_delta_product(**{n: y.transpose(1, 2) for n, y in raw.items()}, num_householder=2, initial_state=pool,
                                     state_indices=torch.tensor([2, 0]), state_v_first=True, head_first=True, cu_seqlens=ends(c),
                                     use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, target=HERE[0])
    near((o.transpose(1, 2), pool[[2, 0]].transpose(2, 3)), want)
    x["g"][:] = 0
    more = dict(num_householder=2, initial_state=S, cu_seqlens=ends(c), target=HERE[0])
    assert torch.equal(chunk_gated_delta_product(**dict(x, g=None), **more)[0], chunk_gated_delta_product(**x, **more)[0])


@pytest.mark.parametrize("said, message", [
    (dict(num_householder=0), "num_householder: got 0; accepted: an int of at least 1"),
    (dict(num_householder=2.0), "num_householder: got 2.0"),
    (dict(num_householder=3), r"k: got shape \(1, 18, 1, 32\); accepted: 27 in place 1: num_householder = 3, and q has 9 tokens"),
    (dict(g=torch.zeros(1, 18, 2)), r"g: got shape \(1, 18, 2\); accepted: 9 in place 1, as q has"),
    (dict(beta=torch.zeros(1, 9, 2)), r"beta: got shape \(1, 9, 2\); accepted: 18"),
    (dict(out=torch.zeros(1, 9, 2, 64)), r"out: got shape \(1, 9, 2, 64\), torch.float32; accepted: shape \(1, 9, 2, 64\), "),
    (dict(out=torch.zeros(1, 18, 2, 64).bfloat16()), r"out: got shape \(1, 18, 2, 64\)"),
    (dict(core_attn_out=torch.zeros(1, 9, 2, 64)), "core_attn_out: got a tensor; accepted: no value, because a token has"),
    (dict(chunk_indices=torch.zeros(1, 2).int()), "chunk_indices: got a tensor; accepted: no value"),
    (dict(state_indices=torch.zeros(1, 2).int()), "state_indices: got rank 2; accepted: rank 1, because a token has several"),
    (dict(gate="raw"), "A_log: got None; accepted: a tensor"),
    (dict(g=None, gate="raw"), "g: got None; accepted: a tensor"),
    (dict(cp_context=1), "cp_context: got 1; accepted: None"),
    (dict(householders=1), "householders: got a keyword that this op does not know"),
    (dict(initial_state=torch.zeros(2, 2, 32, 64)), "initial_state: got")])
def test_steps_that_are_refused(said, message):
    x, *_ = product(Case((9,)), 2)
    with pytest.raises(ValueError, match=message):
        chunk_gated_delta_product(**{**x, "num_householder": 2, **said})
