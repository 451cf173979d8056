"""What the package's ops make of the contract: gates before their activations, slices of a projection, a buffer for o."""
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from reference import expected, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_a_layers_values_before_its_activations(target):
    """As a layer has them: raw gates and beta in bfloat16, q and k before their norms; with FLA's words."""
    x, gen = problem([20, 5], 1, 2, 32, 32, seed=2), torch.Generator().manual_seed(3)
    r = lambda *s: torch.randn(*s, generator=gen)
    q, k, a, b = r(25, 1, 32).half(), r(25, 1, 32).half(), r(25, 2).bfloat16(), r(25, 2).bfloat16()
    A, dt = r(2).abs(), r(2)
    o, S = chunk_gated_delta_rule(
        q[None], k[None], x["v"][None], a[None], b[None], x["scale"], x["S"], True, True, torch.tensor([0, 20, 25]), A_log=A,
        dt_bias=dt, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, target=target, chunk_size=16)
    unit = lambda t: t.double() * torch.rsqrt(t.double().square().sum(-1, keepdim=True) + 1e-6)
    want = expected({**x, "q": unit(q), "k": unit(k), "g": -A.double().exp() * F.softplus(a.double() + dt),
                     "beta": 2 * b.double().sigmoid()})
    assert rms_error(o[0], want[0]) < 5e-3 and rms_error(S, want[1]) < 5e-3


def test_every_call_looks_at_what_it_writes():
    """Kinds of tensors are settled once, where they lie is not."""
    x = problem([20], 1, 1, 32, 32, initial=False)
    given = {n: x[n][None] for n in ("q", "k", "v", "g", "beta")}
    states = torch.zeros(3, 1, 32, 32)
    call = lambda **more: chunk_gated_delta_rule(**given, target=HERE[0], chunk_size=16, **more)
    want = call()[0].clone()
    for _ in range(3):
        o, S = call(out=torch.full_like(given["v"], 7.0), initial_state=states[:1], final_state=states[1:2])
        assert torch.equal(o, want) and S.data_ptr() == states[1:2].data_ptr()
        with pytest.raises(ValueError, match="out: got memory of k; accepted: memory of its own"):
            call(out=given["k"], initial_state=states[:1], final_state=states[1:2])
        with pytest.raises(ValueError, match="final_state: got memory of initial_state; accepted: memory of its own, or inplace"):
            call(out=torch.full_like(given["v"], 7.0), initial_state=states[:1], final_state=states[:1])
    pool, x = torch.zeros(2, 1, 32, 32), {n: y for n, y in given.items() if n != "v"}
    inside = pool.view(-1).view(torch.float16)[:20 * 32].view(1, 20, 1, 32)
    for more in ({"inplace_final_state": True}, {"state_indices": torch.tensor([1, 0]), "cu_seqlens": torch.tensor([0, 9, 20])}):
        for v in (given["v"], inside, given["v"], inside):
            do = lambda: chunk_gated_delta_rule(**x, v=v, initial_state=pool[:len(more)], target=HERE[0], chunk_size=16, **more)
            if v is not inside:
                assert do()[1].data_ptr() == pool.data_ptr()
                continue
            with pytest.raises(ValueError, match="initial_state: got memory of v; accepted: memory of its own, because the"):
                do()
    qkv = torch.cat([given[n].flatten(2) for n in ("q", "k", "v")] + [torch.zeros(1, 20, 32).half()], -1).unflatten(-1, (4, 32))
    q, k, v, out = (qkv[:, :, n:n + 1] for n in range(4))  # apart, though in one memory
    o, _ = chunk_gated_delta_rule(q, k, v, given["g"], given["beta"], target=HERE[0], chunk_size=16, out=out)
    assert o is out and torch.equal(o, want)


def test_a_module_and_the_op_refuse_bad_input_in_the_same_words():
    fn = function(Build(HERE[0], 16, head_dim_k=32, head_dim_v=32))
    x = problem([20], 1, 1, 32, 32)
    given = {n: x[n][None] for n in ("q", "k", "v", "g", "beta")}
    grad = given["k"].clone().requires_grad_()
    for name, bad, why in (("scale", "x", "got str; accepted: a number, or None"), ("scale", torch.ones(1), "got Tensor"),
                           ("scale", math.nan, "got nan; accepted: a number that float32 holds"),
                           ("scale", 10**400, "got an int of 401 digits"), ("output_final_state", 1, "got 1; accepted: True or"),
                           ("output_final_state", "no", "got 'no'; accepted"), ("v", None, "got NoneType; accepted"),
                           ("q", given["q"][0], "got rank 3; accepted: rank 4, layout bthd"), ("g", given["g"].double(), "got"),
                           ("cu_seqlens", torch.zeros(2), "got torch.float32; accepted: an int32 or int64 tensor"),
                           ("cu_seqlens", torch.tensor([[0, 20]]), "got shape"), ("initial_state", given["q"], "got ")):
        said = []
        for op in fn, functools.partial(chunk_gated_delta_rule, target=HERE[0], chunk_size=16):
            with pytest.raises(ValueError) as error:
                op(**{**given, name: bad})
            said.append(str(error.value))
        assert said[0] == said[1] and said[0].startswith(f"{name}: {why}"), said
    with pytest.raises(ValueError, match="k: got a tensor that requires grad; accepted: inference only"):
        fn(**{**given, "k": grad})
    with torch.no_grad():
        assert fn(**{**given, "k": grad})[0].shape == given["v"].shape


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_slices_of_a_projection_into_a_buffer(backend):
    x = problem((20, 5), 1, 2, 32, 32, seed=2)
    qkv = torch.cat([x[n].flatten(1) for n in "qkv"], 1)[None]
    cu, out = torch.tensor([0, 20, 25]), torch.full((1, 26, 2, 32), 7.0, dtype=torch.float16)
    pad = lambda t: F.pad(t, (0, 0, 0, 1))  # a row of no sequence

    def layer(qkv, g, beta, out):
        q, k, v = (t.unflatten(-1, (-1, 32)) for t in qkv.split([32, 32, 64], -1))
        return chunk_gated_delta_rule(q, k, v, g, beta, x["scale"], x["S"], cu_seqlens=cu, out=out, target=HERE[0],
                                      chunk_size=16)[0]
    run = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    o = run(pad(qkv), pad(x["g"][None]), pad(x["beta"][None]), out)
    assert o is out and rms_error(out[0, :25], expected(x)[0]) < 5e-3
    assert (out[0, 25] == 7).all()
