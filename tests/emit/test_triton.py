"""Triton: generated modules in its interpreter against the token recurrence, and compiled ahead of time."""
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from reference import TOLERANCE, call, check, expected, module, problem, rms_error, variant

from gdn_codegen.runtime import load
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import SCHEDULES

pytest.importorskip("triton")
LADDER = [1, 17, 31, 33, 63, 64, 65, 129]


def build(schedule="fused", **options):
    plan = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    sizes = {"chunk": 32, "head_dim_k": 16, "head_dim_v": 32} | options
    return Build("triton", schedule=plan, **sizes)


def function(schedule="fused", **options):
    return load.function(build(schedule, **options))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, dtype, layout", [
    pytest.param(s, d, ("bthd", "bhtd")[m // 2 % 2], marks=pytest.mark.long if (m + n) % 2 else ())
    for m, s in enumerate(SCHEDULES) for n, d in enumerate(("float16", "bfloat16", "float32"))])
def test_schedules(schedule, dtype, layout):
    x = problem([33, 0, 17, 64], 1, 2, 16, 32, getattr(torch, dtype))
    check(function(schedule, dtype=dtype, layout=layout), x, TOLERANCE[dtype], layout=layout, cu_dtype=torch.int64)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["direct", "wy", "gate-free", "unit"])
@pytest.mark.parametrize("schedule", ["replay", "fused"])
def test_forms(schedule, form):
    fn = function(variant(schedule, form=form))
    check(fn, problem([40, 5], 1, 1, 16, 32))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[n] for n in LADDER] + [[0, 33, 1, 0]], ids=str)
@pytest.mark.parametrize("schedule", ["fused", "staged"])
def test_lengths(schedule, lengths):
    check(function(schedule), problem(lengths, 1, 1, 16, 32))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("schedule", ["replay", "prepared"])
