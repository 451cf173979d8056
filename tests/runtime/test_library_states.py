"""The custom op that writes to its caller's memory: states in place, in pools, in buffers; checkpoints."""
from dataclasses import astuple

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.call.request import Request
from gdn_codegen.runtime.targets import runs
from gdn_codegen.runtime.torch_library import gated_delta_rule, gated_delta_rule_into

pytestmark = pytest.mark.skipif(not runs("triton", "cpu"), reason="needs triton")
NAMES = ("q", "k", "v", "g", "beta")
MODEL = dict(target="triton", chunk_size=16)
LENGTHS = (20, 5, 17)


@pytest.fixture
def given():
    """Tensors, ends, what the states should become; the pool's slots and a copy of it."""
    x = problem(LENGTHS, 1, 2, 32, 32, seed=7)
    slots = torch.tensor([4, 1, 2], dtype=torch.int32)
    pool = torch.randn(6, 2, 32, 32, generator=torch.Generator().manual_seed(1))
    pool[slots.long()] = x["S"]
    return [x[n][None] for n in NAMES], torch.tensor([0, 20, 25, 42]), expected(x), x, slots, pool


def words(output_final_state=False, checkpoint_chunks=0, state_v_first=False, state_dtype="float32", in_place=False):
    return None, *astuple(Request(output_final_state, checkpoint_chunks=checkpoint_chunks, state_v_first=state_v_first,
                                  state_dtype=state_dtype, in_place=in_place, target="triton", chunk_size=16))


def compiled(f):
    return torch.compile(f, fullgraph=True, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_a_pool_in_place(given, wrap):
    a, cu, (want, S), x, slots, pool = given
    before = pool.clone()
    call = wrap(lambda pool, slots: chunk_gated_delta_rule(*a, x["scale"], pool, cu_seqlens=cu, state_indices=slots, **MODEL))
    o, final = call(pool, slots)
    assert final is pool and rms_error(o[0], want) < 5e-3 and rms_error(pool[slots.long()], S) < 5e-3
    assert torch.equal(pool[[0, 3, 5]], before[[0, 3, 5]])


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_in_place_and_in_a_buffer(given, wrap):
    a, cu, (_, S), x, _, _ = given
    state, buffer = x["S"].clone(), torch.empty_like(x["S"])
    both = wrap(lambda state, buffer: (
        chunk_gated_delta_rule(*a, x["scale"], x["S"], True, cu_seqlens=cu, final_state=buffer, **MODEL)[1],
        chunk_gated_delta_rule(*a, x["scale"], state, cu_seqlens=cu, inplace_final_state=True, **MODEL)[1]))
    first, second = both(state, buffer)
    assert first is buffer and second is state and rms_error(buffer, S) < 5e-3 and torch.equal(buffer, state)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_a_buffer_for_o_beside_a_pool_that_stays(given, wrap):
    """Rows past the last end stay as they were, and a buffer that does not fit is refused."""
    a, cu, (want, S), x, slots, pool = given
    a = [torch.nn.functional.pad(t, (0, 0) * (t.ndim - 2) + (0, 6)) for t in a]
    before = pool.clone()
    call = wrap(lambda out: chunk_gated_delta_rule(*a, x["scale"], pool, True, cu_seqlens=cu, state_indices=slots, out=out,
                                                   inplace_final_state=False, **MODEL))
    out = torch.full_like(a[2], 7.0)
    o, final = call(out)
    assert o is out and rms_error(out[0, :42], want) < 5e-3 and (out[0, 42:] == 7.0).all()
    assert rms_error(final, S) < 5e-3 and torch.equal(pool, before)
    with pytest.raises(ValueError, match="out: got"):
        call(torch.zeros_like(a[2], dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_checkpoints(given, wrap):
    a, cu, _, x, _, _ = given
    f = lambda *b: chunk_gated_delta_rule(*b[:5], x["scale"], x["S"], True, cu_seqlens=cu, checkpoint_chunks=1, **MODEL)
    o, final, states = wrap(f)(*a)
    _, S = expected({**x, "lengths": [16], **{n: x[n][:16] for n in NAMES}, "S": x["S"][:1]})
    assert states.shape == (2, 2, 32, 32) and rms_error(states[:1], S) < 5e-3
    assert final.shape == (3, 2, 32, 32) and o.shape == a[2].shape


def test_decoding_in_a_pool_skips_padding(given):
    """As servers do: a token a sequence, in rows, some of none."""
    a, _, _, x, _, pool = given
    before, slots = pool.clone(), torch.tensor([2, -1, 0])
    b = [t[:, :3].transpose(0, 1).contiguous() for t in a]
    o, final = recurrent_gated_delta_rule(*b, x["scale"], pool, state_indices=slots, target="triton")
    x1 = {**x, "lengths": [1, 1], **{n: x[n][[0, 2]] for n in NAMES}, "S": before[[2, 0]]}
    want, S = expected(x1)
    assert final is pool and rms_error(pool[[2, 0]], S) < 5e-3 and rms_error(o[[0, 2], 0], want) < 5e-3
    assert torch.equal(pool[[1, 3, 4, 5]], before[[1, 3, 4, 5]])


@pytest.mark.slow
def test_opcheck(given):
    a, cu, _, x, slots, pool = given
    out, b = torch.zeros_like(a[2]), torch.cat([a[2], a[2]], -1)  # V = 64, which is not K
    state = x["S"].clone()
    for op, tensors, rest in (
            (gated_delta_rule_into, (*a, None, None, None, slots, *[None] * 3, cu), (*words(in_place=True), pool, out, None)),
            (gated_delta_rule_into, (*a, None, None, x["S"], None, *[None] * 3, cu), (*words(), state, out, None)),
            (gated_delta_rule_into, (*a, None, None, x["S"], None, *[None] * 3, cu), (*words(), None, out, None)),
            (gated_delta_rule_into, (*a, None, None, pool, slots, *[None] * 3, cu), (*words(True), None, out, None)),
            (gated_delta_rule, (*a, None, None, pool, slots, *[None] * 3, cu), words(True)),
            (gated_delta_rule, (*a, None, None, x["S"], None, *[None] * 3, cu), words(True, 1)),  # all rows are written
            (gated_delta_rule, (*a[:2], b, *a[3:], *[None] * 7, cu), words(True, 0, True, "bfloat16"))):
        torch.library.opcheck(op, (*tensors, *rest))
