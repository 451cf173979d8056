"""A NaN or an infinity of one token, as docs/contract.md says, stays in its sequence and its value head."""
import pytest
import torch
from reference import problem

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

ENDS = torch.tensor([0, 20, 45, 60])


def call(x, target, schedule):
    given = [x[n][None] for n in ("q", "k", "v", "g", "beta")]
    o, S = chunk_gated_delta_rule(*given, initial_state=x["S"], output_final_state=True, cu_seqlens=ENDS, target=target,
                                  schedule=schedule, chunk_size=16)
    return o[0], S


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, "staged", "fused"])
@pytest.mark.parametrize("target", [t for t in OWN if runs(t, "cpu")])
def test_other_sequences_and_heads_keep_their_bits(target, schedule):
    x = problem([20, 25, 15], 1, 2, 32, 32)
    want = call(x, target, schedule)
    for name in ("v", "g", "beta"):
        for wrong in (torch.nan, torch.inf):
            bad = {**x, name: x[name].clone()}
            bad[name][30, 0] = wrong  # a token in the middle of the second sequence, in the first value head
            o, S = call(bad, target, schedule)
            assert not o[30:45, 0].isfinite().all() and not S[1, 0].isfinite().all()
            o[20:45, 0], S[1, 0] = want[0][20:45, 0], want[1][1, 0]
            assert torch.equal(o, want[0]) and torch.equal(S, want[1]), (name, wrong)
