"""States by token on PTO, in its simulator: chunks of one token in tiles of 16 rows."""
from dataclasses import replace

import pytest
import torch
from reference import rms_error
from test_by_token import NAN, Step, by_token, tree

from gdn_codegen import recurrent_gated_delta_rule
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.call.choose_decode import columns, plan
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule.contract import Contract

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not runs("pto", "cpu"), reason="needs PTO's simulator")]
STATES = pytest.mark.parametrize("dtype, states, v_first", [
    (torch.bfloat16, torch.bfloat16, True), (torch.bfloat16, torch.float32, False), (torch.float32, torch.float32, True)],
    ids=["bf16-vk", "bf16-f32-kv", "f32-vk"])


def near(dtype):
    """Products of 16-bit inputs round their operands to 16 bits, the state too."""
    return 1e-5 if dtype == torch.float32 else 5e-3


@STATES
def test_slots_for_tokens(dtype, states, v_first):
    s = Step(states, v_first, dtype=dtype)
    pool, slots = s.given["initial_state"], s.slots.clone()
    slots[0, 1] = -1  # keeps no state
    for _ in range(2):  # the second call takes what the first one settled
        pool.copy_(s.turned(s.pool))
        o, final = recurrent_gated_delta_rule(**s.given, state_v_first=v_first, state_indices=slots, target="pto",
                                              num_accepted_tokens=s.accepted)
        assert final is pool
        tokens = [x for x in s.tokens if x != (0, 1)]
        want, after = by_token(s.x, s.pool[s.first()])
        kept = pool[[int(slots[n, t]) for n, t in tokens]]
        assert rms_error(o[0], want) < near(dtype)
        assert rms_error(kept.mT if v_first else kept, after[[s.tokens.index(x) for x in tokens]]) < near(dtype)
        rest = sorted({*range(len(pool))} - {int(slots[n, t]) for n, t in tokens})
        assert torch.equal(pool[rest], s.turned(s.pool)[rest])
    assert {x.module.TABLES.chunk for x in launch._kept.values()} >= {1}


@pytest.mark.parametrize("frozen", [True, False])
@STATES
def test_a_buffer(dtype, states, v_first, frozen):
    """Rows of the buffer for sequences, -1 for one; a sequence of slot -1; the pool is written at ends alone, or not at all."""
    s = Step(states, v_first, seed=2, dtype=dtype)
    pool, buffer, rows, first = s.given["initial_state"], s.buffer(), torch.tensor([4, 1, -1, 5]), s.first(False)
    first[3] = -1
    o, final = recurrent_gated_delta_rule(**s.given, state_v_first=v_first, state_indices=first, target="pto",
                                          intermediate_states_buffer=buffer, intermediate_state_indices=rows,
                                          disable_state_update=frozen)
    want, after = by_token(s.x, s.pool[first])
    assert rms_error(o[0, :8], want[:8]) < near(dtype) and not o[0, 8:].any() and (final is None if frozen else final is pool)
    turned = lambda x: x.mT if v_first else x
    assert rms_error(turned(buffer[4, :3]), after[:3]) < near(dtype)
    assert buffer[[0, 1, 2, 3, 5]].isnan().all() and buffer[4, 3:].isnan().all()
    written = [] if frozen else [int(first[0]), int(first[2])]
    rest = sorted({*range(len(pool))} - {*written})
    assert torch.equal(pool[rest], s.turned(s.pool)[rest])
    assert frozen or rms_error(turned(pool[written]), after[[2, 7]]) < near(dtype)


def test_output_alone_and_rows_of_equal_length():
    s = Step(torch.bfloat16)
    o, final = recurrent_gated_delta_rule(**s.given, state_v_first=True, state_indices=s.slots, num_accepted_tokens=s.accepted,
                                          disable_state_update=True, target="pto")
    s.compare(o, None, s.first())
    assert final is None and torch.equal(s.given["initial_state"], s.pool.mT)
    s = Step(lengths=[4, 4, 4], dense=True, dtype=torch.float32)
    whole = torch.full((3, 7, *s.pool.mT.shape[1:]), NAN)
    s.given["initial_state"] = s.pool[:3].mT.contiguous()
    o, final = recurrent_gated_delta_rule(**s.given, state_v_first=True, intermediate_states_buffer=whole[:, :6], target="pto",
                                          output_final_state=True)
    states = s.compare(o, whole[:, :4].flatten(0, 1), torch.arange(3))
    assert rms_error(final.mT, states[3::4]) < 1e-5 and whole[:, 4:].isnan().all()


def test_trees_are_refused():
    s = Step()
    with pytest.raises(ValueError, match="target: got 'pto'; accepted: triton or tilelang, which keep states by token "
                                         r"\(slots/parents\)"):
        recurrent_gated_delta_rule(**s.given, state_v_first=True, state_indices=s.slots, target="pto",
                                   retrieve_parent_token=tree(1))


@pytest.mark.parametrize("page", ["gated_delta_rule", "kimi_delta_attention", "rwkv7"])
@pytest.mark.parametrize("size", [128, 200, 256])
def test_wide_states_fit_in_blocks(page, size):
    """Which the choice tries from the widest."""
    c = Contract.parse("state=vk/bfloat16/pool/in_place/slots/accepted")
    b = Build("pto", 16, algorithm=page, dtype="bfloat16", head_dim_k=size, head_dim_v=size, contract=c)
    found = next(n for n in columns(b, 64, 0) if not unfit(replace(b, schedule=plan(b, n, False))))
    assert found == {128: 0, 200: 16, 256: 64}[size]
    assert lowered(replace(b, schedule=plan(b, found, False))).tokens == 1
