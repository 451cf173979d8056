"""Each member's ops on a CUDA GPU: what the op of Gated DeltaNet takes, and bounded gates. Run with: pytest -m device

The features and their calls are those of tests/family, on a GPU, where dispatch chooses other builds.
"""
import sys
from pathlib import Path

import pytest
import torch
from reference import rms_error

from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

sys.path.insert(0, str(Path(__file__).parents[1] / "family"))
import features
import problems

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HERE = [t for t in OWN if t != "pto" and runs(t, "cuda")]
#: A capture with stubbed kernels is for a machine without a GPU; the last test captures them.
CELLS = [(n, page) for n, f in features.FEATURES.items() for page in problems.CALLS
         if (n, page) not in features.REFUSED and f is not features.captured]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Problems lie on the GPU, and are as wide as its kernels for warp groups take them."""
    monkeypatch.setattr(problems.Problem, "device", "cuda")
    for n in ("K", "V"):
        monkeypatch.setitem(problems.SIZES, n, 64)


@pytest.mark.parametrize("name, page", CELLS, ids=lambda x: features.FEATURES[x].__name__ if x in features.FEATURES else x)
@pytest.mark.parametrize("target", HERE)
def test_what_gated_delta_net_takes(target, name, page):
    features.FEATURES[name](page, target)


@pytest.mark.parametrize("page", ["kimi_delta_attention", "gated_delta_rule_2", "rwkv7"])
@pytest.mark.parametrize("target", HERE)
def test_log_decays_that_are_promised_to_be_bounded(target, page):
    p = problems.Problem(page, target, (70, 1, 130))
    p.x[p.gate] = -5 * torch.rand(p.x[p.gate].shape, generator=torch.Generator().manual_seed(1)).to(p.device)
    p.near(*p.call(initial_state=p.S, safe_gate=True, **features.STATES))


@pytest.mark.parametrize("page", ["kimi_delta_attention", "gated_delta_rule_2"])
@pytest.mark.parametrize("target", HERE)
def test_raw_gates_with_a_bound(target, page):
    p, gen = problems.Problem(page, target, (70, 1, 130)), torch.Generator().manual_seed(1)
    shape = p.x["g"].shape
    x, A, bias = (torch.randn(s, generator=gen).to(p.device) for s in (shape, shape[1:2], shape[1:]))
    p.x["g"] = -5 * torch.sigmoid(A.exp()[:, None] * (x + bias))
    p.near(*p.call({"g": x}, initial_state=p.S, use_gate_in_kernel=True, A_log=A, dt_bias=bias, safe_gate=True, lower_bound=-5.0,
                   **features.STATES))


@pytest.mark.parametrize("page", problems.CALLS)
@pytest.mark.parametrize("target", HERE)
def test_a_graph_holds_a_call(target, page):
    """Captured after one call, and replayed on other values."""
    p, graph = problems.Problem(page, target, (70, 130)), torch.cuda.CUDAGraph()
    mine = p.pool([3, 0])
    held, said = mine.clone(), {"initial_state": mine, "state_indices": p.integers([3, 0])}
    p.call(**said)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        o = p.call(**said)[0]
    p.v.mul_(2)
    mine.copy_(held)
    graph.replay()
    p.near(o, mine[[3, 0]])
    assert rms_error(mine[[1, 2]], held[[1, 2]]) == 0
