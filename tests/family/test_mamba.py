"""Mamba-2's op and Lightning attention's, beside token recurrences in float64."""
import inspect
from math import inf

import pytest
import torch
from recurrences import lightning_attention, mamba2
from reference import rms_error
from torch.nn.functional import softplus

from gdn_codegen import chunk_lightning_attn, chunk_simple_gla, mamba_chunk_scan_combined, selective_state_update
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

pytestmark = pytest.mark.slow

HERE = [t for t in OWN if runs(t, "cpu")]
HV, G, P, N = 4, 2, 64, 32


def given(tokens, rows=1, dtype=torch.bfloat16, seed=0):
    """Arguments of mamba-ssm's function: A from slow to -20, dt before a softplus and its bias."""
    gen = torch.Generator().manual_seed(seed)
    def normal(*shape):
        return torch.randn(*shape, generator=gen)
    return {"x": normal(rows, tokens, HV, P).to(dtype), "dt": normal(rows, tokens, HV), "A": -torch.linspace(0.01, 20, HV),
            "B": normal(rows, tokens, G, N).to(dtype) / 4, "C": normal(rows, tokens, G, N).to(dtype) / 4, "chunk_size": 256,
            "D": normal(HV), "dt_bias": normal(HV)}


def want(a, ends, states=None, form=softplus):
    """out and the states of sequences, which end at `ends` of the flat rows."""
    a = {n: y.double() if isinstance(y, torch.Tensor) else y for n, y in a.items()}
    dt = form(a["dt"] + (0 if a["dt_bias"] is None else a["dt_bias"]))
    x, dt, B, C = (y.flatten(0, 1) for y in (a["x"], dt, a["B"], a["C"]))
    out, final = torch.zeros_like(x), torch.zeros(len(ends), HV, P, N).double()
    for n, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        for h in range(HV):
            S, g = torch.zeros(N, P).double() if states is None else states[n, h].double().T, h * G // HV
            for t in range(first, last):
                skip = torch.tensor(0.0) if a["D"] is None else a["D"][h]
                out[t, h], S = mamba2(S, C[t, g], B[t, g], x[t, h], dt[t, h], a["A"][h], skip)
            final[n, h] = S.T
    return out, final


def near(got, expected):
    for y, z in zip(got, expected, strict=True):
        assert rms_error(y.reshape(z.shape), z) < 5e-3


