"""States in float8: what a call gives is what it gives for the same states in float32, rounded once, with saturation."""
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize

from gdn_codegen import chunk_gated_delta_rule, chunk_kda, fused_recurrent_gated_delta_rule

H, K, V = 2, 16, 16
ENDS = torch.tensor([0, 15, 15, 40])
DTYPES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])


def bits(x):
    return x.view(torch.uint8)


def rounded(x, dtype):
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


@pytest.fixture
def x():
    gen = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=gen)
    q, k = (normalize(r(1, 40, H, K), dim=-1) for _ in range(2))
    v = r(1, 40, H, V)
    v[:, 14] = 3e7  # the state after it is larger than a float8
    return dict(q=q, k=k, v=v, g=-torch.rand(1, 40, H, generator=gen), beta=torch.rand(1, 40, H, generator=gen), cu_seqlens=ENDS,
                target="triton")


def states(dtype, n=3, seed=1):
    return torch.randn(n, H, K, V, generator=torch.Generator().manual_seed(seed)).to(dtype)


POOL = states(torch.float8_e5m2, 5)


@pytest.mark.slow
@DTYPES
def test_states_of_sequences(dtype, x):
    S = states(dtype)
    o, want = chunk_gated_delta_rule(**x, initial_state=S.float(), output_final_state=True)
    got, final = chunk_gated_delta_rule(**x, initial_state=S, output_final_state=True)
    assert torch.equal(got, o) and torch.equal(final, want), "the final state is float32 unless the call says otherwise"
    for said in (dtype, str(dtype).removeprefix("torch.")):
        got, final = chunk_gated_delta_rule(**x, initial_state=S, output_final_state=True, state_dtype=said)
        assert torch.equal(got, o) and torch.equal(bits(final), bits(rounded(want, dtype)))
    assert float(final.float().max()) == torch.finfo(dtype).max and bool(final.float().isfinite().all())
    buffer = torch.full_like(S, float("nan"))
    for _ in range(2):
        got, final = chunk_gated_delta_rule(**x, initial_state=S, final_state=buffer)
        assert final is buffer and torch.equal(got, o) and torch.equal(bits(buffer), bits(rounded(want, dtype)))
    mine = S.clone()
    got, final = chunk_gated_delta_rule(**x, initial_state=mine, inplace_final_state=True)
    assert final is mine and torch.equal(got, o) and torch.equal(bits(mine), bits(rounded(want, dtype)))
    other = torch.empty(3, H, K, V, dtype=torch.bfloat16)
    chunk_gated_delta_rule(**x, initial_state=S, final_state=other)
    assert torch.equal(other, want.to(torch.bfloat16))
    *_, kept = chunk_gated_delta_rule(**x, initial_state=S, output_final_state=True, state_dtype=dtype, checkpoint_chunks=1,
                                      chunk_size=16)
    assert kept.dtype == dtype


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("slots", [[4, -1, 2], [-1, -1, -1], [-1, 0, 5]])
def test_states_in_a_pool(dtype, slots, x):
    room = states(dtype, 12)
    pool = room[::2]  # other memory lies between slots
    assert not pool.is_contiguous()
    wide, indices, was = pool.float(), torch.tensor(slots, dtype=torch.int32), bits(room).clone()
    want, _ = chunk_gated_delta_rule(**x, initial_state=wide, state_indices=indices)
    got, final = chunk_gated_delta_rule(**x, initial_state=pool, state_indices=indices)
    assert final is pool and torch.equal(got, want)
    written = [n for n in slots if n >= 0]
    assert torch.equal(bits(pool[written]), bits(rounded(wide[written], dtype)))
    untouched = [n for n in range(12) if n % 2 or n // 2 not in written]
    assert torch.equal(bits(room)[untouched], was[untouched])
    alone = states(dtype, 6)
    got, final = chunk_gated_delta_rule(**x, initial_state=alone, state_indices=indices, inplace_final_state=False,
                                        output_final_state=True)
    assert torch.equal(bits(alone), bits(states(dtype, 6))) and final.dtype == dtype and final.shape == (3, H, K, V)


@pytest.mark.slow
def test_other_ops(x):
    """Another member, and decoding steps, each in a pool."""
    dtype, slots = torch.float8_e4m3fn, torch.tensor([3, 0, 1])
    pool, wide = states(dtype, 5), states(dtype, 5).float()
    y = {**x, "g": x["g"][..., None].expand(1, 40, H, K).contiguous()}
    want, _ = chunk_kda(**y, initial_state=wide, state_indices=slots)
    got, _ = chunk_kda(**y, initial_state=pool, state_indices=slots)
    assert torch.equal(got, want) and torch.equal(bits(pool[[3, 0, 1]]), bits(rounded(wide[[3, 0, 1]], dtype)))
    step = {n: y[:, :3].transpose(0, 1).contiguous() for n, y in x.items() if n in ("q", "k", "v", "g", "beta")}
    wide = pool.float()
    for _ in range(2):
        want, _ = fused_recurrent_gated_delta_rule(**step, target="triton", initial_state=wide, state_indices=slots)
        got, _ = fused_recurrent_gated_delta_rule(**step, target="triton", initial_state=pool, state_indices=slots)
        assert torch.equal(got, want)
        wide = rounded(wide, dtype).float()  # as a step rounds what it stores
        assert torch.equal(pool.float(), wide)


@pytest.mark.slow
def test_torch_compile_takes_them(x):
    pool, slots = states(torch.float8_e5m2, 5), torch.tensor([3, -1, 1])
    same = pool.clone()
    want, _ = chunk_gated_delta_rule(**x, initial_state=pool, state_indices=slots)
    call = torch.compile(lambda x, pool: chunk_gated_delta_rule(**x, initial_state=pool, state_indices=slots)[0], fullgraph=True,
                         backend="eager")
    assert torch.equal(call(x, same), want) and torch.equal(bits(same), bits(pool))


def test_nothing_waits_for_the_device():
    """Fake tensors have no values: an op that reads some raises."""
    with FakeTensorMode():
        on = dict(device="cuda")
        rows = [torch.empty(1, 40, H, n, dtype=torch.bfloat16, **on) for n in (K, K, V)]
        g, beta = (torch.empty(1, 40, H, **on) for _ in range(2))
        pool, slots = torch.empty(5, H, K, V, dtype=torch.float8_e4m3fn, **on), torch.empty(3, dtype=torch.int32, **on)
        ends = torch.empty(4, dtype=torch.int32, **on)
        o, final = chunk_gated_delta_rule(*rows, g, beta, initial_state=pool, state_indices=slots, cu_seqlens=ends)
        assert o.shape == (1, 40, H, V) and final is pool


@pytest.mark.parametrize("change, said", [
    (dict(state_dtype=torch.float8_e4m3fnuz), "state_dtype: got torch.float8_e4m3fnuz; accepted: torch.float16, "),
    (dict(initial_state=states(torch.float8_e5m2, 2)), "initial_state: got"),
    (dict(initial_state=POOL, state_indices=torch.tensor([0, 4, 1]), final_state=POOL[:3].clone()),
     "final_state: got 3 slots; accepted: at least 5"),
    (dict(initial_state=POOL[:1].expand(3, H, K, V), inplace_final_state=True), "initial_state: got strides (0, "),
    (dict(initial_state=POOL, state_indices=torch.tensor([0, 0, 1])), "state_indices: got slot 0 for"),
    (dict(initial_state=POOL, state_indices=torch.tensor([0, 5, 1])), "state_indices: got [0, 5, 1]"),
    (dict(initial_state=POOL, state_indices=torch.tensor([0.0, 1, 2])), "state_indices: got torch.float32"),
    (dict(initial_state=POOL, state_indices=torch.tensor([0, 3, 1]), checkpoint_slots=torch.tensor([[2], [-1], [-1]]),
          checkpoint_positions=torch.ones(3, 1, dtype=torch.int64)),
     "checkpoint_positions: got a tensor beside states in float8"),
    (dict(initial_state=states(torch.float8_e5m2), state_dtype=torch.float8_e5m2, batch_invariant=True),
     "state_dtype: got torch.float8_e5m2 with batch_invariant=True"),
    (dict(initial_state=states(torch.float8_e5m2), final_state=states(torch.float32), state_dtype=torch.float8_e5m2),
     "state_dtype: got torch.float8_e5m2; accepted: torch.float32")])
def test_what_is_refused(change, said, x):
    with pytest.raises(ValueError) as error:
        chunk_gated_delta_rule(**x, **change)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, chunk_kda])
