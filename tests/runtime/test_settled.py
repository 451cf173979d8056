"""What a call after a good one of its kind still looks at: signs, types, classes, derivatives. And calls in dtypes that no kernel
has."""
import pytest
import torch
from reference import expected, problem, rms_error
from torch.autograd import forward_ad

from gdn_codegen import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

TARGET = next(t for t in OWN if runs(t, "cpu"))
HERE = dict(target=TARGET, chunk_size=16)
STATES = ("initial_state", "final_state")


def given(**more):
    """Tensors of every kind that a call may have, raw gates and a pool among them."""
    x = problem([9, 12], 1, 2, 32, 32, seed=3)
    pool = torch.randn(4, 2, 32, 32, generator=torch.Generator().manual_seed(1))
    return dict({n: x[n][None] for n in ("q", "k", "v", "g", "beta")}, gate="raw", A_log=torch.rand(2), dt_bias=torch.rand(2),
                initial_state=pool, final_state=torch.zeros_like(pool), state_indices=torch.tensor([2, 0]),
                cu_seqlens=torch.tensor([0, 9, 21]), out=torch.zeros_like(x["v"][None]), **HERE, **more)


TENSORS = [n for n, x in given().items() if isinstance(x, torch.Tensor)]


def settled(x):
    launch.forget()
    for _ in range(3):
        chunk_gated_delta_rule(**x)


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_a_kind_of_call_is_settled_once(op, monkeypatch):
    """Calls after the first one find what it decided."""
    launch.forget()
    settle, seen = launch._settle, []
    monkeypatch.setattr(launch, "_settle", lambda *a: seen.append(a) or settle(*a))
    x = problem([5], 1, 2, 32, 32)
    for _ in range(3):
        op(**{n: x[n][None] for n in ("q", "k", "v", "g", "beta")}, target=TARGET)
    assert len(seen) == 1


@pytest.mark.parametrize("name", TENSORS)
def test_torchs_negative_bit_is_seen(name):
    x = given()
    settled(x)
    kept = {n: y.clone() for n, y in x.items() if n in TENSORS}
    with pytest.raises(ValueError, match=f"{name}: got a view with torch's negative bit; accepted: x.resolve_neg"):
        chunk_gated_delta_rule(**{**x, name: torch._neg_view(x[name])})
    assert all(torch.equal(x[n], y) for n, y in kept.items())


@pytest.mark.parametrize("name, passed, wrong, op", [
    ("use_qk_l2norm_in_kernel", True, 1, chunk_gated_delta_rule),
    ("use_qk_l2norm_in_kernel", False, 0, recurrent_gated_delta_rule),
    ("output_final_state", True, 1.0, chunk_gated_delta_rule), ("state_v_first", True, 1, fused_recurrent_gated_delta_rule),
    ("inplace_final_state", False, 0, chunk_gated_delta_rule), ("head_first", False, 0, chunk_gated_delta_rule),
    ("unit_keys", True, 1, chunk_gated_delta_rule), ("allow_neg_eigval", False, 0.0, chunk_gated_delta_rule),
    ("chunk_size", 16, 16.0, chunk_gated_delta_rule), ("checkpoint_chunks", 1, True, chunk_gated_delta_rule)])
def test_what_equals_an_option_is_not_that_option(name, passed, wrong, op):
    x = {n: y[:, :9] for n, y in given().items() if n in ("q", "k", "v", "g", "beta")}
    launch.forget()
    for _ in range(3):
        op(**x, target=TARGET, **{name: passed})
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{name}: got {wrong}; accepted: "):
            op(**x, target=TARGET, **{name: wrong})


class Wrapped(torch.Tensor):
    """A class without memory, which has its own way with ops."""

    seen: list = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype,
                                                   device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        bare = lambda x: x.inner if isinstance(x, Wrapped) else x
        return func(*map(bare, args), **{n: bare(x) for n, x in (kwargs or {}).items()})


@pytest.mark.slow
@pytest.mark.parametrize("name, target", [*((n, TARGET) for n in TENSORS if n not in STATES),
                                          *((n, t) for t in OWN for n in ("k", "A_log") if t != TARGET and runs(t, "cpu"))])
def test_a_class_of_its_own_gets_the_op_in_whatever_place(name, target):
    x = dict(given(), target=target)
    settled(x)
    want = x["final_state"].clone()
    x["final_state"].fill_(float("nan"))
    Wrapped.seen.clear()
    o = chunk_gated_delta_rule(**{**x, name: Wrapped(x[name])})[0]
    assert torch.ops.gdn_codegen.gated_delta_rule_into.default in Wrapped.seen
    assert name == "out" or o is x["out"]
    assert torch.equal(x["final_state"][[2, 0]], want[[2, 0]])


def test_a_fake_tensor_among_real_ones_is_nobodys_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode
    x = given()
    settled(x)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x["k"])
    with pytest.raises(Exception, match=r"(?i)fake"):
        chunk_gated_delta_rule(**{**x, "k": fake})


@pytest.mark.parametrize("name", [n for n in TENSORS if n not in ("state_indices", "cu_seqlens")])
def test_derivatives_are_not_lost(name):
    x = given()
    settled(x)
    text = f"{name}: got a (dual tensor of forward-mode|tensor of vmap, grad, jvp)"
    with forward_ad.dual_level(), pytest.raises(ValueError, match=text):
        chunk_gated_delta_rule(**{**x, name: forward_ad.make_dual(x[name], torch.ones_like(x[name]))})
    run = lambda y: chunk_gated_delta_rule(**{**x, name: y})[0]
    with pytest.raises(ValueError, match=text):
        torch.func.jvp(run, (x[name],), (torch.ones_like(x[name]),))
    with pytest.raises(ValueError, match=text):
        torch.func.grad(lambda y: run(y).float().sum())(x[name])