def test_arguments_are_those_of_the_libraries():
    names = [p.name for p in inspect.signature(mamba_chunk_scan_combined).parameters.values()
             if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ["x", "dt", "A", "B", "C", "chunk_size", "D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens",
                     "dt_softplus", "dt_limit", "return_final_states", "return_varlen_states"]
    names = [p.name for p in inspect.signature(chunk_lightning_attn).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ["q", "k", "v", "layer_idx", "num_layers", "scale", "initial_state", "output_final_state", "cu_seqlens"]


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_rows_of_mamba(target):
    a, states = given(70, rows=2), torch.randn(2, HV, P, N)
    near(mamba_chunk_scan_combined(**a, initial_states=states, dt_softplus=True, return_final_states=True, target=target),
         want(a, [70, 140], states))


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_a_pack_of_mamba(target):
    a, ends, states = given(65), torch.tensor([0, 17, 17, 65]), torch.randn(3, HV, P, N)
    idx = torch.tensor([0] * 17 + [2] * 48)[None].int()
    near(mamba_chunk_scan_combined(**a, initial_states=states, seq_idx=idx, cu_seqlens=ends, dt_softplus=True,
                                   return_varlen_states=True, target=target), want(a, [17, 17, 65], states))


@pytest.mark.slow
def test_a_pack_of_mamba_without_ends():
    """As transformers passes it: numbers of sequences alone, and the state after the last is wanted."""
    a, idx = given(65), torch.tensor([5] * 17 + [2] * 40 + [7] * 8)[None].int()
    out, states = want(a, [17, 57, 65])
    near(mamba_chunk_scan_combined(**a, seq_idx=idx, dt_softplus=True, return_final_states=True), (out, states[2:]))
    ends = torch.tensor([0, 17, 57, 65])
    idx = torch.repeat_interleave(ends.diff())[None]
    near(mamba_chunk_scan_combined(**a, seq_idx=idx, cu_seqlens=ends, dt_softplus=True, return_final_states=True),
         (out, states[2:]))


def test_what_mamba_may_leave_out():
    """Without a softplus dt is bounded by 0, as mamba-ssm's default limit says."""
    a = dict(given(33, dtype=torch.float32), D=None, dt_bias=None)
    got = mamba_chunk_scan_combined(**{n: y for n, y in a.items() if y is not None})
    assert isinstance(got, torch.Tensor) and (a["dt"] < 0).any()
    near([got], want(a, [33], form=lambda dt: dt.clamp(min=0))[:1])


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("softly", [True, False])
def test_limits_of_dt(softly, layout):
    """Gradients, too: none reaches a dt that a limit replaces."""
    a = dict(given(33, dtype=torch.float32), dt_limit=(0.5, 1.0))
    form = lambda dt: (softplus(dt) if softly else dt).clamp(0.5, 1.0)
    expected, dt = want({n: y for n, y in a.items() if n != "dt_limit"}, [33], form=form), a["dt"].requires_grad_()
    given_as = {n: y.transpose(1, 2) if n in ("x", "dt", "B", "C") and layout == "bhtd" else y for n, y in a.items()}
    out, final = mamba_chunk_scan_combined(**given_as, dt_softplus=softly, return_final_states=True, layout=layout)
    near((out.transpose(1, 2) if layout == "bhtd" else out, final), expected)
    out.sum().backward()
    x = dt.detach() + a["dt_bias"]
    inside = (form(x) > 0.5) & (form(x) < 1.0)
    assert 0 < inside.sum() < inside.numel() and torch.equal(dt.grad != 0, inside)


def test_a_gate_multiplies_the_result():
    a = given(20)
    a["z"] = a["x"].flip(1)
    o = want(a, [20])[0] * torch.nn.functional.silu(a["z"][0].double())
    near([mamba_chunk_scan_combined(**a, dt_softplus=True)], [o])


def test_numbers_of_heads_in_the_dtype_of_a_model():
    a = given(20)
    half = {n: a[n].bfloat16() for n in ("A", "D", "dt_bias", "dt")}
    near(mamba_chunk_scan_combined(**{**a, **half}, dt_softplus=True, return_final_states=True), want({**a, **half}, [20]))


ENDS = {"cu_seqlens": torch.tensor([0, 4, 9]), "seq_idx": torch.tensor([[0] * 4 + [1] * 5])}


@pytest.mark.parametrize(("said", "message"), [
    (dict(z=torch.zeros(1)), r"z: got shape \(1,\); accepted: shape \(1, 9, 4, 64\)"),
    (dict(z=torch.zeros(1), out=torch.zeros(1)), "z: got a value beside out"),
    (dict(initial_state=torch.zeros(1)), "initial_state: got a value; accepted: initial_states"),
    (dict(D=torch.zeros(HV, P)), r"D: got shape \(4, 64\); accepted: shape \[HV\]"),
    (dict(D=torch.zeros(3)), r"D: got shape \(3,\); accepted: shape \(4,\)"),
    (dict(dt_limit=(-1.0, inf)), r"dt_limit: got \(-1.0, inf\); accepted: two numbers"),
    (dict(dt_limit=(0.1, 0.01)), "dt_limit: got"), (dict(dt_limit=0.1), "dt_limit: got 0.1"),
    (dict(dt_limit=(0.1, inf), dt_bias=torch.zeros(3)), r"dt_bias: got shape \(3,\); accepted: shape \(4,\)"),
    (dict(dt_limit=(0.1, inf), dt=torch.zeros(9, HV)), "dt: got rank 2"),
    (dict(chunk_size=0), "chunk_size: got 0; accepted: a number of tokens"),
    (dict(seq_idx=ENDS["seq_idx"][0]), r"seq_idx: got shape \(9,\); accepted: shape \(1, 9\)"),
    (dict(seq_idx=ENDS["seq_idx"] / 1), "seq_idx: got torch.float32; accepted"),
    (dict(return_varlen_states=True), "return_varlen_states: got True; accepted: cu_seqlens as well"),
    (dict(cu_seqlens=ENDS["cu_seqlens"]), "cu_seqlens: got a value without seq_idx; accepted: both"),
    (dict(ENDS, return_final_states=True, return_varlen_states=True), "return_final_states: got True; accepted: False beside"),
    (dict(ENDS, cu_seqlens=torch.tensor([0, 5, 9])), r"seq_idx: got \[0, 0, 0, 0, 1, .* accepted: the sequences of cu_seqlens"),
    (dict(ENDS, seq_idx=ENDS["seq_idx"][:, :8]), r"seq_idx: got shape \(1, 8\); accepted: shape \(1, 9\)"),
    (dict(dt_softplus=1), "dt_softplus: got 1; accepted: True or False"),
    (dict(A=[-1.0] * 4), "A: got list; accepted: a torch.Tensor"),
    (dict(A=None), "A: got NoneType; accepted: a torch.Tensor"),
    (dict(A=torch.zeros(HV, N)), r"A: got shape \(4, 32\); accepted: shape \(4,\)"),
    (dict(dt_bias=torch.zeros(HV).int()), "dt_bias: got torch.int32; accepted"),
    (dict(B=torch.zeros(1, 9, G, N).half()), "B: got torch.float16; accepted: torch.bfloat16, that of x"),
    (dict(C=torch.zeros(1, 8, G, N).bfloat16()), r"B: got shape .*; accepted: T = 8, as the inputs before it have"),
    (dict(x=torch.zeros(1, 9, HV * P)), "x: got rank 3; accepted: rank 4"),
    (dict(initial_states=torch.zeros(1, HV, N, P)), r"initial_states: got \(1, 4, 32, 64\); accepted: shape \(1, 4, 64, 32\)")])
def test_what_mamba_refuses(said, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        mamba_chunk_scan_combined(**{**given(9), **said})


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_lightning_attention(target):
    """Head 0 keeps all, in FLA as here. The layer's number scales all decays."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, h, 32, generator=gen).half() / 4 for h in (2, 2, 4))
    S = torch.randn(2, 4, 32, 32, generator=gen)
    ends = torch.tensor([0, 17, 40])
    o, final = chunk_lightning_attn(q, k, v, 3, 12, initial_state=S, output_final_state=True, cu_seqlens=ends, target=target)
    for n, (first, last) in enumerate(((0, 17), (17, 40))):
        for h in range(4):
            state, g = S[n, h].double(), torch.tensor(-8 / 4 * (1 - 3 / 12) * h).double()
            for t in range(first, last):
                y, state = lightning_attention(state, *(x[0, t].double()[at] for x, at in ((q, h // 2), (k, h // 2), (v, h))), g,
                                               32 ** -0.5)
                assert (o[0, t, h] - y).norm() < 5e-3 * v.double().norm(dim=-1).max()
            near([final[n, h]], [state])
    swapped = chunk_lightning_attn(*(x.transpose(1, 2) for x in (q, k, v)), 3, 12, initial_state=S, cu_seqlens=ends,
                                   layout="bhtd", target=target)[0]
    assert torch.allclose(swapped.transpose(1, 2), o, atol=1e-3)
    gamma = -8 / 4 * (1 - 3 / 12) * torch.arange(4.0)
    assert torch.equal(chunk_simple_gla(q, k, v, g_gamma=gamma, initial_state=S, cu_seqlens=ends, target=target)[0], o)


@pytest.mark.parametrize(("said", "message"), [
    ((True, 2), "layer_idx: got bool; accepted: an int"), ((0, 0), "layer_idx: got 0 of 0 layers; accepted: 0 to num_layers"),
    ((3, 2), "layer_idx: got 3 of 2 layers")])
def test_what_lightning_attention_refuses(said, message):
    x = torch.zeros(1, 4, 2, 32).half()
    with pytest.raises(ValueError, match=message):
        chunk_lightning_attn(x, x, x, *said)


# --- one step --------------------------------------------------------------------------------------------------------
def step(tokens, rows=3, **more):
    """Arguments of a decoding step, [rows, tokens, heads, ...], with states [rows, HV, P, N]."""
    a = given(tokens, rows=rows, **more)
    a.pop("chunk_size")
    return a, torch.randn(rows, HV, P, N, generator=torch.Generator().manual_seed(5))


def test_the_steps_arguments_are_those_of_the_library():
    names = [p.name for p in inspect.signature(selective_state_update).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ["state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "state_batch_indices"]


@pytest.mark.parametrize("expanded", [False, True])
def test_one_token(expanded):
    """A slot for each sequence; numbers of heads as mamba-ssm's callers expand them; a gate."""
    a, states = step(1)
    a["z"] = torch.randn_like(a["x"].float()).bfloat16()
    want_o, want_S = want(a, [1, 2, 3], states)
    pool = torch.full((6, HV, P, N), 7.0)
    pool[[4, 0, 3]] = states
    one = {n: y[:, 0] if y.ndim > 1 else y for n, y in a.items()}
    if expanded:
        one |= {"dt": one["dt"][..., None].expand(-1, -1, P), "A": one["A"][:, None, None].expand(HV, P, N),
                "D": one["D"][:, None].expand(HV, P), "dt_bias": one["dt_bias"][:, None].expand(HV, P)}
    for slots in ([4, 0, 3], [4, -1, 3]):
        pool[[4, 0, 3]] = states
        o = selective_state_update(pool, **one, dt_softplus=True, state_batch_indices=torch.tensor(slots))
        here = [n for n, slot in enumerate(slots) if slot >= 0]
        gated = want_o * torch.nn.functional.silu(a["z"].flatten(0, 1).double())
        near([o[here], pool[slots][here]], [gated[here], want_S[here]])
        assert (pool[[1, 2, 5]] == 7).all() and (len(here) == 3 or (torch.equal(pool[0], states[1]) and (o[1] == 0).all()))


def test_a_call_that_is_refused_for_z_leaves_the_states():
    a, states = step(1)
    was = states.clone()
    for z, message in ((a["x"][:, 0], "shape"), (a["x"].to("meta"), "device meta"), (a["x"].long(), "torch.int64")):
        with pytest.raises(ValueError, match=f"z: got {message}"):
            selective_state_update(states, **a | {"z": z})
    assert torch.equal(states, was)


@pytest.mark.slow
def test_several_tokens_in_place_and_packed():
    a, states = step(4)
    want_o, want_S = want(a, [4, 8, 12], states)
    mine, out = states.clone(), torch.empty_like(a["x"])
    assert selective_state_update(mine, **a, dt_softplus=True, out=out) is out
    near([out, mine], [want_o, want_S])
    mine = states.clone()
    o = selective_state_update(mine, **{n: y.flatten(0, 1) if y.ndim > 1 else y for n, y in a.items()}, dt_softplus=True,
                               cu_seqlens=torch.tensor([0, 4, 8, 12]))
    near([o, mine], [want_o, want_S])
    kept = states.clone()
    near([selective_state_update(kept, **a, dt_softplus=True, disable_state_update=True)], [want_o])
    assert torch.equal(kept, states)


def test_without_a_softplus_dt_may_be_below_0():
    a, states = step(1)
    a["A"] /= 20
    want_o, want_S = want(a, [1, 2, 3], states, form=lambda dt: dt)
    o = selective_state_update(states, **{n: y[:, 0] if y.ndim > 1 else y for n, y in a.items()})
    near([o, states], [want_o, want_S])
    assert (a["dt"] + a["dt_bias"] < 0).any()


@pytest.mark.parametrize("tokens", [1, HV])
def test_the_bias_of_dt_belongs_to_heads_in_each_layout(tokens):
    """As many tokens as heads: a bias along the wrong axis has the right shape. One token may come without its axis."""
    a, states = step(tokens)
    a["A"] /= 20
    want_o, want_S = want(a, [tokens, 2 * tokens, 3 * tokens], states, form=lambda dt: dt)
    for squeezed in (False, True)[:1 + (tokens == 1)]:
        given = {n: y.transpose(1, 2) if y.ndim > 1 else y for n, y in a.items()}
        given = {n: y.squeeze(2) if y.ndim > 1 and squeezed else y for n, y in given.items()}
        mine = states.clone()
        o = selective_state_update(mine, **given, layout="bhtd")
        near([(o.unsqueeze(2) if squeezed else o).transpose(1, 2), mine], [want_o, want_S])


@pytest.mark.parametrize(("said", "message"), [
    (dict(x=torch.zeros(3, HV * P)), r"x: got rank 2; accepted: rank 3, \[batch, HV, P\], or rank 4"),
    (dict(B=torch.zeros(3, N)), "B: got rank 2; accepted: rank 3, as x has rank 3"),
    (dict(dt=torch.zeros(3, HV, P)), r"dt: got shape \(3, 4, 64\) with strides .*; accepted: one number for each head"),
    (dict(D=torch.zeros(HV, P)), "D: got shape"), (dict(pad_slot_id=0), "pad_slot_id: got 0; accepted: -1"),
    (dict(dt_softplus=1), "dt_softplus: got 1; accepted: True or False"),
    (dict(state=torch.zeros(3, HV, N, P)), r"state: got \(3, 4, 32, 64\); accepted: shape \(3, 4, 64, 32\)"),
    (dict(state=None), "state: got NoneType"),
    (dict(dt_bias=torch.zeros(1)), r"dt_bias: got shape \(1,\); accepted: shape \(4,\)"),
    (dict(dt=torch.zeros(3, HV).long()), "dt: got torch.int64"),
    (dict(dt_bias=torch.zeros(HV).long()), "dt_bias: got torch.int64"),
    (dict(state_batch_indices=torch.tensor([0, 0, 1])), "state_batch_indices: got"),
    (dict(z=torch.zeros(3, HV, P), out=torch.zeros(1)), "z: got a value beside out"),
    (dict(rand_seed=torch.zeros(1)), "rand_seed: got Tensor; accepted: None")])
def test_what_a_step_refuses(said, message):
    a, states = step(1)
    one = {n: y[:, 0] if y.ndim > 1 else y for n, y in a.items()}
    with pytest.raises(ValueError, match=f"^{message}"):
        selective_state_update(**{"state": states, **one, **said})
