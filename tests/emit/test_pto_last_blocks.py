"""PTO: blocks of V that are rows of a state, where V is no multiple of a block, so that the last block has less in memory.

The simulator refuses what is read or written past a state, and two writes to one place.
"""
import shutil

import pytest
import torch

from gdn_codegen import chunk_delta_rule, pages
from gdn_codegen.ir.builder import algorithm, carried, cumsum, last, lower, per_head, valid
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.schedule.schedule import varied

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ 12 or newer")]


@algorithm(q="C K", k="C K", v="C V", S=carried("V K"))
def rows_of_values(q, k, v, S):
    return q @ S.T + lower(q @ k.T) @ v, S + v.T @ k


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def columns_of_values(q, k, v, S):
    return q @ S + lower(q @ k.T) @ v, S + k.T @ v


@algorithm(q="C K", k="C K", v="C V", w=per_head(0.5, "HV V"), z=carried("V"), S=carried("K V"))
def sums_of_values(q, k, v, w, z, S):
    sums = cumsum(w[None, :] * v)
    return valid(sums + z[None, :]) + q @ S + lower(q @ k.T) @ v, z + last(sums), S + k.T @ v


@pytest.mark.parametrize("page, accept, K, V, schedule", [
    (rows_of_values, "", 32, 36, "staged"), (rows_of_values, "state=vk/pool/in_place", 36, 40, "fused"),
    (columns_of_values, "state=vk/checkpoints", 36, 40, "staged"), (columns_of_values, "state=vk", 100, 144, "fused"),
    (sums_of_values, "", 16, 40, "staged")])
def test_last_block(page, accept, K, V, schedule):
    """40 = 2 * 16 + 8: one of two vector cores has no row of the last block. 144 = 9 * 16 has whole blocks, beside a padded K."""
    for errors in pages.verify(page, target="pto", head_dim_k=K, head_dim_v=V, chunk=16, schedule=varied(schedule, v_block=16),
                               contract=Contract.parse(accept) if accept else Contract()):
        assert max(errors.values()) < 2e-3, errors


@pytest.mark.parametrize("V", [136, 200])
def test_op_with_states_of_values_first(V):
    """Widths at which dispatch chooses blocks of 16."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, state = (torch.randn(*shape, generator=gen) for shape in ((1, 3, 1, 16), (1, 3, 1, 16), (1, 3, 2, V), (1, 2, V, 16)))
    k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, 3, 2, generator=gen)
    o, final = chunk_delta_rule(q, k, v, beta, initial_state=state, output_final_state=True, state_v_first=True, target="pto")
    S = state[0].double()
    for t in range(3):
        key = k[0, t, 0].double()
        S = S + torch.einsum("hv,k->hvk", beta[0, t, :, None].double() * (v[0, t].double() - S @ key), key)
        assert torch.allclose(o[0, t].double(), S @ q[0, t, 0].double() / 4, atol=1e-4)
    assert torch.allclose(final[0].double(), S, atol=1e-4)
