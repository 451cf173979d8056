"""Packs of uneven sequences on a CUDA GPU, whose lengths the host knows or not. Run with: pytest -m device"""
import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import module
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.targets import OWN

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HERE = [t for t in OWN if t != "pto" and runs(t, "cuda")]
#: Heads that never forget, that forget slowly, in a few chunks, and at once.
GATES = (0.0, -1e-4, -0.02, -4.0)
H, HV = 8, 16


def heads(x, some):
    """The problem of some of its value heads."""
    shared = [h * H // HV for h in some]
    return {**x, "q": x["q"][:, shared], "k": x["k"][:, shared], "S": x["S"][:, some],
            **{n: x[n][:, some] for n in ("v", "g", "beta")}}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("lengths", [
    [81] * 15 + [4915], [1, 4850, 0, 300, 64], [700, 0, 900, 1500, 33], [3000, 200, 190], [4600, 20], [9000, 130]],
    ids=lambda x: f"{len(x)}of{sum(x)}")
@pytest.mark.parametrize("target", HERE)
def test_parts_of_sequences_that_forget_slowly(target, lengths, known):
    x = problem(lengths, H, HV, 128, 128, torch.bfloat16)
    drawn = 2 * torch.rand(sum(lengths), 1, generator=torch.Generator().manual_seed(1))
    x["g"] = torch.tensor(GATES).repeat(HV // len(GATES)) * drawn
    x["beta"] = x["beta"] * 2
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    given = [x[n][None].cuda() for n in ("q", "k", "v", "g", "beta")]
    lent = torch.full_like(given[2], torch.nan)
    o, S = chunk_gated_delta_rule(*given, initial_state=x["S"].cuda(), output_final_state=True, cu_seqlens=ends.cuda(), out=lent,
                                  target=target, **({"cu_seqlens_cpu": ends} if known else {}))
    assert o.data_ptr() == lent.data_ptr() and o.isfinite().all() and S.isfinite().all()
    some = [0, 1, 6, 15]  # one for each gate
    want = expected(heads(x, some))
    for h, o_, S_ in zip(some, want[0].unbind(1), want[1].unbind(1), strict=True):
        assert rms_error(o[0, :, h].cpu(), o_) < 1e-2 and rms_error(S[:, h].cpu(), S_) < 1e-2, GATES[h % len(GATES)]


@pytest.mark.parametrize("target", HERE)
def test_without_summaries_a_warm_up_has_no_limit(target):
    """The last part has one chunk. It begins later than the longest warm-up of a call with summaries."""
    hopper = target == "tilelang" and torch.cuda.get_device_capability() == (9, 0)
    name, span = ("walk", 8) if hopper or target == "triton" else ("replay", 51)
    arch = "sm_90a" if hopper else ""
    m = module(Build(target, 64, schedule=varied(name, arch, partition="decay", part_chunks=span), dtype="bfloat16", arch=arch))
    x = problem([64 * (1 + span * m.HOST.tables.most)], 1, 2, 128, 128, torch.bfloat16, gate=0.0)
    m.HOST.plans.clear()
    o, S = m.chunk_gated_delta_rule(*(x[n][None].cuda() for n in ("q", "k", "v", "g", "beta")), initial_state=x["S"].cuda(),
                                    output_final_state=True)
    (found,) = m.HOST.plans.values()
    assert not found.summed and (found.parts - 1) * span > min(m.HOST.tables.most * span, span + 50)
    assert all(rms_error(a.cpu(), b) < 1e-2 for a, b in zip((o[0], S), expected(x), strict=True))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("before, after", [([700] * 8, [3500, 10, 90, 0, 1000, 500, 300, 200]),
                                           ([20, 5000, 580], [1900, 1800, 1900])], ids=["longer", "shorter"])
@pytest.mark.parametrize("target", HERE)
def test_a_graph_follows_lengths_that_the_host_was_not_told(target, before, after, known):
    """Kernels choose the parts of the lengths that they find, on which the host has no say but for the instances."""
    x = problem(before, H, HV, 128, 128, torch.bfloat16)
    x["g"] = torch.tensor(GATES).repeat(HV // len(GATES)) * torch.rand(sum(before), 1, generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, *torch.tensor(before).cumsum(0).tolist()])
    here = ends.int().cuda()
    given = [x[n][None].cuda() for n in ("q", "k", "v", "g", "beta")]

    S0, graph = x["S"].cuda(), torch.cuda.CUDAGraph()

    def call():
        return chunk_gated_delta_rule(*given, initial_state=S0, output_final_state=True, cu_seqlens=here, target=target,
                                      **({"cu_seqlens_cpu": ends} if known else {}))

    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        o, S = call()
    here.copy_(torch.tensor([0, *torch.tensor(after).cumsum(0).tolist()]))
    for result in (o, S):
        result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    some = [0, 1, 6, 15]
    want = expected({**heads(x, some), "lengths": after})
    for h, o_, S_ in zip(some, want[0].unbind(1), want[1].unbind(1), strict=True):
        assert rms_error(o[0, :, h].cpu(), o_) < 1e-2 and rms_error(S[:, h].cpu(), S_) < 1e-2, GATES[h % len(GATES)]


@pytest.mark.parametrize("lengths", [[4000, 100, 300], [300, 4000, 0], [64] * 40], ids=lambda x: f"{len(x)}of{sum(x)}")
@pytest.mark.parametrize("target", HERE)
def test_rows_of_no_sequence_are_zero(target, lengths):
    """Kernels over parts that they choose have none for the rows past the last sequence."""
    x, rest = problem(lengths, H, HV, 128, 128, torch.bfloat16, gate=-0.1), 3000
    given = [torch.nn.functional.pad(x[n], (*[0, 0] * (x[n].dim() - 1), 0, rest), value=1.0)[None].cuda()
             for n in ("q", "k", "v", "g", "beta")]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).cuda()
    o, S = chunk_gated_delta_rule(*given, initial_state=x["S"].cuda(), output_final_state=True, cu_seqlens=ends, target=target)
    assert o.shape[1] == sum(lengths) + rest and not o[:, sum(lengths):].any()
    some = [0, 15]
    want = expected(heads(x, some))
    assert rms_error(o[0, :sum(lengths), some].cpu(), want[0]) < 1e-2 and rms_error(S[:, some].cpu(), want[1]) < 1e-2
