"""Dispatch, `list`, `show` and `verify` for pages of the package, and for pages of one's own whose decays have other names."""
import math
import re

import pytest
import torch
from choices import a_call
from tiers import every

from gdn_codegen.algorithms import find, names
from gdn_codegen.cli import main
from gdn_codegen.ir.builder import (
    algorithm,
    carried,
    cumsum,
    decayed_product,
    exp,
    last,
    lower,
    per_head,
    per_token,
    strictly_lower,
    unit_lower_inverse,
)
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import device
from gdn_codegen.runtime.call.choose import choice
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.tools.cases import CASES, SAME, Case, inputs

pytestmark = pytest.mark.slow

SMALL = ["--target", "triton", "--chunk", "16", "--head-dim-k", "16", "--head-dim-v", "16"]


@algorithm(q="C K", k="C K", v="C V", alpha="C", beta="C", S=carried("K V"))
def by_token(q, k, v, alpha, beta, S):
    """Log decays of tokens."""
    G = cumsum(alpha)
    D = exp(lower(G[:, None] - G[None, :], fill=-math.inf))
    U = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T) * D)) @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))
    y = exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
    return y, S


@algorithm(q="C K", k="C K", v="C V", w="HV C K", u="HV K", M=carried("K V"))
def by_channel(q, k, v, w, u, M, *, scale=0.5):
    """Log decays of channels, and a vector for each head."""
    W = cumsum(w)
    r = u[None, :] * q
    y = scale * ((exp(W) * r) @ M + decayed_product(r, k, W) @ v)
    M = exp(last(W))[:, None] * M + (exp(last(W)[None, :] - W) * k).T @ v
    return y, M


def in_order(q, k, v, w, u, M, scale):
    """by_channel, token by token."""
    y = torch.zeros_like(v)
    for t in range(len(v)):
        M = torch.exp(w[t])[:, None] * M + torch.outer(k[t], v[t])
        y[t] = scale * (M.T @ (u * q[t]))
    return y, M


def too_slow(w, **x):
    """by_channel, of which channel 1 forgets half as much."""
    w = w.clone()
    w[:, 1] /= 2
    return in_order(w=w, **x)


@algorithm(q="C K", k="C K", v="C V", tau="HV", D=per_head(0.25), S=carried("K V"))
def by_head(q, k, v, tau, D, S):
    """A log decay of each head."""
    G = cumsum(per_token(tau))
    y = D * v + exp(G)[:, None] * (q @ S) + ((q @ k.T) * exp(lower(G[:, None] - G[None, :], fill=-math.inf))) @ v
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    return y, S


OWN = {n: f"{__file__}:{n}" for n in ("by_token", "by_channel", "by_head")}
#: One of each kind: gates of tokens and of channels, numbers of heads.
ONES = ("gated_delta_rule", "kimi_delta_attention", "mamba2")


# --- dispatch --------------------------------------------------------------------------------------------------------
H100 = device.described("NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("page, target, on, chunk, want", [
    *((p, "triton", H100, None, ("operand_walk", 32)) for p in ("gla", "kimi_delta_attention", "rwkv7", "by_channel")),
    ("by_channel", "triton", H100, 64, ("staged", 64)), ("by_channel", "triton", H100, 32, ("operand_walk", 32)),
    *((p, "triton", H100, None, ("walk", 32)) for p in ("gated_delta_rule", "by_token", "by_head", "mamba2")),
    ("by_channel", "triton", device.described("cpu"), None, ("fused", 64))])
def test_a_page_with_decays_of_channels_gets_kernels_over_chunks(page, target, on, chunk, want):
    """On Triton and a GPU, whatever its names are."""
    call = a_call(Extent(4, 8, 1, 9000), torch.bfloat16, "meta", algorithm=OWN.get(page, page), target=target, chunk_size=chunk)
    found = choice(call, on).build
    assert (found.plan.name, found.chunk) == want


# --- list ------------------------------------------------------------------------------------------------------------
def block(text, name):
    """The lines of `list` about a page."""
    return re.search(rf"^  {name}\n((?:    .*\n)+)", text, re.M)[1]


