"""First calls of a server, where nothing can be compiled: run by test_served.py as a process of its own, with the words of WHAT.

It prints which processes were started. At last it makes a call that no server makes, and prints whether that started one.
"""
import subprocess
import sys

import torch
from test_served import ACCEPT, SMALL, passed

from gdn_codegen import chunk_gated_delta_rule, chunk_kda, fused_recurrent_kda, recurrent_gated_delta_rule
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.schedule.contract import Contract

CONTRACT, STARTED = Contract.parse(ACCEPT), []


def refused(*args, **kwargs):
    STARTED.append(args)
    raise AssertionError(f"a process was started: {args}")


def integers(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def plain():
    """Prefill of 2 sequences and of 1, then decoding, dense and as views."""
    for op, n, tokens in ((chunk_gated_delta_rule, 2, 70), (chunk_gated_delta_rule, 1, 3), (recurrent_gated_delta_rule, 3, 3),
                          (recurrent_gated_delta_rule, 2, 8)):
        for views in (False, True):
            x = passed(SMALL, Extent(1, 2, n, tokens), CONTRACT, views)
            o, pool = op(**x, target="tilelang")
            assert o.shape == (1, tokens, 2, 16) and pool is x["initial_state"]


def drafts():
    """Verification of draft tokens, as vLLM does it, and as SGLang does."""
    frozen = dict(intermediate_states_buffer=torch.zeros(2, 3, 2, 16, 16, dtype=torch.bfloat16), disable_state_update=True)
    for more in (dict(state_indices=integers([0, 1, 2], [3, 4, -1]), num_accepted_tokens=integers(1, 2)), frozen,
                 dict(frozen, retrieve_parent_token=integers([-1, 0, 0], [-1, 0, -1]))):
        for views in (False, True):
            x = passed(SMALL, Extent(1, 2, 2, 5), CONTRACT, views)
            x["initial_state"] = torch.zeros(5, 2, 16, 16, dtype=torch.bfloat16)
            assert recurrent_gated_delta_rule(**{**x, **more}, target="tilelang")[0].shape == (1, 5, 2, 16)


def of_kimi(tokens, views):
    """Inputs of a layer of Kimi's."""
    row = torch.zeros(1, tokens, 96 + views, dtype=torch.float16)[..., :96]
    q, k, v = (x.unflatten(-1, (2, 16)) for x in row.split(32, -1))
    if not views:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, beta = (torch.zeros(1, tokens, *heads, dtype=torch.bfloat16) for heads in ((2, 16), (2,)))
    return dict(q=q, k=k, v=v, g=g, beta=beta, A_log=torch.zeros(2), dt_bias=torch.zeros(32), use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, lower_bound=-5.0, state_v_first=True,
                target="tilelang")


def kimi():
    """Prefill as FlashKDA's, with states in the middle of prompts and without, and decoding."""
    stored = dict(checkpoint_states=torch.zeros(2, 2, 16, 16), checkpoint_positions=integers([16], [0]),
                  checkpoint_slots=integers([0], [-1]))
    for views in (False, True):
        for more in ({}, stored):
            states = torch.zeros(2, 2, 16, 16)
            o = chunk_kda(**of_kimi(70, views), initial_state=states, final_state=states.clone(), output_final_state=True,
                          cu_seqlens=integers(0, 67, 70), **more)[0]
            assert o.shape == (1, 70, 2, 16)
        o, _ = fused_recurrent_kda(**of_kimi(3, views), initial_state=torch.zeros(4, 2, 16, 16), state_indices=integers(1, 2, 3),
                                   cu_seqlens=integers(0, 1, 2, 3), inplace_final_state=True)
        assert o.shape == (1, 3, 2, 16)


WHAT = {"plain": plain, "drafts": drafts, "kimi": kimi}
if __name__ == "__main__":
    subprocess.Popen = refused
    for word in sys.argv[1:]:
        WHAT[word]()
    print("called", STARTED)
    try:
        chunk_gated_delta_rule(**passed(SMALL, Extent(1, 2, 1, 3), CONTRACT), target="tilelang", schedule="replay")
    except ValueError:
        print("started", bool(STARTED))  # one for each of its kernels that began before the first failed