@pytest.mark.parametrize("change", [
    lambda S: dict(initial_state=S[:3], inplace_final_state=True,
                   out=S.view(torch.float32).flatten()[:40 * H * V].view(1, 40, H, V)),
    lambda S: dict(initial_state=S[:3], final_state=S[:3].view(torch.uint8).view(S.dtype)),
    lambda S: dict(initial_state=S[:5], final_state=S[1:6], state_indices=torch.tensor([0, 1, 2]))])
def test_memory_that_a_call_writes_is_its_own(op, change, x):
    g = x["g"] if op is chunk_gated_delta_rule else x["g"][..., None].expand(1, 40, H, K).contiguous()
    with pytest.raises(ValueError, match=r"^(out|initial_state|final_state): got memory of"):
        op(**{**x, "g": g}, **change(torch.zeros(20, H, K, V, dtype=torch.float8_e5m2)))


def test_states_that_are_read_may_share_memory(x):
    one = states(torch.float8_e5m2, 1)
    o, final = chunk_gated_delta_rule(**x, initial_state=one.expand(3, H, K, V), output_final_state=True)
    want, state = chunk_gated_delta_rule(**x, initial_state=one.repeat(3, 1, 1, 1), output_final_state=True)
    assert torch.equal(o, want) and torch.equal(final, state)


def test_a_pool_without_slots(x):
    pool, none = torch.zeros(0, H, K, V, dtype=torch.float8_e5m2), torch.full((3,), -1)
    o, final = chunk_gated_delta_rule(**x, initial_state=pool, state_indices=none)
    assert bool((o == 0).all()) and final is pool


@pytest.mark.parametrize("change", [dict(initial_state=states(torch.float8_e5m2)), dict(state_dtype=torch.float8_e5m2),
                                    dict(final_state=states(torch.float8_e5m2))])
def test_nothing_is_differentiated_through_them(change, x):
    x["v"].requires_grad_()
    for op, g in ((chunk_gated_delta_rule, x["g"]), (chunk_kda, x["g"][..., None].expand(1, 40, H, K))):
        with pytest.raises(ValueError, match=rf"{next(iter(change))}: got torch.float8_e5m2; accepted: .* that requires grad"):
            op(**{**x, "g": g}, **change, output_final_state=True)