def test_list_says_what_each_page_needs(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in names():
        for n in (*find(name).inputs, *find(name).states):
            assert re.search(rf"(inputs|states|;) +{n} \[", block(out, name))
    assert "g [B, T, HV, K] (log decay per channel); beta [B, T, HV]\n" in block(out, "kimi_delta_attention")
    assert "g [B, T, HV] (log decay per token)" in block(out, "gated_delta_rule")
    assert "A [HV] (log decay per head); D [HV] (0 where absent)\n" in block(out, "mamba2")
    assert "forms    q=l2norm; k=l2norm|unit; dt=softplus|rectified\n" in block(out, "mamba2")
    assert "g [HV] (log decay per head)\n" in block(out, "lightning_attention")
    assert "w=linear|raw|bounded" in block(out, "rwkv7") and "numbers  scale = 1.0" in block(out, "rwkv7")


@pytest.mark.usefixtures("unchecked")
def test_list_of_one_page_says_which_schedules_serve_it(capsys):
    assert main(["list", "--algorithm", OWN["by_channel"]]) == 0
    out = capsys.readouterr().out
    assert "w [B, T, HV, K] (log decay per channel); u [HV, K]\n    states   M [N, HV, K, V]\n" in out
    assert re.search(r"^    triton +staged .*fused", out, re.M) and re.search(r"^    pto +staged", out, re.M)
    assert "delta_rule\n" not in out
    assert main(["list", "--algorithm", "gdn"]) == 2 and "algorithm: got 'gdn'" in capsys.readouterr().err


# --- show ------------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, page", every(2, ["triton", "pto"], [*names(), *OWN]))
def test_show_has_all_that_a_page_reads(page, target, capsys):
    spec = OWN.get(page, page)
    words = ["show", "--algorithm", spec, "--target", target, "--schedule", "fused", *SMALL[2:]]
    assert main([*words, "--kernels", "--ir", "--graph"]) == 0
    out = capsys.readouterr().out
    read = {n for line in out.splitlines() if line.startswith("  reads ") for n in line[10:].split(", ")}
    assert set(find(spec).inputs) <= read
    drawn = set(re.findall(r'label="(\w+)(?:\\nof the head)?", fillcolor="#ffffff"', out))
    assert drawn == set(find(spec).inputs) and f"program('{page}'" in out
    assert main([*words, "--graph", "svg"]) == 0 and capsys.readouterr().out.startswith("<svg")


# --- verify ----------------------------------------------------------------------------------------------------------
def drawn(page, **case):
    b = Build("triton", algorithm=OWN.get(page, page), head_dim_k=16, head_dim_v=16)
    return inputs(b, b.page.trace(), Case((100,), **case))


@pytest.mark.parametrize("page, name", [("by_token", "alpha"), ("by_channel", "w"), ("rwkv7", "w"), ("gla", "g")])
def test_gates_are_drawn_by_role(page, name):
    for gate in (-0.5, 0.0, -50.0):
        x = drawn(page, gate=gate)[name]
        assert (x <= 0).all() and x.mean() == pytest.approx(gate, rel=0.1)
    x = drawn(page, gate=None)[name]
    assert {round(e, 2) for e in x.flatten().tolist()} == {0.0, -0.05, -3.0, -50.0} and x.dtype == torch.float32
    if x.ndim == 3:
        assert (x[:, :, ::4] == 0).all() and (x[:, :, 1] < 0).any()


@pytest.mark.parametrize("page, name", [("by_head", "tau"), ("lightning_attention", "g"), ("mamba2", "A")])
def test_decays_of_heads(page, name):
    assert drawn(page, gate=-0.5)[name].tolist() == [-0.5, -0.5] and drawn(page, gate=None)[name].tolist() == [0.0, -50.0]


def test_keys_that_are_equal():
    x, other = drawn("by_token", alike=True), drawn("by_token")
    assert (x["k"][SAME] == x["k"][SAME][:1]).all() and not torch.equal(x["k"][4], x["k"][5])
    assert 1.9 < x["beta"].max() <= 2 and other["beta"].max() <= 1
    assert {c.gates for c in CASES} >= {"mixed", "alike", "0", "-50"}


@pytest.mark.slow
@pytest.mark.parametrize("page", [p if p in (*OWN, *ONES) else pytest.param(p, marks=pytest.mark.long) for p in (*names(), *OWN)])
def test_verify(page, capsys):
    assert main(["verify", "--algorithm", OWN.get(page, page), *SMALL, "--schedule", "fused"]) == 0
    out = capsys.readouterr().out
    assert out.count(" ok\n") == len(CASES) and " mixed " in out and " alike " in out


@pytest.mark.parametrize("reference, status", [("in_order", 0), ("too_slow", 1)])
def test_verify_compares_with_a_recurrence(reference, status, capsys):
    words = ["verify", "--algorithm", OWN["by_channel"], "--reference", f"{__file__}:{reference}", *SMALL, "--schedule", "fused"]
    assert main(words) == status
    out = capsys.readouterr().out
    assert ("all comparisons hold" in out) == (not status)
    assert " FAILED\n" not in next(line + "\n" for line in out.splitlines() if " 129 " in line)  # nothing forgets there
