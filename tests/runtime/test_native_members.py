"""Settled calls of members: as one compiled function the same bits as through Python, and as kept by Python what each call still
looks at."""
from functools import partial

import pytest
import test_native_launcher
import torch

import gdn_codegen as ops
from gdn_codegen.runtime.call import known_members, launch
from gdn_codegen.runtime.targets import runs

pytestmark = test_native_launcher.pytestmark
compiled, poison, started = test_native_launcher.compiled, test_native_launcher.poison, test_native_launcher.started
ASK = dict(target="tilelang", chunk_size=16, schedule="walk")


@pytest.fixture(autouse=True)
def nothing_known():
    known_members.forget()
    yield
    known_members.forget()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4


def qkv(tokens=40, seed=0):
    q, k, v = (normal(1, tokens, n, 16, seed=seed + i).half() for i, n in enumerate((2, 2, 4)))
    return dict(q=q, k=k, v=v)


def kda(seed):
    x = dict(qkv(seed=seed), g=normal(1, 40, 4, 16, seed=seed + 3), beta=normal(1, 40, 4, seed=seed + 4).sigmoid())
    return ops.chunk_kda, dict(x, use_gate_in_kernel=True, A_log=normal(4, seed=seed + 5), dt_bias=normal(64, seed=seed + 6),
                               output_final_state=True, **ASK)


def product_of_keys(seed):
    """A pool in place, by a keyword of another library."""
    x = dict(qkv(seed=seed), beta=normal(1, 40, 4, seed=seed + 4).sigmoid())
    return ops.chunk_delta_rule, dict(x, initial_state=normal(3, 4, 16, 16, seed=seed + 5), scale=0.5,
                                      ssm_state_indices=torch.tensor([2, 0]).int(),
                                      cu_seqlens=torch.tensor([0, 11, 40]).int(), **ASK)


def decays_of_heads(seed):
    """Buffers, and a copy of cu_seqlens on the CPU."""
    ends = torch.tensor([0, 11, 40]).int()
    return ops.chunk_simple_gla, dict(qkv(seed=seed), g_gamma=-normal(4, seed=seed + 3).abs(), cu_seqlens=ends,
                                      cu_seqlens_cpu=ends, out=torch.full((1, 40, 4, 16), 7.0).half(),
                                      final_state=torch.zeros(2, 4, 16, 16), **ASK)


def mamba(seed):
    x = {n: normal(3, h, 16, seed=seed + i).half() for i, (n, h) in enumerate((("x", 4), ("B", 2), ("C", 2)))}
    return ops.selective_state_update, dict(x, state=normal(5, 4, 16, 16, seed=seed + 3), dt=normal(3, 4, seed=seed + 4),
                                            A=-normal(4, seed=seed + 5).abs(), D=normal(4, seed=seed + 6), dt_softplus=True,
                                            dt_bias=normal(4, seed=seed + 7), target="tilelang",
                                            state_batch_indices=torch.tensor([4, 0, 2]).int())


def ran(op, said):
    made = op(**said)
    made = made if isinstance(made, tuple) else (made,)
    return [x.clone() for x in (*made, *said.values()) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("make", [kda, product_of_keys, decays_of_heads, mamba])
def test_it_gives_the_bits_that_python_gives(make, started):
    first = ran(*make(1))
    assert {how for _, how in started} == {"python"}
    started.clear()
    ran(*make(20))
    again = ran(*make(1))
    assert {how for _, how in started} == {"chain"}
    assert len(first) == len(again) and all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, again, strict=True))


