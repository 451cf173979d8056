"""Admission on a GPU: right kernels pass, broken ones are refused. Run with: pytest -m device tests/device/test_admit.py

Each text takes nvcc ten seconds or more; `-k passes` and `-k refused` are the halves.
"""
import re

import pytest
import torch
from reference import expected, module, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime import admit
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract

on_gpu = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
on_hopper = [*on_gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not runs("tilelang", "cuda"),
    reason="needs a Hopper GPU and TileLang")]
FORMS = "beta=sigmoid,g=raw/bfloat16,k=l2norm,q=l2norm,state=vk/bfloat16/pool/in_place/checkpoints,strided"
#: Of each: target, schedule, fields, further options.
RIGHT = {"fused_walk": ("tilelang", "fused_walk", {}, {}),
         "fused_walk in parts": ("tilelang", "fused_walk", {"partition": "decay"}, {}),
         "walk": ("tilelang", "walk", {}, {"dtype": "bfloat16"}),
         "walk, 4 heads, in parts": ("tilelang", "walk", {"value_heads": 4, "partition": "decay"}, {}),
         "walk, all forms": ("tilelang", "walk", {}, {"contract": Contract.parse(FORMS), "dtype": "bfloat16"}),
         "portable": ("tilelang", "fused", {}, {"arch": ""}),
         "portable, K = V = 256": ("tilelang", "fused", {"v_block": 64}, {"arch": "", "head_dim_k": 256, "head_dim_v": 256}),
         "Triton": ("triton", "walk", {}, {}), "Triton in parts": ("triton", "walk", {"partition": "decay"}, {"chunk": 32}),
         "Triton, all forms": ("triton", "walk", {}, {"contract": Contract.parse(FORMS)})}
#: Of a text of Hopper: what is found, and what is put there. Of `walk`, then of `fused_walk`.
BROKEN = {
    "a wait for keys": ("walk", r"^( +T\.set_max_nreg\(\d+, 1\)\n(?:.*\n)*?) +T\.barrier_wait\(k_ready.*\n", r"\1"),
    # aux reads gates at once, and they are what it is loaded last; a wait for what it computes of them is often over by itself
    "a wait for gates": ("walk", r"^ +T\.barrier_wait\(G_ready.*\n", ""),
    # it comes after the copy: left out, the warp that stores would be through before o is, and the next wait never end
    "a wait for o to be stored": ("walk", r"^( +T\.barrier_wait\(o_f16_shared_ready.*\n)((?:.*\n)*?)"
                                          r"(?= +T\.barrier_arrive\(o_f16_shared_free)", r"\2\1"),
    "a stride": ("walk", r"final_state_out\[n, hv, j, i\]", "final_state_out[n, hv, i, j]"),
    "a slot of a ring": ("walk", r"(v_minus_exp_G_k_S_f16,\s+Tinv_below)\[chunk % 2, :, :\]", r"\1[0, :, :]"),
    "a mask": ("walk",
               r"T\.if_then_else\(\s+below [^,]*,\s+(G_col\[i\] - G_row\[j\]),\s+-T\.infinity\(T\.float32\),\s+\)", r"\1"),
    "a tail": ("walk", r"T\.if_then_else\(i < rows, (k_in\[b, row \+ i, h, j\]), 0\)", r"\1"),
    "a wrong dot": ("walk", r"(T\.gemm\(\w+_to_end_f16, k\[chunk % 2, :, :\], S), ", r"\1, clear_accum=True, "),
    "a dropped scale": ("walk", r"= scale \* o_sum\[i, j\]", "= o_sum[i, j]"),
    "a gate's sign": ("walk", r"T\.exp\(G\[i\] - G\[j\]\)", "T.exp(G[j] - G[i])"),
    "a head index": ("walk", r"T\.truncdiv\(hv, T\.truncdiv\(HV, H\)\)", "hv % H"),
    "a wait for what is solved": ("fused_walk", r"^ +T\.barrier_wait\(exp_G_shared_ready.*\n", ""),
}


def text(target, schedule, fields, options):
    options = {"arch": "sm_90a"} | options if target == "tilelang" else options
    return render(Build(target, schedule=varied(schedule, options.get("arch", ""), **fields), **options))


def broken(what):
    schedule, find, put = BROKEN[what]
    out, n = re.subn(find, put, text("tilelang", schedule, {}, {}), flags=re.M)
    assert n, f"nothing to break for: {what}"
    return out


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_to_be_broken_is_there(what):
    """Without a GPU: the faults are still faults of the text."""
    compile(broken(what), what, "exec")


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("what", RIGHT)
    def test_what_is_right_passes(self, what):
        found = module(text(*RIGHT[what])).check("cuda")
        print(what, found)
        assert all(e < accepted for n, (e, accepted) in found.items() if not n.startswith("memory beside"))

    @pytest.mark.parametrize("what", BROKEN)
    def test_what_is_broken_is_refused(self, what):
        with pytest.raises(RuntimeError, match=r"gives wrong results on cuda"):
            print(module(broken(what)).check("cuda"))


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("target", [t for t in ("triton", "tilelang") if runs(t, "cuda")])
    def test_a_graph_is_taken_down_without_it_and_settles_nothing(self, target, monkeypatch, tmp_path):
        monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path))
        x = problem([130], 2, 4, 64, 64)
        a = [x[n][None].cuda() for n in ("q", "k", "v", "g", "beta")]
        tried, real = [], admit._verdict
        monkeypatch.setattr(admit, "_verdict", lambda *args: (tried.append(args), real(*args))[1])
        admit.forget()
        launch.forget()
        o = chunk_gated_delta_rule(*a, target=target)[0]  # compiles, and is admitted
        n = len(tried)
        assert n == 1
        admit.forget()
        launch.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = chunk_gated_delta_rule(*a, target=target)[0]
        graph.replay()
        assert len(tried) == n and not launch._kept and torch.equal(o, again)
        assert rms_error(o[0].cpu(), expected(x | {"S": None})[0]) < 5e-3
        chunk_gated_delta_rule(*a, target=target)
        assert len(tried) == n + 1 and launch._kept
