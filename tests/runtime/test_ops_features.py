"""What the package's ops make of the contract: gates before their activations, slices of a projection, a buffer for o."""
import pytest
import torch
import torch.nn.functional as F
from reference import expected, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime.build import TARGETS
from gdn_codegen.runtime.targets import runs

HERE = [t for t in TARGETS if runs(t, "cpu")]


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
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    o = run(pad(qkv), pad(x["g"][None]), pad(x["beta"][None]), out)
    assert o is out and rms_error(out[0, :25], expected(x)[0]) < 5e-3
    assert (out[0, 25] == 7).all()
