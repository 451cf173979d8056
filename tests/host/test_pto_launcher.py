"""host/pto.py by itself: masks, and which arguments a kernel is launched with."""
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


@pytest.mark.parametrize("heads, sizes", [(False, (1, 5, 0, 2, 4, 3)), (True, (1, 5, 0, 3))])
def test_the_simulator_gets_tensors_then_masks_and_channels(monkeypatch, heads, sizes):
    launcher = PtoLauncher("", {"o": ("o_c", ["eye", "pipe"], [0, 0, 2, 0])}, {"pipe": ([2, 4], "float32")},
                           {"eye": ("eye 1 0", [4, 4], "float16")}, heads)
    launcher.library = lambda kind: None
    seen = []
    monkeypatch.setattr(pto_sim, "launch", lambda *about: seen.append(about))
    given, ends = torch.zeros(3), torch.tensor([0, 5])
    for _ in range(2):
        launcher("o", 100, (1, 5, 0, 2, 4, 3), [7], CPU)([given], ends, [0.5])
    (_, symbol, groups, (x, eye, pipe, cu), kinds, numbers, scalars), again = seen
    assert (symbol, groups, kinds, scalars) == ("o_c", 4, [0, 0, 2, 0], [0.5]) and tuple(numbers) == (*sizes, 7)
    assert x is given and cu is ends and eye.tolist() == torch.eye(4).tolist() and pipe.shape == (4, 2, 4)
    assert again[3][1] is eye and again[3][2] is not pipe