@pytest.mark.parametrize("name", TENSORS)
def test_vmap_is_refused(name):
    x = given()
    settled(x)
    with pytest.raises(ValueError, match=f"{name}: got a tensor of vmap"):
        torch.func.vmap(lambda y: chunk_gated_delta_rule(**{**x, name: y})[0])(torch.stack([x[name]] * 2))


def test_tensors_that_no_transform_has_are_served_inside_one():
    x = given()
    settled(x)
    want = x["out"].clone()
    with forward_ad.dual_level():
        assert torch.equal(chunk_gated_delta_rule(**x)[0], want)
    with pytest.raises(ValueError, match="g: got a tensor of vmap"):
        torch.func.vmap(lambda g: fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], g, beta=x["beta"],
                                                                   target=TARGET)[0])(x["g"][None])


DTYPES = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("dtype, compiled", [
    (torch.float16, False), pytest.param(torch.bfloat16, False, marks=pytest.mark.long), (torch.bfloat16, True)])
def test_q_and_k_normalised_in_float32(dtype, compiled):
    x = problem([9, 12], 1, 2, 32, 32, seed=4, dtype=dtype)
    wide = {n: torch.nn.functional.normalize(torch.randn(1, 21, 1, 32, generator=torch.Generator().manual_seed(i)), dim=-1)
            for i, n in enumerate("qk")}
    said = dict({n: x[n][None] for n in ("v", "g", "beta")}, **wide, scale=x["scale"], initial_state=x["S"],
                cu_seqlens=torch.tensor([0, 9, 21]), output_final_state=True, **HERE)
    o, S = expected({**x, **{n: y[0].double() for n, y in wide.items()}})
    op = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="eager") if compiled else chunk_gated_delta_rule
    for names in ("qk", "q", "k"):  # one of them, too
        these = {**said, **{n: wide[n].to(dtype) for n in "qk" if n not in names}}
        for _ in range(3):
            got, final = op(**these)
            assert got.dtype == dtype and rms_error(got[0], o) < 1e-2 and rms_error(final, S) < 1e-2
            assert torch.equal(got, chunk_gated_delta_rule(**{**these, **{n: wide[n].to(dtype) for n in "qk"}})[0])
    with pytest.raises(ValueError, match="out: got memory of q"):
        chunk_gated_delta_rule(**said, out=said["q"].view(dtype)[..., :32].expand(1, 21, 1, 32))


@pytest.mark.slow
@pytest.mark.parametrize("initial, final, compiled", [*((i, f, False) for i in DTYPES for f in DTYPES),
                                                      (torch.float32, torch.float16, True)])
def test_states_have_a_dtype_each(initial, final, compiled):
    x = problem([9, 12], 1, 2, 32, 32, seed=4)
    given_state = x["S"].to(initial)
    said = dict({n: x[n][None] for n in ("q", "k", "v", "g", "beta")}, scale=x["scale"], initial_state=given_state,
                cu_seqlens=torch.tensor([0, 9, 21]), **HERE)
    o, S = expected({**x, "S": given_state.double()})
    bound = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 8e-3}[final]
    op = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="eager") if compiled else chunk_gated_delta_rule
    for _ in range(1 if compiled else 3):
        buffer = torch.full((2, 2, 32, 32), float("nan"), dtype=final)
        got, state = op(**said, final_state=buffer)
        assert state is buffer and rms_error(buffer, S) < bound and rms_error(got[0], o) < 5e-3
        state = op(**said, output_final_state=True, state_dtype=final)[1]
        assert state.dtype == final and torch.equal(state, buffer)
    assert torch.equal(said["initial_state"], given_state)


def test_a_buffer_in_another_dtype_is_checked_like_its_own():
    x = problem([9, 12], 1, 2, 32, 32, seed=4)
    said = dict({n: x[n][None] for n in ("q", "k", "v", "g", "beta")}, initial_state=x["S"],
                cu_seqlens=torch.tensor([0, 9, 21]), **HERE)
    half = dict(dtype=torch.float16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"final_state: got \(1, 2, 32, 32\); accepted: shape \(2, 2, 32, 32\)"):
            chunk_gated_delta_rule(**said, final_state=torch.zeros(1, 2, 32, 32, **half))
        with pytest.raises(ValueError, match=r"final_state: got strides .*elements that do not overlap"):
            chunk_gated_delta_rule(**said, final_state=torch.zeros(1, 2, 32, 32, **half).expand(2, 2, 32, 32))
        with pytest.raises(ValueError, match="final_state: got memory of v"):
            chunk_gated_delta_rule(**said, final_state=said["v"].view(-1)[:1].expand(2, 2, 32, 32))
        with pytest.raises(ValueError, match=r"state_dtype: got torch\.bfloat16; accepted: torch\.float16"):
            chunk_gated_delta_rule(**said, final_state=torch.zeros(2, 2, 32, 32, **half), state_dtype=torch.bfloat16)
        strided = torch.zeros(2, 2, 32, 40, **half)[..., 4:36]
        final = chunk_gated_delta_rule(**said, final_state=strided)[1]
        assert final is strided and rms_error(strided, expected({**x, "scale": 32 ** -0.5})[1]) < 5e-3
    *_, rows = chunk_gated_delta_rule(**said, state_dtype=torch.float16, checkpoint_chunks=1, output_final_state=True)
    assert rows.dtype == torch.float16
