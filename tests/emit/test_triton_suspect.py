"""Triton 3.4 to 3.7.0 on Hopper miscompiles chains of products: there a module makes its check before its kernels serve."""
import re
from dataclasses import replace

import pytest
import torch
from reference import module

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import SCHEDULES

pytest.importorskip("triton")
CPU = torch.device("cpu")


def text(schedule="replay", layout="bthd", partition=None, **options):
    plan = replace(SCHEDULES[schedule], partition=partition)
    return render(Build("triton", 16, layout, schedule=plan, **{"head_dim_k": 16, "head_dim_v": 16} | options))


@pytest.mark.parametrize("version, capability, hip, want", [
    ((3, 3, 1), (9, 0), None, False), ((3, 4, 0), (9, 0), None, True), ((3, 6, 0), (9, 0), None, True),
    ((3, 7, 0), (9, 0), None, True), ((3, 7, 1), (9, 0), None, False), ((3, 9, 0), (9, 0), None, False),
    ((3, 6, 0), (8, 0), None, False), ((3, 6, 0), (10, 0), None, False), ((3, 6, 0), (9, 4), "6.4", False)])
def test_which_versions_and_devices(version, capability, hip, want, monkeypatch):
    m = module(text())
    monkeypatch.setattr(m, "_VERSION", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert m._is_suspect("cuda") is want


WRONG = {
    "state": (r"(\n        S = tl\.dot\((?:\n {12}.*)*),\n {12}acc=.*\n", r"\1\n", {}),
    "inverse": (r"Tinv_below_8 = tl\.dot\(", "Tinv_below_8 = 1.5 * tl.dot(", {}),
    "nan": (r"U = tl\.dot\(", 'U = float("nan") * tl.dot(', {}),
    "summary": (r"(def S_factor_kernel(?:.|\n)*?        S = )", r"\g<1>0.9 * ", {"partition": "decay"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_kernels_that_are_wrong_are_refused_again_and_again(wrong):
    find, put, options = WRONG[wrong]
    bad, n = re.subn(find, put, text(**options))
    assert n
    m = module(bad)
    for _ in range(2 if wrong == "state" else 1):
        with pytest.raises(RuntimeError, match=r"gives wrong results on cpu: .* off by .* is accepted"):
            m.check.once(CPU, (1, 2))
    assert m.HOST.part_chunks == 0 and not m.check.done


def test_kernels_that_are_right_serve_and_are_tried_once(monkeypatch):
    m = module(text())
    m.check.once(CPU, (1, 2))
    monkeypatch.setattr(m.check, "errors", lambda *a: pytest.fail("tried again"))
    m.check.once(CPU, (1, 2))


def test_launches_ask_first(monkeypatch):
    m, asked = module(text()), []
    gpu = type("Gpu", (), {"type": "cuda", "index": 0})()
    monkeypatch.setattr(m.check, "once", lambda *a: asked.append(a))
    monkeypatch.setattr(m, "_lanes", lambda: 32)
    for suspect in (False, True):
        monkeypatch.setattr(m, "_is_suspect", lambda device, suspect=suspect: suspect)
        m._launcher("o_S", 4, (1, 40, 1, 2, 4, 2), [0] * len(m.TABLES.ints["o_S"]), gpu)
        assert asked == [(gpu, (2, 4))] * suspect


def test_launches_within_the_check_do_not_ask_again(monkeypatch):
    m = module(text())
    launcher = m.HOST.launcher
    monkeypatch.setattr(m.check, "done", set())
    monkeypatch.setattr(m.HOST, "launcher", lambda name, instances, sizes, ints, device: (
        m.check.once(device, sizes[3:5]), launcher(name, instances, sizes, ints, device))[1])
    m.check.once(CPU, (1, 2))
    assert m.check.done == {(CPU, (1, 2))}


def test_a_graph_is_not_captured_before_the_test(monkeypatch):
    m = module(text())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before a graph is captured"):
        m.check.once(torch.device("cuda"), (1, 2))


def test_it_can_be_turned_off(monkeypatch):
    m = module(text())
    monkeypatch.setenv("GDN_CODEGEN_ADMIT", "0")
    monkeypatch.setattr(m.check, "errors", lambda *a: pytest.fail("tried"))
    m.check.once(CPU, (3, 3))
