"""TileLang: generated modules on CPU tensors against the token recurrence, and compiled for sm_90a."""
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from reference import TOLERANCE, call, check, expected, module, problem, rms_error

from gdn_codegen.emit import tilelang as emitter
from gdn_codegen.emit.base import EmitError
from gdn_codegen.emit.tilelang import functions
from gdn_codegen.ir.core import Op
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import SCHEDULES, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.tools import check_tilelang

pytest.importorskip("tilelang")
LADDER = [[n] for n in (1, 17, 31, 33, 63, 64, 65, 129)] + [[0], [33, 0, 64, 1], [0, 17, 17, 0]]


#: A kernel takes seconds to compile, a shape milliseconds to run: few modules, many shapes. Each dtype, layout, schedule,
#: form and inverse stands here, and K != V both ways.
BUILDS = {b.name: b for b in (
    Build("tilelang", 32, "bthd", schedule="fused", dtype="float16", head_dim_k=32, head_dim_v=64),
    Build("tilelang", 32, "bhtd", schedule="staged", dtype="float16", head_dim_k=64, head_dim_v=32),
    Build("tilelang", 32, "bthd", schedule="prepared", dtype="bfloat16", head_dim_k=32, head_dim_v=64),
    Build("tilelang", 32, "bhtd", schedule="replay", dtype="float32", head_dim_k=32, head_dim_v=32),
    Build("tilelang", 32, "bhtd", schedule=replace(SCHEDULES["fused"], name="columns", form="gate-free", inverse="doubling",
                                                   v_block=32), head_dim_k=32, head_dim_v=64),
    Build("tilelang", 16, "bthd", schedule=replace(SCHEDULES["prepared_vk"], name="columns_vk", v_block=16), dtype="float32",
          head_dim_k=16, head_dim_v=32),
    Build("tilelang", 64, "bthd", schedule="fused", head_dim_k=128, head_dim_v=128),
    Build("tilelang", 64, "bthd", schedule=replace(SCHEDULES["replay"], name="unit", kernels=(("G", "Tinv_below"), ("o", "S")),
                                                   form="unit"), head_dim_k=32, head_dim_v=32),
)}


