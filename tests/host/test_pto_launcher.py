"""host/pto.py by itself: masks, where regions of the workspace lie, and which arguments a kernel is launched with."""
from types import SimpleNamespace

import pytest
import torch

from gdn_codegen import pto_sim
from gdn_codegen.host.pto import PtoLauncher, _mask

CPU = torch.device("cpu")


@pytest.mark.parametrize("fill, want", [
    ("lower 1 0", [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]),
    ("strictly_lower 0 -2", [[-2, -2, -2, -2], [0, -2, -2, -2], [0, 0, -2, -2], [0, 0, 0, -2]]),
    ("diagonal_blocks:2 1 0", [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]),
    ("pairs:2 1 0", [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])])
def test_masks(fill, want):
    found = _mask(fill, (4, 4), "float16")
    assert found.dtype == torch.float16 and found.tolist() == want


def launcher(heads=False):
    """Of a kernel with a tensor, two regions, two masks, an integer and two strides. Another kernel has one region more."""
    return PtoLauncher("", {"o": ("o_c", [0], {"pipe": 2, "tile": 0}, {"eye": 0, "low": 512}, 2), "S": ("S_c", [1], {}, {}, 0)},
                       {"other": ("sequence", [3], "float32"), "pipe": ("group", [2, 4], "float32"),
                        "tile": ("slot", [8, 8], "bfloat16")},
                       {"eye": ("eye 1 0", [4, 4], "float16"), "low": ("lower 1 0", [2, 2], "float32")}, heads)


@pytest.mark.parametrize("heads, sizes", [(False, (1, 5, 0, 2, 4, 3)), (True, (1, 5, 0, 3))])
def test_the_simulator_gets_tensors_workspace_masks_and_table(monkeypatch, heads, sizes):
    of = launcher(heads)
    of.library = lambda kind: None
    seen = []
    monkeypatch.setattr(pto_sim, "launch", lambda *about: seen.append(about))
    given, ends = torch.zeros(3), torch.tensor([0, 5])
    workspace = torch.zeros(of.workspace_bytes(3, 1, 4, CPU), dtype=torch.uint8)
    for _ in range(2):
        of("o", 100, (1, 5, 0, 2, 4, 3), [7, 10, 20], CPU)([given, workspace], ends, [0.5])
    of("S", 100, (1, 5, 0, 2, 4, 3), [], CPU)([given], ends, [])
    (_, symbol, groups, (x, held, masks, table, cu), kinds, numbers, scalars, regions), again, plain = seen
    assert (symbol, groups, kinds, scalars) == ("o_c", 4, [0, 4, 4, 0, 0], [0.5]) and tuple(numbers) == (*sizes, 7)
    assert x is given and held is workspace and cu is ends and again[3][2] is masks
    places = of.places(3, 1, 4, CPU)
    assert table.tolist() == [places["pipe"][0], places["tile"][0], 10, 20]
    assert [(r.data_ptr(), r.numel(), r.dtype, kind) for r, kind in regions] == [
        (workspace.data_ptr() + places["pipe"][0], 4 * 2 * 4, torch.float32, 2),
        (workspace.data_ptr() + places["tile"][0], 3 * 4 * 64, torch.bfloat16, 0),
        (masks.data_ptr(), 16, torch.float16, 0), (masks.data_ptr() + 512, 4, torch.float32, 0)]
    assert regions[2][0].tolist() == torch.eye(4).flatten().tolist() and regions[3][0].tolist() == [1, 0, 1, 1]
    assert plain[3] == [given, ends] and plain[4] == [1, 0] and not plain[-1]


@pytest.mark.parametrize("sizes", [(3, 1, 4), (0, 0, 0), (1000, 40, 7)])
def test_regions_lie_apart(monkeypatch, sizes):
    """Each has its tiles, and none overlaps another: on an NPU one after the other, in the simulator with gaps of a tile."""
    npu = SimpleNamespace(type="npu")
    monkeypatch.setattr(torch, "npu", SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(cube_core_num=20)),
                        raising=False)
    slots, sequences, value_heads = sizes
    for device, groups, gap in ((npu, 20, 0), (CPU, 4, 128)):
        *places, (end, _) = launcher().places(*sizes, device).values()
        assert [n for _, n in places] == [sequences * value_heads * 12, groups * 32, slots * value_heads * 128]
        assert all(at % 512 == 0 and 0 <= after - at - n - gap < 512
                   for (at, n), after in zip(places, [*(at for at, _ in places[1:]), end], strict=True))
        assert launcher().workspace_bytes(*sizes, device) == end
