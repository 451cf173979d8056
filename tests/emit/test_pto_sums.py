"""Running sums of several value heads at once, in the simulator: what the kernel leaves in its workspace."""
import pytest
import torch
from reference import problem

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import Schedule

LENGTHS = [33, 0, 70, 1, 8, 32]


def sums(layout, chunk, x):
    """The region of G in the workspace, [slots, HV, chunk]. Tokens past the last sequence belong to none."""
    plan = Schedule("sums", (("G",), ("S",), ("o",)))
    fn = function(Build("pto", chunk, layout=layout, algorithm="simple_gla", schedule=plan, head_dim_k=16, head_dim_v=16))
    ends = torch.tensor([0, *x["lengths"]]).cumsum(0)
    given = tuple(x[n][None] if layout == "bthd" else x[n][None].transpose(1, 2) for n in ("q", "k", "v", "g"))
    host, (heads, tokens) = fn.__globals__["HOST"], (x["g"].shape[1], x["g"].shape[0])
    workspace = host.run(given, (1.0,), (None,), (None,), ends, (None,), True)[host.tables.place("shared")][0]
    slots = tokens // chunk + len(x["lengths"])
    at, size = host.launcher.places(slots, len(x["lengths"]), heads, torch.device("cpu"))["G_ws"]
    return workspace[at:at + size].view(torch.float32).view(slots, heads, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("value_heads", [1, 8, 12, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("layout, chunk", [("bthd", 32), ("bhtd", 32), ("bthd", 128), ("bhtd", 16)])
def test_sums_of_any_number_of_heads(layout, chunk, value_heads):
    """Against float64; past a sequence's end the last sum stands, to the bit. NaN is what was there before."""
    x = problem(LENGTHS, 1, value_heads, 16, 16, gate="mixed", seed=value_heads)
    got, at = sums(layout, chunk, x), 0
    for n, length in enumerate(LENGTHS):
        for c in range(-(-length // chunk)):
            rows = min(chunk, length - c * chunk)
            want = x["g"][at + c * chunk:][:rows].double().cumsum(0).T
            tile = got[at // chunk + n + c]
            assert (tile[:, :rows] - want).abs().max() <= 1e-6 * want.abs().max()
            assert torch.equal(tile[:, rows:], tile[:, rows - 1:rows].expand(-1, chunk - rows))
        at += length


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_more_tokens_than_a_stride_takes(layout):
    """From a head to the next are more elements than a load to L1 skips: they come one by one."""
    x = problem([70000], 1, 17, 16, 16, gate=-0.1) | {"lengths": [33, 40]}
    got = sums(layout, 32, x)
    for slot, start, rows in ((0, 0, 32), (1, 32, 1), (2, 33, 32), (3, 65, 8)):
        want = x["g"][start:start + rows].double().cumsum(0).T
        assert (got[slot, :, :rows] - want).abs().max() <= 1e-6 * want.abs().max()
        assert torch.equal(got[slot, :, rows:], got[slot, :, rows - 1:rows].expand(-1, 32 - rows))