def given(b, lengths, **options):
    return problem(lengths, 2, 4, b.head_dim_k, b.head_dim_v, getattr(torch, b.dtype), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_lengths_packs_and_states(name):
    b = BUILDS[name]
    fn, options = function(b), {"tolerance": TOLERANCE[b.dtype], "layout": b.layout}
    for n, lengths in enumerate(LADDER):
        x = given(b, lengths, gate=-0.1, initial=n % 3 != 2, seed=n)
        check(fn, x, cu_dtype=torch.int64 if n % 2 else torch.int32, **options)
    check(fn, given(b, [45, 45, 45]), batched=True, **options)
    check(fn, given(b, [1, 1], initial=False), batched=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("gate, beta", [(0.0, 1.0), (0.0, 0.0), (-50.0, 0.01), ("mixed", None)])
def test_gates(gate, beta):
    b = BUILDS["gdn_c32_bthd_k32v64"]
    check(function(b), given(b, [70], gate=gate, beta=beta))


@pytest.mark.slow
def test_head_groups_and_an_empty_batch():
    b = BUILDS["gdn_c32_bthd_k32v64"]
    fn = function(b)
    for H, HV in ((1, 1), (3, 3), (1, 4)):
        check(fn, problem([40, 3], H, HV, 32, 64))
    o, S = call(fn, problem([0, 0], 1, 2, 32, 64), batched=True)
    assert o.numel() == 0 and S.shape == (2, 2, 32, 64)


@pytest.mark.slow
def test_unaligned_inputs():
    """A slice of a larger tensor may start anywhere; kernels load 16 bytes at a time."""
    b = BUILDS["gdn_c32_bthd_k32v64"]
    x = given(b, [33])
    for n in ("q", "k", "v"):
        x[n] = torch.cat([torch.zeros(1, dtype=x[n].dtype), x[n].reshape(-1)])[1:].view(x[n].shape)
        assert x[n].data_ptr() % 16
    check(function(b), x)


@pytest.mark.slow
def test_a_member_without_the_inverse():
    b = Build("tilelang", 32, "bthd", "simple_gla", "fused", "float16", 32, 32)
    check(function(b), given(b, [33, 0, 64]), delta=False)


@pytest.mark.slow
def test_values_may_have_names_of_the_kernels_own(tmp_path):
    """A page of one's own may call its values anything."""
    page = tmp_path / "clash.py"
    page.write_text('''from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def clash(q, k, v, g, S, *, n=1.0):
    """S decays and takes k v^T."""
    row = cumsum(g)
    start = exp(row)
    T = exp(last(row) - row)
    hv = n * (start[:, None] * (q @ S))
    S = exp(last(row)) * S + k.T @ (T[:, None] * v)
    return hv, S
''')
    b = Build("tilelang", 16, algorithm=f"{page}:clash", schedule=replace(SCHEDULES["fused"], name="own", kernels=(("hv", "S"),)),
              head_dim_k=16, head_dim_v=16)
    x = problem([16], 1, 1, 16, 16)
    out, S = function(b)(*(x[i][None] for i in "qkvg"), initial_state=x["S"], n=2.0,
                                                          output_final_state=True)
    G, q, k, v = x["g"][:, 0].double().cumsum(0), *(x[i][:, 0].double() for i in "qkv")
    start = x["S"][0, 0].double()
    assert rms_error(out[0, :, 0], 2 * torch.exp(G)[:, None] * (q @ start)) < 5e-3
    assert rms_error(S[0, 0], torch.exp(G[-1]) * start + k.T @ (torch.exp(G[-1] - G)[:, None] * v)) < 5e-3


MUTATIONS = {
    "rows past the end keep what lies there": (r"T\.if_then_else\(i < rows, (.*), 0\)$", r"\1"),
    "blocks are solved with the wrong sign": (r"x\[i, j\] -= ", "x[i, j] += "),
    "the state misses the chunk's update": (r"^ +t\.gemm\(.*, S, transpose_A=True, clear_accum=False\)\n", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_fail_the_comparison(what):
    b = BUILDS["gdn_c32_bthd_k32v64"]
    text, n = re.subn(*MUTATIONS[what], render(b), flags=re.M)
    assert n
    x = given(b, [33, 31, 32])  # the last chunk is whole, so that the mutant reads no memory outside the tensor
    want = expected(x)
    check(function(b), x)
    o, S = call(getattr(module(text), b.function), x)
    assert not (rms_error(o, want[0]) <= 5e-3 and rms_error(S, want[1]) <= 5e-3)


ALONE = """
import sys, torch
import {name} as m
assert "gdn_codegen" not in sys.modules
q, k = (torch.nn.functional.normalize(torch.randn(1, 5, 1, 16), dim=-1) for _ in "qk")
o, S = m.chunk_gated_delta_rule(q, k, torch.ones(1, 5, 1, 16), torch.zeros(1, 5, 1), torch.ones(1, 5, 1), output_final_state=True)
assert o.isfinite().all() and torch.allclose(k[0, 4, 0] @ S[0, 0], torch.ones(16), atol=1e-5)
"""


@pytest.mark.slow
def test_two_processes_build_a_copy_of_the_module_at_once(tmp_path):
    """From a cold cache, in a folder that has nothing else; with beta = 1 and g = 0 the last key then recalls its value."""
    b = Build("tilelang", 16, "bthd", dtype="float32", head_dim_k=16, head_dim_v=16)
    (tmp_path / f"{b.name}.py").write_text(render(b))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"TILELANG_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", ALONE.format(name=b.name)], cwd=tmp_path, env=env, text=True,
                             stderr=subprocess.PIPE) for _ in range(2)]
    for run in runs:
        said = run.communicate(timeout=100)[1]
        assert run.returncode == 0, said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of a CUDA toolkit")
def test_compiles_for_hopper(tmp_path):
    b = Build("tilelang", 64, "bthd", schedule="replay", head_dim_k=64, head_dim_v=64)
    (tmp_path / f"{b.name}.py").write_text(render(b))
    for found in check_tilelang.compiled(tmp_path / f"{b.name}.py", ["o_S"]):
        assert not found.error and not found.spills and found.wgmma
        assert 0 < found.shared <= 227 * 1024 and 0 < found.registers < 256


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of a CUDA toolkit")
@pytest.mark.parametrize("schedule, kernel, words, dtype", [
    ("replay", "G_Tinv", r"None,", "float16"),
    (replace(SCHEDULES["walk"], name="named", kernels=(("G", "Tinv_scaled"), ("U", "S"), ("o",))), "G_Tinv_scaled",
     r"(?!None)\w+,", "float16"),
    (replace(SCHEDULES["replay"], name="unit", kernels=(("G", "Tinv_below"), ("o", "S")), form="unit"), "G_Tinv_below",
     r"None,\), strict=True", "bfloat16")])
def test_inverses_of_whole_tiles_compile(schedule, kernel, words, dtype, tmp_path):
    """Each form of device/inverse.cuh; nvcc sees only what is called."""
    b = Build("tilelang", 64, "bthd", schedule=schedule, dtype=dtype, head_dim_k=64, head_dim_v=64)
    text = render(b)
    assert "unit_lower_inverse" in text and re.search(rf"t\.whole_inverses\(\(\w+,\), \({words}\)+$", text, re.M)
    (tmp_path / f"{b.name}.py").write_text(text)
    (found,) = check_tilelang.compiled(tmp_path / f"{b.name}.py", [kernel])
    assert not found.error and not found.spills and found.wgmma and 0 < found.registers < 256
    assert 0 < found.shared <= 227 * 1024


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of a CUDA toolkit")
def test_sums_of_columns_in_float32_compile(tmp_path):
    """Of a tile of tokens, which 256 threads have, as in gradients with K = V = 32 of FLA's tests."""
    b = Build("tilelang", 64, algorithm="simple_gla.gradient", schedule=varied("gradient", v_block=64, partition="decay"),
              dtype="float32", head_dim_k=32, head_dim_v=32, contract=Contract(state_dtype="float32"))
    (tmp_path / f"{b.name}.py").write_text(render(b))
    (found,) = check_tilelang.compiled(tmp_path / f"{b.name}.py", [lowered(b).kernels[-1].name])
    assert not found.error and "t.column_sum" in render(b)


def test_only_modules_with_inverses_of_whole_tiles_carry_their_text():
    header = (functions.FOLDER / "inverse.cuh").read_text()
    assert header in render(Build("tilelang", schedule="replay"))
    for schedule, chunk, dtype in (("replay", 32, "float16"), ("replay", 64, "float32"), ("fused", 128, "float16")):
        b = Build("tilelang", chunk, "bthd", schedule=schedule, dtype=dtype, head_dim_k=64, head_dim_v=64)
        assert header not in render(b) and "inverted_by_warps" not in render(b)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_text_is_stable_ascii_and_short_lined(schedule):
    for dtype, layout in (("float16", "bthd"), ("bfloat16", "bhtd")):
        b = Build("tilelang", schedule=schedule, dtype=dtype, layout=layout)
        text = render(b)
        assert text == render(b) and text.isascii()
        body = text[text.index("_kernel("):text.index("# --- host")]
        assert max(map(len, body.splitlines())) <= 120
        assert not re.search(r"[ \t]$", text, re.M) and not re.search(r"\n{4}", text)


def test_a_product_of_an_expression_is_refused():
    p = lowered(Build("tilelang"))
    (k,) = p.kernels
    loop = next(s for s in k.body if not isinstance(s, Op))
    broken = tuple(replace(o, buffer="") if o.out == "U_f16" else o for o in loop.body)
    body = tuple(replace(loop, body=broken) if s is loop else s for s in k.body)
    with pytest.raises(EmitError, match="without storage; pass place"):
        emitter.emit(replace(p, kernels=(replace(k, body=body),)), "bthd")


def test_a_copy_fills_the_part_of_a_padded_tile_that_holds_a_value():
    """TileLang refuses a copy between tiles of different shapes. Log decays in 16 bits are converted into a padded tile."""
    b = Build("tilelang", 64, "bthd", algorithm="kimi_delta_attention", schedule=varied("operand_walk", "sm_90a", v_block=64),
              dtype="bfloat16", head_dim_k=64, head_dim_v=64, arch="sm_90a", contract=Contract(dtypes=(("g", "bfloat16"),)))
    padded = {x.name for k in lowered(b).kernels for x in k.buffers if x.pad}
    filled = re.findall(r" t\.copy\(\w+(?:\[0:C, 0:K\])?, (\w+)(.*)\)\n", render(b))
    assert [part for name, part in filled if name in padded] == ["[0:C, 0:K]"]
