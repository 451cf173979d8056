"""host/tilelang.py by itself: what kernels are launched with, and which tensors come back from a CPU."""
import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tilelang")

from gdn_codegen.host.tables import Tables
from gdn_codegen.host.tilelang import TileLangLauncher, _as_dense, _with_rows

CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda", index=0)
SIZES = (1, 5, 0, 2, 4, 3, 7, 2)  # sequences, tokens, batched, H, HV, slots, parts, span


def tables(**fields):
    return Tables("b", "f", 16, "bthd", "float16", inputs=(("x", "H", (8,), "float16"),), outputs=(), ints={"o": (), "p": ()},
                  kernels=(("o", "chunks", 1, ("x", "y"), ()), ("p", "parts", 1, ("x", "y"), ())), **fields)


def launcher(compiled, monkeypatch, arch="", **fields):
    made = TileLangLauncher(tables(**fields), __file__, {"o": None, "p": None}, None, {"o": ("y",), "p": ()}, ("p",), arch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made.for_cpu = lambda name: compiled
    made.loaded = lambda name, arch: SimpleNamespace(main=lambda *a: compiled(name, arch, *a))
    return made


def test_kernels_over_parts_get_how_many_there_are(monkeypatch):
    seen = []
    made = launcher(lambda *a: seen.append(a), monkeypatch)
    for name in ("o", "p"):
        made(name, 9, SIZES, [1], GPU)(("x", "y"), "cu", [0.5])
    assert seen == [("o", "sm_90a", "x", "y", "cu", 0, 1, 0.5), ("p", "sm_90a", "x", "y", "cu", 0, 7, 2, 1, 0.5)]
    assert made.passes["p"] == {**made.passes["o"], "tl.disable_thread_storage_sync": True}


def test_what_a_settled_call_hands_to_the_native_launcher(monkeypatch):
    run, grid, parameters, held = launcher(print, monkeypatch)("p", 9, SIZES, [1], GPU).compiled(2, 1)
    assert callable(run) and held is run and grid is None
    assert parameters == [("t", 0), ("t", 1), ("t", 2), ("i", 0), ("i", 7), ("i", 2), ("i", 1), ("d", 0)]


@pytest.mark.parametrize("strided", [False, True])
def test_views_are_passed_as_dense_where_strides_come_apart(strided, monkeypatch):
    seen = []
    x = torch.zeros(2, 3).T
    launcher(lambda *a: seen.append(a[2]), monkeypatch, strided=strided)("o", 9, SIZES, [], GPU)([x, x], "cu", [])
    assert seen[0].stride() == ((2, 1) if strided else (1, 3)) and seen[0].data_ptr() == x.data_ptr()
    assert _as_dense(y := torch.zeros(2, 3)) is y


def test_a_module_for_one_architecture_takes_no_other_device_and_no_empty_tile(monkeypatch):
    seen = []
    made = launcher(lambda *a: seen.append(a), monkeypatch, arch="sm_90a")
    with pytest.raises(ValueError, match=r"x: got device cpu; accepted: a CUDA device \(this module was built for sm_90a\)"):
        made("o", 9, SIZES, [], CPU)
    made("o", 9, (1, 0, *SIZES[2:]), [], GPU)([torch.zeros(1, 0, 8), torch.zeros(0, 8)], "cu", [])
    assert seen[0][1] == "sm_90a" and [x.shape for x in seen[0][2:4]] == [(1, 1, 8), (0, 8)]
    assert _with_rows(y := torch.zeros(2, 3)) is y


def test_on_a_cpu_bfloat16_is_widened_and_results_come_back(monkeypatch):
    def kernel(x, y, *rest):
        assert x.dtype == y.dtype == torch.float32 and rest == ("cu", 0, 0.5)
        x += 1
        y += 2
    x, y = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    launcher(kernel, monkeypatch)("o", 9, SIZES, [], CPU)([x, y], "cu", [0.5])
    assert x.tolist() == [0, 0] and y.tolist() == [2, 2]  # the kernel stores to y alone