def test_what_is_not_the_same_call_is_not_taken_for_it(started):
    op, x = product_of_keys(1)
    x = {n: y for n, y in x.items() if n not in ("initial_state", "ssm_state_indices")}
    first = ran(op, x)
    states = normal(2, 4, 16, 16, seed=9)

    def run(said):
        """From the same states each time, which some calls overwrite."""
        states.copy_(normal(2, 4, 16, 16, seed=9))
        return ran(op, said)

    for changed in (dict(output_final_state=True), dict(initial_state=states), dict(beta=x["beta"].half()), dict(scale=0.25),
                    dict(cu_seqlens=torch.tensor([0, 12, 40]).int()), dict(q=x["k"]), dict(use_qk_l2norm_in_kernel=True),
                    dict(initial_state=states, final_state=states),
                    dict(initial_state=states, final_state=torch.zeros_like(states))):
        said = {**x, **changed}
        got = [run(said) for _ in range(3)][-1]
        assert all(torch.equal(a, b) for a, b in zip(ran(op, x), first, strict=True)), changed
        known_members.forget()
        want = run(said)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), changed


# --- kept by Python --------------------------------------------------------------------------------------------------
needs_triton = pytest.mark.skipif(not runs("triton", "cpu"), reason="needs triton")


def known(**more):
    """A member's call that came twice before, and its arguments."""
    x = dict(qkv(9), beta=normal(1, 9, 4).sigmoid(), initial_state=normal(3, 4, 16, 16), state_indices=torch.tensor([2]),
             out=torch.zeros(1, 9, 4, 16).half(), target="triton", chunk_size=16, cu_seqlens=torch.tensor([0, 9]), **more)
    for _ in range(2):
        ops.chunk_delta_rule(**x)
    assert len(known_members._known) == 1
    return x


@needs_triton
def test_a_known_call_settles_nothing(monkeypatch):
    x = known()
    want = ran(ops.chunk_delta_rule, {**x, "initial_state": normal(3, 4, 16, 16)})
    def settles(*a):
        raise AssertionError
    monkeypatch.setattr(launch, "admitted", settles)
    got = ran(ops.chunk_delta_rule, {**x, "initial_state": normal(3, 4, 16, 16)})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@needs_triton
@pytest.mark.parametrize("changed, message", [
    (lambda x: dict(q=torch._neg_view(x["q"])), "q: got a view with torch's negative bit"),
    (lambda x: dict(out=x["v"]), "out: got memory of v"),
    (lambda x: dict(out=x["v"][:]), "out: got memory of v"),
    (lambda x: dict(v=x["v"].clone().requires_grad_(), out=x["v"]), "out: got a tensor; .*requires grad"),
    (lambda x: dict(chunk_size=16.0), "chunk_size: got 16.0"),
    (lambda x: dict(output_final_state=0), "output_final_state: got 0"),
    (lambda x: dict(scale=float("nan")), "scale: got nan"),
    (lambda x: dict(state_indices=torch.tensor([3])), r"state_indices: got \[3\]; accepted: slots"),
    (lambda x: dict(cu_seqlens=torch.tensor([0, 10])), "cu_seqlens: got"),
    (lambda x: dict(cu_seqlens_cpu=torch.tensor([0, 8])), "cu_seqlens_cpu: got"),
    (lambda x: dict(max_seqlen=1), "max_seqlen: got 1; accepted: at least"),
    (lambda x: dict(max_seqlen=True), "max_seqlen: got True"),
    (lambda x: dict(cu_seqlens=None, cu_seq_lens_q=x["cu_seqlens"], max_length_q=1), "max_length_q: got 1; accepted: at least"),
    (lambda x: dict(k=None), "k: got NoneType")])
def test_what_a_known_call_still_looks_at(changed, message):
    x = known()
    with pytest.raises(ValueError, match=message):
        ops.chunk_delta_rule(**{**x, **changed(x)})


@needs_triton
def test_values_that_are_looked_at_are_so_each_time():
    x = qkv(9)
    call = partial(ops.chunk_simple_gla, **x, gate="linear", target="triton", chunk_size=16)
    for _ in range(2):
        call(g=torch.ones(1, 9, 4))
    with pytest.raises(ValueError, match="g: got -1 with gate='linear'"):
        call(g=-torch.ones(1, 9, 4))