def test_equal_rows_without_state(schedule, layout):
    x = problem([45, 45, 45], 2, 4, 16, 32, initial=False)
    check(function(schedule, layout=layout), x, batched=True, layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("k, v, chunk", [(32, 16, 16), (16, 64, 64), (64, 32, 32), (16, 16, 128)])
def test_sizes(k, v, chunk):
    check(function(head_dim_k=k, head_dim_v=v, chunk=chunk), problem([2 * chunk + 1], 1, 1, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["prepared", "prepared_vk"])
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_prepared_keeps_the_inverse_in_the_inputs_dtype(schedule, chunk):
    text = {d: render(build(schedule, chunk=chunk, dtype=d)) for d in ("float16", "float32")}
    assert "ieee" not in text["float16"] and 'input_precision="ieee"' in text["float32"]
    check(function(schedule, chunk=chunk), problem([2 * chunk + 1, chunk], 1, 1, 16, 32))


def test_other_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk: got 48; accepted: 1, 16, 32, 64, 128"):
        build("prepared", chunk=48)


@pytest.mark.slow
def test_what_a_schedule_lists_is_what_a_module_has():
    """warps and stages as they are; v_block 64 in walks where it is left open and V is more, V for all of it."""
    b = build(variant("staged", warps=2, stages=3), head_dim_v=128)
    m = module(render(b))
    assert set(m.NUM_WARPS.values()) == {2} and m.NUM_STAGES == 3
    assert m.BLOCKS == {"S_U": {"BV": 64}}
    assert module(render(build(variant("staged", v_block=32), head_dim_v=128))).BLOCKS == {"S_U": {"BV": 32}, "o": {"BV": 32}}
    for v, plan in ((64, SCHEDULES["staged"]), (16, SCHEDULES["staged"]), (128, variant("staged", v_block=128))):
        assert module(render(build(plan, head_dim_v=v))).BLOCKS == {}


def test_walks_take_columns_apart():
    check(function("fused", head_dim_v=128, chunk=16), problem([20, 3], 1, 2, 16, 128))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("schedule", ["fused", "staged"])
def test_split_columns(schedule, dtype):
    fn = function(variant(schedule, v_block=16), head_dim_v=64, dtype=dtype)
    check(fn, problem([40, 33], 1, 2, 16, 64, getattr(torch, dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("gate, beta", [(0.0, 1.0), (0.0, 0.0), (-50.0, 0.01), ("mixed", None)])
def test_gates(gate, beta):
    check(function(), problem([70], 1, 2, 16, 32, gate=gate, beta=beta))


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_text_is_stable_ascii_and_short_lined(schedule):
    texts = [render(build(schedule, dtype=d, layout=layout)) for d in ("float16", "bfloat16") for layout in ("bthd", "bhtd")]
    assert texts[0] == render(build(schedule))
    for text in texts:
        body = text[text.index("_kernel("):text.index("# --- host")]
        assert text.isascii() and max(map(len, body.splitlines())) <= 120
        assert not re.search(r"[ \t]$", text, re.M) and not re.search(r"\n{4}", text)
        for helper in ("find_sequence", "rounded"):
            assert text.count(helper) != 1


def test_value_may_have_a_name_of_the_kernels_own(tmp_path):
    """A page of one's own may call its values anything."""
    page = tmp_path / "clash.py"
    page.write_text('''from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def clash(q, k, v, g, S, *, scale=1.0):
    """S decays and takes k v^T."""
    row = cumsum(g)
    start = exp(row)
    t = exp(last(row) - row)
    hv = scale * (start[:, None] * (q @ S))
    S = exp(last(row)) * S + k.T @ (t[:, None] * v)
    return hv, S
''')
    plan = replace(SCHEDULES["fused"], name="own", kernels=(("hv", "S"),))
    b = build(plan, algorithm=f"{page}:clash", chunk=16, head_dim_v=16)
    x = problem([20], 1, 1, 16, 16)
    q, k, v, g = (x[n][None] for n in "qkvg")
    _, final = module(render(b)).chunk_clash(q, k, v, g, initial_state=x["S"], output_final_state=True)
    G = x["g"].double().cumsum(0)
    want = torch.exp(G[-1])[:, None, None] * x["S"][0].double() + torch.einsum(
        "tk,th,tv->hkv", k[0, :, 0].double(), torch.exp(G[-1] - G), v[0, :, 0].double())
    assert rms_error(final[0], want) < 5e-3


@pytest.mark.slow
def test_alone_and_without_a_trace(tmp_path):
    """A copy elsewhere needs torch and triton alone, and leaves the environment and Triton as they were."""
    (tmp_path / "copied.py").write_text(render(build("replay")))
    (tmp_path / "use.py").write_text("""
import os, sys, torch, triton.language as tl
before, names = dict(os.environ), {m: dict(vars(m)) for m in (tl, tl.core, tl.math, tl.tensor)}
from copied import chunk_gated_delta_rule
x = torch.ones(1, 5, 1, 16, dtype=torch.float16)
o, S = chunk_gated_delta_rule(x, x, torch.ones(1, 5, 1, 32, dtype=torch.float16), -torch.ones(1, 5, 1), torch.ones(1, 5, 1))
assert o.shape == (1, 5, 1, 32) and S is None and o.isfinite().all()
assert before == dict(os.environ) and "gdn_codegen" not in sys.modules
for m, was in names.items():
    assert all(vars(m)[n] is x for n, x in was.items()), m
""")
    hidden = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    subprocess.run([sys.executable, "use.py"], cwd=tmp_path, env=hidden, check=True)


# --- negative controls: the module's text edited, the same comparison must fail ---------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("schedule, find, put", [
    ("fused", r"valid(\w*) = .* < length.*", r"valid\1 = i_C < C"),  # rows of the next sequence leak into the tail
    ("fused", r"\n        S = tl\.dot\(", "\n        S_new = tl.dot("),  # stale state
    ("staged", r"n = find_sequence\(cu_seqlens, slot, N, C\)", "n = (slot * 0).to(tl.int32)"),  # one sequence for all
    ("fused", r"if has_initial_state:", "if False:"),
], ids=["tail", "state", "sequence", "initial"])
def test_mutation_fails(schedule, find, put):
    b, x = build(schedule), problem([33, 64], 1, 1, 16, 32)  # no tail is at the end of memory
    text, n = re.subn(find, put, render(b))
    assert n
    want_o, want_S = expected(x)
    o, S = call(module(text).chunk_gated_delta_rule, x)
    assert not (rms_error(o, want_o) <= 5e-3 and rms_error(S, want_S) <= 5e-3)


#: Those that dispatch takes, and one of each other form of kernels.
COMPILED = ("staged", "walk", "fused", "gradient", "channel_gradient")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [n if n in COMPILED else pytest.param(n, marks=pytest.mark.long) for n in SCHEDULES])
def test_compiles_for_hopper_and_mi300(tmp_path, schedule):
    """After the interpreter ran in this process, and at the sizes of models."""
    from gdn_codegen.tools.check_triton import compiled
    check(function(), problem([3], 1, 1, 16, 32))
    path = tmp_path / f"aot_{schedule}.py"
    path.write_text(render(Build("triton", schedule=schedule)))
    found = compiled(path, ("sm_90", "gfx942"))
    kernels = [k.name for k in lowered(Build("triton", schedule=schedule)).kernels]
    assert [(c.kernel, c.arch) for c in found] == [(k, a) for k in kernels for a in ("sm_90", "gfx942")]
    assert not [c.remark for c in found if c.error]
    assert all(c.registers for c in found)
