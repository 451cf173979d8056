"""Triton 3.4 to 3.7.0 on Hopper miscompiles chains of products: kernels are held against the interpreter before they serve."""
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from reference import module

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import SCHEDULES
from gdn_codegen.schedule.contract import Contract

pytest.importorskip("triton")
CPU = torch.device("cpu")


def text(schedule="replay", layout="bthd", partition=None, **options):
    plan = replace(SCHEDULES[schedule], partition=partition)
    return render(Build("triton", 16, layout, schedule=plan, **{"head_dim_k": 16, "head_dim_v": 16} | options))


@pytest.fixture
def suspect(monkeypatch):
    """A module under such a version, its kernels those of another text where the problem has two value heads."""
    def make(good, bad):
        m, other = module(good), module(bad)
        ours, theirs = m._launcher, other._launcher
        monkeypatch.setattr(m, "_launcher", lambda *a: (ours if a[2][4] == 1 else theirs)(*a))
        monkeypatch.setattr(m, "_difference", partial(m._difference, instances=2))
        for name in ("_plans", "_proven"):
            monkeypatch.setattr(m, name, type(getattr(m, name))())
        return m
    return make


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


@pytest.mark.parametrize("options", [{}, {"layout": "bhtd"}, {"dtype": "bfloat16"}, {"dtype": "float32", "partition": "decay"},
                                     {"schedule": "staged"},
                                     {"contract": Contract.parse("beta=sigmoid,g=raw/float16,k=l2norm")},
                                     {"contract": Contract.parse("g=linear")},
                                     {"contract": Contract.parse("beta=twice_sigmoid,k=unit"), "partition": "decay"},
                                     {"contract": Contract.parse("state=vk/bfloat16/pool/in_place/checkpoints")},
                                     {"contract": Contract.parse("state=float16/pool"), "partition": "decay"},
                                     {"contract": Contract.parse("state=in_place,strided")}], ids=str)
def test_kernels_that_are_right_serve_and_are_tested_once(options, suspect, monkeypatch):
    m = suspect(text(**options), text(**options))
    m._prove(CPU, 1, 2)
    monkeypatch.setattr(m, "_difference", lambda *a: pytest.fail("tested again"))
    m._prove(CPU, 1, 2)


WRONG = {
    "state": (r"\n        S = tl\.dot\((.*), acc=.*\)\n", r"\n        S = tl.dot(\1)\n", {}),
    "inverse": (r"Tinv_p_3 = tl\.dot\(", "Tinv_p_3 = 1.5 * tl.dot(", {}),
    "nan": (r"U = tl\.dot\(", 'U = float("nan") * tl.dot(', {}),
    "summary": (r"(def S_factor_kernel(?:.|\n)*?        S = )", r"\g<1>0.9 * ", {"partition": "decay"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_kernels_that_are_wrong_are_refused_again_and_again(wrong, suspect):
    find, put, options = WRONG[wrong]
    good = text(**options)
    bad, n = re.subn(find, put, good)
    assert n
    m = suspect(good, bad)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"miscompiles this module's kernels for Hopper: off by .* Use Triton 3.7.1"):
            m._prove(CPU, 1, 2)
    assert getattr(m, "PART_CHUNKS", 0) == 0


def test_launches_ask_first(monkeypatch):
    m, asked = module(text()), []
    gpu = type("Gpu", (), {"type": "cuda", "index": 0})()
    monkeypatch.setattr(m, "_prove", lambda *a: asked.append(a))
    monkeypatch.setattr(m, "_lanes", lambda: 32)
    for suspect in (False, True):
        monkeypatch.setattr(m, "_is_suspect", lambda device, suspect=suspect: suspect)
        m._launcher("o_S", 4, (1, 40, 1, 2, 4, 2), [0, 1], gpu)
        assert asked == [(gpu, 2, 4)] * suspect


def test_a_graph_is_not_captured_before_the_test(monkeypatch):
    m = module(text())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before a graph is captured"):
        m._prove(torch.device("cuda"), 1, 2)
